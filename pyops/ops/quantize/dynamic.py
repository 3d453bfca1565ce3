"""fp8 and int8 quantization with dynamic scales, per tensor or per token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float32, int8, int32
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8, geometry
from .._shared.geometry import RowTuning
from ._common import as_fp8, fp8_matrices, integers, matrices, one_row, saturated, shifted
from .static import write_fp8

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dynamic_per_token_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_scaled_int8_quant"]

_absmax = Kernel("quantize/absmax.cu")
_dynamic_tensor_quant = Kernel("quantize/dynamic_tensor_quant.cu")
_dynamic_token_quant = Kernel("quantize/dynamic_token_quant.cu")


class Pass(NamedTuple):
    """Geometry of one pass over the input: threads of a block, blocks per SM, vectors of a thread."""

    num_threads: int
    resident: int
    batch: int


# Passes of absmax.cu and dynamic_tensor_quant.cu. A thread of the latter computes the scale once for its four vectors.
# 256 or 1024 threads for absmax.cu, and fewer vectors, are slower (docs/performance/quantize.md).
_ABSMAX, _QUANTISE = Pass(512, 2, 8), Pass(256, 6, 4)
_BY_TOKEN = RowTuning(many=(4, 7), few=(2, 8), weights=0)
_AZP_BY_ELEMENT = replace(_BY_TOKEN, spare_blocks=1)  # zero points take further registers


@op(out=("result", "scale"), ulps=0)
def dynamic_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    """Quantize to fp8 with one dynamic scale: ``scale = max|input| / 448; result = fp8(input * (1 / scale))``.

    The multiplication is by the float32 reciprocal. The maximum ignores NaN; a NaN becomes +448. If the reciprocal is
    not finite (no magnitude above about 1e-36), results are 0. An infinity makes the scale infinite: it becomes +448,
    and finite elements become 0. The scale is that of the whole tensor, so that a row depends on all others: no switch
    makes it batch invariant, and activations need `dynamic_per_token_scaled_fp8_quant` for that.

    Args:
        result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or uint8, written; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
        scale: float32, contiguous; its first element is written.
    """
    x = input.float()
    absmax = fp8.absmax(x.reshape(1, -1)).reshape(())
    found = absmax / torch.full_like(absmax, fp8.largest_code(as_fp8(result).dtype))
    scale.view(-1)[0] = found
    write_fp8(result, x, found)


@dynamic_scaled_fp8_quant.result
def result_dynamic_scaled_fp8_quant(
    input: TensorArg, *, quant_dtype: torch.dtype | None = None
) -> tuple[Result, Result]:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

    Returns:
        scale: [1] float32.
    """
    return Result(input.shape, fp8.chosen(input, quant_dtype)), Result((1,), float32)


@dynamic_scaled_fp8_quant.plan
def plan_dynamic_scaled_fp8_quant(result: TensorArg, input: TensorArg, scale: TensorArg) -> list[Launch]:
    _, result = fp8_matrices(result, input)
    check.at_least(scale, float32, 1)
    if not input.numel:
        return []
    result, input = one_row(result, input)
    num_sms, num_rows, row_size = input.device.num_sms, check.num_rows(input), input.shape[-1]
    row_stride = check.row_stride(input)

    def chunks(vec_size: int, config: Pass) -> tuple[int, int, dict[str, int]]:
        """(chunks, chunks of a row, constants): several vectors to a thread if every resident block then has work."""
        num_threads, resident, batch = config
        if input.numel < resident * num_sms * batch * num_threads * vec_size:
            batch = 1
        row_chunks = -(-row_size // (batch * num_threads * vec_size))
        constants = {"VEC_SIZE": vec_size, "BATCH": batch, "NUM_THREADS": num_threads}
        return num_rows * row_chunks, row_chunks, constants

    num_chunks, row_chunks, constants = chunks(check.vector_width(row_size, input), _ABSMAX)
    blocks = min(num_chunks, _ABSMAX.resident * num_sms)
    partial = Scratch(4 * blocks)
    absmax = _absmax(scalar_t=input.dtype, **constants).launch(
        grid=blocks,
        block=_ABSMAX.num_threads,
        partial=partial,
        num_chunks=num_chunks,
        row_chunks=row_chunks,
        row_size=row_size,
        input_stride=row_stride,
    )
    num_chunks, row_chunks, constants = chunks(check.vector_width(row_size, result, input), _QUANTISE)
    # On a device without conversion instructions registers are not bounded: integer emulation needs them.
    min_blocks = _QUANTISE.resident if fp8.converts_to(result) else 1
    quantise = _dynamic_tensor_quant(
        scalar_t=input.dtype, code_t=result.dtype, **constants, MIN_BLOCKS=min_blocks
    ).launch(
        grid=num_chunks,
        block=_QUANTISE.num_threads,
        partial=partial,
        num_partial=blocks,
        row_chunks=row_chunks,
        row_size=row_size,
        result_stride=check.row_stride(result),
        input_stride=row_stride,
    )
    return [absmax, quantise]


@dynamic_scaled_fp8_quant.traffic
def traffic_dynamic_scaled_fp8_quant(result: TensorArg, input: TensorArg, scale: TensorArg) -> int:
    """The input is read twice: every fp8 value depends on the scale, and the scale on every element."""
    return 2 * input.nbytes + result.nbytes + scale.nbytes


@dynamic_scaled_fp8_quant.example
def example_dynamic_scaled_fp8_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 14336, 769] = 4096,
    dtype: str = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
) -> tuple[Any, ...]:
    result = make.empty(num_tokens, hidden_size, dtype=quant_dtype)
    return result, make.randn(num_tokens, hidden_size, dtype=dtype), make.empty(1, dtype="float32")


