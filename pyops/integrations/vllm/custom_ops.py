"""The functions of ``vllm._custom_ops``, by this library: ``from pyops.integrations.vllm import custom_ops as ops``.

Names, parameters, defaults and results are vLLM's; further parameters of this library may follow. Most functions are
this library's own; those below adapt them to vLLM's signatures. Ops for which vLLM has no function, such as
``silu_and_mul(out, input)``, are included.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyops

from ..._core.errors import OpError
from ..._core.system.lazy import optional
from ...ops import attention, linear, moe, norm, quantize, sampling
from ...ops.collective import quick_all_reduce
from . import adapters, newer, weight_only
from .schemas import SCHEMAS, SCHEMAS_0_22, SIGNATURES

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:  # not the lazy proxy, which torch.compile cannot trace
    torch = optional("torch", "pyops.integrations.vllm.custom_ops", "torch")


def rms_norm_dynamic_per_token_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(quantized values, scales) of `pyops.rms_norm_dynamic_per_token_quant`, new tensors.

    The quantized values have the shape of `input`, [..., hidden_size], and `quant_dtype`, float8_e4m3fn,
    float8_e4m3fnuz or int8; the scales are [num_tokens, 1] float32. A `residual` is read and written.
    """
    output = torch.empty_like(input, dtype=quant_dtype)
    scales = input.new_empty(input.shape[:-1].numel(), 1, dtype=torch.float32)
    norm.rms_norm_dynamic_per_token_quant(output, input, weight, scales, epsilon, scale_ub, residual)
    return output, scales


def per_token_group_quant_int8(
    x: Tensor, group_size: int, eps: float = 1e-10, dtype: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor]:
    """(quantized values, scales) of `pyops.per_token_group_quant_int8`, new tensors.

    The quantized values have the shape of `x`, [..., hidden_size], hidden_size a multiple of `group_size`; the scales
    are [..., hidden_size / group_size] float32. `dtype` is int8.
    """
    if dtype != torch.int8:
        raise OpError("per_token_group_quant_int8", "dtype", f"expected int8, got {dtype}")
    codes, scales = quantize.per_token_group_quant_int8.new(x, group_size, eps, -128.0, 127.0)
    return codes, scales.unflatten(0, x.shape[:-1])


def sm100_cutlass_mla_decode(
    out: Tensor,
    lse: Tensor,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c_and_k_pe_cache: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    workspace: Tensor,
    scale: float,
    num_kv_splits: int,
) -> Tensor:
    """`pyops.sm100_cutlass_mla_decode`. An empty `lse` means that no log-sum-exp is returned. Returns `out`."""
    adapters.sm100_cutlass_mla_decode(
        out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, scale, num_kv_splits
    )
    return out


def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    """`pyops.apply_repetition_penalties_` for tensors with any strides; tensors that are not contiguous are copied."""
    packed = logits.contiguous()
    others = (prompt_mask, output_mask, repetition_penalties)
    sampling.apply_repetition_penalties_(packed, *(tensor.contiguous() for tensor in others))
    if packed is not logits:
        logits.copy_(packed)


