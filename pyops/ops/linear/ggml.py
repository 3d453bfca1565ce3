"""GEMMs with the quantized weights of GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.tensor import TensorArg
from .._shared import ggml_formats
from .ggml_engines import plan
from .ggml_problem import MAX_FUSED_ROWS, GgmlProblem, format_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ggml_mul_mat_a8", "ggml_mul_mat_vec_a8"]


def _product(W: Tensor, X: Tensor, quant_type: int, row: int) -> Tensor:
    """float64 ``X @ W.T``."""
    weight = ggml_formats.decode(quant_type, W).view(row, -1)[:, : X.shape[1]] if row else W.new_empty(0, X.shape[1])
    if X.shape[0] > MAX_FUSED_ROWS:
        weight = weight.to(X.dtype)
    return X.double() @ weight.double().T


def _result(W: TensorArg, X: TensorArg, row: int) -> Result:
    check.sizes(X, tokens=None, K=None)
    if row < 0:
        raise check.refuse(W, "row", f"expected 0 or more, got {row}")
    return Result((X.shape[0], row), X.dtype)


def _plan(W: TensorArg, X: TensorArg, quant_type: int, row: int, out: TensorArg) -> list[Launch]:
    check.floating(X)
    result = _result(W, X, row)
    format = format_of(W, quant_type, row, X.shape[1])
    if X.shape[1] % format.length:
        raise X.error(f"expected rows of whole blocks of {format.length} elements of {format.name}, got {X.shape}")
    check.row_size(X)
    check.dtype(out, X.dtype)
    check.sizes(out, tokens=result.shape[0], row=row)
    check.row_size(out)
    return plan(GgmlProblem(out, W, X, format))


def random_weight(make: Any, quant_type: int, *sizes: int) -> Any:
    """A random weight of this shape (the last size in elements), with scales below 1 / 128, as in real weights."""
    format = ggml_formats.FORMATS[quant_type]
    weight = make.randint(0, 256, *sizes[:-1], sizes[-1] // format.length * format.nbytes, dtype="uint8")
    return make.masked(weight, format.nbytes, format.exponents, 0x9F)


def _example(make: Any, num_tokens: int, input_size: int, dtype: str, quant_type: int) -> tuple[Any, ...]:
    output_size = 40
    weight = random_weight(make, quant_type, output_size, input_size)
    x = make.randn(num_tokens, input_size, dtype=dtype)
    return weight, x, quant_type, output_size, make.empty(num_tokens, output_size, dtype=dtype)


@op(returns="out", atol=2.0**-18)
def ggml_mul_mat_vec_a8(W: Tensor, X: Tensor, quant_type: int, row: int, *, out: Tensor) -> None:
    """A linear layer with a GGUF weight, for small M: ``out = X @ W.T``, rounded once.

    The weight is dequantized as by `ggml_dequantize`, to float32; for more than 32 tokens it is then rounded to the
    dtype of X. X is not quantized to 8 bits as upstream does; but with a single token its elements may be rounded by up
    to 2^-21 of the largest of the 32, or 16, that share a scale. Accumulation is in float32. Any number of tokens is
    supported. Scales multiply partial sums of a few elements: an infinity in X may give NaN instead of infinity.

    Args:
        W: uint8, contiguous: the blocks of all rows, in any shape; or [row, bytes of a row], where rows may have more
            blocks than K elements need; these are ignored.
        X: the tokens, [tokens, K] float32, float16 or bfloat16, K a multiple of the type's block; constant row stride.
        quant_type: the type's number, as `ggml_dequantize` lists them.
        row: rows of the weight.
        out: [tokens, row] of the dtype of X, returned; elements of a row are contiguous.
    """
    out.copy_(_product(W, X, quant_type, row))


@ggml_mul_mat_vec_a8.result
def result_ggml_mul_mat_vec_a8(W: TensorArg, X: TensorArg, row: int) -> Result:
    return _result(W, X, row)


@ggml_mul_mat_vec_a8.plan
def plan_ggml_mul_mat_vec_a8(W: TensorArg, X: TensorArg, quant_type: int, row: int, out: TensorArg) -> list[Launch]:
    return _plan(W, X, quant_type, row, out)


@ggml_mul_mat_vec_a8.example
def example_ggml_mul_mat_vec_a8(
    make: Any,
    *,
    num_tokens: int = 1,
    input_size: Literal[256, 768] = 768,
    dtype: str = "bfloat16",
    quant_type: Literal[12, 2, 8, 17, 29] = 12,
) -> tuple[Any, ...]:
    return _example(make, num_tokens, input_size, dtype, quant_type)


@op(returns="out", atol=2.0**-18)
def ggml_mul_mat_a8(W: Tensor, X: Tensor, quant_type: int, row: int, *, out: Tensor) -> None:
    """A linear layer with a GGUF weight: ``out = X @ W.T``, accumulated in float32, rounded once.

    The same as `ggml_mul_mat_vec_a8`.

    Args:
        W: uint8, contiguous: the blocks of all rows, in any shape; or [row, bytes of a row], where rows may have more
            blocks than K elements need; these are ignored.
        X: the tokens, [tokens, K] float32, float16 or bfloat16, K a multiple of the type's block; constant row stride.
        quant_type: the type's number, as `ggml_dequantize` lists them.
        row: rows of the weight.
        out: [tokens, row] of the dtype of X, returned; elements of a row are contiguous.
    """
    out.copy_(_product(W, X, quant_type, row))


@ggml_mul_mat_a8.result
def result_ggml_mul_mat_a8(W: TensorArg, X: TensorArg, row: int) -> Result:
    return _result(W, X, row)


@ggml_mul_mat_a8.plan
def plan_ggml_mul_mat_a8(W: TensorArg, X: TensorArg, quant_type: int, row: int, out: TensorArg) -> list[Launch]:
    return _plan(W, X, quant_type, row, out)


@ggml_mul_mat_a8.example
def example_ggml_mul_mat_a8(
    make: Any, *, num_tokens: int = 16, dtype: str = "bfloat16", quant_type: Literal[12, 14] = 12
) -> tuple[Any, ...]:
    return _example(make, num_tokens, 256, dtype, quant_type)
