"""The weight of the examples of norms."""

from __future__ import annotations

from typing import Any


def example_weight(make: Any, hidden_size: int, dtype: str) -> Any:
    """A weight of numbers near one, as norms of models have."""
    return make.randn(hidden_size, dtype=dtype, scale=0.1, shift=1.0)
