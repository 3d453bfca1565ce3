"""State-space models and linear attention: scans over prompts, and their steps of one token."""

from __future__ import annotations

from . import chunk_scan
from . import gated_delta_rule as _gated_delta_rule
from .chunk_scan import *
from .gated_delta_rule import *

__all__: list[str] = []
__all__ += chunk_scan.__all__
__all__ += _gated_delta_rule.__all__
