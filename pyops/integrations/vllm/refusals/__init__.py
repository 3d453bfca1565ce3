"""Arguments that vLLM's ops accept and this library refuses, with reasons, for all ops that it serves."""

from __future__ import annotations

from ._refusal import Refusal
from .products import PRODUCTS
from .rows import ROWS

__all__ = ["REFUSALS", "Refusal"]

REFUSALS: dict[str, tuple[Refusal, ...]] = ROWS | PRODUCTS
