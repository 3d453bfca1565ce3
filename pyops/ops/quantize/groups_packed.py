"""fp8 quantization of groups of contiguous elements, with the exponents of their scales packed four to a word."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from ._common import as_fp8, fp8_matrices
from .groups import group_codes, group_launch, padded_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["per_token_group_fp8_quant_packed"]


@op(out=("output_q", "output_s_packed"), keyed=("eps", "fp8_min", "fp8_max"), ulps=0)
def per_token_group_fp8_quant_packed(
    input: Tensor,
    output_q: Tensor,
    output_s_packed: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
) -> None:
    """Quantize to fp8 with one power-of-two scale per group; a word packs four scale exponents (DeepGEMM's UE8M0).

    Results and scales are those of `per_token_group_fp8_quant` with `scale_ue8m0`. Byte ``g % 4`` (little-endian) of
    ``output_s_packed[token, g // 4]`` is the biased exponent of the scale of group g; bytes after the last one are 0.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        output_q: the same shape, float8_e4m3fn, float8_e4m3fnuz or uint8, written; constant row stride. It may have
            more rows: rows up to num_tokens rounded up to 4 become 0, and further rows are left unchanged.
        output_s_packed: [num_tokens, groups / 4 rounded up] int32, written; any strides. With the strides of TMA, (1,
            num_tokens rounded up to 4), the padding between the columns becomes 0. It may have num_tokens rounded up to
            4 rows: rows after the tokens become 0.
        group_size: a divisor of hidden_size.
        eps: lower bound of the maximum of a group, 2^-100 to 2^100.
        fp8_min, fp8_max: the smallest fp8 value, -448 to 0, and the largest, 1 to 448; for float8_e4m3fnuz, -240 to 0
            and 1 to 240, usually -224 and 224.
    """
    quantized, scales = group_codes(input, group_size, eps, (fp8_min, fp8_max), power_of_two=True)
    num_tokens, groups = scales.shape
    padded = padded_rows(num_tokens)
    rows = as_fp8(output_q).view(-1, input.shape[-1])
    rows[:num_tokens].copy_(quantized.view(num_tokens, -1))
    rows[num_tokens:padded].view(torch.uint8).zero_()
    num_rows, words = output_s_packed.shape
    if output_s_packed.stride() == (1, padded):
        gaps = output_s_packed.storage_offset() + num_rows
        output_s_packed.as_strided((padded - num_rows, words - 1), (1, padded), gaps).zero_()
    exponents = scales.new_zeros(num_rows, 4 * words, dtype=torch.uint8)
    exponents[:num_tokens, :groups] = scales.view(torch.int32) >> 23
    output_s_packed.copy_(exponents.view(torch.int32))


@per_token_group_fp8_quant_packed.result
def result_per_token_group_fp8_quant_packed(
    input: TensorArg, group_size: int, *, quant_dtype: torch.dtype | None = None
) -> tuple[Result, Result]:
    """Quantized values of `input`.

    Args:
        quant_dtype: of the quantized values; None for the e4m3 of the device (on gfx942 float8_e4m3fnuz).

    Returns:
        output_q: the shape of `input`, float8_e4m3fn or float8_e4m3fnuz.
        output_s_packed: [num_tokens, groups / 4 rounded up] int32, for TMA of strides (1, num_tokens rounded up to 4).
    """
    num_tokens, groups = check.num_rows(input), check.row_size(input) // max(1, group_size)
    scales = Result((num_tokens, -(-groups // 4)), int32, padded_rows(num_tokens))
    return Result(input.shape, fp8.chosen(input, quant_dtype)), scales


@per_token_group_fp8_quant_packed.plan
def plan_per_token_group_fp8_quant_packed(
    input: TensorArg,
    output_q: TensorArg,
    output_s_packed: TensorArg,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
) -> Launch:
    num_tokens, hidden_size = check.num_rows(input), check.row_size(input)
    input = replace(input, shape=(num_tokens, hidden_size), strides=(check.row_stride(input), 1))
    num_rows = check.num_rows(output_q)
    if output_q.shape[-1:] != (hidden_size,) or num_rows < num_tokens:
        raise output_q.error(f"expected at least {num_tokens} rows of {hidden_size} elements, got {output_q.shape}")
    output_q = replace(
        output_q, shape=(num_tokens, hidden_size), strides=(check.row_stride(output_q), output_q.strides[-1])
    )
    _, quantized = fp8_matrices(output_q, input)
    quantized = replace(quantized, shape=(min(num_rows, padded_rows(num_tokens)), hidden_size))
    limits = ("fp8_min", fp8_min), ("fp8_max", fp8_max)
    return group_launch(input, quantized, output_s_packed, group_size, eps, limits, power_of_two=True, packed=True)


@per_token_group_fp8_quant_packed.example
def example_per_token_group_fp8_quant_packed(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 14336] = 4096,
    dtype: str = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
) -> tuple[Any, ...]:
    largest = fp8.largest_code(quant_dtype)
    return (
        make.randn(num_tokens, hidden_size, dtype=dtype),
        make.empty(num_tokens, hidden_size, dtype=quant_dtype),
        make.transposed(make.empty(-(-hidden_size // 512), padded_rows(num_tokens), dtype="int32")),
        *(128, 1e-10, -largest, largest),
    )