def moe_permute(
    hidden_states: Tensor,
    a1q_scale: Tensor | None,
    topk_ids: Tensor,
    n_expert: int,
    n_local_expert: int = -1,
    expert_map: Tensor | None = None,
    permuted_hidden_states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """`pyops.moe_permute` into new tensors, with the scales of the rows.

    Returns (permuted rows [num_tokens * topk, hidden_size], their scales, expert_first_token_offset [n_local_expert +
    1] int64, inv_permuted_idx [num_tokens * topk] int32, permuted_idx [num_tokens * topk] int32). Scales with more than
    one dimension are permuted like the rows, and rows of experts on other devices get the last token's scales; scales
    with fewer dimensions are returned as they are. n_local_expert of -1 means n_expert. `permuted_hidden_states`, if
    given, receives the rows.
    """
    num_tokens, topk = topk_ids.shape
    num_rows = num_tokens * topk
    n_local_expert = n_expert if n_local_expert == -1 else n_local_expert
    if permuted_hidden_states is None:
        permuted_hidden_states = hidden_states.new_empty(num_rows, hidden_states.shape[1])
    offsets = topk_ids.new_empty(n_local_expert + 1, dtype=torch.int64)
    inverse, order, indices = (topk_ids.new_empty(num_tokens, topk, dtype=torch.int32) for _ in range(3))
    moe.moe_permute(
        hidden_states,
        topk_ids,
        indices,
        expert_map,
        n_expert,
        n_local_expert,
        topk,
        permuted_hidden_states,
        offsets,
        inverse,
        order,
    )
    if a1q_scale is not None and a1q_scale.dim() > 1:
        a1q_scale = a1q_scale[order.view(-1).clamp(max=num_rows - 1) // topk]
    return permuted_hidden_states, a1q_scale, offsets, inverse.view(-1), order.view(-1)


def moe_unpermute(
    out: Tensor,
    permuted_hidden_states: Tensor,
    topk_weights: Tensor,
    inv_permuted_idx: Tensor,
    expert_first_token_offset: Tensor | None = None,
) -> None:
    """`pyops.moe_unpermute` into `out`."""
    topk = topk_weights.shape[-1]
    moe.moe_unpermute(permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset, topk, out)


def cutlass_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The result of `pyops.cutlass_scaled_mm`, new, of `out_dtype`: [..., N] for `a` [..., K]."""
    rows, out = _rows_and_product(a, b.shape[1], out_dtype)
    linear.cutlass_scaled_mm(out, rows, b, scale_a, scale_b, bias)
    return out.view(*a.shape[:-1], b.shape[1])


def cutlass_scaled_mm_azp(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The result of `pyops.cutlass_scaled_mm_azp`, new, of `out_dtype`: [..., N] for `a` [..., K]."""
    rows, out = _rows_and_product(a, b.shape[1], out_dtype)
    linear.cutlass_scaled_mm_azp(out, rows, b, scale_a, scale_b, azp_adj, azp, bias)
    return out.view(*a.shape[:-1], b.shape[1])


def cutlass_scaled_sparse_mm(
    a: Tensor,
    bt_nzs: Tensor,
    bt_meta: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The result of `pyops.cutlass_scaled_sparse_mm`, new: [M, N] of `out_dtype`."""
    out = a.new_empty(a.shape[0], bt_nzs.shape[0], dtype=out_dtype)
    linear.cutlass_scaled_sparse_mm(out, a, bt_nzs, bt_meta, scale_a, scale_b, bias)
    return out


def cutlass_scaled_fp4_mm(
    a: Tensor, b: Tensor, block_scale_a: Tensor, block_scale_b: Tensor, alpha: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """The result of `pyops.cutlass_scaled_fp4_mm`, new: [M, N] of `out_dtype`."""
    out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    linear.cutlass_scaled_fp4_mm(out, a, b, block_scale_a, block_scale_b, alpha)
    return out


def _rows_and_product(a: Tensor, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`a` as a matrix, and an allocated result [..., columns]."""
    rows = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    return rows, a.new_empty(rows.shape[0], columns, dtype=dtype)


def LLMM1(a: Tensor, b: Tensor, rows_per_block: int) -> Tensor:
    """`pyops.LLMM1` of the weight `a` and the tokens `b`."""
    return linear.LLMM1(a, b, rows_per_block)


def wvSplitK(a: Tensor, b: Tensor, cu_count: int, bias: Tensor | None = None) -> Tensor:
    """`pyops.wvSplitK` of the weight `a` and the tokens `b`, where the bias comes last."""
    return linear.wvSplitK(a, b, bias, cu_count)


def wvSplitKrc(a: Tensor, b: Tensor, cu_count: int, bias: Tensor | None = None) -> Tensor:
    """`pyops.wvSplitKrc` of the weight `a` and the tokens `b`, where the bias comes last."""
    return linear.wvSplitKrc(a, b, bias, cu_count)


def wvSplitKQ(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    scale_a: Tensor,
    scale_b: Tensor,
    cu_count: int,
    bias: Tensor | None = None,
) -> Tensor:
    """The result of `pyops.wvSplitKQ` for the weight `a` and the tokens `b`, new: [tokens, outputs] of `out_dtype`."""
    out = b.new_empty(b.shape[0], a.shape[0], dtype=out_dtype)
    linear.wvSplitKQ(a, b, bias, out, scale_a, scale_b, cu_count)
    return out


def dsv3_router_gemm(hidden_states: Tensor, router_weight: Tensor, output_dtype: torch.dtype) -> Tensor:
    """The result of `pyops.dsv3_router_gemm`, new: [tokens, experts] of `output_dtype`."""
    output = hidden_states.new_empty(hidden_states.shape[0], router_weight.shape[0], dtype=output_dtype)
    linear.dsv3_router_gemm(output, hidden_states, router_weight)
    return output


shuffle_rows = moe.shuffle_rows.new
apply_repetition_penalties_torch = sampling.apply_repetition_penalties_.reference
apply_repetition_penalties_cuda = sampling.apply_repetition_penalties_
scaled_fp4_experts_quant = quantize.nvfp4_experts_quant
silu_and_mul_scaled_fp4_experts_quant = quantize.silu_and_mul_nvfp4_experts_quant


def _renamed(function: Callable[..., None], **names: str) -> Callable[..., None]:
    """`function` with other names for some parameters."""

    def call(*args: Any, **kwargs: Any) -> None:
        function(*args, **{names.get(name, name): value for name, value in kwargs.items()})

    theirs = {ours: name for name, ours in names.items()}
    signature = inspect.signature(function)
    parameters = [p.replace(name=theirs.get(p.name, p.name)) for p in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


paged_attention_v2 = _renamed(attention.paged_attention_v2, exp_sum="exp_sums")
paged_attention_rocm = _renamed(attention.paged_attention_rocm, exp_sum="exp_sums")
_OPERANDS = {"out_tensors": "out", "a_tensors": "a", "b_tensors": "b"}
_OF_FP4 = _OPERANDS | {"a_scales": "a_blockscale", "b_scales": "b_blockscales"}
cutlass_fp4_moe_mm = _renamed(linear.cutlass_fp4_group_mm, **_OF_FP4)
cutlass_mxfp4_moe_mm = _renamed(linear.cutlass_mxfp4_group_mm, **_OF_FP4)
cutlass_mxfp8_grouped_mm = _renamed(linear.cutlass_mxfp8_grouped_mm, **_OPERANDS, a_scales="sfa", b_scales="sfb")
mxfp8_experts_quant = _renamed(quantize.mxfp8_experts_quant, input_tensor="input")


def qr_open_handles(fa: int, handles: list[Tensor]) -> None:
    """`pyops.qr_open_handles`."""
    quick_all_reduce.qr_open_handles(fa, handles)


def _signatures() -> dict[str, inspect.Signature]:
    """vLLM's signatures, by function name."""
    lines = (line.partition("(") for line in SIGNATURES.split("\n")[1:-1])
    return {name: inspect.signature(eval(f"lambda {rest[:-1]}: None", {"torch": torch})) for name, _, rest in lines}


def _conforms(function: Callable[..., Any], signature: inspect.Signature) -> bool:
    """Whether `function` accepts the calls of vLLM's signature."""
    own, theirs = (list(one.parameters.values()) for one in (inspect.signature(function), signature))
    same = all(a.name == b.name and b.default in (b.empty, a.default) for a, b in zip(own, theirs, strict=False))
    return same and len(own) >= len(theirs) and all(p.default is not p.empty for p in own[len(theirs) :])


_theirs = _signatures()
# vLLM 0.22 has functions, but no ops, of these names.
_NEWER = ("awq_marlin_moe_repack", "cutlass_mxfp4_moe_mm", "gptq_marlin_moe_repack", "topk_hash_softplus_sqrt")
_ops = [
    re.split(r"[.(]", line)[0]
    for schemas in (*SCHEMAS.values(), *SCHEMAS_0_22.values())
    for line in schemas.split("\n")[1:-1]
]
for _name in {*_theirs, *_ops, *_NEWER} - globals().keys():
    _found = next(
        (found for room in (newer, weight_only, pyops, adapters) if (found := getattr(room, _name, None))), None
    )
    if callable(_found) and _name in newer.KEYWORDS:
        _found = newer.with_keywords(_found, newer.KEYWORDS[_name])
    if callable(_found) and (_name not in _theirs or _conforms(_found, _theirs[_name])):
        globals()[_name] = _found

__all__ = sorted({*_theirs, *_ops, *_NEWER} & globals().keys())
