"""Adapters for those ops of vLLM that have other arguments, or another order, than the ops of this library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..._core.errors import OpError
from ..._core.system.lazy import torch
from ...ops.attention import convert_vertical_slash_indexes_mergehead as _convert_vertical_slash_indexes_mergehead
from ...ops.attention import merge_attn_states as _merge_attn_states
from ...ops.attention import paged_attention_rocm
from ...ops.attention import sm100_cutlass_mla_decode as _sm100_cutlass_mla_decode
from ...ops.linear import cutlass_sparse_compress as _cutlass_sparse_compress
from ...ops.linear import marlin_gemm as _marlin_gemm
from ...ops.linear import moe_wna16_gemm as _moe_wna16_gemm
from ...ops.linear import moe_wna16_marlin_gemm as _moe_wna16_marlin_gemm
from ...ops.mamba import selective_scan_fwd as _selective_scan_fwd
from ...ops.memory import get_cuda_view_from_cpu_tensor as _get_cuda_view_from_cpu_tensor
from ...ops.moe import get_cutlass_moe_mm_data as _get_cutlass_moe_mm_data
from ...ops.moe import moe_lora_align_block_size as _moe_lora_align_block_size
from ...ops.norm import fused_qk_norm_rope as _fused_qk_norm_rope
from ...ops.quantize import per_token_group_fp8_quant as _per_token_group_fp8_quant
from ...ops.quantize import scaled_fp4_quant as _scaled_fp4_quant
from ...ops.quantize import static_scaled_fp8_quant as _static_scaled_fp8_quant
from ...ops.sampling import top_k_per_row_decode as _top_k_per_row_decode
from . import adapters_lora

if TYPE_CHECKING:
    from torch import Tensor

# {version of vLLM: {name of its op: adapter}}. The docstring names the op of this library and the difference.
ADAPTERS: dict[str, dict[str, Callable[..., Any]]] = {"0.16": {}, "0.22": {}}


def _adapter(*versions: str, name: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the adapter of the op `name`, by default its own name, in these versions."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for version in versions:
            ADAPTERS[version][name or function.__name__] = function
        return function

    return add


@_adapter("0.16")
def merge_attn_states(
    output: Tensor,
    output_lse: Tensor | None,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
) -> None:
    """merge_attn_states, where output_lse comes last"""
    _merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)


@_adapter("0.22", name="merge_attn_states")
def merge_attn_states_of_contexts(
    output: Tensor,
    output_lse: Tensor | None,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    prefill_tokens_with_context: int | None,
    output_scale: Tensor | None = None,
) -> None:
    """merge_attn_states, where output_lse comes second"""
    parts = prefix_output, prefix_lse, suffix_output, suffix_lse
    _merge_attn_states(output, *parts, output_lse, prefill_tokens_with_context, output_scale)


@_adapter("0.16")
def convert_vertical_slash_indexes(*args: Any) -> None:
    """convert_vertical_slash_indexes_mergehead, without the two counts of heads; outputs come first"""
    try:
        convert_vertical_slash_indexes_mergehead(*args[:8], None, None, *args[8:])
    except OpError as error:
        raise error.within("convert_vertical_slash_indexes", {}) from None


@_adapter("0.16")
def convert_vertical_slash_indexes_mergehead(
    block_count: Tensor, block_offset: Tensor, column_count: Tensor, column_index: Tensor, *inputs: Any
) -> None:
    """convert_vertical_slash_indexes_mergehead, where outputs come first"""
    outputs = {"block_count": block_count, "block_offset": block_offset}
    outputs |= {"column_count": column_count, "column_index": column_index}
    _convert_vertical_slash_indexes_mergehead(*inputs, **outputs)


@_adapter("0.16")
def paged_attention(out: Tensor, exp_sums: Tensor, max_logits: Tensor, tmp_out: Tensor, *others: Any) -> None:
    """paged_attention_rocm, with partial results in memory of its own"""
    # vLLM's schema marks only `out` as written, and torch relies on that.
    partial = (torch.empty_like(tensor) for tensor in (exp_sums, max_logits, tmp_out))
    paged_attention_rocm(out, *partial, *others)


@_adapter("0.16")
def sm100_cutlass_mla_decode(out: Tensor, lse: Tensor, *others: Any) -> None:
    """sm100_cutlass_mla_decode, for which an lse without elements is none"""
    _sm100_cutlass_mla_decode(out, lse if lse.numel() else None, *others)


@_adapter("0.16")
def moe_lora_align_block_size(*args: Any) -> None:
    """moe_lora_align_block_size, which writes neither adapter_enabled nor lora_ids"""
    _moe_lora_align_block_size(*args)


@_adapter("0.16", "0.22")
def get_cutlass_moe_mm_data(*args: Any) -> None:
    """get_cutlass_moe_mm_data, where blockscale_offsets is written without a mark"""
    _get_cutlass_moe_mm_data(*args)


@_adapter("0.16")
def cutlass_sparse_compress(a: Tensor) -> list[Tensor]:
    """cutlass_sparse_compress, with its results as a list"""
    return list(_cutlass_sparse_compress(a))


@_adapter("0.16")
def marlin_gemm(a: Tensor, c_or_none: Tensor | None, *others: Any) -> Tensor:
    """marlin_gemm, where c comes second"""
    product: Tensor = _marlin_gemm(a, *others, c=c_or_none)
    return product


def new_product(a: Tensor, b_scales: Tensor, rows: int, columns: int) -> Tensor:
    """Allocate the result of `pyops.marlin_gemm`, in its dtype."""
    from torch import bfloat16  # not the lazy proxy, which torch.compile cannot trace

    dtype = a.dtype
    if a.element_size() == 1:
        dtype = b_scales.dtype if b_scales.element_size() == 2 else bfloat16
    return a.new_empty(rows, columns, dtype=dtype)


@_adapter("0.16", "0.22")
def moe_wna16_marlin_gemm(a: Tensor, c_or_none: Tensor | None, *others: Any) -> Tensor:
    """moe_wna16_marlin_gemm, which returns c, or a new one"""
    b_scales, top_k, size_m, size_n = others[2], others[14], others[17], others[18]
    c = new_product(a, b_scales, size_m * top_k, size_n) if c_or_none is None else c_or_none
    _moe_wna16_marlin_gemm(a, c, *others)
    return c


@_adapter("0.16")
def gptq_marlin_gemm(a: Tensor, c_or_none: Tensor | None, *others: Any) -> Tensor:
    """marlin_gemm, where c comes second"""
    return marlin_gemm(a, c_or_none, *others)


@_adapter("0.16", "0.22")
def selective_scan_fwd(*args: Any) -> None:
    """selective_scan_fwd, which of the tensors that are marked as written writes delta, z_ and ssm_states"""
    _selective_scan_fwd(*args)


@_adapter("0.22")
def fused_qk_norm_rope(*args: Any) -> None:
    """fused_qk_norm_rope, without the hint of how many heads a warp takes"""
    _fused_qk_norm_rope(*args[:11])


@_adapter("0.22")
def per_token_group_fp8_quant(*args: Any) -> None:
    """per_token_group_fp8_quant, which reads the layout of output_s off its strides"""
    _per_token_group_fp8_quant(*args[:8])


@_adapter("0.22")
def static_scaled_fp8_quant(
    result: Tensor, input: Tensor, scale: Tensor, group_shape: Sequence[int] | None = None
) -> None:
    """static_scaled_fp8_quant, with group_shape as a list"""
    rows_and_columns = None if group_shape is None else cast("tuple[int, int]", tuple(group_shape))
    _static_scaled_fp8_quant(result, input, scale, rows_and_columns)


@_adapter("0.22")
def scaled_fp4_quant(input: Tensor, input_scale: Tensor, is_sf_swizzled_layout: bool) -> tuple[Tensor, Tensor]:
    """scaled_fp4_quant.new, four scales in tiles to an int32"""
    codes, scales = _scaled_fp4_quant.new(input, input_scale, is_sf_swizzled_layout)
    return codes, scales.view(torch.int32) if is_sf_swizzled_layout else scales


@_adapter("0.22", name="scaled_fp4_quant.out")
def scaled_fp4_quant_out(
    input: Tensor, input_scale: Tensor, is_sf_swizzled_layout: bool, *, output: Tensor, output_scale: Tensor
) -> None:
    """scaled_fp4_quant, with the outputs last, by name"""
    _scaled_fp4_quant(output, input, output_scale, input_scale, is_sf_swizzled_layout)


@_adapter("0.22")
def persistent_topk(
    logits: Tensor, lengths: Tensor, output: Tensor, workspace: Tensor, k: int, max_seq_len: int
) -> None:
    """top_k_per_row_decode, for rows of one sequence each, which needs no workspace"""
    if logits.ndim != 2:
        raise OpError("persistent_topk", "logits", f"expected [num_rows, columns], got shape {tuple(logits.shape)}")
    if lengths.numel() != len(logits):
        raise OpError("persistent_topk", "lengths", f"expected {len(logits)} elements, got {lengths.numel()}")
    stride0, stride1 = logits.stride()
    _top_k_per_row_decode(logits, 1, lengths.flatten(), output, len(logits), stride0, stride1, k)


@_adapter("0.16")
def get_cuda_view_from_cpu_tensor(cpu_tensor: Tensor) -> Tensor:
    """get_cuda_view_from_cpu_tensor, of a pinned copy where the tensor is not pinned; a new tensor where it is empty"""
    if not cpu_tensor.numel():
        return cpu_tensor.to("cuda")
    is_pinned = not cpu_tensor.is_cpu or cpu_tensor.is_pinned()
    return _get_cuda_view_from_cpu_tensor(cpu_tensor if is_pinned else cpu_tensor.pin_memory())


def _empty_like(tensor: Tensor, device: Any) -> Tensor:
    empty: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return empty


# Fakes for tracing, for ops that cannot trace themselves because they look at addresses.
FAKES: dict[str, Callable[..., Any]] = {
    "weak_ref_tensor": lambda input: _empty_like(input, input.device),
    "get_cuda_view_from_cpu_tensor": lambda cpu_tensor: _empty_like(cpu_tensor, "cuda"),
}


@_adapter("0.16")
def moe_wna16_gemm(input: Tensor, output: Tensor, *args: Any) -> Tensor:
    """moe_wna16_gemm, which returns nothing; here an empty tensor, as the schema promises one"""
    _moe_wna16_gemm(input, output, *args)
    return output.new_empty(0)


for _lora in (adapters_lora.lora_shrink, adapters_lora.lora_expand):
    _adapter("0.22")(_lora)
