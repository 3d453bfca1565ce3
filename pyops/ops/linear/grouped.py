"""Grouped GEMMs: rows times the weights of their experts, with rows sorted as `moe_align_block_size` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import E4M3, FLOATS, bfloat16, float8_e5m2, float16, float32, int8
from ..._core.tensors.tensor import TensorArg
from .._shared.fp8_accumulation import experts_error
from .gemm_problem import SCALE_BLOCK, Operand
from .grouped_engines import plan
from .grouped_problem import ACTIVATIONS, ExpertLists, GroupedProblem, check_scales

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["grouped_gemm"]

_LIMIT, _ALPHA = 7.0, 1.702  # constants of swigluoai and swiglustep


@op(partial="out", atol=experts_error)
def grouped_gemm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_pad: Tensor,
    topk_weights: Tensor | None = None,
    a_scales: Tensor | None = None,
    b_scales: Tensor | None = None,
    bias: Tensor | None = None,
    top_k: int = 1,
    block_size: int = 64,
    activation: str = "none",
) -> None:
    """Grouped GEMM over experts: ``out[t] = f(weight[t] * (a[t // top_k] @ b[e].T + bias[e]))``.

    e is the expert of row t. Accumulation is exact for int8 and in float32 for other dtypes, with scales as
    `cutlass_scaled_mm` applies them; the epilogue is computed in float32 and rounded once. Rows that the lists do not
    name, and rows of experts that do not exist, are left unchanged.

    Args:
        out: [num_rows, N], written; float16 or bfloat16, or float32 for operands of float32. Constant row stride.
        a: [num_rows / top_k, K] float32, float16, bfloat16, int8 or float8; constant row stride.
        b: [num_experts, N, K] of the same dtype, or [num_experts, 2 N, K] for an activation with gates and ups; rows of
            one stride.
        sorted_token_ids: [slots] int32, contiguous: rows of out, block by block; any other number for padding.
        expert_ids: [blocks] int32, contiguous: the expert of each block of `block_size` slots.
        num_tokens_post_pad: one int32, the number of slots in use.
        topk_weights: float32, contiguous, a weight for each row of out; or None.
        a_scales: float32, contiguous, one element or one for each row of a; or, for 8-bit operands, block scales
            [num_rows / top_k, ceil(K / 128)] of any strides; or None.
        b_scales: float32, contiguous, [num_experts] or [num_experts, rows of b[e]], with further sizes of 1; or block
            scales [num_experts, ceil(rows / 128), ceil(K / 128)] of any strides; or None.
        bias: of the dtype of out, contiguous, [num_experts, rows of b[e]]; or None.
        top_k: rows of out that share a row of a.
        block_size: slots of a block, a multiple of 8; GPUs with WGMMA are fast with multiples of 64.
        activation: "none"; "silu_no_mul", "gelu_no_mul" (by the error function) or "relu2_no_mul"; "silu" or "gelu",
            ``f(gate) * up``; "swiglustep", ``min(silu(gate), 7) * clip(up, -7, 7)``. Gates are the first half of the
            rows of b[e], ups the other. Or "swigluoai", ``(clip(up, -7, 7) + 1) * g * sigmoid(1.702 g)`` with
            ``g = min(gate, 7)``, with alternating rows of gates and ups.
    """
    num_rows, num_experts = out.shape[0], b.shape[0]
    places = min(max(int(num_tokens_post_pad), 0), len(expert_ids) * block_size, len(sorted_token_ids))
    for block in range(places // block_size):
        expert = int(expert_ids[block])
        rows = sorted_token_ids[block * block_size : (block + 1) * block_size].long()
        rows = rows[(rows >= 0) & (rows < num_rows)]
        if not 0 <= expert < num_experts or not len(rows):
            continue
        x = _scaled_product(a, b[expert], rows // top_k, a_scales, None if b_scales is None else b_scales[expert])
        if bias is not None:
            x = x + bias[expert].double()
        if topk_weights is not None:
            x = x * topk_weights.reshape(-1)[rows, None].double()
        out[rows] = activated(x, activation).to(out.dtype)


def _scaled_product(a: Tensor, b: Tensor, rows: Tensor, a_scales: Tensor | None, b_scales: Tensor | None) -> Tensor:
    """float64 ``a[rows] @ b.T`` with scales."""
    if a_scales is not None and b_scales is not None and b_scales.ndim == 2 and b_scales.shape != (len(b), 1):
        return block_scaled_product(a[rows], b, a_scales[rows], b_scales)
    x = a[rows].double() @ b.double().T
    if b_scales is not None:
        x = b_scales.reshape(-1).double() * x
    if a_scales is not None:
        scales = a_scales.reshape(-1).double()
        x = x * (scales if len(scales) == 1 and len(a) != 1 else scales[rows, None])
    return x


def block_scaled_product(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor) -> Tensor:
    """float64 ``a @ b.T`` with block scales: each block of K is multiplied by its scales."""
    x = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    of_rows = torch.arange(len(b), dtype=torch.int64, device=b.device) // SCALE_BLOCK
    for j in range(b_scales.shape[1]):
        block = slice(j * SCALE_BLOCK, (j + 1) * SCALE_BLOCK)
        factors = a_scales[:, j, None] * b_scales[of_rows, j]
        x += factors.double() * (a[:, block].double() @ b[:, block].double().T)
    return x


def activated(x: Tensor, activation: str) -> Tensor:
    """An activation of `grouped_gemm`; gated ones take rows with twice the columns."""
    silu, gelu, relu = torch.nn.functional.silu, torch.nn.functional.gelu, torch.nn.functional.relu
    if activation == "swigluoai":
        gate, up = x[:, ::2].clamp(max=_LIMIT), x[:, 1::2].clamp(-_LIMIT, _LIMIT)
        return (up + 1) * gate * torch.sigmoid(_ALPHA * gate)
    if ACTIVATIONS[activation] == 1:
        gate, up = x.chunk(2, 1)
        if activation == "swiglustep":
            return silu(gate).clamp(max=_LIMIT) * up.clamp(-_LIMIT, _LIMIT)
        return (silu if activation == "silu" else gelu)(gate) * up
    plain = {"silu_no_mul": silu, "gelu_no_mul": gelu, "relu2_no_mul": lambda x: relu(x) ** 2}
    result: Tensor = plain[activation](x) if activation in plain else x
    return result


@grouped_gemm.result
def result_grouped_gemm(
    a: TensorArg,
    b: TensorArg,
    bias: TensorArg | None,
    top_k: int,
    activation: str,
    *,
    out_dtype: torch.dtype | None = None,
) -> Result:
    """Rows of `a`, each `top_k` times.

    Args:
        out_dtype: of the output; None for the dtype of `a` if that is a float of 16 or 32 bits, else for the dtype of
            the bias, else for bfloat16.
    """
    check.sizes(a, num_rows=None, K=None)
    check.sizes(b, num_experts=None, rows=None, K=None)
    default = a.dtype if a.dtype in FLOATS else bias.dtype if bias else bfloat16
    n = b.shape[1] // (2 if ACTIVATIONS.get(activation) else 1)
    return Result((a.shape[0] * top_k, n), check.chosen(a, "out_dtype", out_dtype, default))


@grouped_gemm.plan
def plan_grouped_gemm(
    out: TensorArg,
    a: TensorArg,
    b: TensorArg,
    sorted_token_ids: TensorArg,
    expert_ids: TensorArg,
    num_tokens_post_pad: TensorArg,
    topk_weights: TensorArg | None,
    a_scales: TensorArg | None,
    b_scales: TensorArg | None,
    bias: TensorArg | None,
    top_k: int,
    block_size: int,
    activation: str,
) -> Launch | list[Launch]:
    if activation not in ACTIVATIONS:
        raise check.refuse(out, "activation", f"expected {' or '.join(ACTIVATIONS)}, got {activation}")
    check.dtype(a, *FLOATS, *E4M3, float8_e5m2, int8)
    check.sizes(a, rows=None, K=None)
    check.row_size(a)
    check.dtype(b, a.dtype)
    check.sizes(b, num_experts=None, rows=None, K=a.shape[1])
    check.row_size(b), check.row_stride(b)
    check.dtype(out, *((a.dtype,) if a.dtype in FLOATS else (float16, bfloat16)))
    if not 1 <= top_k <= 1024:
        raise check.refuse(out, "top_k", f"expected 1 to 1024, got {top_k}")
    b_rows = b.shape[1]
    if ACTIVATIONS[activation] and b_rows % 2:
        raise b.error(f"expected as many gates as ups, got {b_rows} rows")
    check.sizes(out, num_rows=a.shape[0] * top_k, N=b_rows // 2 if ACTIVATIONS[activation] else b_rows)
    check.row_size(out)
    if max(out.shape[0], b.shape[0] * b_rows) > 2**31 - 1:
        raise out.error(f"expected fewer than 2^31 rows, got {max(out.shape[0], b.shape[0] * b_rows)}")
    check.per_row(topk_weights, float32, out.shape[0])
    blocked = check_scales(a, (b.shape[0], b_rows, b.shape[2]), a_scales, b_scales)
    if blocked and a.dtype.itemsize > 1:
        raise a.error(f"expected operands of 8 bits under scales of blocks, got {a.dtype}")
    check.shape(bias, out.dtype, num_experts=b.shape[0], rows=b_rows)
    lists = ExpertLists.of(sorted_token_ids, expert_ids, num_tokens_post_pad, block_size)
    operands = Operand.of_rows(a), Operand.of_rows(b), b.shape[0], a.shape[1]
    terms = topk_weights, a_scales, b_scales, bias
    return plan(GroupedProblem(out, *operands, lists, *terms, top_k, activation, blocked))


@grouped_gemm.bad_indices
def bad_indices_grouped_gemm(out: Tensor, b: Tensor, sorted_token_ids: Tensor, expert_ids: Tensor) -> dict[str, Tensor]:
    return {
        "sorted_token_ids": (sorted_token_ids < 0) | (sorted_token_ids > len(out)),  # num_rows itself is padding
        "expert_ids": (expert_ids < -1) | (expert_ids >= len(b)),
    }


@grouped_gemm.example
def example_grouped_gemm(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: Literal["bfloat16", "float32", "float8_e4m3fn", "int8"] = "bfloat16",
    activation: Literal["silu", "swigluoai", "none"] = "silu",
    scales: Literal["row", "block"] = "row",
) -> tuple[Any, ...]:
    num_experts, top_k, k, columns, block_size = 4, 2, 208, 128, 64
    out_dtype = "float32" if dtype == "float32" else "bfloat16"
    b_rows = columns * (1 if activation == "none" else 2)
    sizes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "row": ((num_tokens, 1), (num_experts, b_rows, 1)),
        "block": ((num_tokens, 2), (num_experts, -(-b_rows // SCALE_BLOCK), 2)),
    }
    a_scales, b_scales = (
        make.full(*size, value=0.05, dtype="float32") if dtype in ("float8_e4m3fn", "int8") else None
        for size in sizes[scales]
    )

    def draw(*sizes: int, scale: float = 1.0) -> Any:
        if dtype == "int8":
            return make.randint(-128, 128, *sizes, dtype=dtype)
        return make.randn(*sizes, dtype=dtype, scale=scale)

    num_rows = num_tokens * top_k
    num_blocks = -(-num_rows // block_size)
    return (
        make.full(num_rows, columns, value=0.0, dtype=out_dtype),
        draw(num_tokens, k),
        draw(num_experts, b_rows, k, scale=k**-0.5),
        make.permutation(num_blocks * block_size, num_blocks * block_size, dtype="int32"),
        make.randint(0, num_experts, num_blocks, dtype="int32"),
        make.full(1, value=num_blocks * block_size, dtype="int32"),
        make.randn(num_tokens, top_k, dtype="float32") if activation == "none" else None,
        a_scales,
        b_scales,
        make.randn(num_experts, b_rows, dtype=out_dtype) if activation == "swigluoai" else None,
        top_k,
        block_size,
        activation,
    )
