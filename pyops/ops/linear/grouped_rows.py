"""Contiguous rows per expert, given by offsets and sizes: the arguments of vLLM's grouped GEMMs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float16, float32, int32, int64
from ..._core.tensors.tensor import TensorArg
from .._shared.groups import SHARES, sharing
from .grouped_blocks import block_size_for
from .grouped_problem import ExpertLists
from .grouped_shape import GroupedShape, Scales

if TYPE_CHECKING:
    from torch import Tensor

_group_rows = Kernel("linear/group_rows.cu")
_NUM_THREADS = 256  # threads of a block of group_rows.cu; not yet measured


def each_expert(out: Tensor, problem_sizes: Tensor, expert_offsets: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows of out) of each expert that has rows."""
    found = []
    for e, (sizes, first) in enumerate(zip(problem_sizes.tolist(), expert_offsets.tolist(), strict=True)):
        rows = min(max(sizes[0] if sizes[1] == out.shape[1] else sizes[1], 0), len(out))
        if rows and 0 <= first < len(out):
            found.append((e, slice(first, min(first + rows, len(out)))))
    return found


def lists_of(
    out: TensorArg,
    problem_sizes: TensorArg,
    expert_offsets: TensorArg,
    sf_offsets: TensorArg | None = None,
    block_size: int | None = None,
    a: TensorArg | None = None,
    scales: Scales = "none",
) -> tuple[ExpertLists, Launch, Scratch | None]:
    """The sorted lists of rows, the launch that writes them, and the workspace of the rows of scales.

    Blocks have `block_size` slots, or by default the number that suits the product of `a` with weights of its dtype
    and with these scales; without `a`, the product of bfloat16 operands.
    """
    check.sizes(problem_sizes, num_experts=None, sizes=3)
    num_experts, (num_rows, n) = problem_sizes.shape[0], out.shape
    check.shape(problem_sizes, int32, num_experts=num_experts, sizes=3)
    check.dtype(expert_offsets, int32, int64)
    check.shape(expert_offsets, num_experts=num_experts)
    check.shape(sf_offsets, int32, num_experts=num_experts)
    if block_size is None:
        k, dtype = (n, bfloat16) if a is None else (a.shape[1], a.dtype)
        shape = GroupedShape(num_rows, num_experts, n, k, dtype=dtype, scales=scales)
        block_size = block_size_for(shape, out.device)
    num_blocks = num_rows // block_size + min(num_rows, num_experts)
    sorted_ids, expert_ids, total = Scratch(4 * num_blocks * block_size or 4), Scratch(4 * num_blocks or 4), Scratch(4)
    scale_rows = None if sf_offsets is None else Scratch(4 * num_rows or 4)
    kernel = _group_rows if sf_offsets is None else _group_rows.renamed(sf_offsets=sf_offsets.name)
    launch = kernel(
        offset_t=expert_offsets.dtype, HAS_SCALE_ROWS=scale_rows is not None, NUM_THREADS=_NUM_THREADS
    ).launch(
        num_experts if num_rows and n else 0,
        _NUM_THREADS,
        sorted_token_ids=sorted_ids,
        expert_ids=expert_ids,
        num_tokens_post_pad=total,
        scale_rows=scale_rows or 0,
        **({"sf_offsets": 0} if sf_offsets is None else {}),
        num_experts=num_experts,
        num_rows=num_rows,
        n=n,
        block_size=block_size,
        num_blocks=num_blocks,
    )
    return ExpertLists(sorted_ids, expert_ids, total, block_size, num_blocks), launch, scale_rows


def by_rows(b: Tensor, n: int, k: int) -> Tensor:
    """References: b as [num_experts, N, K]; it may be given as a transposed view [num_experts, K, N]."""
    return b.transpose(1, 2) if b.shape[1] != n or (n == k and b.stride(2) != 1) else b


def swapped(b: TensorArg, num_experts: int, n: int, k: int) -> TensorArg:
    """`by_rows` for descriptors in plans; any other shape is returned unchanged."""
    if b.shape != (num_experts, k, n) or (n == k and (b.strides[2] == 1 or k <= 1)):
        return b
    return replace(b, shape=(num_experts, n, k), strides=(b.strides[0], b.strides[2], b.strides[1]))


def weights_of(b: TensorArg, num_experts: int, n: int, k: int) -> TensorArg:
    """Check weights [num_experts, N, K]; they may be given as a transposed view [num_experts, K, N]."""
    b = swapped(b, num_experts, n, k)
    check.sizes(b, num_experts=num_experts, N=n, K=k)
    check.row_size(b)
    return b


def check_rows(out: TensorArg, a: TensorArg, b: TensorArg) -> TensorArg:
    """Check out [rows, N], a [rows, K] and the properties common to weights of any layout; returns out."""
    check.sizes(a, num_rows=None, K=None)
    check.row_size(a)
    check.dtype(out, float16, bfloat16)
    check.sizes(out, num_rows=a.shape[0], N=None)
    check.row_size(out)
    check.dtype(b, a.dtype)
    check.sizes(b, num_experts=None, N=None, K=None)
    return out


def result_rows(a: TensorArg, b: TensorArg, *, out_dtype: torch.dtype | None = None) -> Result:
    """Rows of `a` times the weights of experts, [num_experts, N, K], or a view of them, [num_experts, K, N].

    Args:
        out_dtype: of the output; None for bfloat16.
    """
    check.sizes(a, num_rows=None, K=None)
    check.sizes(b, num_experts=None, N=None, K=None)
    n = b.shape[1] if b.shape[2] == a.shape[1] else b.shape[2]
    return Result((a.shape[0], n), check.chosen(a, "out_dtype", out_dtype, bfloat16))


def check_strides(num_experts: int, *strides: TensorArg | None) -> None:
    """Check the int64 strides that vLLM's callers pass for each expert's matrices."""
    for one in strides:
        if one is not None:
            check.dtype(one, int64)
            check.sizes(one, num_experts=num_experts)


def check_scale_counts(*counts: tuple[TensorArg, int]) -> None:
    """Check that each tensor has float32 scales, contiguous, with this number of elements."""
    for scales, count in counts:
        check.elements(scales, float32, count)


def bad_rows(out: Tensor, expert_offsets: Tensor, problem_sizes: Tensor) -> dict[str, Any]:
    """For PYOPS_CHECK: experts with rows that do not exist, and experts that share rows with another one."""
    sizes = problem_sizes.long()
    rows = torch.where(sizes[:, 1] == out.shape[1], sizes[:, 0], sizes[:, 1])
    first = expert_offsets.long()
    outside = (rows < 0) | ((rows > 0) & ((first < 0) | (first > len(out) - rows)))
    shared = {"are out of range": outside, SHARES: sharing(first, rows.masked_fill(outside, 0))}
    return {"expert_offsets": shared, "problem_sizes": outside[:, None].expand(-1, 3)}


def example_counts(num_tokens: int, num_experts: int = 3) -> list[int]:
    """The rows of each expert: none for the second; the last takes the remainder of equal shares."""
    counts = [0 if e == 1 else num_tokens // num_experts for e in range(num_experts)]
    counts[-1] += num_tokens - sum(counts)
    return counts


def example_sizes(make: Any, counts: list[int], n: int, k: int) -> tuple[Any, Any]:
    """(offsets, sizes) of experts with these counts of rows."""
    offsets = make.values([sum(counts[:e]) for e in range(len(counts))], "int32")
    return offsets, make.values([[m, n, k] for m in counts], "int32")
