"""Kernels of this library for transformers' models. A file imports only files above it, and ops of pyops:

trial replacement         find out what a module computes by running it; the base of all replaced forwards
cache joined              the KV cache of a batch; several projections as one GEMM
norms mlp rotary          norms, MLPs and rotary embeddings, recognised by what they compute
seams attention           the functions that attention forwards look up; attention with a cache
encoders                  attention without a cache
layers                    the residual additions of a layer, fused with norms
experts routers           experts of a mixture; routers
quantised packed          linear modules with fp8 weights; with packed weights
named                     "pyops" in transformers' own interfaces of attention and experts
generation reporting      the cache that `generate` makes; the report, module by module
patching                  accelerate, restore, report
"""

from __future__ import annotations

from ..._core.system.lazy import optional

_found = optional("transformers", "pyops.integrations.transformers", "transformers").__version__
# Older versions have another cache interface.
if tuple(map(int, _found.split(".")[:2])) < (5, 16):
    raise ImportError(f"pyops.integrations.transformers needs transformers 5.16 or later, found {_found}")

from . import named  # noqa: E402
from .cache import PagedCache  # noqa: E402
from .patching import accelerate, report, restore  # noqa: E402
from .reporting import Report  # noqa: E402

named.register()

__all__ = ["PagedCache", "Report", "accelerate", "report", "restore"]
