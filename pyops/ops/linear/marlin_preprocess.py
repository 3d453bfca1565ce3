"""4-bit weights for GEMMs with e4m3 activations, as Marlin takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["marlin_int4_fp8_preprocess", "marlin_int4_fp8_preprocess_out"]

_preprocess = Kernel("linear/marlin_int4_fp8_preprocess.cu")
_NUM_THREADS = 256  # threads of a block; a thread has a word


def marlin_int4_fp8_preprocess(qweight: Tensor, qzeros_or_none: Tensor | None = None, inplace: bool = False) -> Tensor:
    """`marlin_int4_fp8_preprocess_out` into `qweight`, which is returned, or into a new tensor if not `inplace`.

    Args:
        inplace: whether the result overwrites `qweight`.
    """
    if not inplace:
        return marlin_int4_fp8_preprocess_out.new(qweight, qzeros_or_none)
    marlin_int4_fp8_preprocess_out(qweight, qweight, qzeros_or_none)
    return qweight


@op(out="out", in_place={"out": "qweight"}, ulps=0)
def marlin_int4_fp8_preprocess_out(out: Tensor, qweight: Tensor, qzeros_or_none: Tensor | None = None) -> None:
    """4-bit quants, recoded for a cheap conversion to e4m3: for `marlin_gemm` with activations of e4m3.

    A quant v becomes ``v - zero`` where that is not negative, else ``15 - v``.

    Args:
        out: the shape of qweight, int32, contiguous, written; may be qweight itself.
        qweight: [K, N / 8] int32, contiguous, in the layout of AWQ; without zero points of any shape and layout.
        qzeros_or_none: [num_groups, N / 8] int32, contiguous, packed as qweight; num_groups divides K. None: all zero
            points are 8.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=qweight.device)
    codes = qweight.long().unsqueeze(-1) >> shifts & 15
    zeros = torch.full((), 8, dtype=torch.int64, device=qweight.device)
    if qzeros_or_none is not None:
        zeros = (qzeros_or_none.long().unsqueeze(-1) >> shifts & 15).repeat_interleave(
            qweight.shape[0] // max(1, qzeros_or_none.shape[0]), 0
        )
    recoded = torch.where(codes >= zeros, codes - zeros, 15 - codes)
    out.copy_((recoded << shifts).sum(-1).to(torch.int32))


@marlin_int4_fp8_preprocess_out.result
def result_marlin_int4_fp8_preprocess_out(qweight: TensorArg) -> Result:
    return Result(qweight.shape, int32)


@marlin_int4_fp8_preprocess_out.plan
def plan_marlin_int4_fp8_preprocess_out(out: TensorArg, qweight: TensorArg, qzeros_or_none: TensorArg | None) -> Launch:
    check.dtype(qweight, int32)
    check.contiguous(qweight)
    check.like(out, qweight)
    check.contiguous(out)
    num_rows, columns, group_rows = 1, qweight.numel, 1
    if qzeros_or_none is not None:
        check.sizes(qweight, K=None, words=None)
        num_rows, columns = qweight.shape
        check.dtype(qzeros_or_none, int32)
        check.sizes(qzeros_or_none, num_groups=None, words=columns)
        check.contiguous(qzeros_or_none)
        groups = qzeros_or_none.shape[0]
        if groups == 0 < num_rows or num_rows % max(1, groups):
            raise qzeros_or_none.error(f"expected groups that divide the {num_rows} rows of qweight, got {groups}")
        group_rows = max(1, num_rows // max(1, groups))
    kernel = _preprocess.renamed(recoded="out", **({} if qzeros_or_none is None else {"qzeros": "qzeros_or_none"}))
    return kernel(HAS_ZEROS=qzeros_or_none is not None, NUM_THREADS=_NUM_THREADS).launch(
        -(-qweight.numel // _NUM_THREADS),
        _NUM_THREADS,
        num_rows=num_rows,
        columns=columns,
        group_rows=group_rows,
        **({"qzeros": 0} if qzeros_or_none is None else {}),
    )


@marlin_int4_fp8_preprocess_out.example
def example_marlin_int4_fp8_preprocess_out(
    make: Any, *, num_tokens: int = 16, with_zeros: bool = False
) -> tuple[Any, ...]:
    k, words = 32 * num_tokens, 24
    return (
        make.empty(k, words, dtype="int32"),
        make.randint(-(2**31), 2**31, k, words, dtype="int32"),
        make.randint(-(2**31), 2**31, num_tokens, words, dtype="int32") if with_zeros else None,
    )
