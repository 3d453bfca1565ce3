"""Converting a cache to fp8, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import E4M3, FLOATS, bfloat16, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from ._common import fp8_codes, indexable

if TYPE_CHECKING:
    from torch import Tensor

_convert_fp8 = Kernel("cache/convert_fp8.cu")

_NUM_THREADS = 256  # threads of a block; not tuned
_MAX_ROWS = 32768  # most blocks along grid dimension y; a block loops over the rows beyond


@op(out="output", ulps=0)
def convert_fp8(output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """Convert a cache to fp8, ``e4m3(input / scale)``, or from fp8 to floats, ``T(input * scale)``.

    The quotient is a true division in float32, rounded to the nearest fp8 value; it saturates, and NaN stays NaN.

    Args:
        output, input: one of them float32, float16 or bfloat16, the other uint8, float8_e4m3fn or float8_e4m3fnuz. They
            have the same shape and the same order of dimensions in memory; or both are contiguous, with the same number
            of elements, which are converted in memory order (caches of different packing). `output` is written.
        scale: the scale of the fp8 values.
        kv_dtype: "fp8" or "fp8_e4m3".
    """
    divisor = torch.full((), scale, dtype=torch.float32, device=input.device)
    if output.shape != input.shape:
        output, input = output.view(-1), input.view(-1)
    if output.element_size() == 1:
        indexable(output).copy_(fp8_codes(input, divisor, fp8.cache_codes(output, kv_dtype)))
    else:
        output.copy_(input.view(fp8.cache_codes(input, kv_dtype)).float() * divisor)


@convert_fp8.result
def result_convert_fp8(input: TensorArg, *, out_dtype: torch.dtype | None = None) -> Result:
    """Elements of `input`.

    Args:
        out_dtype: of the output; None for bfloat16 of fp8 values, and for the e4m3 of the device of others.

    Returns:
        output: the shape of `input`.
    """
    default = fp8.native_fp8(input.device) if input.dtype in FLOATS else bfloat16
    return Result(input.shape, check.chosen(input, "out_dtype", out_dtype, default))


@convert_fp8.plan
def plan_convert_fp8(output: TensorArg, input: TensorArg, kv_dtype: str) -> Launch:
    if kv_dtype not in ("fp8", "fp8_e4m3"):
        raise check.refuse(input, "kv_dtype", f'expected "fp8" or "fp8_e4m3", got "{kv_dtype}"')
    to_codes = input.dtype in FLOATS
    check.dtype(input, *FLOATS, uint8, *E4M3)
    check.dtype(output, *((uint8, *E4M3) if to_codes else FLOATS))
    kind = fp8.cache_dtype(output if to_codes else input, kv_dtype, input.dtype)
    if output.shape != input.shape and output.numel == input.numel:
        # Contiguous caches of different packing: treat both as one row.
        for arg in (output, input):
            check.contiguous(arg)
        output, input = (replace(arg, shape=(arg.numel,), strides=(1,)) for arg in (output, input))
    check.same_shape(output, input)
    # With dimensions sorted by stride, both tensors are matrices of the same size.
    order = sorted(range(len(input.shape)), key=lambda dim: (-input.strides[dim], -input.shape[dim]))
    rows = [
        replace(arg, shape=(*(arg.shape[dim] for dim in order), 1), strides=(*(arg.strides[dim] for dim in order), 1))
        for arg in (output, input)
    ]
    dims = check.leading(*rows, max_dims=2)
    if dims[-1][1] != (1, 1):  # no contiguous dimension: rows have one element
        dims.append((1, (1, 1)))
    if len(dims) > 2:
        raise output.error(f"expected strides {input.strides} like input, got {output.strides}")
    (num_rows, strides), (row_size, _) = ((1, (0, 0)), *dims)[-2:]
    matrices = [
        replace(arg, shape=(num_rows, row_size), strides=(row_stride, 1))
        for arg, row_stride in zip((output, input), strides, strict=True)
    ]
    vec_size = check.vector_width(row_size, *matrices)
    return _convert_fp8(
        out_t=kind if to_codes else output.dtype,
        in_t=input.dtype if to_codes else kind,
        VEC_SIZE=vec_size,
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        grid=(-(-row_size // (vec_size * _NUM_THREADS)) if input.numel else 0, min(num_rows, _MAX_ROWS)),
        block=_NUM_THREADS,
        num_rows=num_rows,
        row_size=row_size,
        output_stride=strides[0],
        input_stride=strides[1],
    )


@convert_fp8.example
def example_convert_fp8(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    to_codes: Literal[True, False] = True,
) -> tuple[Any, ...]:
    if to_codes:
        output, input = (
            make.empty(num_tokens, hidden_size, dtype="uint8"),
            make.randn(num_tokens, hidden_size, dtype=dtype),
        )
    else:
        output = make.empty(num_tokens, hidden_size, dtype=dtype)
        input = make.randint(0, 120, num_tokens, hidden_size, dtype="uint8")
    return output, input, 0.03, "fp8"
