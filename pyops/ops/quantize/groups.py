"""fp8 and int8 quantization of groups of contiguous elements, with one scale per group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float8_e4m3fn, float8_e4m3fnuz, float32, int8, int32
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8, geometry
from .._shared.geometry import RowTuning, RowVectors
from ._common import as_fp8, fp8_matrices, matrices

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["per_token_group_fp8_quant", "per_token_group_quant_int8"]

_group_quant = Kernel("quantize/group_quant.cu")
# docs/performance/quantize.md: small inputs are spread over more threads, with one vector each; in large ones a thread
# has two vectors of a group of 128, with 2048 resident threads per SM.
_MAX_FEW_VECTORS = 4096  # vectors per SM up to which an input counts as small
_FEW_THREAD_VECS, _MANY_THREAD_VECS = 1, 2  # vectors per lane: of small inputs, of large ones
_MAX_WARP_VECS = 64  # vectors of a group up to which a lane has at most two, for which 32 registers are enough
_RESIDENT_WARP, _RESIDENT, _RESIDENT_LONG = 2048, 1024, 896  # resident threads per SM: warp groups, short, long ones
# {(the input is small, a group has at most _MAX_WARP_VECS vectors): tuning}
_TUNING = {
    (few, in_warp): RowTuning(
        many=(4, 7),
        few=(2, 8),
        resident=(_RESIDENT_WARP if in_warp else _RESIDENT, _RESIDENT_LONG),
        weights=0,
        lane_vecs=_FEW_THREAD_VECS if few else _MANY_THREAD_VECS,
    )
    for few in (False, True)
    for in_warp in (False, True)
}
# Range of each quantized type.
_CODE_RANGE = {int8: (-128.0, 127.0), float8_e4m3fn: (-448.0, 448.0), float8_e4m3fnuz: (-240.0, 240.0)}


def group_codes(
    input: Tensor, group_size: int, eps: float, limits: tuple[float, float], power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """(scaled float32 values before rounding, in the shape of `input`; scales [num_tokens, groups])."""
    x = input.float().unflatten(-1, (-1, group_size))
    absmax = fp8.absmax(x)
    scale = absmax.clamp(min=eps) / torch.full_like(absmax, limits[1])
    if power_of_two:
        bits = scale.clamp(min=1e-10).view(torch.int32)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    y = (x / scale).nan_to_num(nan=limits[0], posinf=limits[1], neginf=limits[0]).clamp(*limits)
    if limits[0] == 0:
        y = y + 0.0  # -0 becomes 0, the limit
    return y.flatten(-2), scale.reshape(-1, x.shape[-2])


def padded_rows(num_tokens: int) -> int:
    """Rows of packed scales in memory: TMA needs columns that begin at multiples of 16 bytes."""
    return -(-num_tokens // 4) * 4


def group_launch(
    input: TensorArg,
    quantized: TensorArg,
    scales: TensorArg,
    group_size: int,
    eps: float,
    limits: tuple[tuple[str, float], tuple[str, float]],
    power_of_two: bool,
    packed: bool = False,
    nearest: bool = False,
) -> Launch:
    """The launch of group_quant.cu. `limits`: names and values of the arguments for the smallest and largest quantized
    value."""
    hidden_size, num_tokens = check.row_size(input), check.num_rows(input)
    if group_size < 1 or hidden_size % group_size:
        raise check.refuse(input, "group_size", f"expected a divisor of hidden_size={hidden_size}, got {group_size}")
    (min_name, code_min), (max_name, code_max) = limits
    low, high = _CODE_RANGE[quantized.dtype]
    if not low <= code_min <= 0.0:
        raise check.refuse(input, min_name, f"expected {low} to 0, got {code_min}")
    if not 1.0 <= code_max <= high:
        raise check.refuse(input, max_name, f"expected 1 to {high}, got {code_max}")
    if not 2.0**-100 <= eps <= 2.0**100:
        raise check.refuse(input, "eps", f"expected a positive number, 2^-100 to 2^100, got {eps}")
    groups = hidden_size // group_size
    check.dtype(scales, int32 if packed else float32)
    num_scale_rows, columns = num_tokens, groups
    if packed:
        columns = -(-groups // 4)
        if scales.shape[:1] == (padded_rows(num_tokens),):
            num_scale_rows = scales.shape[0]
    check.sizes(scales, num_tokens=num_scale_rows, groups=columns)
    num_gap_rows, num_code_rows = num_scale_rows, check.num_rows(quantized)
    if packed and scales.strides == (1, padded_rows(num_tokens)):
        num_gap_rows = padded_rows(num_tokens)
    num_rows = max(num_code_rows, num_gap_rows)
    vectors = RowVectors(check.vector_width(group_size, input, quantized))
    scales_of_token = 4 * columns if packed else columns
    num_groups = num_rows * scales_of_token
    few = num_groups * group_size <= _MAX_FEW_VECTORS * vectors.vec_size * input.device.num_sms
    in_warp = group_size // vectors.vec_size <= _MAX_WARP_VECS
    config = geometry.choose_rows(
        input,
        num_groups,
        vectors,
        _TUNING[few, in_warp],
        size=group_size,
        bound_registers=fp8.converts_to(quantized),
    )
    return _group_quant(
        scalar_t=input.dtype,
        code_t=quantized.dtype,
        GROUP_SIZE=group_size,
        GROUPS=max(1, groups),
        SCALES=max(1, scales_of_token),
        **config.constants,
        POWER_OF_TWO=power_of_two,
        NEAREST=nearest,
        PACKED=packed,
        PADDED=num_rows > num_tokens or scales_of_token > groups,
    ).launch(
        grid=config.num_blocks(num_groups) if input.numel else 0,
        block=config.num_threads,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_code_rows=num_code_rows,
        num_scale_rows=num_scale_rows,
        num_gap_rows=num_gap_rows,
        input_stride=check.row_stride(input),
        output_stride=check.row_stride(quantized),
        scale_stride=scales.strides[0],
        scale_column_stride=scales.strides[1],
        code_min=code_min,
        code_max=code_max,
        **{"output_s" if packed else "output_s_packed": 0},
    )


@op(out=("output_q", "output_s"), keyed=("eps", "fp8_min", "fp8_max"), ulps=0)
def per_token_group_fp8_quant(
    input: Tensor,
    output_q: Tensor,
    output_s: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
) -> None:
    """Quantize to fp8 with one dynamic scale per group of contiguous elements, by a true division.

    ``output_s = max(max|input|, eps) / fp8_max`` over a group, rounded up to a power of two of at least 1e-10 if
    `scale_ue8m0`; ``output_q = fp8(clamp(input / output_s, fp8_min, fp8_max))``. The maximum ignores NaN. NaN
    and infinities become fp8_min.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        output_q: the same shape, float8_e4m3fn, float8_e4m3fnuz or uint8, written; constant row stride.
        output_s: [num_tokens, hidden_size / group_size] float32, written; any strides: row-major, column-major, or
            column-major with columns padded for TMA.
        group_size: any divisor of hidden_size; multiples of 16 bytes (8 elements of 16 bits) are fast.
        eps: lower bound of the maximum of a group, 2^-100 to 2^100.
        fp8_min, fp8_max: the smallest fp8 value, -448 to 0, and the largest, 1 to 448; for float8_e4m3fnuz, -240 to 0
            and 1 to 240, usually -224 and 224.
        scale_ue8m0: whether scales are powers of two.
    """
    quantized, scales = group_codes(input, group_size, eps, (fp8_min, fp8_max), scale_ue8m0)
    as_fp8(output_q).copy_(quantized)
    output_s.copy_(scales)


@per_token_group_fp8_quant.result
def result_per_token_group_fp8_quant(
    input: TensorArg, group_size: int, *, quant_dtype: torch.dtype | None = None
) -> tuple[Result, Result]:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

    Returns:
        output_s: [num_tokens, hidden_size / group_size] float32.
    """
    quants = Result(input.shape, fp8.chosen(input, quant_dtype))
    return quants, fp8.group_scales(input, check.row_size(input), group_size, transposed=False)


