"""Normalisation: root-mean-square and layer norms, alone and fused with residual, quantisation and rotary embedding."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from ._core import check, quant, spread
from ._core.dtypes import bfloat16, float8_e4m3fn, float16, float32, int8, int64
from ._core.kernel import Kernel, Launch
from ._core.lazy import torch
from ._core.op import op
from ._core.tensor import Arg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_fp8_quant",
    "fused_qk_norm_rope",
    "gemma_rms_norm",
    "layer_norm",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_gated",
    "rms_norm_per_block_quant",
    "rms_norm_static_fp8_quant",
]

_rms_norm = Kernel("norm/rms_norm.cu")
_fused_add_rms_norm = Kernel("norm/fused_add_rms_norm.cu")
_rms_norm_static_fp8_quant = Kernel("norm/rms_norm_static_fp8_quant.cu")
_rms_norm_dynamic_quant = Kernel("norm/rms_norm_dynamic_quant.cu")
_gemma_rms_norm = Kernel("norm/gemma_rms_norm.cu")
_layer_norm = Kernel("norm/layer_norm.cu")
_fused_qk_norm_rope = Kernel("norm/fused_qk_norm_rope.cu")


def _rms(x: Tensor, weight: Tensor | None, epsilon: float, dtype: Any) -> Tensor:
    """The norm of float32 values, rounded to `dtype` before and after the product with the weight."""
    y = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)).to(dtype)
    return y if weight is None else y * weight


# A sum in another order rounds T(x * scale) the other way now and then, and the weight can make two units of that one.
@op(out="out", in_place={"out": "input"}, ulps=2)
def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Scale each row of `input` to unit root mean square, then by `weight`.

    ``out = T(T(input / sqrt(mean(input^2) + epsilon)) * weight)``, the mean in float32 over the last dimension
    (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        out: [..., hidden_size], written; may be `input` itself.
        input: [..., hidden_size], float32, float16 or bfloat16; up to three leading dimensions of any strides.
        weight: [hidden_size] of the same dtype, or None for ones.
        epsilon: added to the mean of squares.
    """
    out.copy_(_rms(input.float(), weight, epsilon, input.dtype))


@rms_norm.plan
def _(out: Arg, input: Arg, weight: Arg | None) -> Launch:
    check.floating(input)
    check.like(out, input)
    hidden_size = check.row_size(input)
    check.row_size(out)
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    leading = check.leading(input, out, most=3)
    num_rows = check.num_rows(input)
    vectors = spread.vectors(hidden_size, leading[0][1] if len(leading) == 1 else (), out, input, weight)
    grid, threads = spread.rows(input, num_rows, vectors, many=(4, 6))
    (_, (input_stride0, out_stride0)), *inner = leading
    (size1, (input_stride1, out_stride1)), (size2, (input_stride2, out_stride2)) = (*inner, _ONE, _ONE)[:2]
    return _rms_norm(
        scalar_t=input.dtype,
        HIDDEN_SIZE=hidden_size,
        **threads,
        LEADING=len(leading),
        HAS_WEIGHT=weight is not None,
    ).launch(
        grid=grid if hidden_size else 0,
        block=threads["NUM_THREADS"],
        num_rows=num_rows,
        size1=size1,
        size2=size2,
        out_stride0=out_stride0,
        out_stride1=out_stride1,
        out_stride2=out_stride2,
        input_stride0=input_stride0,
        input_stride1=input_stride1,
        input_stride2=input_stride2,
    )


_ONE = (1, (0, 0))  # a leading dimension that is not there


@rms_norm.example
def _(make: Any, *, num_tokens: int = 16, hidden_size: int = 4096, dtype: str = "bfloat16") -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    return make.empty(num_tokens, hidden_size, dtype=dtype), x, _weight(make, hidden_size, dtype), 1e-6


def _weight(make: Any, hidden_size: int, dtype: str) -> Any:
    return make.randn(hidden_size, dtype=dtype, scale=0.1, shift=1.0)


