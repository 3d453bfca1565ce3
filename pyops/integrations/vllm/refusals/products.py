"""Arguments that GEMMs and the ops around experts refuse, and vLLM's own ops accept.

Refusals of meaningless arguments, which vLLM's ops accept without a check, are not listed: strides and dtypes that they
ignore, tensors that are too short, and sizes that contradict each other.
"""

from __future__ import annotations

from ._refusal import Refusal

_CHOICES = "more than 1024 choices of a token", "the choices of a token are a loop that is unrolled"
_OWN_TILES = (
    "strides of a weight that the op before did not reorder",
    "the tiles are this library's own, and contiguous",
)
_BOTH = "one of g_idx and perm without the other", "vLLM's op would ignore it, and the product would be another one"
_REPEATED_BIAS = Refusal(
    "in_bias",
    "a bias whose rows or columns are fewer than those of the result, and not one row",
    "vLLM's op repeats it by the remainder of a division; no layer has such a bias",
)
_ROW_OF_SCALES = "any shape but [1, columns]", "a row of scales is the one form that allspark_repack_weight makes"
_IDS = Refusal("topk_ids", "dtypes other than int32 and int64", "routers return these two")
_WHOLE_BLOCKS = "columns that end within a block", "vLLM's op leaves out the columns behind the last whole block"
_DIMENSIONS = Refusal("gating_output", "more than two dimensions", "a matrix of logits is what a router makes")
_LOGITS = (
    _DIMENSIONS,
    Refusal("gating_output", "more than 8192 experts", "a block has the logits of a token in registers"),
)
_ROWS_OF_W = Refusal("W", "more rows than the argument row says", "a weight of another size is more likely a mistake")
_TOKENS_OF_X = "more rows than tokens", "rows behind the first so many would silently have no product"
_PARTS_OF_X = Refusal("X", *_TOKENS_OF_X), Refusal("X", *_WHOLE_BLOCKS)

PRODUCTS: dict[str, tuple[Refusal, ...]] = {
    "LLMM1": (),
    "allspark_w8a16_gemm": (
        Refusal("b_scales", *_ROW_OF_SCALES),
        Refusal("b_qzeros", "zero points without has_zp", "vLLM's op subtracts them nevertheless"),
        Refusal("n32k16_reorder", "False", "vLLM's op does not look at it: the weight has to be in that order"),
    ),
    "awq_gemm": (),
    "awq_marlin_repack": (),
    "batched_moe_align_block_size": (),
    "cutlass_blockwise_scaled_grouped_mm": (),
    "cutlass_encode_and_reorder_int4b": (
        Refusal("B", "K no multiple of 32", "tiles have 32 rows"),
        Refusal("B", "N no multiple of 16", "half a tile has 16 columns"),
    ),
    "cutlass_encode_and_reorder_int4b_grouped": (),
    "cutlass_fp4_group_mm": (),
    "cutlass_group_gemm_supported": (),
    "cutlass_moe_mm": (),
    "cutlass_mxfp4_group_mm": (),
    "cutlass_mxfp8_grouped_mm": (),
    "cutlass_pack_scale_fp8": (),
    "cutlass_scaled_fp4_mm": (),
    "cutlass_scaled_mm": (),
    "cutlass_scaled_mm_azp": (),
    "cutlass_scaled_mm_supports_block_fp8": (),
    "cutlass_scaled_mm_supports_fp4": (),
    "cutlass_scaled_mm_supports_fp8": (),
    "cutlass_scaled_sparse_mm": (),
    "cutlass_sparse_compress": (),
    "cutlass_sparse_scaled_mm_supported": (),
    "cutlass_w4a8_mm": (Refusal("B", *_OWN_TILES),),
    "cutlass_w4a8_moe_mm": (),
    "dsv3_fused_a_gemm": (),
    "dsv3_router_gemm": (),
    "fused_moe_lora": (),
    "get_cutlass_batched_moe_mm_data": (
        Refusal(
            "expert_offsets", "more elements than num_local_experts", "those behind the last would keep their bits"
        ),
    ),
    "get_cutlass_moe_mm_data": (),
    "get_cutlass_moe_mm_problem_sizes": (),
    "get_cutlass_moe_mm_problem_sizes_from_expert_offsets": (),
    "get_cutlass_pplx_moe_mm_data": (),
    "ggml_moe_a8": (*_PARTS_OF_X, _ROWS_OF_W),
    "ggml_moe_a8_vec": _PARTS_OF_X,
    "ggml_moe_get_block_size": (),
    "ggml_mul_mat_a8": (Refusal("X", *_WHOLE_BLOCKS), _ROWS_OF_W),
    "ggml_mul_mat_vec_a8": (Refusal("X", *_WHOLE_BLOCKS), _ROWS_OF_W),
    "gptq_gemm": (),
    "gptq_marlin_24_gemm": (),
    "gptq_marlin_gemm": (),  # an alias of marlin_gemm, with its refusals
    "gptq_marlin_repack": (),
    "grouped_topk": (),
    "lora_expand": (),
    "lora_shrink": (),
    "machete_mm": (Refusal("B", *_OWN_TILES),),
    "machete_prepack_B": (),
    "machete_supported_schedules": (),
    "marlin_gemm": (Refusal("g_idx", *_BOTH), Refusal("perm", *_BOTH)),
    "marlin_int4_fp8_preprocess": (),
    "moe_align_block_size": (_IDS,),
    "moe_lora_align_block_size": (_IDS,),
    "moe_permute": (
        Refusal("topk_ids", *_CHOICES),
        Refusal("permuted_input", "more rows than there are choices", "those behind the last would keep their bits"),
    ),
    "moe_permute_unpermute_supported": (),
    "moe_sum": (
        Refusal(
            "input",
            "strides of a tensor that is not contiguous, which vLLM's op takes of 1 and of 5 or more choices",
            "experts write their results one after another",
        ),
        Refusal("topk_ids", "strides of a tensor that is not contiguous", "routers return contiguous ids"),
    ),
    "moe_unpermute": (Refusal("topk_weights", *_CHOICES),),
    "moe_wna16_gemm": (Refusal("top_k", *_CHOICES),),
    "moe_wna16_marlin_gemm": (
        Refusal("g_idx", *_BOTH),
        Refusal("perm", *_BOTH),
        Refusal("top_k", *_CHOICES),
    ),
    "rearrange_kn_weight_as_n32k16_order": (Refusal("b_scales", *_ROW_OF_SCALES),),
    "shuffle_rows": (),
    "topk_sigmoid": _LOGITS,
    "topk_softmax": _LOGITS,
    "topk_softplus_sqrt": (
        _DIMENSIONS,
        Refusal("bias_vl", "a tensor, with an image_sentinel_lo", "no expert is chosen by the kind of a token"),
    ),
    "wvSplitK": (_REPEATED_BIAS,),
    "wvSplitKQ": (_REPEATED_BIAS,),
    "wvSplitKrc": (_REPEATED_BIAS,),
}
