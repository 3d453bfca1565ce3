"""Products with a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.kernel import Kernel, Launch
from ..._core.op import op
from ..._core.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["skinny_linear"]

_skinny_linear = Kernel("linear/skinny_linear.cu")
_MAX_TOKENS = 4  # of a block, which hold as many sums in registers
_BATCH = 4  # vectors that a lane multiplies with while as many are on their way
_RESIDENT = 1024, 512  # threads of a multiprocessor that find registers enough: for one token, and for more


@op(out="out", atol=2.0**-18)
def skinny_linear(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """A linear layer for few rows: ``out = input @ weight.T + bias``, summed in float32 and rounded once.

    Made for the decode step of a few sequences, where every weight is read for each four rows: with more rows a
    library's matrix product, on tensor cores, is faster. Order of the sum: by lanes of a warp.

    Args:
        out: [..., output_size], written; rows of one stride.
        input: [..., hidden_size], float32, float16 or bfloat16; rows of one stride.
        weight: [output_size, hidden_size] of the same dtype; rows of one stride.
        bias: [output_size] of the same dtype, contiguous; or None.
    """
    product = input.float() @ weight.float().T
    out.copy_(product if bias is None else product + bias.float())


@skinny_linear.plan
def plan_skinny_linear(out: TensorArg, input: TensorArg, weight: TensorArg, bias: TensorArg | None) -> Launch:
    check.floating(input)
    hidden_size, output_size = check.row_size(input), check.row_size(out)
    check.dtype(out, input.dtype)
    if out.shape[:-1] != input.shape[:-1]:
        raise out.error(f"expected the leading dimensions of input, {input.shape[:-1]}, got shape {out.shape}")
    check.sizes(weight, output_size=output_size, hidden_size=hidden_size)
    check.dtype(weight, input.dtype)
    check.row_size(weight)
    check.shape(bias, input.dtype, output_size=output_size)
    num_tokens = check.num_rows(input)
    strides = {"out_stride": check.row_stride(out), "input_stride": check.row_stride(input)}
    vec_size = check.vector_width(hidden_size, input, weight)
    tokens = 1 if num_tokens == 1 else _MAX_TOKENS
    warp_size, multiprocessors = input.device.warp_size, input.device.multiprocessors
    rounds = max(1, -(-hidden_size // (vec_size * warp_size)))  # vectors of a row to each lane of one warp
    split = next(warps for warps in (1, 2, 4, 8) if rounds <= warps * _BATCH or warps == 8)
    num_threads = warp_size * max(4, split)
    blocks = -(-output_size // (num_threads // warp_size // split))
    min_blocks = max(1, _RESIDENT[tokens > 1] // num_threads)
    return _skinny_linear(
        scalar_t=input.dtype,
        HIDDEN_SIZE=hidden_size,
        VEC_SIZE=vec_size,
        TOKENS=tokens,
        SPLIT=split,
        BATCH=min(_BATCH, -(-rounds // split)),
        HAS_BIAS=bias is not None,
        NUM_THREADS=num_threads,
        MIN_BLOCKS=min_blocks,
    ).launch(
        grid=(min(blocks, multiprocessors * min_blocks), -(-num_tokens // tokens)),
        block=num_threads,
        num_tokens=num_tokens,
        output_size=output_size,
        weight_stride=check.row_stride(weight),
        **strides,
    )


@skinny_linear.example
def example_skinny_linear(
    make: Any,
    *,
    num_tokens: int = 1,
    input_size: Literal[2048, 96, 769] = 2048,
    output_size: Literal[16, 37] = 16,
    dtype: str = "bfloat16",
    with_bias: bool = False,
) -> tuple[Any, ...]:
    return (
        make.empty(num_tokens, output_size, dtype=dtype),
        make.randn(num_tokens, input_size, dtype=dtype),
        make.randn(output_size, input_size, dtype=dtype, scale=input_size**-0.5),
        make.randn(output_size, dtype=dtype) if with_bias else None,
    )
