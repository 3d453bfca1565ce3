"""Kernels of this library for decoders of transformers. A file imports only files above it, and of pyops the ops:

trial replacement         what a module computes, found out by running it; what every replaced forward has
cache joined              keys and values of a batch; several projections as one GEMM
norms mlp rotary          parts of layers, known by what they compute
seams attention           what an attention asks of transformers, by the ops; the attentions themselves
encoders                  attention without a cache
layers                    the residual additions of a layer
experts routers           mixtures of experts; their choice
quantised packed          modules that hold fp8 weights, or packed ones
generation reporting      the cache that `generate` makes; what was done, module by module
patching                  accelerate, restore, report
"""

from __future__ import annotations

from ..._core.system.lazy import optional

_found = optional("transformers", "pyops.integrations.transformers", "transformers").__version__
# Caches of earlier ones are asked other things.
if tuple(map(int, _found.split(".")[:2])) < (5, 16):
    raise ImportError(f"pyops.integrations.transformers needs transformers 5.16 or later, found {_found}")

from .cache import PagedCache  # noqa: E402
from .patching import accelerate, report, restore  # noqa: E402
from .reporting import Report  # noqa: E402

__all__ = ["PagedCache", "Report", "accelerate", "report", "restore"]
