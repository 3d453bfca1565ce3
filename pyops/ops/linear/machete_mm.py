"""GEMMs with weights that `machete_prepack_B` has packed.

`machete_prepack_B` returns a GPTQ weight in Marlin's tiles, contiguous and in the shape of its argument. `machete_mm`
refuses any other strides: a column-major weight that was not packed is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors import dtypes
from ..._core.tensors.dtypes import DType, bfloat16, float16, int32
from ..._core.tensors.tensor import TensorArg
from .._shared.scalar_type import SCALAR_TYPES, ScalarType, uint4, uint4b8, uint8, uint8b128
from .gemm_problem import Epilogue, Operand
from .packed_plan import plan
from .packed_problem import PackedProblem, PackedWeight
from .packed_reference import multiply, rounding_of_weights
from .repack import TILE_COLUMNS, repack, repacked

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["machete_gemm", "machete_mm", "machete_prepack_B", "machete_supported_schedules"]

_TYPES = (uint4b8, uint8b128, uint4, uint8)
_HAVE_ZEROS = (uint4, uint8)  # types with zero points
_SCHEDULES = ("default",)


@op(returns="out", ulps=0)
def machete_prepack_B(
    B: Tensor, a_type: torch.dtype | None, b_type: int, group_scales_type: torch.dtype | None, *, out: Tensor
) -> None:
    """A GPTQ weight in Marlin's tiles and in its own shape, as `machete_mm` takes it.

    Args:
        B: [K * bits / 32, N] int32, any strides; K a multiple of 16, N of 64. Each column has consecutive quants,
            starting at the lowest bit of its first word.
        a_type: dtype of the activations, float16 or bfloat16; None for either.
        b_type: type of the quants, a number of vLLM's scalar types (`pyops.SCALAR_TYPES`): uint4b8, uint8b128, uint4 or
            uint8.
        group_scales_type: dtype of the scales, as `a_type`.
        out: of the shape of B, int32, contiguous, returned; new unless given.
    """
    bits = ScalarType.of(b_type).size_bits
    size = B.shape[0] * 32 // bits, B.shape[1]
    out.copy_(repacked(B, ("gptq", "marlin"), bits, size).view(out.shape))


@machete_prepack_B.result
def result_machete_prepack_B(B: TensorArg) -> Result:
    return Result(B.shape, int32)


@machete_prepack_B.plan
def plan_machete_prepack_B(B: TensorArg, a_type: Any, b_type: int, group_scales_type: Any, out: TensorArg) -> Launch:
    kind, (k, n) = _check_weight(B, b_type)
    for name, given in (("a_type", a_type), ("group_scales_type", group_scales_type)):
        if given is not None and dtypes.of(given) not in (float16, bfloat16):
            raise check.refuse(B, name, f"expected float16 or bfloat16, got {given}")
    if None not in (a_type, group_scales_type) and dtypes.of(a_type) is not dtypes.of(group_scales_type):
        raise check.refuse(B, "group_scales_type", f"expected {dtypes.of(a_type)}, got {group_scales_type}")
    check.shape(out, int32, words=B.shape[0], N=n)
    stride, step = B.strides
    return repack(out, B, ("gptq", "marlin"), kind.size_bits, (k, n), strides=(stride, step))


def _check_weight(B: TensorArg, b_type: int) -> tuple[ScalarType, tuple[int, int]]:
    """The type of the quants, and the size [K, N], of a weight of this shape."""
    kind = next((one for one in _TYPES if one.id == b_type), None)
    if kind is None:
        names = " or ".join(f"{one} ({one.id})" for one in _TYPES)
        raise check.refuse(B, "b_type", f"expected {names}, got {b_type}")
    check.dtype(B, int32)
    check.sizes(B, words=None, N=None)
    k, n = B.shape[0] * 32 // kind.size_bits, B.shape[1]
    if k % 16 or n % TILE_COLUMNS:
        raise B.error(f"expected K a multiple of 16 and N of {TILE_COLUMNS}, got {k} and {n}")
    return kind, (k, n)


@machete_prepack_B.example
def example_machete_prepack_B(
    make: Any,
    *,
    num_tokens: int = 16,
    codes: Literal["uint4b8", "uint8"] = "uint4b8",
    row_major: bool = False,
) -> tuple[Any, ...]:
    kind, n = SCALAR_TYPES[codes], 128
    words = 4 * num_tokens * kind.size_bits // 8
    shape = (words, n) if row_major else (n, words)
    weight = make.randint(-(2**31), 2**31, *shape, dtype="int32")
    out = make.empty(words, n, dtype="int32")
    return weight if row_major else make.transposed(weight), None, kind.id, None, out


@op(
    returns="out",
    ulps=2,
    atol=lambda A, B, b_type, group_scales, group_zeros, group_size: rounding_of_weights(
        A, _machete_weight(A, B, b_type, group_scales, group_zeros, group_size), A.dtype
    ),
)
def machete_mm(
    A: Tensor,
    B: Tensor,
    b_type: int,
    out_type: torch.dtype | None = None,
    group_scales: Tensor | None = None,
    group_zeros: Tensor | None = None,
    group_size: int | None = None,
    channel_scales: Tensor | None = None,
    token_scales: Tensor | None = None,
    schedule: str | None = None,
    *,
    out: Tensor,
) -> None:
    """A GEMM with a weight of `machete_prepack_B`: ``out = A @ (quant * scale + zero)``.

    Weights may be rounded to the dtype of A, unless a column has one scale and no zero; then the epilogue applies the
    scale. Accumulation is in float32; the result is rounded once.

    Args:
        A: [M, K] float16 or bfloat16; constant row stride.
        B: [K * bits / 32, N] int32, contiguous, as `machete_prepack_B` returns it.
        b_type: type of the quants, a number of vLLM's scalar types (`pyops.SCALAR_TYPES`): uint4b8 or uint8b128 without
            group_zeros, uint4 or uint8 with them.
        out_type: None or the dtype of A.
        group_scales: [ceil(K / group_size), N] of the dtype of A, contiguous.
        group_zeros: the same, added to the scaled quants: minus the zero point, times the scale.
        group_size: rows under one scale; None or -1 for K.
        channel_scales, token_scales: None.
        schedule: None, or one of `machete_supported_schedules`; it has no effect.
        out: [M, N] of the dtype of A, returned; elements of a row are contiguous; new unless given.
    """
    weight = _machete_weight(A, B, b_type, group_scales, group_zeros, group_size)
    multiply(out, A, weight, b_scales=group_scales if weight.scales is None else None)


def _machete_weight(A: Any, B: Any, b_type: int, scales: Any, zeros: Any, group_size: int | None) -> PackedWeight:
    k, (groups, n) = A.shape[1], scales.shape
    grouped = zeros is not None or groups > 1
    return PackedWeight(
        B,
        "marlin",
        ScalarType.of(b_type),
        k,
        n,
        groups,
        k if group_size in (None, -1) else int(group_size or k),
        scales if grouped else None,
        zeros=zeros,
        zero_kind="none" if zeros is None else "added",
    )


@machete_mm.result
def result_machete_mm(A: TensorArg, B: TensorArg) -> Result:
    check.sizes(A, M=None, K=None)
    check.sizes(B, words=None, N=None)
    return Result((A.shape[0], B.shape[1]), A.dtype)


@machete_mm.plan
def plan_machete_mm(
    A: TensorArg,
    B: TensorArg,
    b_type: int,
    out_type: Any,
    group_scales: TensorArg | None,
    group_zeros: TensorArg | None,
    group_size: int | None,
    channel_scales: TensorArg | None,
    token_scales: TensorArg | None,
    schedule: str | None,
    out: TensorArg,
) -> list[Launch]:
    check.dtype(A, float16, bfloat16)
    result = result_machete_mm(A, B)
    kind, (k, n) = _check_weight(B, b_type)
    check.sizes(A, M=None, K=k)
    if B.strides != (n, 1):
        raise B.error(f"expected a contiguous tensor, as machete_prepack_B returns it, got strides {B.strides}")
    if out_type is not None and dtypes.of(out_type) is not A.dtype:
        raise check.refuse(A, "out_type", f"expected {A.dtype} or None, got {out_type}")
    for scales in (channel_scales, token_scales):
        if scales is not None:
            raise scales.error("expected None")
    if schedule not in (None, *_SCHEDULES):
        raise check.refuse(A, "schedule", f"expected None or one of {_SCHEDULES}, got {schedule!r}")
    rows = k if group_size in (None, -1) else group_size
    if rows is None or (rows < 1 and k):
        raise check.refuse(A, "group_size", f"expected 1 or more, -1 or None, got {group_size}")
    if group_scales is None:
        raise check.refuse(A, "group_scales", "expected scales, got None")
    check.shape(group_scales, A.dtype, num_groups=max(1, -(-k // max(1, rows))), N=n)
    if (group_zeros is not None) != (kind in _HAVE_ZEROS):
        expected = "zeros" if kind in _HAVE_ZEROS else "None"
        raise check.refuse(A, "group_zeros", f"expected {expected} with codes of {kind}")
    check.shape(group_zeros, A.dtype, num_groups=group_scales.shape[0], N=n)
    check.dtype(out, result.dtype)
    check.sizes(out, M=A.shape[0], N=n)
    check.row_size(out)
    weight = _machete_weight(A, B, b_type, group_scales, group_zeros, group_size)
    epilogue = Epilogue(out, b_scales=group_scales if weight.scales is None else None)
    return plan(PackedProblem(Operand.of_rows(A), weight, epilogue))


@machete_mm.example
def example_machete_mm(
    make: Any,
    *,
    num_tokens: int = 16,
    codes: Literal["uint4b8", "uint8b128", "uint4", "uint8"] = "uint4b8",
    group_size: Literal[64, -1] = 64,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    k, n, kind = 144, 64, SCALAR_TYPES[codes]
    groups = 1 if group_size == -1 else -(-k // group_size)
    return (
        make.randn(num_tokens, k, dtype=dtype),
        make.randint(-(2**31), 2**31, k * kind.size_bits // 32, n, dtype="int32"),
        kind.id,
        None,
        make.randn(groups, n, dtype=dtype, scale=2.0**-6),
        make.randn(groups, n, dtype=dtype, scale=2.0**-3) if kind in _HAVE_ZEROS else None,
        group_size,
        None,
        None,
        _SCHEDULES[0] if group_size == -1 else None,
        make.empty(num_tokens, n, dtype=dtype),
    )


machete_gemm = machete_mm


def machete_supported_schedules(
    a_type: Any,
    b_type: int,
    group_scales_type: Any,
    group_zeros_type: Any = None,
    channel_scales_type: Any = None,
    token_scales_type: Any = None,
    out_type: Any = None,
) -> list[str]:
    """The schedules that `machete_mm` takes for these types; an empty list for types that it does not multiply.

    Args:
        a_type: dtype of A.
        b_type: type of the quants, a number of vLLM's scalar types.
        group_scales_type, group_zeros_type, channel_scales_type, token_scales_type: dtypes; None for absent arguments.
        out_type: dtype of the result; None for that of A.
    """
    dtype: DType | None = dtypes.of(a_type)
    kind = next((one for one in _TYPES if one.id == b_type), None)
    zeros = dtype if kind in _HAVE_ZEROS else None
    wanted = (dtype, zeros, None, None)
    types = (group_scales_type, group_zeros_type, channel_scales_type, token_scales_type)
    given = tuple(None if one is None else dtypes.of(one) for one in types)
    served = kind is not None and dtype in (float16, bfloat16) and given == wanted
    return list(_SCHEDULES) if served and (out_type is None or dtypes.of(out_type) is dtype) else []
