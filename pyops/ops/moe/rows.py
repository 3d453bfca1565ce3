"""Sums over the choices of each token, and gathers of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from .._shared import chunks, copied_rows
from .._shared.copied_rows import MOVED, check_matrix
from ._common import check_topk
from ._sort import check_count, check_ids, check_map, local_experts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["moe_sum", "moe_sum_experts", "shuffle_rows"]

_moe_sum = Kernel("moe/moe_sum.cu")
_shuffle_rows = Kernel("moe/shuffle_rows.cu")
_SUM_BLOCKS = 4  # blocks of 256 threads per SM: 64 registers for eight loads


@op(out="output", ulps=0)
def moe_sum(input: Tensor, output: Tensor) -> None:
    """The sum over the choices of each token: ``output[t] = T(sum of input[t, j] over j)``.

    Accumulation is in float32, in the order of j; the sum is rounded to the element type once. Modelled on vLLM's op of
    this name.

    Args:
        input: [num_tokens, topk, hidden_size], float32, float16 or bfloat16, contiguous.
        output: [num_tokens, hidden_size] of the same dtype, written; constant row stride.
    """
    total = input[:, 0].float()
    for j in range(1, input.shape[1]):
        total = total + input[:, j].float()
    output.copy_(total)


def _check_choices(input: TensorArg) -> None:
    check.floating(input)
    check.sizes(input, num_tokens=None, topk=None, hidden_size=None)
    check_topk(input, input.shape[1])


def _first_choices(input: TensorArg, output: TensorArg) -> TensorArg:
    """Check both; returns the first choice of each token, a matrix."""
    _check_choices(input)
    check.contiguous(input)
    num_tokens, topk, hidden_size = input.shape
    check.sizes(output, num_tokens=num_tokens, hidden_size=hidden_size)
    check.dtype(output, input.dtype)
    check.row_size(output)
    return replace(input, shape=output.shape, strides=(topk * hidden_size, 1))


@moe_sum.result
def result_moe_sum(input: TensorArg) -> Result:
    _check_choices(input)
    return Result((input.shape[0], input.shape[2]), input.dtype)


@moe_sum.plan
def plan_moe_sum(input: TensorArg, output: TensorArg) -> Launch:
    first, topk = _first_choices(input, output), input.shape[1]
    absent = {"topk_ids": 0, "expert_map": 0, "num_ids": 0, "num_local": 0}
    constants: dict[str, Any] = {"TOPK": topk, "HAS_IDS": False, "HAS_MAP": False, "id_t": int32}
    return chunks.launch(_moe_sum, output, first, min_blocks=_SUM_BLOCKS, fixed=absent, **constants)


@moe_sum.example
def example_moe_sum(
    make: Any,
    *,
    num_tokens: int = 16,
    topk: Literal[8, 3, 17] = 8,
    hidden_size: Literal[4096, 64, 511] = 4096,
    dtype: str = "bfloat16",
) -> tuple[Any, ...]:
    return make.randn(num_tokens, topk, hidden_size, dtype=dtype), make.empty(num_tokens, hidden_size, dtype=dtype)


@op(out="output", ulps=0)
def moe_sum_experts(
    input: Tensor, topk_ids: Tensor, output: Tensor, num_experts: int, expert_map: Tensor | None = None
) -> None:
    """`moe_sum` over the choices with experts on this device; zeros for a token without such a choice.

    Args:
        input: [num_tokens, topk, hidden_size], float32, float16 or bfloat16, contiguous; any values for choices with
            experts elsewhere.
        topk_ids: [num_tokens, topk] int32 or int64, contiguous: the experts of each token; any number.
        output: [num_tokens, hidden_size] of the same dtype, written; constant row stride.
        num_experts: experts on this device.
        expert_map: [any] int32, contiguous: the local index of each expert, -1 for an expert on another device. None:
            ids are not mapped.
    """
    num_ids = num_experts if expert_map is None else len(expert_map)
    exists = (local_experts(topk_ids, num_ids, num_experts, expert_map) >= 0).reshape(topk_ids.shape)
    moe_sum.reference(input.where(exists[:, :, None], 0), output)


@moe_sum_experts.result
def result_moe_sum_experts(input: TensorArg) -> Result:
    _check_choices(input)
    return Result((input.shape[0], input.shape[2]), input.dtype)


@moe_sum_experts.plan
def plan_moe_sum_experts(
    input: TensorArg, topk_ids: TensorArg, output: TensorArg, num_experts: int, expert_map: TensorArg | None
) -> Launch:
    first = _first_choices(input, output)
    topk = input.shape[1]
    check_ids(topk_ids)
    check.sizes(topk_ids, num_tokens=input.shape[0], topk=topk)
    check_count(topk_ids, "num_experts", num_experts, low=0)
    num_ids = check_map(expert_map, num_experts if expert_map is None else expert_map.numel)
    constants: dict[str, Any] = {
        "TOPK": topk,
        "HAS_IDS": True,
        "HAS_MAP": expert_map is not None,
        "id_t": topk_ids.dtype,
    }
    fixed = {"num_ids": num_ids, "num_local": num_experts}
    return chunks.launch(_moe_sum, output, first, min_blocks=_SUM_BLOCKS, fixed=fixed, **constants)


@moe_sum_experts.bad_indices
def bad_indices_moe_sum_experts(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> dict[str, Tensor]:
    bad = {"topk_ids": (topk_ids < 0) | (topk_ids >= (num_experts if expert_map is None else len(expert_map)))}
    return bad if expert_map is None else {**bad, "expert_map": (expert_map < -1) | (expert_map >= num_experts)}


@moe_sum_experts.example
def example_moe_sum_experts(
    make: Any, *, num_tokens: int = 16, with_map: bool = False, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    num_experts, hidden_size, topk = 32, 511, 9
    return (
        make.randn(num_tokens, topk, hidden_size, dtype=dtype),
        make.randint(0, num_experts, num_tokens, topk, dtype="int32"),
        make.empty(num_tokens, hidden_size, dtype=dtype),
        num_experts,
        make.randint(-1, num_experts, num_experts, dtype="int32") if with_map else None,
    )


@op(out="output_tensor", ulps=0)
def shuffle_rows(input_tensor: Tensor, dst2src_map: Tensor, output_tensor: Tensor) -> None:
    """Rows in any order and number, bit for bit: ``output_tensor[i] = input_tensor[dst2src_map[i]]``.

    Where there is no such row, `output_tensor` becomes 0. Modelled on vLLM's op of this name.

    Args:
        input_tensor: [num_sources, hidden_size], floats, float8 or integers; constant row stride.
        dst2src_map: [num_rows, or more] int32, contiguous.
        output_tensor: [num_rows, hidden_size] of the same dtype, written; constant row stride.
    """
    dst2src_map = dst2src_map[: len(output_tensor)]
    exists = (dst2src_map >= 0) & (dst2src_map < len(input_tensor))
    bits = [x.view(torch.uint8) if x.element_size() == 1 else x for x in (input_tensor, output_tensor)]
    bits[1].zero_()
    bits[1][exists] = bits[0][dst2src_map[exists].long()]


@shuffle_rows.result
def result_shuffle_rows(input_tensor: TensorArg, dst2src_map: TensorArg) -> Result:
    check_matrix(input_tensor, *MOVED)
    check.sizes(dst2src_map, num_rows=None)
    return Result((dst2src_map.shape[0], input_tensor.shape[1]), input_tensor.dtype)


@shuffle_rows.plan
def plan_shuffle_rows(input_tensor: TensorArg, dst2src_map: TensorArg, output_tensor: TensorArg) -> Launch:
    num_sources, hidden_size = check_matrix(input_tensor, *MOVED)
    num_rows, _ = check_matrix(output_tensor, input_tensor.dtype)
    check.sizes(output_tensor, num_rows=None, hidden_size=hidden_size)
    check.sizes(dst2src_map, num_rows=None)
    check.at_least(dst2src_map, int32, num_rows)
    return copied_rows.gather(_shuffle_rows, output_tensor, input_tensor, {"num_sources": num_sources})


@shuffle_rows.bad_indices
def bad_indices_shuffle_rows(input_tensor: Tensor, dst2src_map: Tensor) -> dict[str, Tensor]:
    return {"dst2src_map": (dst2src_map < 0) | (dst2src_map >= len(input_tensor))}


@shuffle_rows.traffic
def traffic_shuffle_rows(dst2src_map: TensorArg, output_tensor: TensorArg) -> int:
    return dst2src_map.nbytes + 2 * output_tensor.nbytes


@shuffle_rows.example
def example_shuffle_rows(
    make: Any, *, num_tokens: int = 16, hidden_size: Literal[4096, 64] = 4096, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    num_rows = 2 * num_tokens
    return (
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.randint(0, max(1, num_tokens), num_rows, dtype="int32"),
        make.empty(num_rows, hidden_size, dtype=dtype),
    )
