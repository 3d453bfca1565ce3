"""Quantisation into new torch tensors, with the signatures that models call.

torch is imported where it is used: torch.compile, for which these functions are, does not trace `_core/lazy.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core.errors import OpError
from .._shared.fp8 import largest_code, native_fp8_of
from ._fp4 import rounded_up
from .dynamic import dynamic_per_token_scaled_fp8_quant, dynamic_scaled_fp8_quant, dynamic_scaled_int8_quant
from .fp4 import scaled_fp4_quant
from .fp4_experts import scaled_fp4_experts_quant, silu_and_mul_scaled_fp4_experts_quant
from .groups import per_token_group_fp8_quant, per_token_group_fp8_quant_packed
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


def own_fp8(x: Tensor) -> Any:
    """The e4m3 that models for the device of `x` are made of, as torch.compile can find it: `native_fp8`."""
    import torch

    if torch.version.hip is None or not x.is_cuda:
        return torch.float8_e4m3fn
    return getattr(torch, native_fp8_of(torch.cuda.get_device_properties(x.device).gcnArchName.split(":")[0]).name)


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(fp8 codes, scale) of a matrix: under the `scale` given, or under one for each token or for all, found here.

    Args:
        input: [num_tokens, hidden_size], float32, float16 or bfloat16.
        scale: as `static_scaled_fp8_quant` takes it, and returned as it is; None to find scales.
        num_token_padding: the codes, and scales of tokens, have at least so many rows; those behind the tokens hold
            anything.
        scale_ub: bounds the magnitude under scales of tokens, see `dynamic_per_token_scaled_fp8_quant`.
        use_per_token_if_dynamic: scales found are those of tokens, [rows, 1]; else one, [1].
        output: float8_e4m3fn or float8_e4m3fnuz for the codes; not with num_token_padding. None: the device's own,
            float8_e4m3fnuz on gfx942, float8_e4m3fn elsewhere.
        group_shape: see `static_scaled_fp8_quant`.
    """
    import torch

    name = "scaled_fp8_quant"
    if input.ndim != 2:
        raise OpError(name, "input", f"expected 2 dimensions, got shape {tuple(input.shape)}")
    num_tokens, hidden_size = input.shape
    if output is None:
        rows = max(num_token_padding or 0, num_tokens)
        output = input.new_empty(rows, hidden_size, dtype=own_fp8(input))
    elif num_token_padding is not None:
        raise OpError(name, "num_token_padding", "is given with output")
    elif output.dtype not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        raise OpError(name, "output", f"expected dtype float8_e4m3fn or float8_e4m3fnuz, got {output.dtype}")
    codes = output[:num_tokens]
    if scale is not None:
        static_scaled_fp8_quant(codes, input, scale, group_shape)
    elif use_per_token_if_dynamic:
        scale = input.new_empty(output.shape[0], 1, dtype=torch.float32)
        dynamic_per_token_scaled_fp8_quant(codes, input, scale[:num_tokens], scale_ub)
    else:
        scale = input.new_empty(1, dtype=torch.float32)
        dynamic_scaled_fp8_quant(codes, input, scale)
    return output, scale


