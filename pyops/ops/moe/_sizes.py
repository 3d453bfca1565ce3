"""Tables of the problem sizes of grouped GEMMs: their reference, checks, launch and examples.

The first layer multiplies the rows of an expert by ``[first_n, k]``; first_n is 2 * n if its output is gated, else
n; the second layer by ``[k, n]``. A size is (M, N, K), or (N, M, K) where a GEMM swaps its operands (swap-AB), as
it does for small M.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from ._sort import check_count

if TYPE_CHECKING:
    from torch import Tensor

_moe_mm_sizes = Kernel("moe/moe_mm_sizes.cu")
_NUM_THREADS = 128  # threads of a block of moe_mm_sizes.cu; not tuned
MAX_SWAPPED_ROWS = 64  # vLLM's bound of M for swap-AB


def write_sizes(
    problem_sizes1: Tensor, problem_sizes2: Tensor, rows: Tensor, first_n: int, n: int, k: int, swap: bool
) -> None:
    """The reference of both tables."""
    for table, columns, depth in ((problem_sizes1, first_n, k), (problem_sizes2, k, n)):
        table[:, 1 if swap else 0] = rows.int()
        table[:, 0 if swap else 1] = columns
        table[:, 2] = depth


def check_tables(problem_sizes1: TensorArg, problem_sizes2: TensorArg, num_experts: int, n: int, k: int) -> None:
    """Check both tables, and the sizes of the layers."""
    for table in (problem_sizes1, problem_sizes2):
        check.shape(table, int32, num_experts=num_experts, sizes=3)
    check_count(problem_sizes1, "n", n, low=0, high=2**30 - 1)
    check_count(problem_sizes1, "k", k, low=0)


def new_tables(num_experts: int) -> tuple[Result, Result]:
    """The new tables of `num_experts` experts."""
    return Result((num_experts, 3), int32), Result((num_experts, 3), int32)


def sizes_launch(num_experts: int, n: int, swap: bool, from_offsets: bool, **absent: int) -> Launch:
    """The launch of moe_mm_sizes.cu; `absent` feeds null pointers for tensors that the op lacks."""
    return _moe_mm_sizes(FROM_OFFSETS=from_offsets, SWAP=swap, NUM_THREADS=_NUM_THREADS).launch(
        grid=-(-num_experts // _NUM_THREADS), block=_NUM_THREADS, num_experts=num_experts, first_n=2 * n, **absent
    )


def example_tables(make: Any, num_experts: int, n: int, k: int, swap: bool) -> tuple[Any, Any]:
    """Both tables, with the contents that a call without rows leaves."""
    sizes = [[0, 2 * n, k], [0, k, n]]
    rows = [[columns, none, depth] if swap else [none, columns, depth] for none, columns, depth in sizes]
    return make.values([rows[0]] * num_experts, dtype="int32"), make.values([rows[1]] * num_experts, dtype="int32")
