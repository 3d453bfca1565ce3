"""The overlap test for the row ranges of experts, given by offsets and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SHARES = "begin in rows of another expert, so that both write them"  # message of PYOPS_CHECK


def sharing(first: Tensor, count: Tensor) -> Tensor:
    """Mask of the ranges ``[first, first + count)`` that begin inside another range, or where an earlier one begins."""
    before = (first[None] < first[:, None]) | ((first[None] == first[:, None]).tril(-1))
    inside = before & (first[:, None] < (first + count)[None])
    return (inside & (count > 0)[:, None] & (count > 0)[None]).any(1)
