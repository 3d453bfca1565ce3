"""Ops of vLLM that this library does not have, by name, with the reason."""

from __future__ import annotations

_MULTICAST = "stores to all GPUs at once by NVLink multicast; collectives here read and write the memory of one peer"
_MNNVL = "is for GPUs of several nodes with one NVLink switch; collectives here are those of one node"
_OCTAVE = "has a format of the KV cache for gfx1100 and gfx942 alone, which no attention here reads"
_RDNA = "is in vLLM's build for ROCm alone, for RDNA 3; the products of such weights here are for all GPUs"
_KDA_PARTS = "is in vLLM's build for ROCm alone, a part of Kimi Delta Attention; kda does the whole, on all GPUs"
_HISPARSE = "reads the KV cache in pinned memory of the host; tensors of an op here are all on one device"

REFUSED_OPS: dict[str, str] = {
    "beam_allreduce": _MULTICAST,
    "beam_allreduce_norm": _MULTICAST,
    "direct_dcp_q_gather": _MULTICAST,
    "direct_dcp_kv_gather": _MULTICAST,
    "mnnvl_multimem_reduce_scatter": _MULTICAST,
    "mnnvl_lamport_all_gather": _MNNVL,
    "mnnvl_lamport_reduce_scatter": _MNNVL,
    "octave_cache_store": _OCTAVE,
    "octave_decode": _OCTAVE,
    "octave_decode_sparse": _OCTAVE,
    "octave_window_store": _OCTAVE,
    "octave_rotate": _OCTAVE,
    "octave_prefill": _OCTAVE,
    "gptq_gemm_rdna3": _RDNA,
    "gptq_gemm_rdna3_wmma": _RDNA,
    "moe_gptq_gemm_rdna3": _RDNA,
    "mxfp4_w4a8_gemv_rdna3": _RDNA,
    "wvSplitK_int4_g": "is in vLLM's build for ROCm alone; the products of few rows here are those of wvSplitK",
    "fused_kda_prologue": _KDA_PARTS,
    "fused_kda_chunk": _KDA_PARTS,
    "hisparse_resolve_residency": _HISPARSE,
    "hisparse_invalidate_written_slots": "keeps the tables of hisparse_resolve_residency, which is refused",
    "hisparse_gather_plan": _HISPARSE,
    "hisparse_gather_compact": _HISPARSE,
    "direct_dcp_a2a_lse_reduce": "gets symmetric memory of peers as addresses without sizes or signals of this library",
    "fused_globalize_align_block_size": "aligns rows as moe_align_block_size, but of a number that is on the GPU",
    "concat_and_cache_mla_grouped": "gets caches as addresses without sizes, so a slot has no bound to be checked with",
}
