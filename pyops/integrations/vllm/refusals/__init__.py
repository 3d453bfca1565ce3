"""What this library refuses of vLLM, with reasons: arguments of the ops that it serves, and whole ops."""

from __future__ import annotations

from ._refusal import Refusal
from .ops import REFUSED_OPS
from .products import PRODUCTS
from .rows import ROWS

__all__ = ["REFUSALS", "REFUSED_OPS", "Refusal"]

REFUSALS: dict[str, tuple[Refusal, ...]] = ROWS | PRODUCTS
