"""The skinny GEMMs of vLLM's ROCm namespace.

Upstream's kernels support some sizes only; these support any size, on every platform.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import E4M3, bfloat16, float16
from ..._core.tensors.tensor import TensorArg
from .._shared.fp8_accumulation import absolute_error
from .gemm_plan import plan
from .gemm_problem import Epilogue, GemmProblem, Operand
from .scaled_mm import codes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["LLMM1", "wvSplitK", "wvSplitKQ", "wvSplitKrc"]


def weight_product(in_a: Tensor, in_b: Tensor, in_bias: Tensor | None = None) -> Tensor:
    """float64 ``in_b @ in_a.T + in_bias``."""
    x = in_b.double() @ in_a.double().T
    return x if in_bias is None else x + in_bias.double()


def _result(in_a: TensorArg, in_b: TensorArg) -> Result:
    check.sizes(in_a, outputs=None, K=None)
    check.sizes(in_b, tokens=None, K=in_a.shape[1])
    return Result((in_b.shape[0], in_a.shape[0]), in_b.dtype)


def plan_product(
    out: TensorArg,
    in_a: TensorArg,
    in_b: TensorArg,
    in_bias: TensorArg | None = None,
    scale_a: TensorArg | None = None,
    scale_b: TensorArg | None = None,
) -> list[Launch]:
    """The launch of ``out = scale_b * (scale_a * (in_b @ in_a.T)) + in_bias``."""
    check.sizes(in_a, outputs=None, K=None)
    check.sizes(in_b, tokens=None, K=in_a.shape[1])
    check.dtype(in_b, in_a.dtype)
    (outputs, k), tokens = in_a.shape, in_b.shape[0]
    check.sizes(out, tokens=tokens, outputs=outputs)
    check.row_size(out)
    if in_bias is not None:
        check.dtype(in_bias, out.dtype)
        if in_bias.shape not in ((outputs,), (1, outputs), (tokens, outputs)):
            raise in_bias.error(f"expected shape ({outputs},) or ({tokens}, {outputs}), got {in_bias.shape}")
        check.row_size(in_bias)
    epilogue = Epilogue(out, scale_b, scale_a, bias=in_bias)
    return plan(GemmProblem(Operand.of_matrix(in_b), Operand.of_matrix(in_a), k, epilogue))


def example_tensors(make: Any, num_tokens: int, dtype: str, with_bias: bool) -> tuple[Any, Any, Any]:
    """A weight, tokens, and a bias or None."""
    k, outputs = 160, 40
    return (
        make.randn(outputs, k, dtype=dtype, scale=k**-0.5),
        make.randn(num_tokens, k, dtype=dtype),
        make.randn(outputs, dtype=dtype) if with_bias else None,
    )


@op(returns="out", atol=2.0**-18)
def LLMM1(in_a: Tensor, in_b: Tensor, rows_per_block: int, *, out: Tensor) -> None:
    """A GEMM for one token: ``out = in_b @ in_a.T``, accumulated in float32 and rounded once.

    More tokens are supported, too.

    Args:
        in_a: the weight, [outputs, K] float16 or bfloat16, any strides; row-major is fast.
        in_b: the tokens, [tokens, K] of the same dtype, likewise.
        rows_per_block: launch parameter of upstream's kernel; any integer, no effect.
        out: [tokens, outputs] of the same dtype, returned; elements of a row are contiguous.
    """
    out.copy_(weight_product(in_a, in_b))


@LLMM1.result
def result_LLMM1(in_a: TensorArg, in_b: TensorArg) -> Result:
    return _result(in_a, in_b)


@LLMM1.plan
def plan_LLMM1(in_a: TensorArg, in_b: TensorArg, out: TensorArg) -> list[Launch]:
    check.dtype(in_a, float16, bfloat16)
    check.dtype(out, in_a.dtype)
    return plan_product(out, in_a, in_b)


@LLMM1.example
def example_LLMM1(
    make: Any, *, num_tokens: int = 1, dtype: Literal["bfloat16", "float16"] = "bfloat16"
) -> tuple[Any, ...]:
    weight, tokens, _ = example_tensors(make, num_tokens, dtype, with_bias=False)
    return (weight, tokens, 4, make.empty(num_tokens, 40, dtype=dtype))


@op(returns="out", atol=2.0**-18)
def wvSplitK(in_a: Tensor, in_b: Tensor, in_bias: Tensor | None, CuCount: int, *, out: Tensor) -> None:
    """A linear layer for one to four tokens: ``out = in_b @ in_a.T + in_bias``, accumulated in float32, rounded once.

    More tokens are supported, too.

    Args:
        in_a: the weight, [outputs, K] float16 or bfloat16, any strides; row-major is fast.
        in_b: the tokens, [tokens, K] of the same dtype, likewise.
        in_bias: [outputs] or [tokens, outputs] of the same dtype, elements of a row contiguous; or None.
        CuCount: number of compute units for upstream's kernel; any integer, no effect.
        out: [tokens, outputs] of the same dtype, returned; elements of a row are contiguous.
    """
    out.copy_(weight_product(in_a, in_b, in_bias))


@wvSplitK.result
def result_wvSplitK(in_a: TensorArg, in_b: TensorArg) -> Result:
    return _result(in_a, in_b)


@wvSplitK.plan
def plan_wvSplitK(in_a: TensorArg, in_b: TensorArg, in_bias: TensorArg | None, out: TensorArg) -> list[Launch]:
    check.dtype(in_a, float16, bfloat16)
    check.dtype(out, in_a.dtype)
    return plan_product(out, in_a, in_b, in_bias)


@wvSplitK.example
def example_wvSplitK(
    make: Any, *, num_tokens: int = 4, dtype: Literal["bfloat16", "float16"] = "bfloat16", with_bias: bool = False
) -> tuple[Any, ...]:
    return (*example_tensors(make, num_tokens, dtype, with_bias), 80, make.empty(num_tokens, 40, dtype=dtype))


@op(returns="out", atol=2.0**-18)
def wvSplitKrc(in_a: Tensor, in_b: Tensor, in_bias: Tensor | None, CuCount: int, *, out: Tensor) -> None:
    """A linear layer for 9 to 128 tokens: ``out = in_b @ in_a.T + in_bias``, accumulated in float32 and rounded once.

    Any number of tokens is supported.

    Args:
        in_a: the weight, [outputs, K] float16 or bfloat16, any strides; row-major is fast.
        in_b: the tokens, [tokens, K] of the same dtype, likewise.
        in_bias: [outputs] or [tokens, outputs] of the same dtype, elements of a row contiguous; or None.
        CuCount: number of compute units for upstream's kernel; any integer, no effect.
        out: [tokens, outputs] of the same dtype, returned; elements of a row are contiguous.
    """
    out.copy_(weight_product(in_a, in_b, in_bias))


@wvSplitKrc.result
def result_wvSplitKrc(in_a: TensorArg, in_b: TensorArg) -> Result:
    return _result(in_a, in_b)


@wvSplitKrc.plan
def plan_wvSplitKrc(in_a: TensorArg, in_b: TensorArg, in_bias: TensorArg | None, out: TensorArg) -> list[Launch]:
    check.dtype(in_a, float16, bfloat16)
    check.dtype(out, in_a.dtype)
    return plan_product(out, in_a, in_b, in_bias)


@wvSplitKrc.example
def example_wvSplitKrc(
    make: Any, *, num_tokens: int = 32, dtype: Literal["bfloat16", "float16"] = "bfloat16", with_bias: bool = False
) -> tuple[Any, ...]:
    return (*example_tensors(make, num_tokens, dtype, with_bias), 80, make.empty(num_tokens, 40, dtype=dtype))


@op(out="out_c", atol=lambda in_a, in_b: absolute_error(in_b, in_a.T))
def wvSplitKQ(
    in_a: Tensor, in_b: Tensor, in_bias: Tensor | None, out_c: Tensor, scale_a: Tensor, scale_b: Tensor, CuCount: int
) -> None:
    """A linear layer of fp8 for one to four tokens: ``out_c = scale_b * (scale_a * (in_b @ in_a.T)) + in_bias``.

    Accumulation and scales are in float32; the result is rounded once. More tokens are supported, too.

    Args:
        in_a: the weight, [outputs, K] float8_e4m3fn or float8_e4m3fnuz, any strides; row-major is fast.
        in_b: the tokens, [tokens, K] of the same dtype, likewise.
        in_bias: [outputs] or [tokens, outputs] of the dtype of out_c, elements of a row contiguous; or None.
        out_c: [tokens, outputs] float16 or bfloat16, written; elements of a row are contiguous.
        scale_a: scale of the weight, one float32; scale_b: scale of the tokens, likewise.
        CuCount: number of compute units for upstream's kernel; any integer, no effect.
    """
    x = scale_b.reshape(()) * (scale_a.reshape(()) * weight_product(in_a, in_b).float())
    out_c.copy_(x if in_bias is None else x + in_bias.float())


@wvSplitKQ.result
def result_wvSplitKQ(
    in_a: TensorArg, in_b: TensorArg, in_bias: TensorArg | None, *, out_dtype: torch.dtype | None = None
) -> Result:
    """Rows of `in_b`.

    Args:
        out_dtype: of the output; None for bfloat16, or the dtype of the bias.
    """
    dtype = check.chosen(in_a, "out_dtype", out_dtype, in_bias.dtype if in_bias else bfloat16)
    return _result(in_a, in_b)._replace(dtype=dtype)


@wvSplitKQ.plan
def plan_wvSplitKQ(
    in_a: TensorArg,
    in_b: TensorArg,
    in_bias: TensorArg | None,
    out_c: TensorArg,
    scale_a: TensorArg,
    scale_b: TensorArg,
) -> list[Launch]:
    check.dtype(in_a, *E4M3)
    check.dtype(out_c, float16, bfloat16)
    check.scalar(scale_a)
    check.scalar(scale_b)
    return plan_product(out_c, in_a, in_b, in_bias, scale_a, scale_b)


@wvSplitKQ.example
def example_wvSplitKQ(
    make: Any,
    *,
    num_tokens: int = 4,
    quant_dtype: Literal["float8_e4m3fn", "float8_e4m3fnuz"] = "float8_e4m3fn",
    out_dtype: Literal["bfloat16", "float16"] = "bfloat16",
    with_bias: bool = False,
) -> tuple[Any, ...]:
    k, outputs = 160, 40
    return (
        codes(make, outputs, k, quant_dtype),
        codes(make, num_tokens, k, quant_dtype),
        make.randn(num_tokens, outputs, dtype=out_dtype) if with_bias else None,
        make.empty(num_tokens, outputs, dtype=out_dtype),
        make.full(1, value=0.05, dtype="float32"),
        make.full(1, value=0.02, dtype="float32"),
        80,
    )
