"""State-space models: the recurrences of Mamba over prompts and over single tokens, with their states in a cache.

No slot or offset in a tensor can lead outside a tensor: what does not exist is neither read nor written.
"""

from __future__ import annotations

from .selective_scan import selective_scan_fn, selective_scan_fwd
from .selective_state_update import selective_state_update

__all__ = [
    "selective_scan_fn",
    "selective_scan_fwd",
    "selective_state_update",
]
