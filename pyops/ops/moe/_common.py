"""The check of the choices of a token."""

from __future__ import annotations

from ... import check
from ..._core.tensors.tensor import TensorArg

_MAX_TOPK = 1024  # most choices of a token, because kernels unroll the loop over them


def check_topk(arg: TensorArg, topk: int) -> None:
    """Check `topk`, the number of choices per token; the error names `arg`."""
    if not 1 <= topk <= _MAX_TOPK:
        raise check.refuse(arg, arg.name, f"expected 1 to {_MAX_TOPK} choices of a token, got {topk}")
