"""Quantization into new tensors, with the signatures that models call: for torch tensors, CuPy and numpy arrays.

Each function chooses an op by its arguments. Where the op's form `new` does not suffice, the function itself allocates
the outputs: results of another dtype or with padding, and scales in the requested layout. torch.compile traces these
functions, so they use no proxy of `_core/system/lazy.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.errors import OpError
from ..._core.tensors.tensor import contiguous, new
from .._shared.fp8 import e4m3_name, largest_code, own_fp8
from ._common import with_dense_rows
from .dynamic import dynamic_per_token_scaled_fp8_quant, dynamic_scaled_fp8_quant, dynamic_scaled_int8_quant
from .fp4 import scaled_fp4_quant
from .fp4_experts import scaled_fp4_experts_quant, silu_and_mul_scaled_fp4_experts_quant
from .groups import per_token_group_fp8_quant
from .groups_packed import per_token_group_fp8_quant_packed
from .static import static_scaled_fp8_quant, static_scaled_int8_quant

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "nvfp4_experts_quant",
    "nvfp4_quant",
    "per_token_group_quant_fp8",
    "per_token_group_quant_fp8_packed_for_deepgemm",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "silu_and_mul_nvfp4_experts_quant",
]


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(fp8 values, scale) of a matrix, with the static `scale`, or with dynamic scales per token or per tensor.

    Args:
        input: [num_tokens, hidden_size], float32, float16 or bfloat16.
        scale: as in `static_scaled_fp8_quant`, returned unchanged; None for dynamic scales.
        num_token_padding: minimum number of rows of the fp8 values, and of per-token scales; rows after the tokens are
            undefined.
        scale_ub: bounds the magnitude for per-token scales, see `dynamic_per_token_scaled_fp8_quant`.
        use_per_token_if_dynamic: dynamic scales are per token, [rows, 1]; else per tensor, [1].
        output: float8_e4m3fn or float8_e4m3fnuz, written; not with num_token_padding. None: the device's
            format, float8_e4m3fnuz on gfx942, float8_e4m3fn elsewhere.
        group_shape: see `static_scaled_fp8_quant`.
    """
    name = "scaled_fp8_quant"
    if input.ndim != 2:
        raise OpError(name, "input", f"expected 2 dimensions, got shape {tuple(input.shape)}")
    num_tokens, hidden_size = input.shape
    if output is None:
        output = new(input, (max(num_token_padding or 0, num_tokens), hidden_size), own_fp8(input))
    elif num_token_padding is not None:
        raise OpError(name, "num_token_padding", "is given with output")
    elif e4m3_name(output.dtype) is None:
        raise OpError(name, "output", f"expected dtype float8_e4m3fn or float8_e4m3fnuz, got {output.dtype}")
    quantized = output[:num_tokens]
    if scale is not None:
        static_scaled_fp8_quant(quantized, input, scale, group_shape)
    elif use_per_token_if_dynamic:
        scale = new(input, (output.shape[0], 1), "float32")
        dynamic_per_token_scaled_fp8_quant(quantized, input, scale[:num_tokens], scale_ub)
    else:
        scale = new(input, (1,), "float32")
        dynamic_scaled_fp8_quant(quantized, input, scale)
    return output, scale


