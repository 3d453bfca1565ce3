"""GEMMs with AWQ and GPTQ weights in the layouts of their checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import bfloat16, float16, int32
from ..._core.tensors.tensor import TensorArg
from .._shared.packed_layouts import unit
from .._shared.scalar_type import ScalarType, uint4
from .gemm_problem import Epilogue, Operand
from .packed_plan import plan
from .packed_problem import PackedProblem, PackedWeight
from .packed_reference import multiply, rounding_of_weights

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["awq_gemm", "gptq_gemm"]

_BITS = (2, 3, 4, 8)


@op(
    returns="out",
    runtime="split_k_iters",
    ulps=2,
    atol=lambda input, qweight, scales, qzeros: rounding_of_weights(
        input, _awq_weight(qweight, scales, qzeros), input.dtype
    ),
)
def awq_gemm(
    input: Tensor, qweight: Tensor, scales: Tensor, qzeros: Tensor, split_k_iters: int, *, out: Tensor
) -> None:
    """A GEMM with an AWQ weight: ``out = input @ ((quant - zero) * scale)``, accumulated in float32, rounded once.

    Weights may be rounded to the dtype of `input`, unless a column has one scale; then the epilogue applies it. A word
    holds eight columns in the order 0 2 4 6 1 3 5 7, starting at its lowest nibble (Lin et al. 2023, arXiv:2306.00978).

    Args:
        input: [M, K] float16 or bfloat16; constant row stride.
        qweight: [K, N / 8] int32, contiguous.
        scales: [num_groups, N] of the dtype of `input`, contiguous; num_groups divides K.
        qzeros: [num_groups, N / 8] int32, packed as the weight, contiguous; used as stored.
        split_k_iters: for compatibility with vLLM; no effect.
        out: [M, N] of the dtype of `input`, returned; elements of a row are contiguous; new unless given.
    """
    multiply(out, input, _awq_weight(qweight, scales, qzeros), *_scales_of_sums(scales))


def _awq_weight(qweight: Any, scales: Any, qzeros: Any) -> PackedWeight:
    k, (groups, n) = qweight.shape[0], scales.shape
    return PackedWeight(
        qweight,
        "awq",
        uint4,
        k,
        n,
        groups,
        k // max(1, groups),
        None if groups == 1 else scales,
        zeros=qzeros,
        zero_kind="codes",
    )


def _scales_of_sums(scales: Any) -> tuple[Any, Any]:
    """a_scales and b_scales of the epilogue: with one group, the epilogue applies the scales."""
    return None, scales if scales.shape[0] == 1 else None


@awq_gemm.result
def result_awq_gemm(input: TensorArg, scales: TensorArg) -> Result:
    check.sizes(input, M=None, K=None)
    check.sizes(scales, num_groups=None, N=None)
    return Result((input.shape[0], scales.shape[1]), input.dtype)


@awq_gemm.plan
def plan_awq_gemm(
    input: TensorArg, qweight: TensorArg, scales: TensorArg, qzeros: TensorArg, out: TensorArg
) -> list[Launch]:
    check.dtype(input, float16, bfloat16)
    (m, n), *_ = result_awq_gemm(input, scales)
    k, num_groups = input.shape[1], scales.shape[0]
    check.dtype(scales, input.dtype)
    check.contiguous(scales)
    if n % 8:
        raise scales.error(f"expected a multiple of 8 columns, got {n}")
    _check_groups(scales, k)
    check.shape(qweight, int32, K=k, words=n // 8)
    check.shape(qzeros, int32, num_groups=num_groups, words=n // 8)
    check.dtype(out, input.dtype)
    check.sizes(out, M=m, N=n)
    check.row_size(out)
    epilogue = Epilogue(out, *_scales_of_sums(scales))
    return plan(PackedProblem(Operand.of_rows(input), _awq_weight(qweight, scales, qzeros), epilogue))


def _check_groups(scales: TensorArg, k: int) -> None:
    """Check that the number of groups, the rows of scales, divides K."""
    num_groups = scales.shape[0]
    if k % max(1, num_groups) or num_groups == 0 < k:
        raise scales.error(f"expected groups that divide K, {k}, got {num_groups}")


@awq_gemm.example
def example_awq_gemm(
    make: Any,
    *,
    num_tokens: int = 16,
    num_groups: Literal[2, 1] = 2,
    dtype: Literal["float16", "bfloat16"] = "float16",
    is_tiled: bool = False,
) -> tuple[Any, ...]:
    """`is_tiled`: columns and groups fill whole tiles, so that kernels with fused dequantization support the call."""
    k, n = (256, 128) if is_tiled else (160, 72)
    return (
        make.randn(num_tokens, k, dtype=dtype),
        make.randint(-(2**31), 2**31, k, n // 8, dtype="int32"),
        make.randn(num_groups, n, dtype=dtype, scale=0.01),
        make.randint(-(2**31), 2**31, num_groups, n // 8, dtype="int32"),
        8,
        make.empty(num_tokens, n, dtype=dtype),
    )


def _gptq_error(
    a: Tensor,
    b_q_weight: Tensor,
    b_gptq_qzeros: Tensor,
    b_gptq_scales: Tensor,
    b_g_idx: Tensor | None,
    use_exllama: bool,
    use_v2_format: bool,
    bit: int,
) -> float:
    weight = _gptq_weight(b_q_weight, b_gptq_qzeros, b_gptq_scales, _given(b_g_idx), use_exllama, use_v2_format, bit)
    return rounding_of_weights(a, weight, a.dtype)


@op(returns="out", ulps=2, atol=_gptq_error)
def gptq_gemm(
    a: Tensor,
    b_q_weight: Tensor,
    b_gptq_qzeros: Tensor,
    b_gptq_scales: Tensor,
    b_g_idx: Tensor | None,
    use_exllama: bool,
    use_v2_format: bool,
    bit: int,
    *,
    out: Tensor,
) -> None:
    """A GEMM with a GPTQ weight: ``out = a @ ((quant - zero) * scale)``, accumulated in float32, rounded once.

    Weights may be rounded to the dtype of `a`, unless a column has one scale; then the epilogue applies it. Each column
    of the weight has consecutive quants, starting at the lowest bit of its first word; so does each row of zero points
    (Frantar et al. 2022, arXiv:2210.17323). A row of the weight counts as zeros if b_g_idx names no group or no column
    of `a` for it.

    Args:
        a: [M, K] float16 or bfloat16; constant row stride.
        b_q_weight: [K * bit / 32, N] int32, contiguous.
        b_gptq_qzeros: [num_groups, N * bit / 32] int32, contiguous.
        b_gptq_scales: [num_groups, N] of the dtype of `a`, contiguous.
        b_g_idx: [K] int32, contiguous; empty or None: rows are in order, in groups of K / num_groups. With use_exllama
            row k of the weight multiplies column ``b_g_idx[k]`` of `a`; otherwise its group is ``b_g_idx[k]``.
        use_exllama: whether the weight comes from `gptq_shuffle` (layout exllama).
        use_v2_format: whether zero points are used as they are stored; otherwise 1 is added to them.
        bit: bits of a quant: 2, 3, 4 or 8.
        out: [M, N] of the dtype of `a`, returned; elements of a row are contiguous; new unless given.
    """
    weight = _gptq_weight(b_q_weight, b_gptq_qzeros, b_gptq_scales, _given(b_g_idx), use_exllama, use_v2_format, bit)
    multiply(out, a, weight, *_gptq_scales(weight, b_gptq_scales))


def _given(b_g_idx: Tensor | None) -> Tensor | None:
    return None if b_g_idx is None or not b_g_idx.numel() else b_g_idx


def _gptq_weight(
    codes: Any, zeros: Any, scales: Any, g_idx: Any, use_exllama: bool, use_v2_format: bool, bit: int
) -> PackedWeight:
    words, fields = unit(bit)
    k, (groups, n) = codes.shape[0] // words * fields, scales.shape
    by_index = g_idx is not None and not use_exllama
    return PackedWeight(
        codes,
        "exllama" if use_exllama else "gptq",
        ScalarType(0, bit, False),
        k,
        n,
        groups,
        k // max(1, groups),
        scales if groups > 1 or by_index else None,
        zeros=zeros,
        zero_kind="codes",
        zero_layout="gptq",
        zero_offset=0 if use_v2_format else 1,
        g_idx=g_idx if by_index else None,
        perm=g_idx if use_exllama else None,
    )


def _gptq_scales(weight: PackedWeight, scales: Any) -> tuple[Any, Any]:
    """a_scales and b_scales of the epilogue: the scales, if dequantization does not apply them."""
    return None, scales if weight.scales is None else None


@gptq_gemm.result
def result_gptq_gemm(a: TensorArg, b_gptq_scales: TensorArg) -> Result:
    check.sizes(a, M=None, K=None)
    check.sizes(b_gptq_scales, num_groups=None, N=None)
    return Result((a.shape[0], b_gptq_scales.shape[1]), a.dtype)


@gptq_gemm.plan
def plan_gptq_gemm(
    a: TensorArg,
    b_q_weight: TensorArg,
    b_gptq_qzeros: TensorArg,
    b_gptq_scales: TensorArg,
    b_g_idx: TensorArg | None,
    use_exllama: bool,
    use_v2_format: bool,
    bit: int,
    out: TensorArg,
) -> list[Launch]:
    check.dtype(a, float16, bfloat16)
    (m, n), *_ = result_gptq_gemm(a, b_gptq_scales)
    if bit not in _BITS:
        raise check.refuse(a, "bit", f"expected one of {_BITS}, got {bit}")
    k, num_groups, (words, fields) = a.shape[1], b_gptq_scales.shape[0], unit(bit)
    if k % fields:
        raise a.error(f"expected rows of a multiple of {fields} elements for {bit} bits, got shape {a.shape}")
    if n * bit % 32:
        raise b_gptq_scales.error(f"expected columns whose zero points of {bit} bits fill words, got {n}")
    check.dtype(b_gptq_scales, a.dtype)
    check.contiguous(b_gptq_scales)
    check.shape(b_q_weight, int32, words=k // fields * words, N=n)
    check.shape(b_gptq_qzeros, int32, num_groups=num_groups, words=n * bit // 32)
    check.dtype(b_g_idx, int32)
    g_idx = None if b_g_idx is None or b_g_idx.shape == (0,) else b_g_idx
    check.shape(g_idx, int32, K=k)
    if g_idx is None or use_exllama:
        _check_groups(b_gptq_scales, k)
    check.dtype(out, a.dtype)
    check.sizes(out, M=m, N=n)
    check.row_size(out)
    weight = _gptq_weight(b_q_weight, b_gptq_qzeros, b_gptq_scales, g_idx, use_exllama, use_v2_format, bit)
    epilogue = Epilogue(out, *_gptq_scales(weight, b_gptq_scales))
    return plan(PackedProblem(Operand.of_rows(a), weight, epilogue))


@gptq_gemm.bad_indices
def bad_indices_gptq_gemm(
    a: Tensor, b_gptq_scales: Tensor, b_g_idx: Tensor | None, use_exllama: bool
) -> dict[str, Tensor]:
    bound = a.shape[1] if use_exllama else b_gptq_scales.shape[0]
    return {} if b_g_idx is None else {"b_g_idx": (b_g_idx < 0) | (b_g_idx >= bound)}


@gptq_gemm.example
def example_gptq_gemm(
    make: Any,
    *,
    num_tokens: int = 16,
    bit: Literal[4, 2, 3, 8] = 4,
    order: Literal["exllama", "permuted", "groups"] = "exllama",
    num_groups: Literal[4, 1] = 4,
    dtype: Literal["float16", "bfloat16"] = "float16",
) -> tuple[Any, ...]:
    """A weight from `gptq_shuffle`, with or without a permutation, or one with rows in groups of any order."""
    k, n = 256, 96
    g_idx = make.permutation(k, k, dtype="int32") if order == "permuted" else None
    if order == "groups":
        g_idx = make.randint(0, num_groups, k, dtype="int32")
    return (
        make.randn(num_tokens, k, dtype=dtype),
        make.randint(-(2**31), 2**31, k * bit // 32, n, dtype="int32"),
        make.randint(-(2**31), 2**31, num_groups, n * bit // 32, dtype="int32"),
        make.randn(num_groups, n, dtype=dtype, scale=0.01),
        g_idx,
        order != "groups",
        bit == 8,
        bit,
        make.empty(num_tokens, n, dtype=dtype),
    )
