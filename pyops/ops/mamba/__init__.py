"""State-space models and linear attention: scans over prompts, steps of single tokens, causal convolutions.

No slot or offset in a tensor can lead outside a tensor: what does not exist is neither read nor written.
"""

from __future__ import annotations

from . import chunk_scan
from . import gated_delta_rule as _gated_delta_rule
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .chunk_scan import *
from .conv_decode import causal_conv1d_decode
from .conv_prefill import causal_conv1d_prefill
from .gated_delta_rule import *
from .selective_scan import selective_scan_fn, selective_scan_fwd
from .selective_state_update import selective_state_update

__all__ = [
    "causal_conv1d_decode",
    "causal_conv1d_fn",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "selective_scan_fn",
    "selective_scan_fwd",
    "selective_state_update",
]
__all__ += chunk_scan.__all__
__all__ += _gated_delta_rule.__all__
