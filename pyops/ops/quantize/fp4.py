"""NVFP4 quantization of a matrix, and of a gated activation (the format: `_fp4.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float8_e4m3fn, uint8
from ..._core.tensors.tensor import TensorArg
from .._shared.fp4_tiles import BLOCK, tile_sizes, tiled
from ._fp4 import Fp4Problem, check_codes, check_scales, gated, launch, matrix, nvfp4

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["scaled_fp4_quant", "silu_and_mul_nvfp4_quant"]

_scaled_fp4_quant = Kernel("quantize/scaled_fp4_quant.cu")
_silu_and_mul_nvfp4_quant = Kernel("quantize/silu_and_mul_nvfp4_quant.cu")


@op(out=("output", "output_scale"), ulps=0)
def scaled_fp4_quant(
    output: Tensor, input: Tensor, output_scale: Tensor, input_scale: Tensor, is_sf_swizzled_layout: bool
) -> None:
    """NVFP4: e2m1 values and, for every sixteen elements, an e4m3 scale, ``s = e4m3(g * (max|x| * (1/6)))``.

    ``output = e2m1(x * r)`` with ``r = 1 / (s * (1 / g))``, or 0 where s is 0, so that x is about ``output * s / g``.
    Every step is rounded to float32; e2m1 values and scales round to nearest even and saturate, at +-6 and 448. The
    maximum ignores NaN; a NaN becomes +6. Two e2m1 values share a byte, the first in its low nibble (NVIDIA 2025,
    "Pretraining Large Language Models with NVFP4", arXiv:2509.25149).

    Args:
        output: [..., hidden_size / 2] uint8, written; constant row stride.
        input: [..., hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
        output_scale: written; contiguous, float8_e4m3fn or uint8 of [rows, columns], or int32 of [rows, columns / 4].
            With is_sf_swizzled_layout the rows are num_tokens rounded up to 128 and the columns hidden_size / 16
            rounded up to 4, in tiles (see `_shared/fp4_tiles.py`) that are padded with zeros; else [num_tokens,
            hidden_size / 16].
        input_scale: g, one float32, a factor of the input: normally ``448 * 6 / max|input|``.
        is_sf_swizzled_layout: whether scales lie in tiles.
    """
    quantized, scales = nvfp4(matrix(input), input_scale.reshape(1, 1))
    output.copy_(quantized.reshape(output.shape))
    scales = tiled(scales) if is_sf_swizzled_layout else scales.view(torch.uint8)
    output_scale.copy_(scales.view(output_scale.dtype))


@scaled_fp4_quant.result
def result_scaled_fp4_quant(input: TensorArg, is_sf_swizzled_layout: bool) -> tuple[Result, Result]:
    return _results(input, check.row_size(input), bool(is_sf_swizzled_layout))


def _results(input: TensorArg, hidden_size: int, tiled: bool) -> tuple[Result, Result]:
    """Packed values and scales for the rows of `input`; `hidden_size` is the size of a row without its gate."""
    num_rows, blocks = check.num_rows(input), hidden_size // BLOCK
    quantized = Result((*input.shape[:-1], hidden_size // 2), uint8)
    if not tiled:
        return quantized, Result((num_rows, blocks), uint8)
    columns, scale_rows = tile_sizes(num_rows, blocks)
    return quantized, Result((scale_rows, columns), float8_e4m3fn)


@scaled_fp4_quant.plan
def plan_scaled_fp4_quant(
    output: TensorArg, input: TensorArg, output_scale: TensorArg, input_scale: TensorArg, is_sf_swizzled_layout: bool
) -> Launch:
    blocks, num_rows = check_codes(output, input), check.num_rows(input)
    check.scalar(input_scale)
    columns, scale_rows = tile_sizes(num_rows, blocks) if is_sf_swizzled_layout else (blocks, num_rows)
    check_scales(output_scale, columns, scale_rows)
    fixed = {"scale_rows": scale_rows}
    problem = Fp4Problem(num_rows, scale_rows, columns, tiled=bool(is_sf_swizzled_layout))
    return launch(_scaled_fp4_quant, output, output_scale, input, problem, fixed, TILED=problem.tiled)


@scaled_fp4_quant.example
def example_scaled_fp4_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 7152, 80] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
    is_sf_swizzled_layout: bool = True,
) -> tuple[Any, ...]:
    blocks = hidden_size // BLOCK
    columns, rows = tile_sizes(num_tokens, blocks) if is_sf_swizzled_layout else (blocks, num_tokens)
    return (
        make.empty(num_tokens, hidden_size // 2, dtype="uint8"),
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.empty(rows, columns, dtype="float8_e4m3fn"),
        make.full(1, value=400.0, dtype="float32"),
        is_sf_swizzled_layout,
    )


@op(out=("result", "result_block_scale"), ulps=0)
def silu_and_mul_nvfp4_quant(
    result: Tensor, result_block_scale: Tensor, input: Tensor, input_global_scale: Tensor
) -> None:
    """`scaled_fp4_quant` of a gated activation: of ``T(silu(gate) * up)`` for the halves ``input = [gate, up]``.

    The product is computed in float32 and rounded to the element type once, where `silu_and_mul` rounds twice.

    Args:
        result: [..., hidden_size / 2] uint8, written; constant row stride.
        result_block_scale: written; in tiles that are padded with zeros, as in `scaled_fp4_quant`.
        input: [..., 2 * hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
        input_global_scale: g, one float32, a factor of the product.
    """
    quantized, scales = nvfp4(matrix(gated(input)), input_global_scale.reshape(1, 1))
    result.copy_(quantized.reshape(result.shape))
    result_block_scale.copy_(tiled(scales).view(result_block_scale.dtype))


@silu_and_mul_nvfp4_quant.result
def result_silu_and_mul_nvfp4_quant(input: TensorArg) -> tuple[Result, Result]:
    return _results(input, check.row_size(input) // 2, tiled=True)


@silu_and_mul_nvfp4_quant.plan
def plan_silu_and_mul_nvfp4_quant(
    result: TensorArg, result_block_scale: TensorArg, input: TensorArg, input_global_scale: TensorArg
) -> Launch:
    blocks, num_rows = check_codes(result, input, halves=2), check.num_rows(input)
    check.scalar(input_global_scale)
    columns, scale_rows = tile_sizes(num_rows, blocks)
    check_scales(result_block_scale, columns, scale_rows)
    fixed = {"scale_rows": scale_rows}
    problem = Fp4Problem(num_rows, scale_rows, columns, gated=True)
    return launch(_silu_and_mul_nvfp4_quant, result, result_block_scale, input, problem, fixed)


@silu_and_mul_nvfp4_quant.example
def example_silu_and_mul_nvfp4_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 7152, 80] = 4096,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
) -> tuple[Any, ...]:
    columns, rows = tile_sizes(num_tokens, hidden_size // BLOCK)
    return (
        make.empty(num_tokens, hidden_size // 2, dtype="uint8"),
        make.empty(rows, columns // 4, dtype="int32"),
        make.randn(num_tokens, 2 * hidden_size, dtype=dtype),
        make.full(1, value=100.0, dtype="float32"),
    )
