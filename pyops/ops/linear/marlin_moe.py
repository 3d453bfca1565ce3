"""Grouped GEMMs with weights in Marlin's layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32, int8, int32
from ..._core.tensors.tensor import TensorArg
from .._shared.scalar_type import SCALAR_TYPES, uint8b128
from .gemm_problem import Epilogue, Operand
from .grouped_problem import ExpertLists
from .marlin_weight import (
    check_order,
    check_out,
    check_scales,
    check_sizes,
    check_types,
    check_zeros,
    marlin_weight,
    out_dtype,
)
from .packed_grouped_engines import plan
from .packed_problem import PackedExperts, PackedProblem, PackedWeight
from .packed_reference import multiply, rounding_of_weights

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["moe_wna16_marlin_gemm"]


def _of_experts(
    b_q_weight: Tensor, b_bias: Tensor | None, *others: Tensor | None
) -> list[tuple[Tensor, Tensor | None, tuple[Any, ...]]]:
    """The quants, the bias and the other tensors of each expert."""
    given = [None if one is None or not one.numel() else one for one in others]
    return [
        (codes, None if b_bias is None else b_bias[e], tuple(None if one is None else one[e] for one in given))
        for e, codes in enumerate(b_q_weight)
    ]


def _absolute_error(
    a: Tensor,
    c: Tensor,
    b_q_weight: Tensor,
    b_scales: Tensor,
    global_scale: Tensor | None,
    b_zeros: Tensor | None,
    g_idx: Tensor | None,
    perm: Tensor | None,
    b_type_id: int,
    size_n: int,
    size_k: int,
    is_k_full: bool,
    is_zp_float: bool,
) -> float:
    """The largest error of any expert from rounding weights."""
    errors = [2.0**-18]
    scale = None if global_scale is None else global_scale.view(-1, 1)
    for codes, _, others in _of_experts(b_q_weight, None, b_scales, scale, b_zeros, g_idx, perm):
        given: tuple[Any, ...] = (a, codes, *others, b_type_id, size_n, size_k, is_k_full, is_zp_float)
        weight, _ = marlin_weight(*given)
        errors.append(rounding_of_weights(a, weight, c.dtype))
    return max(errors)


@op(partial="c", ulps=2, atol=_absolute_error)
def moe_wna16_marlin_gemm(
    a: Tensor,
    c: Tensor,
    b_q_weight: Tensor,
    b_bias: Tensor | None,
    b_scales: Tensor,
    a_scales: Tensor | None,
    global_scale: Tensor | None,
    b_zeros: Tensor | None,
    g_idx: Tensor | None,
    perm: Tensor | None,
    workspace: Tensor | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_past_padded: Tensor,
    topk_weights: Tensor | None,
    moe_block_size: int,
    top_k: int,
    mul_topk_weights: bool,
    b_type_id: int,
    size_m: int,
    size_n: int,
    size_k: int,
    is_k_full: bool = True,
    use_atomic_add: bool = False,
    use_fp32_reduce: bool = False,
    is_zp_float: bool = False,
    thread_k: int = -1,
    thread_n: int = -1,
    blocks_per_sm: int = -1,
) -> None:
    """Grouped GEMM with weights in Marlin's layout: ``c[t] = weight[t] * (a[t // top_k] @ w[e] + b_bias[e])``.

    e is the expert of row t. The rules of `marlin_gemm` for weights, scales and zero points hold for every expert. Rows
    that the lists do not name, and rows of experts that do not exist, are left unchanged. With 8-bit activations the
    weights are dequantized to a workspace, with all of their scales, in the dtype of c. Modelled on vLLM's op of this
    name.

    Args:
        a: [M, K] float16, bfloat16, int8 or float8_e4m3fn; constant row stride.
        c: [M * top_k, N] of the dtype that `marlin_gemm` gives, written; constant row stride.
        b_q_weight: [num_experts, K / 16, N * bits / 2] int32, contiguous; K a multiple of 16, or of 32 with 8-bit
            activations, N of 64.
        b_bias: [num_experts, N] of the dtype of c, contiguous, permuted; or None.
        b_scales: [num_experts, num_groups, N], contiguous.
        a_scales: float32, contiguous, M or 1 elements, with 8-bit activations; else None.
        global_scale: [num_experts] of the dtype of a or float32, where scales are e4m3; else None.
        b_zeros: [num_experts, num_groups, ...], contiguous; or None.
        g_idx, perm: [num_experts, K] int32, contiguous; both empty or None, as with 8-bit activations, or both given.
        workspace, use_atomic_add, use_fp32_reduce, thread_k, thread_n, blocks_per_sm: for compatibility with vLLM; no
            effect.
        sorted_token_ids, expert_ids, num_tokens_past_padded: as `moe_align_block_size` writes them for blocks of
            moe_block_size.
        topk_weights: float32, contiguous, a weight for each row of c; or None.
        mul_topk_weights: whether rows are multiplied by their weights.
        moe_block_size: slots of a block, a multiple of 8.
        top_k: rows of c that share a row of a.
        b_type_id, is_k_full, is_zp_float: as in `marlin_gemm`; no uint8b128 with int8.
        size_m, size_n, size_k: M, N, K.
    """
    scale = None if global_scale is None else global_scale.view(-1, 1)
    experts = _of_experts(b_q_weight, b_bias, b_scales, scale, b_zeros, g_idx, perm)
    places = min(max(int(num_tokens_past_padded), 0), len(expert_ids) * moe_block_size, len(sorted_token_ids))
    for block in range(places // moe_block_size):
        expert = int(expert_ids[block])
        rows = sorted_token_ids[block * moe_block_size : (block + 1) * moe_block_size].long()
        rows = rows[(rows >= 0) & (rows < len(c))]
        if not 0 <= expert < len(experts) or not len(rows):
            continue
        codes, bias, others = experts[expert]
        x = a[rows // top_k]
        given: tuple[Any, ...] = (x, codes, *others, b_type_id, size_n, size_k, is_k_full, is_zp_float)
        weight, scales = marlin_weight(*given)
        if a_scales is not None:
            scales["a_scales"] = a_scales.reshape(-1) if a_scales.numel() == 1 else a_scales.reshape(-1)[rows // top_k]
        product = x.new_empty(len(rows), size_n, dtype=torch.float32)
        multiply(product, x, weight, bias=bias, column_order="marlin_32", **scales)
        if mul_topk_weights and topk_weights is not None:
            product = product * topk_weights.reshape(-1)[rows, None]
        c[rows] = product.to(c.dtype)


def _of_one(arg: TensorArg | None, num_experts: int) -> TensorArg | None:
    """The descriptor of one expert's part of a contiguous tensor; None for an empty one."""
    if arg is None or 0 in arg.shape[1:] or arg.shape == (0,):
        return None
    check.contiguous(arg)
    if not arg.shape or arg.shape[0] != num_experts:
        raise arg.error(f"expected {num_experts} experts, got shape {arg.shape}")
    return replace(arg, shape=arg.shape[1:] or (1,), strides=arg.strides[1:] or (1,))