@op(out=("result", "scale"), ulps=0)
def dynamic_per_token_scaled_fp8_quant(
    result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None = None
) -> None:
    """Quantize to fp8 with one dynamic scale per token: ``result = fp8(input / scale)``, a true division.

    ``scale = max(min(max|input|, scale_ub) / 448, 1 / (448 * 512))``, with the maximum of the row, which ignores NaN;
    a NaN becomes +448. Values above the bound saturate. Rows of zeros have the smallest scale.

    Args:
        result: [..., hidden_size], float8_e4m3fn, float8_e4m3fnuz or uint8, written; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
        scale: float32, contiguous; its first elements, one for each row, are written.
        scale_ub: one float32, an upper bound of the maximum (not of the scale); NaN and None are no bound.
    """
    x = input.float()
    quantized, scales = fp8.dynamic_codes(x, fp8.absmax(x), scale_ub, as_fp8(result).dtype)
    as_fp8(result).copy_(quantized)
    scale.view(-1)[: scales.numel()] = scales.flatten()


@dynamic_per_token_scaled_fp8_quant.result
def result_dynamic_per_token_scaled_fp8_quant(
    input: TensorArg, *, quant_dtype: torch.dtype | None = None
) -> tuple[Result, Result]:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

    Returns:
        scale: [num_tokens, 1] float32.
    """
    return Result(input.shape, fp8.chosen(input, quant_dtype)), Result((check.num_rows(input), 1), float32)


@dynamic_per_token_scaled_fp8_quant.plan
def plan_dynamic_per_token_scaled_fp8_quant(
    result: TensorArg, input: TensorArg, scale: TensorArg, scale_ub: TensorArg | None
) -> Launch:
    _, result = fp8_matrices(result, input)
    check.at_least(scale, float32, check.num_rows(input))
    check.scalar(scale_ub)
    bound = {} if scale_ub else {"scale_ub": 0}
    return _by_token(result, input, {"azp": 0, **bound}, HAS_BOUND=scale_ub is not None, HAS_AZP=False)


def _by_token(result: TensorArg, input: TensorArg, fixed: dict[str, int], **constants: bool) -> Launch:
    """The launch of dynamic_token_quant.cu."""
    hidden_size, num_rows = input.shape[-1], check.num_rows(input)
    strides = check.row_stride(result), check.row_stride(input)
    vectors = geometry.row_vectors(hidden_size, strides, result, input)
    tuning = _AZP_BY_ELEMENT if constants["HAS_AZP"] and vectors.vec_size == 1 else _BY_TOKEN
    config = geometry.choose_rows(input, num_rows, vectors, tuning, bound_registers=fp8.converts_to(result))
    return _dynamic_token_quant(
        scalar_t=input.dtype,
        code_t=result.dtype,
        HIDDEN_SIZE=hidden_size,
        **config.constants,
        **constants,
    ).launch(
        grid=config.num_blocks(num_rows) if hidden_size else 0,
        block=config.num_threads,
        num_rows=num_rows,
        result_stride=strides[0],
        input_stride=strides[1],
        **fixed,
    )


@dynamic_per_token_scaled_fp8_quant.example
def example_dynamic_per_token_scaled_fp8_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    with_bound: bool = False,
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
) -> tuple[Any, ...]:
    return (
        make.empty(num_tokens, hidden_size, dtype=quant_dtype),
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.empty(num_tokens, 1, dtype="float32"),
        make.full(1, value=2.0, dtype="float32") if with_bound else None,
    )


@op(out=("result", "scale", "azp"), ulps=0)
def dynamic_scaled_int8_quant(result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
    """Quantize to int8 with one dynamic scale and, with `azp`, one zero point per token.

    Symmetric: ``scale = max|input| / 127; result = int8(input * (127 / max|input|))``, and 0 where that factor is not
    finite (no magnitude above about 2^-121). Asymmetric: ``scale = (max - min) / 255; azp = round(-128 -
    min / scale); result = int8(round(input * (1 / scale)) + azp)``, so that ``input`` is about ``scale * (result -
    azp)``. If the reciprocal of this scale is not finite, as for a constant row, the range is extended to include 0; if
    it is still not finite, the scale is 1. Integers are int32 and saturate, as do additions. Minimum and maximum
    ignore NaN, which quantizes like 0. An infinite scale quantizes everything like 0.

    Args:
        result: [..., hidden_size] int8, written; constant row stride.
        input: the same shape, float32, float16 or bfloat16; constant row stride.
        scale: one float32 per row, contiguous, written.
        azp: one int32 per row, contiguous, written: the zero point, which may lie outside int8. Or None: symmetric.
    """
    x = input.float()
    if azp is None:
        absmax = fp8.absmax(x)
        largest = torch.full_like(absmax, 127.0)  # a tensor: torch multiplies by the reciprocal of a Python number
        factor = largest / absmax
        result.copy_(saturated((x * torch.where(factor.isinf(), 0.0, factor)).round()))
        scale.copy_((absmax / largest).reshape(scale.shape))
        return
    low = torch.where(x.isnan(), torch.inf, x).amin(-1, keepdim=True)
    high = torch.where(x.isnan(), -torch.inf, x).amax(-1, keepdim=True)
    low, high = (torch.where(low > high, 0.0, end) for end in (low, high))
    steps = torch.full_like(low, 255.0)
    exists = (1.0 / ((high - low) / steps)).isfinite()
    low, high = torch.where(exists, low, low.clamp(max=0.0)), torch.where(exists, high, high.clamp(min=0.0))
    scales = (high - low) / steps
    scales = torch.where((1.0 / scales).isinf(), 1.0, scales)
    zeros = integers(-128.0 - low / scales)
    result.copy_(shifted(x * (1.0 / scales), zeros))
    scale.copy_(scales.reshape(scale.shape))
    azp.copy_(zeros.reshape(azp.shape))


@dynamic_scaled_int8_quant.result
def result_dynamic_scaled_int8_quant(input: TensorArg) -> tuple[Result, Result]:
    """Quantized values of `input`.

    Returns:
        scale: [num_tokens, 1] float32.
    """
    return Result(input.shape, int8), Result((check.num_rows(input), 1), float32)


@dynamic_scaled_int8_quant.plan
def plan_dynamic_scaled_int8_quant(
    result: TensorArg, input: TensorArg, scale: TensorArg, azp: TensorArg | None
) -> Launch:
    matrices(result, input, int8)
    check.per_row(scale, float32, check.num_rows(input))
    check.per_row(azp, int32, check.num_rows(input))
    no_azp = {} if azp else {"azp": 0}
    return _by_token(result, input, {"scale_ub": 0, **no_azp}, HAS_BOUND=False, HAS_AZP=azp is not None)


@dynamic_scaled_int8_quant.example
def example_dynamic_scaled_int8_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    with_azp: bool = False,
) -> tuple[Any, ...]:
    return (
        make.empty(num_tokens, hidden_size, dtype="int8"),
        make.randn(num_tokens, hidden_size, dtype=dtype, shift=0.5),
        make.empty(num_tokens, 1, dtype="float32"),
        make.empty(num_tokens, 1, dtype="int32") if with_azp else None,
    )
