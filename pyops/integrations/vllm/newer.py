"""Functions that vLLM 0.22 added to ``vllm._custom_ops``, and keywords of other versions of vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._core.errors import OpError
from ..._core.system.lazy import optional
from ...ops import activation, linear, moe, norm, quantize

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:  # not the lazy proxy, which torch.compile cannot trace
    torch = optional("torch", "pyops.integrations.vllm.custom_ops", "torch")

_GATED = ("fatrelu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "mul_and_silu", "silu_and_mul", "swigluoai_and_mul")
_PLAIN = ("gelu_fast", "gelu_new", "gelu_quick")
_SEGMENTS = {"raw_topk_indices": "indices", "num_rows": "numRows", "topk_tokens": "topK"}
# {function: {keyword of another version of vLLM: keyword of this library}}
KEYWORDS: dict[str, dict[str, str]] = {
    **{name: {"x": "input"} for name in (*_GATED, *_PLAIN)},
    "selective_scan_fwd": {"null_block_id": "pad_slot_id"},
    "top_k_per_row_decode": _SEGMENTS,
    "top_k_per_row_prefill": {**_SEGMENTS, "cu_seqlen_ks": "rowStarts", "cu_seqlen_ke": "rowEnds"},
}


def with_keywords(function: Callable[..., Any], keywords: dict[str, str]) -> Callable[..., Any]:
    """`function`, which also accepts the names `keywords` for its parameters."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{keywords.get(name, name): value for name, value in kwargs.items()})

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


def silu_and_mul_per_block_quant(
    input: Tensor,
    group_size: int,
    quant_dtype: torch.dtype,
    scale_ub: Tensor | None = None,
    is_scale_transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """(quantized values, scales) of `pyops.silu_and_mul_per_block_quant`, new tensors.

    The quantized values are [num_tokens, hidden_size] of `quant_dtype` for `input` [num_tokens, 2 * hidden_size]; the
    scales are [num_tokens, hidden_size / group_size] float32, in memory transposed if `is_scale_transposed`.
    """
    hidden_size = input.shape[-1] // 2
    codes = input.new_empty(*input.shape[:-1], hidden_size, dtype=quant_dtype)
    scales = _scales(input, hidden_size // max(1, group_size), is_scale_transposed)
    activation.silu_and_mul_per_block_quant(codes, input, scales, group_size, scale_ub, is_scale_transposed)
    return codes, scales


def rms_norm_per_block_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    group_size: list[int],
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
    is_scale_transposed: bool = False,
    tma_alignment: int = 0,
) -> tuple[Tensor, Tensor]:
    """(quantized values, scales) of `pyops.rms_norm_per_block_quant`, new tensors.

    The quantized values have the shape of `input`, [..., hidden_size], and `quant_dtype`, float8_e4m3fn,
    float8_e4m3fnuz or int8; the scales are [num_tokens, hidden_size / group] float32, in memory transposed if
    `is_scale_transposed`, with a column stride that is a multiple of `tma_alignment` tokens if that is not 0.
    `group_size` is two numbers; the second is the elements of a group. A `residual` is read and written.
    """
    if len(group_size) != 2 or group_size[1] < 1:
        raise OpError("rms_norm_per_block_quant", "group_size", f"expected [1, elements], got {group_size}")
    output = torch.empty_like(input, dtype=quant_dtype)
    scales = _scales(input, input.shape[-1] // group_size[1], is_scale_transposed, max(1, tma_alignment))
    norm.rms_norm_per_block_quant(
        output, input, weight, scales, epsilon, scale_ub, residual, group_size[1], is_scale_transposed
    )
    return output, scales


def _scales(input: Tensor, groups: int, transposed: bool, alignment: int = 1) -> Tensor:
    """Allocate scales [num_tokens, groups]; if `transposed`, column-major with a stride aligned to `alignment`."""
    num_tokens = input.shape[:-1].numel()
    if not transposed:
        return input.new_empty(num_tokens, groups, dtype=torch.float32)
    column = -(-num_tokens // alignment) * alignment
    return input.new_empty(groups, column, dtype=torch.float32).t()[:num_tokens]


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
    forced_token_heads_per_warp: int = -1,
) -> None:
    """`pyops.fused_qk_norm_rope`; forced_token_heads_per_warp has no effect."""
    norm.fused_qk_norm_rope(
        *(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps),
        *(q_weight, k_weight, cos_sin_cache, is_neox, position_ids),
    )


def topk_hash_softplus_sqrt(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
    input_tokens: Tensor | None = None,
    hash_indices_table: Tensor | None = None,
) -> None:
    """`pyops.topk_softplus_sqrt`, by its name and keywords in vLLM."""
    moe.topk_softplus_sqrt(
        *(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize),
        *(routed_scaling_factor, e_score_correction_bias, input_tokens, hash_indices_table),
    )


def gptq_marlin_moe_repack(
    b_q_weight: Tensor, perm: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> Tensor:
    """`pyops.gptq_marlin_repack` of the weights of experts, [experts, ...] with perm [experts, ...], as one tensor."""
    sizes = size_k, size_n, num_bits, is_a_8bit
    pairs = zip(b_q_weight, perm, strict=True)
    return torch.stack([linear.gptq_marlin_repack(weight, own, *sizes) for weight, own in pairs])


def awq_marlin_moe_repack(
    b_q_weight: Tensor, perm: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> Tensor:
    """`pyops.awq_marlin_repack` of the weights of experts, [experts, ...], as one tensor; perm has no effect."""
    sizes = size_k, size_n, num_bits, is_a_8bit
    return torch.stack([linear.awq_marlin_repack(weight, *sizes) for weight in b_q_weight])


def scaled_fp4_quant(
    input: Tensor,
    input_global_scale: Tensor,
    is_sf_swizzled_layout: bool = True,
    backend: str = "none",
    padded_n: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(e2m1 values, scales) of `pyops.nvfp4_quant`; rows are zero-padded to `padded_n` elements if that is given."""
    if padded_n is not None and padded_n != input.shape[-1]:
        if padded_n < input.shape[-1]:
            raise OpError("scaled_fp4_quant", "padded_n", f"expected at least {input.shape[-1]}, got {padded_n}")
        input = torch.nn.functional.pad(input, (0, padded_n - input.shape[-1]))
    codes, scales = quantize.nvfp4_quant(input, input_global_scale, is_sf_swizzled_layout, backend)
    return codes, scales


def mxfp4_experts_quant(
    input_tensor: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor, n_experts: int, topk: int
) -> tuple[Tensor, Tensor]:
    """(e2m1 values, scales) of `pyops.mxfp4_experts_quant`, new tensors.

    The scales are uint8 in tiles, with enough rows for any distribution of the tokens. Rows that belong to no expert
    are uninitialised. topk has no effect.
    """
    codes, scales = quantize.mxfp4_experts_quant.new(input_tensor, expert_offsets, blockscale_offsets, n_experts)
    return codes, scales


def silu_and_mul_mxfp4_experts_quant(
    input_tensor: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor, n_experts: int, topk: int
) -> tuple[Tensor, Tensor]:
    """`mxfp4_experts_quant` with SwiGLU, by `pyops.silu_and_mul_mxfp4_experts_quant`."""
    offsets = expert_offsets, blockscale_offsets
    codes, scales = quantize.silu_and_mul_mxfp4_experts_quant.new(input_tensor, *offsets, n_experts)
    return codes, scales
