"""A gated activation whose results are fp8 codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import E4M3, bfloat16, float16
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg
from .._shared import chunks, fp8
from ._common import check_halves, min_blocks_of_silu

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["silu_and_mul_quant"]

_silu_and_mul_quant = Kernel("activation/silu_and_mul_quant.cu")


@op(out="result", ulps=0)
def silu_and_mul_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    """`silu_and_mul` written as fp8: ``result = fp8(clamp(T(T(silu(g)) * u) * (1 / scale)))`` for ``input = [g, u]``.

    The reciprocal is float32. The product saturates at +-448 (224 for float8_e4m3fnuz), and NaN becomes the largest
    code. `static_scaled_fp8_quant` says what happens if the reciprocal of the scale is not finite.

    Args:
        result: [..., hidden_size], float8_e4m3fn or float8_e4m3fnuz, written; rows of one stride.
        input: [..., 2 * hidden_size], float16 or bfloat16; rows of one stride.
        scale: one float32 element, of any sign.
    """
    gate, up = input.chunk(2, dim=-1)
    product = (torch.nn.functional.silu(gate) * up).float()
    result.copy_(fp8.static_codes(product, scale.reshape(()), result.dtype))


@silu_and_mul_quant.plan
def plan_silu_and_mul_quant(result: TensorArg, input: TensorArg, scale: TensorArg) -> Launch:
    check.dtype(input, float16, bfloat16)
    check_halves(result, input)
    check.dtype(result, *E4M3)
    check.scalar(scale)
    return chunks.launch(
        _silu_and_mul_quant,
        result,
        input,
        "result_stride",
        min_blocks=min_blocks_of_silu(input),
        code_t=result.dtype,
    )


@silu_and_mul_quant.example
def example_silu_and_mul_quant(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 14336,
    dtype: Literal["float16", "bfloat16"] = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
) -> tuple[Any, ...]:
    result = make.empty(num_tokens, hidden_size, dtype=quant_dtype)
    input = make.randn(num_tokens, 2 * hidden_size, dtype=dtype)
    return result, input, make.full(1, value=0.02, dtype="float32")