def scaled_int8_quant(
    input: Tensor, scale: Tensor | None = None, azp: Tensor | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(int8 values, scale, zero point or None), with static ones, or with dynamic ones per token.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16; constant row stride if `scale` is given, else copied
            unless contiguous or a matrix with contiguous rows.
        scale, azp: as in `static_scaled_int8_quant`, returned unchanged; None for dynamic ones, [rows, 1].
        symmetric: whether the zero point is 0. With `scale` it must agree with `azp`.
    """
    if scale is not None:
        if symmetric != (azp is None):
            raise OpError("scaled_int8_quant", "azp", f"expected {'None' if symmetric else 'one'} with {symmetric=}")
        return static_scaled_int8_quant.new(input, scale, azp), scale, azp
    azp = None if symmetric else new(input, (check.num_rows(input), 1), "int32")
    input = with_dense_rows(input) if input.ndim == 2 else contiguous(input)
    quantized, scale = dynamic_scaled_int8_quant.new(input, azp)
    return quantized, scale, azp


def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: Any = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(fp8 values, scales) with a dynamic scale per group of contiguous elements, see `per_token_group_fp8_quant`.

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16; constant row stride.
        group_size: a divisor of hidden_size.
        eps: lower bound of the maximum of a group.
        dtype: torch.float8_e4m3fn or torch.float8_e4m3fnuz; None for the dtype of `out_q`, or else the device's format,
            float8_e4m3fnuz on gfx942, float8_e4m3fn elsewhere.
        column_major_scales: whether the last two dimensions of the scales are transposed in memory.
        tma_aligned_scales: with column_major_scales, whether columns begin at multiples of 16 bytes; only for a matrix.
        out_q: receives the fp8 values; None for a new tensor.
        use_ue8m0: whether scales are powers of two; None is False.
    """
    name = "per_token_group_quant_fp8"
    if dtype is not None and e4m3_name(dtype) is None:
        raise OpError(name, "dtype", f"expected float8_e4m3fn or float8_e4m3fnuz, got {dtype}")
    if not x.ndim:
        raise OpError(name, "x", "expected at least one dimension, got a scalar")
    if x.ndim > 2 and column_major_scales and tma_aligned_scales:
        raise OpError(name, "tma_aligned_scales", f"expected a matrix, got shape {tuple(x.shape)}")
    rows, groups = check.num_rows(x), x.shape[-1] // max(1, group_size)
    quantized, largest = _codes_for(name, x, dtype, out_q)
    if column_major_scales and x.ndim <= 2:
        stride = -(-rows // 4) * 4 if tma_aligned_scales else rows
        scales = new(x, (groups, stride), "float32").T[:rows]
    else:
        scales = new(x, (rows, groups), "float32")
    per_token_group_fp8_quant(x, quantized, scales, group_size, eps, -largest, largest, bool(use_ue8m0))
    if x.ndim > 2:
        scales = scales.reshape(*x.shape[:-1], groups)
        if column_major_scales:
            scales = contiguous(scales.swapaxes(-1, -2)).swapaxes(-1, -2)
    return quantized, scales


def _codes_for(op: str, x: Any, dtype: Any, out_q: Any) -> tuple[Any, float]:
    """(tensor for the fp8 values of `x`, the largest fp8 value). Bytes hold float8_e4m3fn."""
    if out_q is None:
        kind = own_fp8(x) if dtype is None else e4m3_name(dtype)
        return new(x, x.shape, kind), largest_code(kind)
    kind = "float8_e4m3fn" if str(out_q.dtype) in ("torch.uint8", "uint8") else e4m3_name(out_q.dtype)
    if kind is None or (dtype is not None and kind != e4m3_name(dtype)):
        raise OpError(op, "out_q", f"expected quantized values of {dtype or 'an e4m3'}, got {out_q.dtype}")
    return out_q, largest_code(kind)


def per_token_group_quant_fp8_packed_for_deepgemm(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    use_ue8m0: bool | None = None,
    out_q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(fp8 values, packed exponents of scales) of a matrix, see `per_token_group_fp8_quant_packed`.

    Args:
        x: [num_tokens, hidden_size], float32, float16 or bfloat16; copied unless the elements of a row are contiguous.
        group_size: a divisor of hidden_size.
        eps: lower bound of the maximum of a group.
        use_ue8m0: must not be False: scales are powers of two.
        out_q: receives the fp8 values; None for a new tensor.

    The exponents are [num_tokens, groups / 4 rounded up] int32 with strides (1, num_tokens rounded up to 4); the
    padding between the columns is 0.
    """
    name = "per_token_group_quant_fp8_packed_for_deepgemm"
    if x.ndim != 2:
        raise OpError(name, "x", f"expected 2 dimensions, got shape {tuple(x.shape)}")
    if use_ue8m0 is False:
        raise OpError(name, "use_ue8m0", "expected scales that are powers of two, got False")
    x, num_tokens = with_dense_rows(x), x.shape[0]
    quantized, largest = _codes_for(name, x, None, out_q)
    words = -(-x.shape[1] // max(1, group_size) // 4)
    packed = new(x, (words, -(-num_tokens // 4) * 4), "int32").T
    per_token_group_fp8_quant_packed(x, quantized, packed, group_size, eps, -largest, largest)
    return quantized, packed[:num_tokens]


def nvfp4_quant(
    input: Tensor, input_global_scale: Tensor, is_sf_swizzled_layout: bool = True, backend: str = "none"
) -> tuple[Tensor, Tensor]:
    """(packed e2m1 values, scales) of `scaled_fp4_quant`, for which vLLM has the same name.

    Args:
        input: [..., hidden_size], float16 or bfloat16, hidden_size a multiple of 16; constant row stride.
        input_global_scale: one float32, a factor of the input.
        is_sf_swizzled_layout: scales are float8_e4m3fn in tiles, [num_tokens rounded up to 128, hidden_size / 16
            rounded up to 4]; else uint8, [num_tokens, hidden_size / 16].
        backend: a name with "trtllm" asks for tiles of 8 rows for at most 32 rows, which is not supported.

    The packed values are uint8, [num_tokens, hidden_size / 2].
    """
    name = "nvfp4_quant"
    if input.ndim < 1:
        raise OpError(name, "input", "expected at least one dimension, got a scalar")
    rows, hidden_size = check.num_rows(input), input.shape[-1]
    if is_sf_swizzled_layout and "trtllm" in backend and rows <= 32:
        raise OpError(name, "backend", f"tiles of 8 rows are not made here, got {backend} for {rows} rows")
    matrix = input if input.ndim == 2 else input.reshape(rows, hidden_size)
    quantized, scales = scaled_fp4_quant.new(matrix, input_global_scale, is_sf_swizzled_layout)
    return quantized, scales


def nvfp4_experts_quant(
    input_tensor: Tensor,
    input_global_scale: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """(packed e2m1 values, scales) of `scaled_fp4_experts_quant`, for which vLLM has the same name.

    Args:
        input_tensor: [num_tokens * topk, hidden_size], float16 or bfloat16, hidden_size a multiple of 16; rows of one
            stride.
        input_global_scale: [num_experts] float32.
        expert_offsets: [num_experts + 1] int32, where the rows of each expert begin.
        blockscale_offsets: [num_experts + 1] int32, the first rows of scales: cumulative rows, each rounded up to 128.
        topk: experts of a token; it has no effect.

    The scales are float8_e4m3fn in tiles, with enough rows for any distribution; rows without an expert are undefined.
    """
    tensors = input_tensor, input_global_scale, expert_offsets, blockscale_offsets
    quantized, scales = scaled_fp4_experts_quant.new(*tensors)
    return quantized, scales


def silu_and_mul_nvfp4_experts_quant(
    input_tensor: Tensor,
    input_global_scale: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """(e2m1 values, scales) of `silu_and_mul_scaled_fp4_experts_quant`, for which vLLM has the same name.

    As `nvfp4_experts_quant`, but `input_tensor` has twice the columns: gate and up.

    Args:
        input_tensor: [num_tokens * topk, 2 * hidden_size].
        input_global_scale, expert_offsets, blockscale_offsets, topk: as `nvfp4_experts_quant` takes them.
    """
    tensors = input_tensor, input_global_scale, expert_offsets, blockscale_offsets
    quantized, scales = silu_and_mul_scaled_fp4_experts_quant.new(*tensors)
    return quantized, scales
