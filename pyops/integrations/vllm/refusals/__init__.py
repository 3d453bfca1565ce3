"""What ops of vLLM take and this library refuses, with the reason, for every op that it serves."""

from __future__ import annotations

from ._refusal import Refusal
from .products import PRODUCTS
from .rows import ROWS

__all__ = ["REFUSALS", "Refusal"]

REFUSALS: dict[str, tuple[Refusal, ...]] = ROWS | PRODUCTS
