"""State-space models: the causal convolutions of Mamba layers over prompts and decode steps, with states in a cache.

No slot or offset in a tensor can lead outside a tensor: what does not exist is neither read nor written.
"""

from __future__ import annotations

from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .conv_decode import causal_conv1d_decode
from .conv_prefill import causal_conv1d_prefill

__all__ = [
    "causal_conv1d_decode",
    "causal_conv1d_fn",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
]