def scaled_int8_quant(
    input: Tensor, scale: Tensor | None = None, azp: Tensor | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(int8 codes, scale, zero point or None): under those given, or under some for each token, found here.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16; rows of one stride if `scale` is given, else copied
            unless contiguous or a matrix whose rows are.
        scale, azp: as `static_scaled_int8_quant` takes them, and returned as they are; None to find scales, [rows, 1].
        symmetric: whether the zero point is 0. With `scale`, it says that there is no `azp`.
    """
    import torch

    if scale is not None:
        if symmetric != (azp is None):
            raise OpError("scaled_int8_quant", "azp", f"expected {'None' if symmetric else 'one'} with {symmetric=}")
        codes = torch.empty_like(input, dtype=torch.int8)
        static_scaled_int8_quant(codes, input, scale, azp)
        return codes, scale, azp
    if input.ndim != 2 or input.stride(-1) != 1:
        input = input.contiguous()
    codes = torch.empty_like(input, dtype=torch.int8)
    rows = input.shape[:-1].numel()
    scale = input.new_empty(rows, 1, dtype=torch.float32)
    azp = None if symmetric else input.new_empty(rows, 1, dtype=torch.int32)
    dynamic_scaled_int8_quant(codes, input, scale, azp)
    return codes, scale, azp


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
    """(fp8 codes, scales) of groups of neighbouring elements, see `per_token_group_fp8_quant`.

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16; rows of one stride.
        group_size: a divisor of hidden_size.
        eps: the least magnitude of a group.
        dtype: torch.float8_e4m3fn, torch.float8_e4m3fnuz or None: that of `out_q`, or else the device's own,
            float8_e4m3fnuz on gfx942, float8_e4m3fn elsewhere.
        column_major_scales: scales of one group lie together, in a tensor whose last two dimensions are transposed.
        tma_aligned_scales: with column_major_scales, columns begin at multiples of 16 bytes; of a matrix only.
        out_q: for the codes.
        use_ue8m0: scales are powers of two; None is False.
    """
    import torch

    name = "per_token_group_quant_fp8"
    if dtype not in (None, torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        raise OpError(name, "dtype", f"expected float8_e4m3fn or float8_e4m3fnuz, got {dtype}")
    if dtype and out_q is not None and _fp8_of(out_q) != dtype:
        raise OpError(name, "out_q", f"expected codes of {dtype}, got {out_q.dtype}")
    if not x.ndim:
        raise OpError(name, "x", "expected at least one dimension, got a scalar")
    if x.ndim > 2 and column_major_scales and tma_aligned_scales:
        raise OpError(name, "tma_aligned_scales", f"expected a matrix, got shape {tuple(x.shape)}")
    groups = x.shape[-1] // max(1, group_size)
    rows = x.shape[:-1].numel()
    codes, largest = _codes_for(x, dtype, out_q)
    if column_major_scales and x.ndim <= 2:
        stride = -(-rows // 4) * 4 if tma_aligned_scales else rows
        scales = x.new_empty(groups, stride, dtype=torch.float32).t()[:rows]
    else:
        scales = x.new_empty(rows, groups, dtype=torch.float32)
    per_token_group_fp8_quant(x, codes, scales, group_size, eps, -largest, largest, bool(use_ue8m0))
    if x.ndim > 2:
        scales = scales.unflatten(0, x.shape[:-1])
        if column_major_scales:
            scales = scales.mT.contiguous().mT
    return codes, scales


def _fp8_of(codes: Tensor) -> Any:
    """The type of fp8 codes, which are float8_e4m3fn where they are held as bytes."""
    import torch

    return torch.float8_e4m3fn if codes.dtype == torch.uint8 else codes.dtype


def _codes_for(x: Tensor, dtype: Any, out_q: Tensor | None) -> tuple[Tensor, float]:
    """(where the codes of `x` go, the largest of them)."""
    import torch

    codes = torch.empty_like(x, dtype=dtype or own_fp8(x)) if out_q is None else out_q
    return codes, largest_code(_fp8_of(codes))


def per_token_group_quant_fp8_packed_for_deepgemm(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    use_ue8m0: bool | None = None,
    out_q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(fp8 codes, packed exponents of scales) of a matrix, see `per_token_group_fp8_quant_packed`.

    Args:
        x: [num_tokens, hidden_size], float32, float16 or bfloat16; copied unless elements of a row lie together.
        group_size: a divisor of hidden_size.
        eps: the least magnitude of a group.
        use_ue8m0: not False: scales are powers of two.
        out_q: for the codes.

    The exponents are [num_tokens, groups / 4 rounded up] int32 with strides (1, num_tokens rounded up to 4); what lies
    between the columns is 0.
    """
    import torch

    name = "per_token_group_quant_fp8_packed_for_deepgemm"
    if x.ndim != 2:
        raise OpError(name, "x", f"expected 2 dimensions, got shape {tuple(x.shape)}")
    if use_ue8m0 is False:
        raise OpError(name, "use_ue8m0", "expected scales that are powers of two, got False")
    if x.stride(1) != 1:
        x = x.contiguous()
    num_tokens, hidden_size = x.shape
    words = -(-hidden_size // max(1, group_size) // 4)
    codes, largest = _codes_for(x, None, out_q)
    packed = x.new_empty(words, -(-num_tokens // 4) * 4, dtype=torch.int32).t()
    per_token_group_fp8_quant_packed(x, codes, packed, group_size, eps, -largest, largest)
    return codes, packed[:num_tokens]


def nvfp4_quant(
    input: Tensor, input_global_scale: Tensor, is_sf_swizzled_layout: bool = True, backend: str = "none"
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of `scaled_fp4_quant`, for which vLLM has the same name.

    Args:
        input: [..., hidden_size], float16 or bfloat16, hidden_size a multiple of 16; rows of one stride.
        input_global_scale: one float32, which is multiplied in.
        is_sf_swizzled_layout: scales are float8_e4m3fn in tiles, [num_tokens rounded up to 128, hidden_size / 16
            rounded up to 4]; else uint8, [num_tokens, hidden_size / 16].
        backend: one that names "trtllm" wants tiles of 8 rows where there are no more than 32, which are not made here.

    The codes are uint8, [num_tokens, hidden_size / 2].
    """
    import torch

    name = "nvfp4_quant"
    if input.ndim < 1:
        raise OpError(name, "input", "expected at least one dimension, got a scalar")
    hidden_size = input.shape[-1]
    rows = input.shape[:-1].numel()
    if is_sf_swizzled_layout and "trtllm" in backend and rows <= 32:
        raise OpError(name, "backend", f"tiles of 8 rows are not made here, got {backend} for {rows} rows")
    codes = input.new_empty(rows, hidden_size // 2, dtype=torch.uint8)
    if is_sf_swizzled_layout:
        shape = rounded_up(rows, 128), rounded_up(hidden_size // 16, 4)
        scales = input.new_empty(shape, dtype=torch.float8_e4m3fn)
    else:
        scales = input.new_empty(rows, hidden_size // 16, dtype=torch.uint8)
    matrix = input if input.ndim == 2 else input.reshape(rows, hidden_size)
    scaled_fp4_quant(codes, matrix, scales, input_global_scale, is_sf_swizzled_layout)
    return codes, scales


def nvfp4_experts_quant(
    input_tensor: Tensor,
    input_global_scale: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of `scaled_fp4_experts_quant`, for which vLLM has the same name.

    Args:
        input_tensor: [num_tokens * topk, hidden_size], float16 or bfloat16, hidden_size a multiple of 16; rows of one
            stride.
        input_global_scale: [num_experts] float32.
        expert_offsets: [num_experts + 1] int32, where the rows of each expert begin.
        blockscale_offsets: [num_experts + 1] int32, where its scales do, in rows: sums of its rows rounded up to 128.
        topk: experts of a token; nothing depends on it.

    The scales are float8_e4m3fn in tiles, with rows enough for any distribution; what is no expert's is garbage.
    """
    return _of_experts(
        scaled_fp4_experts_quant, input_tensor, 1, input_global_scale, expert_offsets, blockscale_offsets
    )


def silu_and_mul_nvfp4_experts_quant(
    input_tensor: Tensor,
    input_global_scale: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of `silu_and_mul_scaled_fp4_experts_quant`, for which vLLM has the same name.

    As `nvfp4_experts_quant`, but `input_tensor` has twice the columns: gate and up.
    """
    return _of_experts(
        silu_and_mul_scaled_fp4_experts_quant, input_tensor, 2, input_global_scale, expert_offsets, blockscale_offsets
    )


def _of_experts(op: Any, input: Tensor, halves: int, scale: Tensor, *offsets: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    if input.ndim != 2:
        raise OpError(op.__name__, "input", f"expected 2 dimensions, got shape {tuple(input.shape)}")
    hidden_size = input.shape[-1] // halves
    codes = input.new_empty(*input.shape[:-1], hidden_size // 2, dtype=torch.uint8)
    rows = rounded_up(input.shape[0], 128) + 128 * scale.numel()
    scales = input.new_empty(rows, rounded_up(hidden_size // 16, 4), dtype=torch.float8_e4m3fn)
    op(codes, scales, input, scale, *offsets)
    return codes, scales
