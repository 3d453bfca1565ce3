"""GEMM problem sizes of experts with one batch of rows each, under vLLM's two names for one op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from ._sizes import MAX_SWAPPED_ROWS, check_tables, example_tables, new_tables, sizes_launch, write_sizes
from ._sort import check_count

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["get_cutlass_batched_moe_mm_data", "get_cutlass_pplx_moe_mm_data"]


@op(out=("expert_offsets", "problem_sizes1", "problem_sizes2"), ulps=0)
def get_cutlass_batched_moe_mm_data(
    expert_offsets: Tensor,
    problem_sizes1: Tensor,
    problem_sizes2: Tensor,
    expert_num_tokens: Tensor,
    num_local_experts: int,
    padded_m: int,
    n: int,
    k: int,
) -> None:
    """The GEMM problem sizes of each expert, and the offset of its batch, for batches of `padded_m` rows.

    Sizes are swapped if the batches together have up to 64 rows. Modelled on vLLM's op of this name.

    Args:
        expert_offsets: [num_local_experts] int32, contiguous, written: ``e * padded_m``.
        problem_sizes1, problem_sizes2, n, k: as in `get_cutlass_moe_mm_data`.
        expert_num_tokens: [num_local_experts] int32, contiguous: rows of each expert, clamped to 0 ... padded_m.
        num_local_experts: how many experts there are on this device.
        padded_m: rows of a batch.
    """
    _write_batched(expert_offsets, problem_sizes1, problem_sizes2, expert_num_tokens, num_local_experts, padded_m, n, k)


def _write_batched(
    expert_offsets: Tensor,
    problem_sizes1: Tensor,
    problem_sizes2: Tensor,
    expert_num_tokens: Tensor,
    num_local_experts: int,
    padded_m: int,
    n: int,
    k: int,
) -> None:
    """The reference of both ops."""
    expert_offsets.copy_(torch.arange(num_local_experts, dtype=torch.int64, device=expert_offsets.device) * padded_m)
    rows = expert_num_tokens.clamp(0, padded_m)
    swap = num_local_experts * padded_m <= MAX_SWAPPED_ROWS
    write_sizes(problem_sizes1, problem_sizes2, rows, 2 * n, n, k, swap)


@get_cutlass_batched_moe_mm_data.result
def result_get_cutlass_batched_moe_mm_data(num_local_experts: int) -> tuple[Result, Result, Result]:
    return Result((num_local_experts,), int32), *new_tables(num_local_experts)


@get_cutlass_batched_moe_mm_data.plan
def plan_get_cutlass_batched_moe_mm_data(
    expert_offsets: TensorArg,
    problem_sizes1: TensorArg,
    problem_sizes2: TensorArg,
    expert_num_tokens: TensorArg,
    num_local_experts: int,
    padded_m: int,
    n: int,
    k: int,
) -> Launch:
    for arg in (expert_num_tokens, expert_offsets):
        check.shape(arg, int32, num_local_experts=num_local_experts)
    check_count(expert_offsets, "padded_m", padded_m, low=0)
    check_count(expert_offsets, "padded_m", num_local_experts * padded_m, low=0)
    check_tables(problem_sizes1, problem_sizes2, num_local_experts, n, k)
    swap = num_local_experts * padded_m <= MAX_SWAPPED_ROWS
    return sizes_launch(num_local_experts, n, swap, from_offsets=False, expert_first_token_offset=0)


@get_cutlass_batched_moe_mm_data.bad_indices
def bad_indices_get_cutlass_batched_moe_mm_data(expert_num_tokens: Tensor, padded_m: int) -> dict[str, Tensor]:
    return {"expert_num_tokens": (expert_num_tokens < 0) | (expert_num_tokens > padded_m)}


@get_cutlass_batched_moe_mm_data.example
def example_get_cutlass_batched_moe_mm_data(make: Any, *, num_tokens: int = 16) -> tuple[Any, ...]:
    num_experts, n, k = 64, 1024, 4096
    return (
        make.full(num_experts, value=0, dtype="int32"),
        *example_tables(make, num_experts, n, k, swap=True),
        make.randint(0, num_tokens + 1, num_experts, dtype="int32"),
        num_experts,
        num_tokens,
        n,
        k,
    )


@op(out=("expert_offsets", "problem_sizes1", "problem_sizes2"), ulps=0)
def get_cutlass_pplx_moe_mm_data(
    expert_offsets: Tensor,
    problem_sizes1: Tensor,
    problem_sizes2: Tensor,
    expert_num_tokens: Tensor,
    num_local_experts: int,
    padded_m: int,
    n: int,
    k: int,
) -> None:
    """`get_cutlass_batched_moe_mm_data` under the name that vLLM gave it before.

    Args:
        expert_offsets, problem_sizes1, problem_sizes2, expert_num_tokens, num_local_experts, padded_m, n, k: as in
            `get_cutlass_batched_moe_mm_data`.
    """
    _write_batched(expert_offsets, problem_sizes1, problem_sizes2, expert_num_tokens, num_local_experts, padded_m, n, k)


get_cutlass_pplx_moe_mm_data.result(result_get_cutlass_batched_moe_mm_data)
get_cutlass_pplx_moe_mm_data.plan(plan_get_cutlass_batched_moe_mm_data)
get_cutlass_pplx_moe_mm_data.bad_indices(bad_indices_get_cutlass_batched_moe_mm_data)
get_cutlass_pplx_moe_mm_data.example(example_get_cutlass_batched_moe_mm_data)