@op(inout=("input", "residual"), ulps=2)
def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Add `residual` to `input`, keep the sum in `residual` and its RMS norm in `input`.

    ``residual = T(input + residual); input = T(T(residual / sqrt(mean(residual^2) + epsilon)) * weight)``: the norm is
    that of the rounded sum.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16, read and written; rows of one stride.
        residual: the same shape and dtype, read and written; rows of one stride.
        weight: [hidden_size] of the same dtype, or None for ones.
        epsilon: added to the mean of squares.
    """
    residual.copy_(input.float() + residual.float())
    input.copy_(_rms(residual.float(), weight, epsilon, input.dtype))


@fused_add_rms_norm.plan
def _(input: Arg, residual: Arg, weight: Arg | None) -> Launch:
    check.floating(input)
    hidden_size = check.row_size(input)
    check.like(residual, input)
    check.row_size(residual)
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    num_rows = check.num_rows(input)
    strides = check.row_stride(input), check.row_stride(residual)
    vectors = spread.vectors(hidden_size, strides, input, residual, weight)
    grid, threads = spread.rows(input, num_rows, vectors, many=(3, 6), held=2, resident=(1152, 896))
    return _fused_add_rms_norm(
        scalar_t=input.dtype,
        HIDDEN_SIZE=hidden_size,
        **threads,
        HAS_WEIGHT=weight is not None,
    ).launch(
        grid=grid if hidden_size else 0,
        block=threads["NUM_THREADS"],
        num_rows=num_rows,
        input_stride=strides[0],
        residual_stride=strides[1],
    )


@fused_add_rms_norm.example
def _(make: Any, *, num_tokens: int = 16, hidden_size: int = 4096, dtype: str = "bfloat16") -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    residual = make.randn(num_tokens, hidden_size, dtype=dtype)
    return x, residual, _weight(make, hidden_size, dtype), 1e-6


@op(out="result")
def rms_norm_static_fp8_quant(result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> None:
    """RMS norm of `input`, written as fp8 under one given scale.

    The norm is `rms_norm`'s, rounded as there; then ``result = fp8(norm * (1 / scale))``, saturating, NaN to the
    largest code.

    Args:
        result: [..., hidden_size], float8_e4m3fn, written; rows of one stride.
        input: [..., hidden_size], float32, float16 or bfloat16; rows of one stride.
        weight: [hidden_size] of the same dtype.
        scale: one float32 on the device; multiplies a code to give its value.
        epsilon: added to the mean of squares.
    """
    y = _rms(input.float(), weight, epsilon, input.dtype).float()
    result.copy_(quant.fp8(y * (1.0 / scale.reshape(())), result.dtype))


@rms_norm_static_fp8_quant.plan
def _(result: Arg, input: Arg, weight: Arg, scale: Arg) -> Launch:
    return _static_fp8_plan(result, input, None, weight, scale)


def _static_fp8_plan(result: Arg, input: Arg, residual: Arg | None, weight: Arg, scale: Arg) -> Launch:
    check.floating(input)
    hidden_size = check.row_size(input)
    check.dtype(result, float8_e4m3fn)
    check.same_shape(result, input)
    check.row_size(result)
    check.like(residual, input)
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    check.scalar(scale)
    num_rows = check.num_rows(input)
    strides = [check.row_stride(arg) for arg in (result, input, residual) if arg]
    vectors = spread.vectors(hidden_size, strides, result, input, weight, residual)
    # The threads of rms_norm and fused_add_rms_norm, so that the sums, and with them the codes, agree bit for bit.
    grid, threads = spread.rows(
        input,
        num_rows,
        vectors,
        many=(3, 6) if residual else (4, 6),
        held=2 if residual else 1,
        resident=(896, 896) if residual else (1024, 896),
    )
    threads = spread.converting(threads, result)
    return _rms_norm_static_fp8_quant(
        scalar_t=input.dtype,
        HIDDEN_SIZE=hidden_size,
        **threads,
        HAS_RESIDUAL=residual is not None,
    ).launch(
        grid=grid if hidden_size else 0,
        block=threads["NUM_THREADS"],
        num_rows=num_rows,
        result_stride=strides[0],
        input_stride=strides[1],
        residual_stride=strides[2] if residual else 0,
        **({} if residual else {"residual": 0}),
    )


@rms_norm_static_fp8_quant.example
def _(make: Any, *, num_tokens: int = 16, hidden_size: int = 4096, dtype: str = "bfloat16") -> tuple[Any, ...]:
    result = make.empty(num_tokens, hidden_size, dtype="float8_e4m3fn")
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    return result, x, _weight(make, hidden_size, dtype), make.full(1, value=0.02, dtype="float32"), 1e-6


@op(out="result", inout="residual")
def fused_add_rms_norm_static_fp8_quant(
    result: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    """Add `residual` to `input`, keep the sum in `residual`, and write its RMS norm as fp8 under one given scale.

    The sum and the norm are `fused_add_rms_norm`'s, the codes `rms_norm_static_fp8_quant`'s; `input` is not written.

    Args:
        result: [..., hidden_size], float8_e4m3fn, written; rows of one stride.
        input: [..., hidden_size], float32, float16 or bfloat16; rows of one stride.
        residual: the shape and dtype of `input`, read and written; rows of one stride.
        weight: [hidden_size] of the same dtype.
        scale: one float32 on the device; multiplies a code to give its value.
        epsilon: added to the mean of squares.
    """
    residual.copy_(input.float() + residual.float())
    y = _rms(residual.float(), weight, epsilon, input.dtype).float()
    result.copy_(quant.fp8(y * (1.0 / scale.reshape(())), result.dtype))


@fused_add_rms_norm_static_fp8_quant.plan
def _(result: Arg, input: Arg, residual: Arg, weight: Arg, scale: Arg) -> Launch:
    check.row_size(residual)
    return _static_fp8_plan(result, input, residual, weight, scale)


@fused_add_rms_norm_static_fp8_quant.example
def _(make: Any, *, num_tokens: int = 16, hidden_size: int = 4096, dtype: str = "bfloat16") -> tuple[Any, ...]:
    result = make.empty(num_tokens, hidden_size, dtype="float8_e4m3fn")
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    residual = make.randn(num_tokens, hidden_size, dtype=dtype)
    return result, x, residual, _weight(make, hidden_size, dtype), make.full(1, value=0.02, dtype="float32"), 1e-6


@op(out=("result", "scale"), inout="residual")
def rms_norm_dynamic_per_token_quant(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """RMS norm of `input` (plus `residual`), written as int8 or fp8 with one scale per row, found here.

    ``z = input + residual`` in float32, ``residual = T(z)``, ``y = T(T(z / sqrt(mean(z^2) + epsilon)) * weight)``,
    ``scale = max(min(max|y|, scale_ub) / largest, smallest)``, ``result = code(y / scale)``. largest is 448 for fp8,
    127 for int8; smallest 1 / (448 * 512) and 2^-23. int8 multiplies by the reciprocal of the scale. NaN is ignored by
    the maximum and becomes the largest fp8 code or int8 0.

    Args:
        result: [..., hidden_size], float8_e4m3fn or int8, contiguous, written.
        input: [..., hidden_size], float32, float16 or bfloat16, contiguous.
        weight: [hidden_size] of the same dtype.
        scale: one float32 per row, contiguous, written; multiplies a code to give its value.
        epsilon: added to the mean of squares.
        scale_ub: one float32 that bounds max|y|; only with fp8.
        residual: the shape and dtype of `input`, contiguous, read and written; or None.
    """
    z = input.float() if residual is None else input.float() + residual.float()
    y = _rms(z, weight, epsilon, input.dtype).float()
    codes, scales = quant.dynamic_codes(y, quant.absmax(y), scale_ub, result.dtype)
    if residual is not None:
        residual.copy_(z)
    result.copy_(codes)
    scale.copy_(scales.reshape(scale.shape))


@rms_norm_dynamic_per_token_quant.plan
def _(result: Arg, input: Arg, weight: Arg, scale: Arg, scale_ub: Arg | None, residual: Arg | None) -> Launch:
    check.per_row(scale, float32, check.num_rows(input))
    return _dynamic_quant_plan(result, input, weight, scale_ub, residual, group_size=None, group_major=False)


def _dynamic_quant_plan(
    result: Arg,
    input: Arg,
    weight: Arg,
    scale_ub: Arg | None,
    residual: Arg | None,
    group_size: int | None,
    group_major: bool,
) -> Launch:
    check.floating(input)
    check.dtype(result, float8_e4m3fn, int8)
    check.same_shape(result, input)
    check.like(residual, input)
    hidden_size = check.row_size(input)
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    check.scalar(scale_ub)
    if scale_ub is not None and result.dtype is int8:
        raise scale_ub.error("is only taken with a float8_e4m3fn result, got int8")
    tensors = (result, input, weight, *((residual,) if residual else ()))
    for arg in tensors:
        check.contiguous(arg)
    num_rows = check.num_rows(input)
    access_size, shifted = spread.vectors(hidden_size, (hidden_size,), *tensors)
    # The lanes of a group are one warp's, so a group needs whole vectors even where memory is not aligned for them.
    vec_size = 16 // input.dtype.itemsize if group_size else access_size
    grid, threads = spread.rows(
        input,
        num_rows,
        (vec_size, shifted),
        many=(3, 4) if residual else (4, 7),
        few=(2, 4) if residual or group_size else (2, 8),
        held=2 if residual else 1,
        lanes=group_size // vec_size if group_size else 1,
        resident=(896 if residual or group_size else 1024, 896),
    )
    threads = spread.converting(threads, result)
    # Taking vectors apart takes registers, and so does, by sm_100's compiler, putting weights together.
    if access_size < vec_size or (shifted and input.device.arch == "sm_100"):
        threads = {**threads, "MIN_BLOCKS": 1}
    return _rms_norm_dynamic_quant(
        scalar_t=input.dtype,
        code_t=result.dtype,
        HIDDEN_SIZE=hidden_size,
        ACCESS_SIZE=access_size,
        **threads,
        GROUP_SIZE=group_size or hidden_size or 1,
        HAS_RESIDUAL=residual is not None,
        HAS_BOUND=scale_ub is not None,
        GROUP_MAJOR=group_major,
    ).launch(grid=grid if hidden_size else 0, block=threads["NUM_THREADS"], num_rows=num_rows)


@rms_norm_dynamic_per_token_quant.example
def _(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "int8"] = "float8_e4m3fn",
    with_residual: bool = False,
    with_bound: bool = False,
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    return (
        make.empty(num_tokens, hidden_size, dtype=quant_dtype),
        x,
        _weight(make, hidden_size, dtype),
        make.empty(num_tokens, 1, dtype="float32"),
        1e-6,
        make.full(1, value=2.0, dtype="float32") if with_bound and quant_dtype != "int8" else None,
        make.randn(num_tokens, hidden_size, dtype=dtype) if with_residual else None,
    )


@op(out=("result", "scale"), inout="residual")
def rms_norm_per_block_quant(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    scale_ub: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    is_scale_transposed: bool,
) -> None:
    """RMS norm of `input` (plus `residual`), written as int8 or fp8 with one scale per group of neighbouring elements.

    As `rms_norm_dynamic_per_token_quant`, with the maximum taken over each group.

    Args:
        result: [..., hidden_size], float8_e4m3fn or int8, contiguous, written.
        input: [..., hidden_size], float32, float16 or bfloat16, contiguous; hidden_size a multiple of group_size.
        weight: [hidden_size] of the same dtype.
        scale: [num_tokens, hidden_size / group_size] float32, written; contiguous, or with `is_scale_transposed` the
            transpose of a contiguous tensor.
        epsilon: added to the mean of squares.
        scale_ub: one float32 that bounds max|y| of every group; only with fp8.
        residual: the shape and dtype of `input`, contiguous, read and written; or None.
        group_size: 64 or 128.
        is_scale_transposed: scales of one group lie together instead of those of one row.
    """
    z = input.float() if residual is None else input.float() + residual.float()
    y = _rms(z, weight, epsilon, input.dtype).float().unflatten(-1, (-1, group_size))
    codes, scales = quant.dynamic_codes(y, quant.absmax(y), scale_ub, result.dtype)
    if residual is not None:
        residual.copy_(z)
    result.copy_(codes.flatten(-2))
    scale.copy_(scales.reshape(scale.shape))


@rms_norm_per_block_quant.plan
def _(
    result: Arg,
    input: Arg,
    weight: Arg,
    scale: Arg,
    scale_ub: Arg | None,
    residual: Arg | None,
    group_size: int,
    is_scale_transposed: bool,
) -> Launch:
    if group_size not in (64, 128):
        raise check.refuse(input, "group_size", f"expected 64 or 128, got {group_size}")
    hidden_size = check.row_size(input)
    if hidden_size % group_size:
        raise input.error(f"expected a last dimension that is a multiple of group_size={group_size}, got {hidden_size}")
    num_rows, groups = check.num_rows(input), hidden_size // group_size
    check.dtype(scale, float32)
    expected = (1, num_rows) if is_scale_transposed else (groups, 1)
    if scale.shape[-1:] != (groups,) or check.num_rows(scale) != num_rows:
        raise scale.error(f"expected shape (num_tokens={num_rows}, groups={groups}), got {scale.shape}")
    strides = (check.row_stride(scale), scale.strides[-1])
    if any(s != e for s, e, size in zip(strides, expected, (num_rows, groups), strict=True) if size > 1):
        raise scale.error(f"expected strides {expected} with is_scale_transposed={is_scale_transposed}, got {strides}")
    return _dynamic_quant_plan(result, input, weight, scale_ub, residual, group_size, bool(is_scale_transposed))


@rms_norm_per_block_quant.example
def _(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: Literal[4096, 14336, 128, 768] = 4096,
    dtype: str = "bfloat16",
    quant_dtype: Literal["float8_e4m3fn", "int8"] = "float8_e4m3fn",
    group_size: Literal[128, 64] = 128,
    with_residual: bool = False,
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    return (
        make.empty(num_tokens, hidden_size, dtype=quant_dtype),
        x,
        _weight(make, hidden_size, dtype),
        make.empty(num_tokens, hidden_size // group_size, dtype="float32"),
        1e-6,
        None,
        make.randn(num_tokens, hidden_size, dtype=dtype) if with_residual else None,
        group_size,
        False,
    )


@op(out=("out", "residual_out"), in_place={"out": "input"})
def gemma_rms_norm(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> None:
    """RMS norm with a weight that counts from one, rounded once (the norm of the Gemma models).

    ``z = input`` or ``residual_out = input + residual``; ``out = T(z / sqrt(mean(z^2) + epsilon) * (1 + weight))``.
    With float16 the sum is kept in float32, otherwise it is rounded to the type of the sum.

    Args:
        out: [..., hidden_size], written; may be `input` itself.
        input: [..., hidden_size], float32, float16 or bfloat16; rows of one stride.
        weight: [hidden_size] of the same dtype, zero for no scaling.
        epsilon: added to the mean of squares.
        residual: the shape of `input`, of its dtype or float32; or None.
        residual_out: the shape of `input`, written, given with `residual`; float32 if `input` is float16 or `residual`
            is float32, else the dtype of `input`.
    """
    z = input
    if residual is not None and residual_out is not None:
        z = (input.float() + residual.float()).to(residual_out.dtype)
        residual_out.copy_(z)
    x = z.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    out.copy_(x * (1.0 + weight.float()))


@gemma_rms_norm.plan
def _(out: Arg, input: Arg, weight: Arg, residual: Arg | None, residual_out: Arg | None) -> Launch:
    check.floating(input)
    check.like(out, input)
    hidden_size = check.row_size(input)
    check.row_size(out)
    check.shape(weight, input.dtype, hidden_size=hidden_size)
    rows = [out, input]
    kept = input.dtype
    if residual is not None:
        if residual_out is None:
            raise residual.error("is given without residual_out")
        check.same_shape(residual, input)
        check.dtype(residual, input.dtype, float32)
        if input.dtype is float16 or residual.dtype is float32:
            kept = float32
        check.same_shape(residual_out, input)
        check.dtype(residual_out, kept)
        check.row_size(residual)
        check.row_size(residual_out)
        rows += [residual, residual_out]
    elif residual_out is not None:
        raise residual_out.error("is given without residual")
    num_rows = check.num_rows(input)
    strides = [check.row_stride(arg) for arg in rows]
    vectors = spread.vectors(hidden_size, strides, *rows, weight)
    grid, threads = spread.rows(
        input,
        num_rows,
        vectors,
        many=(3, 4) if residual else (2, 4),
        held=2 if residual else 1,
        resident=(896, 896) if residual else (1024, 896),
    )
    return _gemma_rms_norm(
        scalar_t=input.dtype,
        residual_t=residual.dtype if residual else kept,
        residual_out_t=kept,
        HIDDEN_SIZE=hidden_size,
        **threads,
        HAS_RESIDUAL=residual is not None,
    ).launch(
        grid=grid if hidden_size else 0,
        block=threads["NUM_THREADS"],
        num_rows=num_rows,
        out_stride=strides[0],
        input_stride=strides[1],
        residual_stride=strides[2] if residual else 0,
        residual_out_stride=strides[3] if residual else 0,
    )


@gemma_rms_norm.example
def _(
    make: Any, *, num_tokens: int = 16, hidden_size: int = 4096, dtype: str = "bfloat16", with_residual: bool = False
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    kept = "float32" if dtype == "float16" else dtype
    return (
        make.empty(num_tokens, hidden_size, dtype=dtype),
        x,
        make.randn(hidden_size, dtype=dtype, scale=0.1),
        1e-6,
        make.randn(num_tokens, hidden_size, dtype=dtype) if with_residual else None,
        make.empty(num_tokens, hidden_size, dtype=kept) if with_residual else None,
    )


def _grouped_norm(
    out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    stats: tuple[Tensor | None, Tensor | None],
    epsilon: float,
    group_size: int | None,
    norm_before_gate: bool,
    is_rms: bool,
) -> None:
    x = input.float()
    if z is not None and not norm_before_gate:
        x = x * torch.nn.functional.silu(z.float())
    groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    mean = groups.mean(-1, keepdim=True)
    if is_rms:
        mean = torch.zeros_like(mean)
    rstd = torch.rsqrt((groups - mean).square().mean(-1, keepdim=True) + epsilon)
    y = ((groups - mean) * rstd).flatten(-2)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    if z is not None and norm_before_gate:
        y = y * torch.nn.functional.silu(z.float())
    out.copy_(y)
    for kept, value in zip(stats, (mean, rstd), strict=True):
        if kept is not None:
            kept.copy_(value.reshape(-1, value.shape[-2]).t().reshape(kept.shape))


@op(out=("out", "mean", "rstd"), in_place={"out": "input"})
def layer_norm(
    out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    z: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> None:
    """Normalise rows, or groups within rows, to mean 0 and variance 1; optionally gate with SiLU.

    ``out = T((x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias)`` in float32, rounded once (Ba, Kiros and Hinton
    2016, arXiv:1607.06450). With `z`, ``x = input * silu(z)`` or, if `norm_before_gate`, the result is times silu(z).

    Args:
        out: [..., hidden_size], written; rows of one stride; may be `input` itself.
        input: [..., hidden_size], float32, float16 or bfloat16; rows of one stride.
        weight, bias: [hidden_size] of the same dtype, or None for ones and zeros.
        epsilon: added to the variance.
        z: the shape and dtype of `input`, rows of one stride; or None.
        mean, rstd: [groups * num_tokens] float32, written, group by group; or None.
        group_size: elements normalised together, a divisor of hidden_size; None for the whole row.
        norm_before_gate: where the gate applies.
    """
    _grouped_norm(out, input, weight, bias, z, (mean, rstd), epsilon, group_size, norm_before_gate, is_rms=False)


@layer_norm.plan
def _(
    out: Arg,
    input: Arg,
    weight: Arg | None,
    bias: Arg | None,
    z: Arg | None,
    mean: Arg | None,
    rstd: Arg | None,
    group_size: int | None,
    norm_before_gate: bool,
) -> Launch:
    return _grouped_norm_plan(out, input, weight, bias, z, mean, rstd, group_size, norm_before_gate, is_rms=False)


def _grouped_norm_plan(
    out: Arg,
    input: Arg,
    weight: Arg | None,
    bias: Arg | None,
    z: Arg | None,
    mean: Arg | None,
    rstd: Arg | None,
    group_size: int | None,
    norm_before_gate: bool,
    is_rms: bool,
) -> Launch:
    check.floating(input)
    check.like(out, input)
    hidden_size = check.row_size(input)
    check.row_size(out)
    group_size = hidden_size if group_size is None else group_size
    if group_size < 0 or (hidden_size and (group_size == 0 or hidden_size % group_size)):
        raise check.refuse(input, "group_size", f"expected a divisor of hidden_size={hidden_size}, got {group_size}")
    for vector in (weight, bias):
        check.shape(vector, input.dtype, hidden_size=hidden_size)
    check.like(z, input)
    if z is not None:
        check.row_size(z)
    num_rows, num_groups = check.num_rows(input), hidden_size // max(1, group_size)
    for stat in (mean, rstd):
        check.shape(stat, float32, **{"groups * num_tokens": num_groups * num_rows})
    strides = [check.row_stride(arg) for arg in (out, input, z) if arg]
    vectors = spread.vectors(group_size, strides if num_groups == 1 else (), out, input, z, weight, bias)
    few, held = ((4, 8), 2) if z is None else ((1, 2), 2 if norm_before_gate else 4)
    grid, threads = spread.rows(
        input,
        num_rows * num_groups,
        vectors,
        many=(4, 7) if z is None else (4, 4),
        few=few,
        held=held,
        weights=2,
        size=group_size,
        resident=(896, 896),
    )
    if z is not None and norm_before_gate:  # the gate's function takes registers while the row is held
        threads = {**threads, "MIN_BLOCKS": max(1, threads["MIN_BLOCKS"] - 1)}
    return _layer_norm(
        scalar_t=input.dtype,
        GROUP_SIZE=group_size,
        **threads,
        IS_RMS=is_rms,
        GATE=0 if z is None else 2 if norm_before_gate else 1,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_MEAN=mean is not None,
        HAS_RSTD=rstd is not None,
    ).launch(
        grid=grid if hidden_size else 0,
        block=threads["NUM_THREADS"],
        num_rows=num_rows,
        num_groups=num_groups,
        out_stride=strides[0],
        input_stride=strides[1],
        z_stride=strides[2] if z else 0,
        **({"mean": 0} if is_rms else {}),
    )


@layer_norm.example
def _(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    with_stats: bool = False,
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype, shift=0.5)
    bias = make.randn(hidden_size, dtype=dtype)
    mean, rstd = (make.empty(num_tokens, dtype="float32") if with_stats else None for _ in range(2))
    out = make.empty(num_tokens, hidden_size, dtype=dtype)
    return out, x, _weight(make, hidden_size, dtype), bias, 1e-6, None, mean, rstd, None, True


@op(out=("out", "rstd"), in_place={"out": "input"})
def rms_norm_gated(
    out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    epsilon: float,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    rstd: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> None:
    """RMS norm of rows, or of groups within rows, with an optional SiLU gate (the norm of Mamba-2 mixers).

    ``out = T(norm(input * silu(z)) * weight + bias)``, or ``T((norm(input) * weight + bias) * silu(z))`` if
    `norm_before_gate`, with ``norm(x) = x / sqrt(mean(x^2) + epsilon)``; float32, rounded once.

    Args:
        out: [..., hidden_size], written; rows of one stride; may be `input` itself.
        input: [..., hidden_size], float32, float16 or bfloat16; rows of one stride.
        weight: [hidden_size] of the same dtype, or None for ones.
        epsilon: added to the mean of squares.
        z: the gate, of the shape and dtype of `input`, rows of one stride; or None.
        bias: [hidden_size] of the same dtype, or None for zeros.
        rstd: [groups * num_tokens] float32, written, group by group: 1 / sqrt(mean + epsilon); or None.
        group_size: elements normalised together, a divisor of hidden_size; None for the whole row.
        norm_before_gate: where the gate applies.
    """
    _grouped_norm(out, input, weight, bias, z, (None, rstd), epsilon, group_size, norm_before_gate, is_rms=True)


@rms_norm_gated.plan
def _(
    out: Arg,
    input: Arg,
    weight: Arg | None,
    z: Arg | None,
    bias: Arg | None,
    rstd: Arg | None,
    group_size: int | None,
    norm_before_gate: bool,
) -> Launch:
    return _grouped_norm_plan(out, input, weight, bias, z, None, rstd, group_size, norm_before_gate, is_rms=True)


@rms_norm_gated.example
def _(
    make: Any,
    *,
    num_tokens: int = 16,
    hidden_size: int = 4096,
    dtype: str = "bfloat16",
    groups: Literal[1, 8] = 1,
    norm_before_gate: bool = False,
) -> tuple[Any, ...]:
    x = make.randn(num_tokens, hidden_size, dtype=dtype)
    z = make.randn(num_tokens, hidden_size, dtype=dtype)
    group_size = hidden_size // groups if hidden_size % groups == 0 else None
    out = make.empty(num_tokens, hidden_size, dtype=dtype)
    return out, x, _weight(make, hidden_size, dtype), 1e-6, z, None, None, group_size, norm_before_gate


@op(inout="qkv")
def fused_qk_norm_rope(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    position_ids: Tensor,
) -> None:
    """RMS norm of every query and key head, then rotary embedding, in place; value heads are not touched.

    Norm and rotation are in float32 and rounded once. The first ``rotary_dim`` elements of a head turn in pairs:
    (j, j + rotary_dim / 2) if `is_neox`, else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864). Heads of a token whose
    position lies outside the cache are left as they are.

    Args:
        qkv: [num_tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim], float16 or bfloat16, contiguous, read
            and written.
        num_heads_q, num_heads_k, num_heads_v: heads of each kind, in this order in a row.
        head_dim: 64, 128 or 256.
        eps: added to the mean of squares.
        q_weight, k_weight: [head_dim] of the same dtype.
        cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, contiguous; cosines in the first half
            of a row, sines in the second; rotary_dim even, at most head_dim.
        is_neox: which elements make a pair.
        position_ids: [num_tokens] int64, contiguous.
    """
    heads = qkv.unflatten(-1, (-1, head_dim))[:, : num_heads_q + num_heads_k]
    weight = torch.stack([q_weight] * num_heads_q + [k_weight] * num_heads_k).float()
    x = heads.float()
    x = x * (torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)
    max_position, rotary_dim = cos_sin_cache.shape
    inside = (position_ids >= 0) & (position_ids < max_position)
    cos, sin = cos_sin_cache[position_ids.where(inside, 0)].float().unsqueeze(1).chunk(2, -1)
    turned, kept = x.split((rotary_dim, head_dim - rotary_dim), -1)
    if is_neox:
        first, second = turned.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    result = torch.cat((turned, kept), -1).to(qkv.dtype)
    heads.copy_(torch.where(inside[:, None, None], result, heads))


@fused_qk_norm_rope.plan
def _(
    qkv: Arg,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    q_weight: Arg,
    k_weight: Arg,
    cos_sin_cache: Arg,
    is_neox: bool,
    position_ids: Arg,
) -> Launch:
    check.dtype(qkv, float16, bfloat16)
    if head_dim not in (64, 128, 256):
        raise check.refuse(qkv, "head_dim", f"expected 64, 128 or 256, got {head_dim}")
    for name, heads in (("num_heads_q", num_heads_q), ("num_heads_k", num_heads_k), ("num_heads_v", num_heads_v)):
        if heads < 0:
            raise check.refuse(qkv, name, f"expected at least 0, got {heads}")
    num_tokens = qkv.shape[0] if qkv.shape else 0
    width = (num_heads_q + num_heads_k + num_heads_v) * head_dim
    check.shape(qkv, num_tokens=num_tokens, **{"heads * head_dim": width})
    for weight in (q_weight, k_weight):
        check.shape(weight, qkv.dtype, head_dim=head_dim)
    check.floating(cos_sin_cache)
    check.contiguous(cos_sin_cache)
    if len(cos_sin_cache.shape) != 2:
        raise cos_sin_cache.error(f"expected shape (max_position, rotary_dim), got {cos_sin_cache.shape}")
    max_position, rotary_dim = cos_sin_cache.shape
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise cos_sin_cache.error(f"expected an even rotary_dim of at most head_dim={head_dim}, got {rotary_dim}")
    check.shape(position_ids, int64, num_tokens=num_tokens)
    heads = num_heads_q + num_heads_k
    # Few tokens: a group of lanes for every head. Many: several heads to a group, all loaded before the first is used.
    few = num_tokens <= qkv.device.multiprocessors
    num_threads = spread.threads_for_row(heads * (head_dim // 8), 1 if few else 4, most=6)
    return _fused_qk_norm_rope(
        scalar_t=qkv.dtype,
        cache_t=cos_sin_cache.dtype,
        HEAD_SIZE=head_dim,
        NUM_HEADS_Q=num_heads_q,
        NUM_HEADS_K=num_heads_k,
        NUM_HEADS_V=num_heads_v,
        ROTARY_DIM=rotary_dim,
        IS_NEOX=bool(is_neox),
        ACCESS_SIZE=check.vector_width(head_dim, qkv, q_weight, k_weight),
        CACHE_VEC=check.vector_width(gcd(rotary_dim // 2, 8), cos_sin_cache),
        NUM_THREADS=num_threads,
    ).launch(grid=num_tokens if heads else 0, block=num_threads, max_position=max_position)


@fused_qk_norm_rope.traffic
def _(
    qkv: Arg,
    num_heads_q: int,
    num_heads_k: int,
    head_dim: int,
    q_weight: Arg,
    k_weight: Arg,
    cos_sin_cache: Arg,
    position_ids: Arg,
) -> int:
    num_tokens, rotary_dim = qkv.shape[0], cos_sin_cache.shape[1]
    heads = 2 * num_tokens * (num_heads_q + num_heads_k) * head_dim * qkv.dtype.itemsize
    angles = min(num_tokens, cos_sin_cache.shape[0]) * rotary_dim * cos_sin_cache.dtype.itemsize
    return heads + angles + position_ids.nbytes + q_weight.nbytes + k_weight.nbytes


@fused_qk_norm_rope.example
def _(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: Literal["bfloat16", "float16"] = "bfloat16",
    head_dim: Literal[128, 64, 256] = 128,
    rotary_dim: Literal[None, 64, 20] = None,
    is_neox: bool = True,
) -> tuple[Any, ...]:
    heads, max_position = (32, 8, 8), 4096
    qkv = make.randn(num_tokens, sum(heads) * head_dim, dtype=dtype)
    weights = (_weight(make, head_dim, dtype) for _ in range(2))
    cache = make.randn(max_position, rotary_dim or head_dim, dtype=dtype)
    positions = make.randint(0, max_position, num_tokens)
    return qkv, *heads, head_dim, 1e-6, *weights, cache, is_neox, positions
