"""State-space models and linear attention: scans for prefill, steps for decode, causal convolutions.

No slot or offset in a tensor can lead outside a tensor: what does not exist is neither read nor written.
"""

from __future__ import annotations

from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .chunk_scan import mamba_chunk_scan_combined_varlen, mamba_chunk_scan_varlen
from .conv_decode import causal_conv1d_decode
from .conv_prefill import causal_conv1d_prefill
from .fused_kda_decode import fused_kda_decode
from .gated_delta_rule import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule,
    gated_delta_rule_update,
)
from .kda import chunk_kda, fused_recurrent_kda, kda, kda_update
from .selective_scan import selective_scan_fwd
from .selective_scan_fn import selective_scan_fn
from .selective_state_update import selective_state_update

__all__ = [
    "causal_conv1d_decode",
    "causal_conv1d_fn",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_kda_decode",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "gated_delta_rule",
    "gated_delta_rule_update",
    "kda",
    "kda_update",
    "mamba_chunk_scan_combined_varlen",
    "mamba_chunk_scan_varlen",
    "selective_scan_fn",
    "selective_scan_fwd",
    "selective_state_update",
]