def _of_all(
    weight: PackedWeight, of_sums: dict[str, Any], tensors: dict[TensorArg | None, TensorArg | None]
) -> tuple[PackedWeight, dict[str, Any]]:
    """The weight and epilogue arguments of all experts, from those checked for one expert."""
    names = "codes", "scales", "zeros", "g_idx", "perm"
    changes: dict[str, Any] = {name: tensors[getattr(weight, name)] for name in names if getattr(weight, name)}
    return replace(weight, **changes), {name: tensors.get(one, one) for name, one in of_sums.items()}


@moe_wna16_marlin_gemm.result
def result_moe_wna16_marlin_gemm(a: TensorArg, b_scales: TensorArg, top_k: int, size_m: int, size_n: int) -> Result:
    return Result((size_m * top_k, size_n), out_dtype(a, b_scales))


@moe_wna16_marlin_gemm.plan
def plan_moe_wna16_marlin_gemm(
    a: TensorArg,
    c: TensorArg,
    b_q_weight: TensorArg,
    b_bias: TensorArg | None,
    b_scales: TensorArg,
    a_scales: TensorArg | None,
    global_scale: TensorArg | None,
    b_zeros: TensorArg | None,
    g_idx: TensorArg | None,
    perm: TensorArg | None,
    sorted_token_ids: TensorArg,
    expert_ids: TensorArg,
    num_tokens_past_padded: TensorArg,
    topk_weights: TensorArg | None,
    moe_block_size: int,
    top_k: int,
    mul_topk_weights: bool,
    b_type_id: int,
    size_m: int,
    size_n: int,
    size_k: int,
    is_k_full: bool,
    is_zp_float: bool,
) -> list[Launch]:
    kind = check_types(a, b_type_id)
    if a.dtype is int8 and kind == uint8b128:  # products of 8-bit quants and scales leave the range of float16
        raise check.refuse(a, "b_type_id", f"expected codes of 4 bits with int8 activations, got {kind}")
    if not 1 <= top_k <= 1024:
        raise check.refuse(a, "top_k", f"expected 1 to 1024, got {top_k}")
    check_sizes(a, size_m, size_n, size_k)
    check.sizes(b_q_weight, num_experts=None, row_tiles=None, words=None)
    num_experts, words = b_q_weight.shape[0], size_n * kind.size_bits // 2
    check.shape(b_q_weight, int32, num_experts=num_experts, row_tiles=size_k // 16, words=words)
    check.sizes(b_scales, num_experts=num_experts, num_groups=None, N=size_n)
    check.contiguous(b_scales)
    codes, scales = (replace(one, shape=one.shape[1:], strides=one.strides[1:]) for one in (b_q_weight, b_scales))
    others = global_scale, b_zeros, g_idx, perm
    global_one, zeros, groups, order = of_one = [_of_one(one, num_experts) for one in others]
    check_scales(a, scales, a_scales, global_one, kind, size_n, size_k)
    check_zeros(a, scales, zeros, kind, size_n, is_zp_float)
    if order is not None and a.dtype.itemsize == 1:
        raise order.error(f"expected None with {a.dtype} activations")
    check_order(groups, order, size_k)
    check_out(c, a, b_scales, size_m * top_k, size_n)
    check.shape(b_bias, c.dtype, num_experts=num_experts, N=size_n)
    if mul_topk_weights and topk_weights is None:
        raise check.refuse(a, "topk_weights", "expected weights of rows with mul_topk_weights, got None")
    weights = topk_weights if mul_topk_weights else None
    check.per_row(weights, float32, size_m * top_k)
    lists = ExpertLists.of(sorted_token_ids, expert_ids, num_tokens_past_padded, moe_block_size, "moe_block_size")
    given: tuple[Any, ...] = a, codes, scales, *of_one, b_type_id, size_n, size_k, is_k_full, is_zp_float
    weight, of_sums = marlin_weight(*given)
    of_all = {codes: b_q_weight, scales: b_scales, **dict(zip(of_one, others, strict=True))}
    weight, of_sums = _of_all(weight, of_sums, of_all)
    of_sums |= {} if a_scales is None else {"a_scales": a_scales}
    epilogue = Epilogue(c, bias=b_bias, column_order="marlin_32", of_experts=True, **of_sums)
    experts = PackedExperts(num_experts, lists, top_k, weights)
    return plan(PackedProblem(Operand.of_rows(a), weight, epilogue, experts))


@moe_wna16_marlin_gemm.bad_indices
def bad_indices_moe_wna16_marlin_gemm(
    a: Tensor,
    b_q_weight: Tensor,
    b_scales: Tensor,
    g_idx: Tensor | None,
    perm: Tensor | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    top_k: int,
    size_k: int,
    is_k_full: bool,
) -> dict[str, Tensor]:
    found = {
        "sorted_token_ids": (sorted_token_ids < 0) | (sorted_token_ids > len(a) * top_k),
        "expert_ids": (expert_ids < -1) | (expert_ids >= len(b_q_weight)),
    }
    if perm is not None:
        found["perm"] = (perm < 0) | (perm >= size_k)
    if g_idx is not None and not is_k_full:
        found["g_idx"] = (g_idx < 0) | (g_idx >= b_scales.shape[1])
    return found


@moe_wna16_marlin_gemm.example
def example_moe_wna16_marlin_gemm(
    make: Any,
    *,
    num_tokens: int = 16,
    codes: Literal["uint4b8", "uint4", "float4_e2m1f"] = "uint4b8",
    moe_block_size: Literal[16, 8] = 16,
    permuted: bool = False,
    with_bias: bool = False,
) -> tuple[Any, ...]:
    """Only integer weights without zero points are permuted."""
    num_experts, top_k, k, n, dtype = 3, 2, 128, 64, "bfloat16"
    kind, num_rows = SCALAR_TYPES[codes], num_tokens * top_k
    groups = k // 16 if codes == "float4_e2m1f" else 4
    permuted = permuted and codes == "uint4b8"
    blocks = -(-num_rows // moe_block_size)
    scales = make.randn(num_experts, groups, n, dtype=dtype, scale=2.0**-8)
    zeros = make.randint(-(2**31), 2**31, num_experts, groups, n // 8, dtype="int32") if codes == "uint4" else None
    if codes == "float4_e2m1f":
        scales = make.full(num_experts, groups, n, value=1.5, dtype="float8_e4m3fn")
    return (
        make.randn(num_tokens, k, dtype=dtype),
        make.full(num_rows, n, value=0.0, dtype=dtype),
        make.randint(-(2**31), 2**31, num_experts, k // 16, n * kind.size_bits // 2, dtype="int32"),
        make.randn(num_experts, n, dtype=dtype) if with_bias else None,
        scales,
        None,
        make.full(num_experts, value=1.0, dtype=dtype) if codes == "float4_e2m1f" else None,
        zeros,
        make.randint(0, groups, num_experts, k, dtype="int32") if permuted else None,
        make.randint(0, k, num_experts, k, dtype="int32") if permuted else None,
        None,
        make.permutation(blocks * moe_block_size, blocks * moe_block_size, dtype="int32"),
        make.randint(0, num_experts, blocks, dtype="int32"),
        make.full(1, value=blocks * moe_block_size, dtype="int32"),
        make.randn(num_rows, dtype="float32"),
        moe_block_size,
        top_k,
        with_bias,
        kind.id,
        num_tokens,
        n,
        k,
        not permuted,
        *(False, True, False),
        *(-1, -1, -1),
    )