@per_token_group_fp8_quant.plan
def plan_per_token_group_fp8_quant(
    input: TensorArg,
    output_q: TensorArg,
    output_s: TensorArg,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
) -> Launch:
    _, quantized = fp8_matrices(output_q, input)
    limits = ("fp8_min", fp8_min), ("fp8_max", fp8_max)
    return group_launch(input, quantized, output_s, group_size, eps, limits, bool(scale_ue8m0))


@per_token_group_fp8_quant.example
def example_per_token_group_fp8_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 14336] = 4096,
    dtype: str = "bfloat16",
    scale_ue8m0: bool = False,
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
) -> tuple[Any, ...]:
    largest = fp8.largest_code(quant_dtype)
    return (
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.empty(num_tokens, hidden_size, dtype=quant_dtype),
        make.empty(num_tokens, hidden_size // 128, dtype="float32"),
        *(128, 1e-10, -largest, largest, scale_ue8m0),
    )


@op(out=("output_q", "output_s"), keyed=("eps", "int8_min", "int8_max"), ulps=0)
def per_token_group_quant_int8(
    input: Tensor,
    output_q: Tensor,
    output_s: Tensor,
    group_size: int,
    eps: float,
    int8_min: float,
    int8_max: float,
    round_to_nearest: bool = False,
) -> None:
    """Quantize to int8 with one dynamic scale per group of contiguous elements, rounded toward zero.

    ``output_s = max(max|input|, eps) / int8_max`` over a group; ``output_q = trunc(clamp(input / output_s, int8_min,
    int8_max))``, a true division. The maximum ignores NaN. NaN and infinities become int8_min. vLLM rounds toward
    zero; rounding to nearest halves the largest error.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        output_q: the same shape, int8, written; constant row stride.
        output_s: [num_tokens, hidden_size / group_size] float32, written; any strides.
        group_size: any divisor of hidden_size; multiples of 16 bytes (8 elements of 16 bits) are fast.
        eps: lower bound of the maximum of a group, 2^-100 to 2^100.
        int8_min, int8_max: the smallest int8 value, -128 to 0, and the largest, 1 to 127.
        round_to_nearest: round to nearest even instead of toward zero.
    """
    quantized, scales = group_codes(input, group_size, eps, (int8_min, int8_max), power_of_two=False)
    output_q.copy_(quantized.round() if round_to_nearest else quantized.trunc())
    output_s.copy_(scales)


@per_token_group_quant_int8.result
def result_per_token_group_quant_int8(input: TensorArg, group_size: int) -> tuple[Result, Result]:
    groups = check.row_size(input) // max(1, group_size)
    return Result(input.shape, int8), Result((check.num_rows(input), groups), float32)


@per_token_group_quant_int8.plan
def plan_per_token_group_quant_int8(
    input: TensorArg,
    output_q: TensorArg,
    output_s: TensorArg,
    group_size: int,
    eps: float,
    int8_min: float,
    int8_max: float,
    round_to_nearest: bool,
) -> Launch:
    matrices(output_q, input, int8)
    limits = ("int8_min", int8_min), ("int8_max", int8_max)
    nearest = bool(round_to_nearest)
    return group_launch(input, output_q, output_s, group_size, eps, limits, power_of_two=False, nearest=nearest)


@per_token_group_quant_int8.example
def example_per_token_group_quant_int8(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 14336] = 4096,
    dtype: str = "bfloat16",
    round_to_nearest: bool = False,
) -> tuple[Any, ...]:
    return (
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.empty(num_tokens, hidden_size, dtype="int8"),
        make.empty(num_tokens, hidden_size // 128, dtype="float32"),
        *(128, 1e-10, -128.0, 127.0, round_to_nearest),
    )
