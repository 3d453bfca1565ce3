"""Problem sizes of the grouped GEMMs of both layers of a mixture, from ids or offsets (the tables: `_sizes.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32, int64
from ..._core.tensors.tensor import TensorArg
from ._sizes import MAX_SWAPPED_ROWS, check_tables, example_tables, new_tables, sizes_launch, write_sizes
from ._sort import check_count, check_ids, local_experts, sort_launch, sorted_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "get_cutlass_moe_mm_data",
    "get_cutlass_moe_mm_problem_sizes",
    "get_cutlass_moe_mm_problem_sizes_from_expert_offsets",
]

_moe_mm_data = Kernel("moe/moe_mm_data.cu")
_SCALE_ROWS = 128  # rows of a tile of block scales


@op(
    out=(
        "expert_offsets",
        "problem_sizes1",
        "problem_sizes2",
        "input_permutation",
        "output_permutation",
        "blockscale_offsets",
    ),
    ulps=0,
)
def get_cutlass_moe_mm_data(
    topk_ids: Tensor,
    expert_offsets: Tensor,
    problem_sizes1: Tensor,
    problem_sizes2: Tensor,
    input_permutation: Tensor,
    output_permutation: Tensor,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: Tensor | None = None,
    is_gated: bool = True,
) -> None:
    """Sort rows by their experts; compute each expert's GEMM problem sizes and row offsets.

    A row is one choice of one token: row t is element t of `topk_ids`. The sort is stable. A row with an
    expert id out of range is not counted; its position is the number of counted rows. M and N are swapped (swap-AB) for
    up to 64 rows, unless `blockscale_offsets` is given. Modelled on vLLM's op of this name.

    Args:
        topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
        expert_offsets: [num_experts + 1] int32, contiguous, written: the sorted position of each expert's first row,
            then the number of counted rows.
        problem_sizes1, problem_sizes2: [num_experts, 3] int32, contiguous, written: the problem sizes of the first and
            of the second layer.
        input_permutation: [num_tokens * topk] int32, contiguous, written: the token of the row at each sorted position;
            0 after the last.
        output_permutation: [num_tokens * topk] int32, contiguous, written: the sorted position of each row.
        num_experts: number of experts.
        n, k: the sizes of the layers.
        blockscale_offsets: [num_experts + 1] int32, contiguous, written: like expert_offsets, of rows rounded up to a
            multiple of 128 in each expert. None: not wanted.
        is_gated: the first layer has 2 * n columns; otherwise n.
    """
    num_rows, topk = topk_ids.numel(), topk_ids.shape[1]
    rows, counts = sorted_rows(local_experts(topk_ids, num_experts, num_experts, None), num_experts)
    expert_offsets.copy_(torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    if blockscale_offsets is not None:
        padded = (counts + _SCALE_ROWS - 1) // _SCALE_ROWS * _SCALE_ROWS
        blockscale_offsets.copy_(torch.nn.functional.pad(padded.cumsum(0), (1, 0)))
    input_permutation.zero_()
    input_permutation[: len(rows)] = (rows // max(1, topk)).int()
    output_permutation.fill_(len(rows))
    output_permutation[rows] = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    swap = blockscale_offsets is None and num_rows <= MAX_SWAPPED_ROWS
    write_sizes(problem_sizes1, problem_sizes2, counts, (1 + is_gated) * n, n, k, swap)


@get_cutlass_moe_mm_data.result
def result_get_cutlass_moe_mm_data(topk_ids: TensorArg, num_experts: int) -> tuple[Result, ...]:
    rows = Result((topk_ids.numel,), int32)
    return Result((num_experts + 1,), int32), *new_tables(num_experts), rows, rows


@get_cutlass_moe_mm_data.plan
def plan_get_cutlass_moe_mm_data(
    topk_ids: TensorArg,
    expert_offsets: TensorArg,
    problem_sizes1: TensorArg,
    problem_sizes2: TensorArg,
    input_permutation: TensorArg,
    output_permutation: TensorArg,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: TensorArg | None,
    is_gated: bool,
) -> Launch:
    check_ids(topk_ids)
    for permutation in (input_permutation, output_permutation):
        check.shape(permutation, int32, num_rows=topk_ids.numel)
    for offsets in (expert_offsets, blockscale_offsets):
        check.shape(offsets, int32, num_offsets=num_experts + 1)
    return _sizes_of_ids(
        topk_ids,
        problem_sizes1,
        problem_sizes2,
        num_experts,
        (n, k),
        is_gated,
        swap=blockscale_offsets is None and topk_ids.numel <= MAX_SWAPPED_ROWS,
        sorts=True,
        has_blockscale=blockscale_offsets is not None,
    )


def _sizes_of_ids(
    topk_ids: TensorArg,
    problem_sizes1: TensorArg,
    problem_sizes2: TensorArg,
    num_experts: int,
    layer: tuple[int, int],
    is_gated: bool,
    swap: bool,
    sorts: bool,
    has_blockscale: bool = False,
    absent: dict[str, int] | None = None,
) -> Launch:
    """The launch of moe_mm_data.cu; `absent` feeds null pointers for tensors that the op lacks."""
    check_ids(topk_ids)
    check_count(topk_ids, "num_experts", num_experts)
    n, k = layer
    check_tables(problem_sizes1, problem_sizes2, num_experts, n, k)
    return sort_launch(
        _moe_mm_data,
        topk_ids,
        num_experts,
        topk_ids.numel if sorts else 0,
        SORTS=sorts,
        SWAP=swap,
        HAS_BLOCKSCALE=has_blockscale,
        fixed={"topk": topk_ids.shape[1], "first_n": (1 + is_gated) * n, **(absent or {})},
    )


def _example_ids(make: Any, num_tokens: int, topk: int, num_experts: int) -> Any:
    return make.randint(-1, num_experts, num_tokens, topk, dtype="int32")


@get_cutlass_moe_mm_data.example
def example_get_cutlass_moe_mm_data(
    make: Any, *, num_tokens: int = 16, with_blockscale: bool = False
) -> tuple[Any, ...]:
    topk, num_experts, n, k = 8, 128, 1024, 4096
    return (
        _example_ids(make, num_tokens, topk, num_experts),
        make.full(num_experts + 1, value=0, dtype="int32"),
        *example_tables(make, num_experts, n, k, swap=not with_blockscale),
        make.empty(num_tokens * topk, dtype="int32"),
        make.empty(num_tokens * topk, dtype="int32"),
        num_experts,
        n,
        k,
        make.full(num_experts + 1, value=0, dtype="int32") if with_blockscale else None,
        True,
    )


@op(out=("problem_sizes1", "problem_sizes2"), ulps=0)
def get_cutlass_moe_mm_problem_sizes(
    topk_ids: Tensor,
    problem_sizes1: Tensor,
    problem_sizes2: Tensor,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: Tensor | None = None,
    force_swap_ab: bool | None = None,
) -> None:
    """Only the GEMM problem sizes of each expert, see `get_cutlass_moe_mm_data`. Modelled on vLLM's op of this name.

    Args:
        topk_ids, problem_sizes1, problem_sizes2, num_experts, n, k: as in `get_cutlass_moe_mm_data`.
        blockscale_offsets: any tensor, neither read nor written; only whether it is given matters, for `force_swap_ab`.
        force_swap_ab: whether sizes are swapped. None: for up to 64 rows, unless `blockscale_offsets` is given.
    """
    swap = blockscale_offsets is None and topk_ids.numel() <= MAX_SWAPPED_ROWS
    _, counts = sorted_rows(local_experts(topk_ids, num_experts, num_experts, None), num_experts)
    write_sizes(problem_sizes1, problem_sizes2, counts, 2 * n, n, k, swap if force_swap_ab is None else force_swap_ab)


@get_cutlass_moe_mm_problem_sizes.result
def result_get_cutlass_moe_mm_problem_sizes(num_experts: int) -> tuple[Result, Result]:
    return new_tables(num_experts)


@get_cutlass_moe_mm_problem_sizes.plan
def plan_get_cutlass_moe_mm_problem_sizes(
    topk_ids: TensorArg,
    problem_sizes1: TensorArg,
    problem_sizes2: TensorArg,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: TensorArg | None,
    force_swap_ab: bool | None,
) -> Launch:
    swap = blockscale_offsets is None and topk_ids.numel <= MAX_SWAPPED_ROWS
    return _sizes_of_ids(
        topk_ids,
        problem_sizes1,
        problem_sizes2,
        num_experts,
        (n, k),
        is_gated=True,
        swap=swap if force_swap_ab is None else force_swap_ab,
        sorts=False,
        absent={"expert_offsets": 0, "input_permutation": 0, "output_permutation": 0},
    )


@get_cutlass_moe_mm_problem_sizes.example
def example_get_cutlass_moe_mm_problem_sizes(make: Any, *, num_tokens: int = 16) -> tuple[Any, ...]:
    topk, num_experts, n, k = 8, 128, 1024, 4096
    ids = _example_ids(make, num_tokens, topk, num_experts)
    return ids, *example_tables(make, num_experts, n, k, swap=True), num_experts, n, k, None, None


@op(out=("problem_sizes1", "problem_sizes2"), ulps=0)
def get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
    expert_first_token_offset: Tensor, problem_sizes1: Tensor, problem_sizes2: Tensor, n: int, k: int, swap_ab: bool
) -> None:
    """The GEMM problem sizes of each expert, from its row offsets (`moe_permute`). Modelled on vLLM's op of this name.

    Args:
        expert_first_token_offset: [num_experts + 1] int64, contiguous. An expert that ends before it begins has
            no rows.
        problem_sizes1, problem_sizes2, n, k: as in `get_cutlass_moe_mm_data`.
        swap_ab: sizes are swapped.
    """
    first, end = expert_first_token_offset[:-1], expert_first_token_offset[1:]
    rows = torch.where(end > first, end - first, 0)
    rows = torch.where(rows < 0, 2**31 - 1, rows).clamp(max=2**31 - 1)  # negative: the difference overflowed 64 bits
    write_sizes(problem_sizes1, problem_sizes2, rows, 2 * n, n, k, swap_ab)


@get_cutlass_moe_mm_problem_sizes_from_expert_offsets.result
def result_get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
    expert_first_token_offset: TensorArg,
) -> tuple[Result, Result]:
    check.sizes(expert_first_token_offset, num_offsets=None)
    return new_tables(expert_first_token_offset.shape[0] - 1)


@get_cutlass_moe_mm_problem_sizes_from_expert_offsets.plan
def plan_get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
    expert_first_token_offset: TensorArg,
    problem_sizes1: TensorArg,
    problem_sizes2: TensorArg,
    n: int,
    k: int,
    swap_ab: bool,
) -> Launch:
    check.sizes(expert_first_token_offset, num_offsets=None)
    check.at_least(expert_first_token_offset, int64, 1)
    num_experts = expert_first_token_offset.numel - 1
    check_tables(problem_sizes1, problem_sizes2, num_experts, n, k)
    return sizes_launch(num_experts, n, swap_ab, from_offsets=True, expert_num_tokens=0, expert_offsets=0, padded_m=0)


@get_cutlass_moe_mm_problem_sizes_from_expert_offsets.example
def example_get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
    make: Any, *, num_tokens: int = 16, swap_ab: bool = False
) -> tuple[Any, ...]:
    num_experts, n, k = 128, 1024, 4096
    offsets = make.values([expert * num_tokens // num_experts for expert in range(num_experts + 1)], dtype="int64")
    return offsets, *example_tables(make, num_experts, n, k, swap_ab), n, k, swap_ab
