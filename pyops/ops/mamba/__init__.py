"""State-space models and linear attention: scans over prompts, and their steps of one token."""

from __future__ import annotations

from . import chunk_scan
from .chunk_scan import *

__all__: list[str] = []
__all__ += chunk_scan.__all__
