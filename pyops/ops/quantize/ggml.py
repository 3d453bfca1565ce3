"""Dequantization of GGUF weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors import dtypes
from ..._core.tensors.tensor import TensorArg
from .._shared import ggml_formats
from ._common import one_row

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["ggml_dequantize"]


@op(returns="out", ulps=0)
def ggml_dequantize(
    W: Tensor, quant_type: int, m: int, n: int, dtype: torch.dtype | None = None, *, out: Tensor
) -> None:
    """Dequantize a weight of a GGUF file: computed in float32, rounded to the dtype of `out`.

    Types and their numbers in the format: in blocks of 32 elements 2 Q4_0, 3 Q4_1, 6 Q5_0, 7 Q5_1, 8 Q8_0, 20 IQ4_NL;
    in blocks of 256 10 to 14 Q2_K to Q6_K, 16 IQ2_XXS, 17 IQ2_XS, 18 IQ3_XXS, 19 IQ1_S, 21 IQ3_S, 22 IQ2_S, 23 IQ4_XS,
    29 IQ1_M. The float32 values are those of the format's own decoder (the `gguf` package), bit for bit.

    Args:
        W: uint8 of any shape, contiguous: the blocks of the rows, one after another.
        quant_type: the type's number.
        m, n: rows and columns of the weight; n is a multiple of the block.
        dtype: of a new `out`: float32, float16 or bfloat16; None is float16.
        out: [m, n] of any of these dtypes, contiguous, written and returned; new unless given.
    """
    out.copy_(ggml_formats.decode(quant_type, W).view(out.shape))


@ggml_dequantize.result
def result_ggml_dequantize(W: TensorArg, m: int, n: int, dtype: Any) -> Result:
    for name, size in (("m", m), ("n", n)):
        if size < 0:
            raise check.refuse(W, name, f"expected 0 or more, got {size}")
    kind = dtypes.float16 if dtype is None else dtypes.of(dtype)
    if kind is None or kind not in dtypes.FLOATS:
        raise check.refuse(W, "dtype", f"expected {' or '.join(map(str, dtypes.FLOATS))}, got {dtype}")
    return Result((m, n), kind)


@ggml_dequantize.plan
def plan_ggml_dequantize(W: TensorArg, quant_type: int, m: int, n: int, dtype: Any, out: TensorArg) -> Launch:
    result = result_ggml_dequantize(W, m, n, dtype)
    check.dtype(out, *(dtypes.FLOATS if dtype is None else [result.dtype]))
    check.sizes(out, m=m, n=n)
    check.contiguous(out)
    format = ggml_formats.of_rows(W, quant_type, *out.shape)
    if out.shape[1] % format.length:
        raise out.error(f"expected rows of whole blocks of {format.length} elements of {format.name}, got {out.shape}")
    access = check.vector_width(8, *one_row(out))
    return ggml_formats.dequantised(W, format, out, out.dtype, out.numel, access)


@ggml_dequantize.example
def example_ggml_dequantize(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 256] = 4096,
    dtype: str = "bfloat16",
    quant_type: Literal[2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23, 29] = 12,
) -> tuple[Any, ...]:
    """A weight of `num_tokens` rows of random bytes; its scales are below 1 / 128, as in real weights."""
    format = ggml_formats.FORMATS[quant_type]
    row_blocks = hidden_size // format.length
    weight = make.randint(0, 256, num_tokens, row_blocks * format.nbytes, dtype="uint8")
    weight = make.masked(weight, format.nbytes, format.exponents, 0x9F)
    return weight, quant_type, num_tokens, hidden_size, None, make.empty(num_tokens, hidden_size, dtype=dtype)
