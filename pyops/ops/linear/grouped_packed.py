"""`grouped_gemm` with K-major quantized weights of 4 or 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import bfloat16, float16, float32
from ..._core.tensors.tensor import TensorArg
from .grouped import grouped_gemm
from .grouped_problem import ACTIVATIONS, ExpertLists
from .quantized_experts import TYPES, check_quants, dequantized
from .wq_grouped_engines import plan
from .wq_grouped_problem import WqGroupedProblem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["grouped_gemm_packed"]


@op(partial="out", atol=2.0**-18)
def grouped_gemm_packed(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_zeros: Tensor | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_pad: Tensor,
    topk_weights: Tensor | None = None,
    bias: Tensor | None = None,
    top_k: int = 1,
    block_size: int = 16,
    activation: str = "none",
    b_type: str = "uint4",
) -> None:
    """Grouped GEMM with quantized weights: ``out[t] = f(weight[t] * (a[t // top_k] @ w[e].T + bias[e]))``.

    ``w = scale * (quant - zero)``, rounded once to the dtype of a. e is the expert of row t; accumulation is in
    float32, the rest is as in `grouped_gemm`. For many rows per expert, or where no kernel
    fuses the dequantization, the weights are dequantized to a workspace first.

    Args:
        out: [num_rows, N], written; of the dtype of a. Constant row stride.
        a: [num_rows / top_k, K] float16 or bfloat16; constant row stride.
        b: [num_experts, rows, K * bits / 8], contiguous: int8, or uint8; rows are N, or 2 N for an activation with
            gates and ups. With 4 bits the first of two quants is in the lower half of a byte.
        b_scales: contiguous; for "uint4" and "uint8" [num_experts, rows, K / group size] of the dtype of a; for "int8"
            [num_experts, rows] float32; for "float4_e2m1f" [num_experts, rows, K / 32] exponents, uint8 or
            float8_e8m0fnu.
        b_zeros: uint8, contiguous; for "uint4" [num_experts, rows / 2, K / group size], the zero point of the first of
            two rows in the lower half; for "uint8" [num_experts, rows, K / group size]. None: all are 8 (4 bits) or 128
            (8 bits).
        sorted_token_ids, expert_ids, num_tokens_post_pad, topk_weights, bias, top_k, activation: as in `grouped_gemm`.
        block_size: slots of a block, a multiple of 8; with weights that are dequantized first, multiples of 16 and of
            64 are faster.
        b_type: the type of the quants: "uint4", "uint8", "int8" or "float4_e2m1f".
    """
    weights = dequantized(b, b_scales, b_zeros, b_type, a.dtype)
    lists = sorted_token_ids, expert_ids, num_tokens_post_pad
    of_sums = b_scales if b_type == "int8" else None
    terms = topk_weights, None, of_sums, bias, top_k, block_size, activation
    grouped_gemm.reference(out, a, weights, *lists, *terms)


@grouped_gemm_packed.result
def result_grouped_gemm_packed(a: TensorArg, b: TensorArg, top_k: int, activation: str) -> Result:
    check.sizes(a, num_rows=None, K=None)
    check.sizes(b, num_experts=None, rows=None, bytes=None)
    return Result((a.shape[0] * top_k, b.shape[1] // (2 if ACTIVATIONS.get(activation) else 1)), a.dtype)


@grouped_gemm_packed.plan
def plan_grouped_gemm_packed(
    out: TensorArg,
    a: TensorArg,
    b: TensorArg,
    b_scales: TensorArg,
    b_zeros: TensorArg | None,
    sorted_token_ids: TensorArg,
    expert_ids: TensorArg,
    num_tokens_post_pad: TensorArg,
    topk_weights: TensorArg | None,
    bias: TensorArg | None,
    top_k: int,
    block_size: int,
    activation: str,
    b_type: str,
) -> list[Launch]:
    for name, value, known in (
        ("activation", activation, tuple(ACTIVATIONS)),
        ("b_type", b_type, TYPES),
    ):
        if value not in known:
            raise check.refuse(out, name, f"expected {' or '.join(known)}, got {value}")
    check.dtype(a, float16, bfloat16)
    check.sizes(a, rows=None, K=None)
    check.row_size(a)
    if not 1 <= top_k <= 1024:
        raise check.refuse(out, "top_k", f"expected 1 to 1024, got {top_k}")
    check.dtype(out, a.dtype)
    check.sizes(out, num_rows=a.shape[0] * top_k, N=None)
    check.row_size(out)
    rows = out.shape[1] * (2 if ACTIVATIONS[activation] else 1)
    weight = check_quants(b, b_scales, b_zeros, b_type, a.dtype, rows, a.shape[1])
    if max(out.shape[0], weight.num_experts * rows) > 2**31 - 1:
        raise out.error(f"expected fewer than 2^31 rows, got {max(out.shape[0], weight.num_experts * rows)}")
    check.per_row(topk_weights, float32, out.shape[0])
    check.shape(bias, out.dtype, num_experts=weight.num_experts, rows=rows)
    lists = ExpertLists.of(sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    of_sums = b_scales if weight.scales is None else None
    return plan(WqGroupedProblem.of(out, a, weight, lists, topk_weights, of_sums, bias, top_k, activation))


@grouped_gemm_packed.bad_indices
def bad_indices_grouped_gemm_packed(
    out: Tensor, b: Tensor, sorted_token_ids: Tensor, expert_ids: Tensor
) -> dict[str, Tensor]:
    return {
        "sorted_token_ids": (sorted_token_ids < 0) | (sorted_token_ids > len(out)),  # num_rows itself is padding
        "expert_ids": (expert_ids < -1) | (expert_ids >= len(b)),
    }


@grouped_gemm_packed.example
def example_grouped_gemm_packed(
    make: Any,
    *,
    num_tokens: int = 16,
    b_type: Literal["uint4", "uint8", "int8", "float4_e2m1f"] = "uint4",
    activation: Literal["silu", "none"] = "silu",
) -> tuple[Any, ...]:
    """With the activation "none" there are zero points (if b_type has them), topk_weights and small blocks; with
    others a bias."""
    num_experts, top_k, k, columns, dtype = 3, 2, 192, 64, "bfloat16"
    block_size = 8 if activation == "none" else 16
    rows = columns * (1 if activation == "none" else 2)
    num_rows, bits = num_tokens * top_k, 4 if b_type in ("uint4", "float4_e2m1f") else 8
    num_blocks = -(-num_rows // block_size)
    with_zeros = activation == "none" and b_type in ("uint4", "uint8")
    if b_type == "float4_e2m1f":
        scales = make.randint(110, 124, num_experts, rows, k // 32, dtype="uint8")
    elif b_type == "int8":
        scales = make.full(num_experts, rows, value=2.0**-10, dtype="float32")
    else:
        scales = make.full(num_experts, rows, k // 64, value=2.0**-10, dtype=dtype)
    low, high = (-128, 128) if b_type == "int8" else (0, 256)
    return (
        make.full(num_rows, columns, value=0.0, dtype=dtype),
        make.randn(num_tokens, k, dtype=dtype),
        make.randint(low, high, num_experts, rows, k * bits // 8, dtype="int8" if b_type == "int8" else "uint8"),
        scales,
        make.randint(0, 256, num_experts, rows * bits // 8, k // 64, dtype="uint8") if with_zeros else None,
        make.permutation(num_blocks * block_size, num_blocks * block_size, dtype="int32"),
        make.randint(0, num_experts, num_blocks, dtype="int32"),
        make.full(1, value=num_blocks * block_size, dtype="int32"),
        make.randn(num_tokens, top_k, dtype="float32") if activation == "none" else None,
        make.randn(num_experts, rows, dtype=dtype) if activation == "silu" else None,
        top_k,
        block_size,
        activation,
        b_type,
    )
