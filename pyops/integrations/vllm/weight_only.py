"""Functions of ``vllm._custom_ops`` for GEMMs with packed weights, with vLLM's parameter names.

A quantized type may be vLLM's ``ScalarType``, this library's, or the id of either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core.system.lazy import optional
from ...ops import linear
from .adapters import new_product

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:  # not the lazy proxy, which torch.compile cannot trace
    torch = optional("torch", "pyops.integrations.vllm.weight_only", "torch")

__all__ = [
    "allspark_repack_weight",
    "cutlass_encode_and_reorder_int4b",
    "cutlass_w4a8_mm",
    "gptq_marlin_24_gemm",
    "gptq_marlin_gemm",
    "machete_mm",
    "machete_prepack_B",
    "machete_supported_schedules",
    "marlin_gemm",
    "moe_wna16_marlin_gemm",
]


def _id(type: Any) -> int:
    """The id of a quantized type."""
    return int(getattr(type, "id", type))


def marlin_gemm(
    a: Tensor,
    c: Tensor | None,
    b_q_weight: Tensor,
    b_bias: Tensor | None,
    b_scales: Tensor,
    a_scales: Tensor | None,
    global_scale: Tensor | None,
    b_zeros: Tensor | None,
    g_idx: Tensor | None,
    perm: Tensor | None,
    workspace: Tensor | None,
    b_q_type: Any,
    size_m: int,
    size_n: int,
    size_k: int,
    is_k_full: bool = True,
    use_atomic_add: bool = False,
    use_fp32_reduce: bool = False,
    is_zp_float: bool = False,
) -> Tensor:
    """`pyops.marlin_gemm` into `c`, which is returned, or into a new tensor."""
    product: Tensor = linear.marlin_gemm(
        a,
        b_q_weight,
        b_bias,
        b_scales,
        a_scales,
        global_scale,
        b_zeros,
        g_idx,
        perm,
        workspace,
        _id(b_q_type),
        size_m,
        size_n,
        size_k,
        is_k_full,
        use_atomic_add,
        use_fp32_reduce,
        is_zp_float,
        c=c,
    )
    return product


gptq_marlin_gemm = marlin_gemm


def moe_wna16_marlin_gemm(
    input: Tensor,
    output: Tensor | None,
    b_qweight: Tensor,
    b_bias: Tensor | None,
    b_scales: Tensor,
    a_scales: Tensor | None,
    global_scale: Tensor | None,
    b_qzeros: Tensor | None,
    g_idx: Tensor | None,
    perm: Tensor | None,
    workspace: Tensor | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_past_padded: Tensor,
    topk_weights: Tensor,
    moe_block_size: int,
    top_k: int,
    mul_topk_weights: bool,
    b_q_type: Any,
    size_m: int,
    size_n: int,
    size_k: int,
    is_k_full: bool,
    use_atomic_add: bool,
    use_fp32_reduce: bool,
    is_zp_float: bool,
    thread_k: int = -1,
    thread_n: int = -1,
    blocks_per_sm: int = -1,
) -> Tensor:
    """`pyops.moe_wna16_marlin_gemm` into `output`, which is returned, or into a new tensor."""
    c = new_product(input, b_scales, size_m * top_k, size_n) if output is None else output
    linear.moe_wna16_marlin_gemm(
        input,
        c,
        b_qweight,
        b_bias,
        b_scales,
        a_scales,
        global_scale,
        b_qzeros,
        g_idx,
        perm,
        workspace,
        sorted_token_ids,
        expert_ids,
        num_tokens_past_padded,
        topk_weights,
        moe_block_size,
        top_k,
        mul_topk_weights,
        _id(b_q_type),
        size_m,
        size_n,
        size_k,
        is_k_full,
        use_atomic_add,
        use_fp32_reduce,
        is_zp_float,
        thread_k,
        thread_n,
        blocks_per_sm,
    )
    return c


def gptq_marlin_24_gemm(
    a: Tensor,
    b_q_weight: Tensor,
    b_meta: Tensor,
    b_scales: Tensor,
    workspace: Tensor | None,
    b_q_type: Any,
    size_m: int,
    size_n: int,
    size_k: int,
) -> Tensor:
    """`pyops.gptq_marlin_24_gemm` into a new tensor."""
    product: Tensor = linear.gptq_marlin_24_gemm(
        a, b_q_weight, b_meta, b_scales, workspace, _id(b_q_type), size_m, size_n, size_k
    )
    return product


def machete_supported_schedules(
    a_type: torch.dtype,
    b_type: Any,
    group_scales_type: torch.dtype | None,
    group_zeros_type: torch.dtype | None = None,
    channel_scales_type: torch.dtype | None = None,
    token_scales_type: torch.dtype | None = None,
    out_type: torch.dtype | None = None,
) -> list[str]:
    """`pyops.machete_supported_schedules`."""
    types = group_scales_type, group_zeros_type, channel_scales_type, token_scales_type, out_type
    return linear.machete_supported_schedules(a_type, _id(b_type), *types)


def machete_prepack_B(
    b_q_weight: Tensor, a_type: torch.dtype, b_type: Any, group_scales_type: torch.dtype | None
) -> Tensor:
    """`pyops.machete_prepack_B` into a new tensor."""
    packed: Tensor = linear.machete_prepack_B(b_q_weight, a_type, _id(b_type), group_scales_type)
    return packed


def machete_mm(
    a: Tensor,
    b_q: Tensor,
    b_type: Any,
    out_type: torch.dtype | None = None,
    b_group_scales: Tensor | None = None,
    b_group_zeros: Tensor | None = None,
    b_group_size: int | None = None,
    b_channel_scales: Tensor | None = None,
    a_token_scales: Tensor | None = None,
    schedule: str | None = None,
) -> Tensor:
    """`pyops.machete_mm` into a new tensor."""
    scales = b_group_scales, b_group_zeros, b_group_size, b_channel_scales, a_token_scales
    product: Tensor = linear.machete_mm(a, b_q, _id(b_type), out_type, *scales, schedule)
    return product


def cutlass_w4a8_mm(
    a: Tensor,
    b_q: Tensor,
    b_group_scales: Tensor,
    b_group_size: int,
    b_channel_scales: Tensor,
    a_token_scales: Tensor,
    out_type: torch.dtype | None = None,
    maybe_schedule: str | None = None,
) -> Tensor:
    """`pyops.cutlass_w4a8_mm` into a new tensor."""
    scales = b_group_scales, b_group_size, b_channel_scales, a_token_scales
    product: Tensor = linear.cutlass_w4a8_mm(a, b_q, *scales, out_type, maybe_schedule)
    return product


def cutlass_encode_and_reorder_int4b(b: Tensor) -> Tensor:
    """`pyops.cutlass_encode_and_reorder_int4b` into a new tensor."""
    packed: Tensor = linear.cutlass_encode_and_reorder_int4b(b)
    return packed


def allspark_repack_weight(
    qweight: Tensor, scale: Tensor, zero_point: Tensor | None = None, has_zp: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(weight, scales, zero points or None) of `pyops.rearrange_kn_weight_as_n32k16_order`, new."""
    k, n = qweight.shape
    padded = -(-n // 32) * 32
    weight, scales = qweight.new_empty(padded, k), scale.new_empty(1, padded)
    zeros = scale.new_empty(1, padded) if has_zp else None
    linear.rearrange_kn_weight_as_n32k16_order(qweight, scale, zero_point, has_zp, weight, scales, zeros, k, n, padded)
    return weight, scales, zeros
