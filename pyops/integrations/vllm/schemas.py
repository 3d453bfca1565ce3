# ruff: noqa: E501
"""The schemas of vLLM's torch ops, and the signatures of the Python functions that call them.

`SCHEMAS` has the ops of version 0.16, ops of 0.13 that 0.16 no longer has, and three newer ops: the two GEMMs of
DeepSeek-V3 and `get_cutlass_batched_moe_mm_data`, the name of `get_cutlass_pplx_moe_mm_data` in 0.22. `SCHEMAS_0_22`
has the ops of 0.22 that differ or are new. One name differs from vLLM, where `convert_vertical_slash_indexes` and
`convert_vertical_slash_indexes_mergehead` have two arguments ``q_seqlens``: the second is ``kv_seqlens`` here.
"""

from __future__ import annotations

# The schemas of each namespace of torch.ops.
SCHEMAS = {
    "_C": """
paged_attention_v1(Tensor! out, Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, int block_size, int max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, int tp_rank, int blocksparse_local_blocks, int blocksparse_vert_stride, int blocksparse_block_size, int blocksparse_head_sliding_step) -> ()
paged_attention_v2(Tensor! out, Tensor! exp_sums, Tensor! max_logits, Tensor! tmp_out, Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, int block_size, int max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, int tp_rank, int blocksparse_local_blocks, int blocksparse_vert_stride, int blocksparse_block_size, int blocksparse_head_sliding_step) -> ()
merge_attn_states(Tensor! output, Tensor!? output_lse, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse) -> ()
convert_vertical_slash_indexes(Tensor! block_count, Tensor! block_offset, Tensor! column_count, Tensor! column_index, Tensor q_seqlens, Tensor kv_seqlens, Tensor vertical_indexes, Tensor slash_indexes, int context_size, int block_size_M, int block_size_N, bool causal) -> ()
convert_vertical_slash_indexes_mergehead(Tensor! block_count, Tensor! block_offset, Tensor! column_count, Tensor! column_index, Tensor q_seqlens, Tensor kv_seqlens, Tensor vertical_indexes, Tensor slash_indexes, Tensor vertical_indices_count, Tensor slash_indices_count, int context_size, int block_size_M, int block_size_N, bool causal) -> ()
sm100_cutlass_mla_decode(Tensor! out, Tensor! lse, Tensor q_nope, Tensor q_pe, Tensor kv_c_and_k_pe_cache, Tensor seq_lens, Tensor page_table, Tensor workspace, float scale, int num_kv_splits) -> ()
sm100_cutlass_mla_get_workspace_size(int max_seq_len, int num_batches, int sm_count, int num_kv_splits) -> int
rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()
fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()
rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()
fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, float epsilon) -> ()
rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual) -> ()
rms_norm_per_block_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual, int group_size, bool is_scale_transposed) -> ()
fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids) -> ()
rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox) -> ()
silu_and_mul(Tensor! result, Tensor input) -> ()
mul_and_silu(Tensor! out, Tensor input) -> ()
gelu_and_mul(Tensor! out, Tensor input) -> ()
gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()
fatrelu_and_mul(Tensor! out, Tensor input, float threshold) -> ()
swigluoai_and_mul(Tensor! out, Tensor input, float alpha=1.702, float limit=7.0) -> ()
gelu_new(Tensor! out, Tensor input) -> ()
gelu_fast(Tensor! out, Tensor input) -> ()
gelu_quick(Tensor! out, Tensor input) -> ()
silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()
silu_and_mul_nvfp4_quant(Tensor! result, Tensor! result_block_scale, Tensor input, Tensor input_global_scale) -> ()
persistent_masked_m_silu_mul_quant(Tensor input, Tensor counts, Tensor! y_q, Tensor! y_s, bool use_ue8m0) -> ()
apply_repetition_penalties_(Tensor! logits, Tensor prompt_mask, Tensor output_mask, Tensor repetition_penalties) -> ()
top_k_per_row_prefill(Tensor logits, Tensor rowStarts, Tensor rowEnds, Tensor! indices, int numRows, int stride0, int stride1, int topK) -> ()
top_k_per_row_decode(Tensor logits, int next_n, Tensor seq_lens, Tensor! indices, int numRows, int stride0, int stride1, int topK) -> ()
weak_ref_tensor(Tensor input) -> Tensor
get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor
static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None) -> ()
dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()
dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()
static_scaled_int8_quant(Tensor! result, Tensor input, Tensor scale, Tensor? azp) -> ()
dynamic_scaled_int8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor!? azp) -> ()
per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, float fp8_min, float fp8_max, bool scale_ue8m0) -> ()
per_token_group_fp8_quant_packed(Tensor input, Tensor! output_q, Tensor! output_s_packed, int group_size, float eps, float fp8_min, float fp8_max) -> ()
per_token_group_quant_int8(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, float int8_min, float int8_max) -> ()
scaled_fp4_quant(Tensor! output, Tensor input, Tensor! output_scale, Tensor input_scale, bool is_sf_swizzled_layout) -> ()
scaled_fp4_experts_quant(Tensor! output, Tensor! output_scale, Tensor input, Tensor input_global_scale, Tensor input_offset_by_experts, Tensor output_scale_offset_by_experts) -> ()
silu_and_mul_scaled_fp4_experts_quant(Tensor! output, Tensor! output_scale, Tensor input, Tensor input_global_scale, Tensor input_offset_by_experts, Tensor output_scale_offset_by_experts) -> ()
hadacore_transform(Tensor! x, bool inplace) -> Tensor
permute_cols(Tensor A, Tensor perm) -> Tensor
ggml_dequantize(Tensor W, int type, SymInt m, SymInt n, ScalarType? dtype) -> Tensor
awq_dequantize(Tensor _kernel, Tensor _scaling_factors, Tensor _zeros, SymInt split_k_iters, int thx, int thy) -> Tensor
awq_gemm(Tensor _in_feats, Tensor _kernel, Tensor _scaling_factors, Tensor _zeros, SymInt split_k_iters) -> Tensor
gptq_gemm(Tensor a, Tensor b_q_weight, Tensor b_gptq_qzeros, Tensor b_gptq_scales, Tensor b_g_idx, bool use_exllama, bool use_v2_format, int bit) -> Tensor
gptq_shuffle(Tensor! q_weight, Tensor q_perm, int bit) -> ()
marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none, Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, bool is_k_full, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor
gptq_marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none, Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, bool is_k_full, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor
gptq_marlin_repack(Tensor b_q_weight, Tensor perm, SymInt size_k, SymInt size_n, int num_bits, bool is_a_8bit) -> Tensor
awq_marlin_repack(Tensor b_q_weight, SymInt size_k, SymInt size_n, int num_bits, bool is_a_8bit) -> Tensor
marlin_int4_fp8_preprocess(Tensor qweight, Tensor? qzeros_or_none, bool inplace) -> Tensor
gptq_marlin_24_gemm(Tensor a, Tensor b_q_weight, Tensor b_meta, Tensor b_scales, Tensor workspace, int b_q_type, SymInt size_m, SymInt size_n, SymInt size_k) -> Tensor
machete_supported_schedules(ScalarType a_type, int b_type, ScalarType? maybe_group_scales_type, ScalarType? maybe_group_zeros_type, ScalarType? maybe_channel_scales_type, ScalarType? maybe_token_scales_type, ScalarType? maybe_out_type) -> str[]
machete_mm(Tensor A, Tensor B, int b_type, ScalarType? out_type, Tensor? group_scales, Tensor? group_zeros, int? group_size, Tensor? channel_scales, Tensor? token_scales, str? schedule) -> Tensor
machete_prepack_B(Tensor B, ScalarType a_type, int b_type, ScalarType? group_scales_type) -> Tensor
dsv3_fused_a_gemm(Tensor! output, Tensor mat_a, Tensor mat_b) -> ()
cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()
cutlass_scaled_mm_azp(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor azp_adj, Tensor? azp, Tensor? bias) -> ()
cutlass_scaled_mm_supports_fp8(int cuda_device_capability) -> bool
cutlass_scaled_mm_supports_block_fp8(int cuda_device_capability) -> bool
cutlass_scaled_mm_supports_fp4(int cuda_device_capability) -> bool
cutlass_group_gemm_supported(int cuda_device_capability) -> bool
cutlass_sparse_scaled_mm_supported(int cuda_device_capability) -> bool
cutlass_sparse_compress(Tensor a) -> Tensor[]
cutlass_scaled_sparse_mm(Tensor! out, Tensor a, Tensor bt_nzs, Tensor bt_meta, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()
cutlass_scaled_fp4_mm(Tensor! out, Tensor a, Tensor b, Tensor block_scale_a, Tensor block_scale_b, Tensor alpha) -> ()
cutlass_fp4_group_mm(Tensor! out, Tensor a, Tensor b, Tensor a_blockscale, Tensor b_blockscales, Tensor alphas, Tensor problem_sizes, Tensor expert_offsets, Tensor sf_offsets) -> ()
cutlass_w4a8_mm(Tensor A, Tensor B, Tensor group_scales, int group_size, Tensor channel_scales, Tensor token_scales, ScalarType? out_type, str? maybe_schedule) -> Tensor
cutlass_pack_scale_fp8(Tensor scales) -> Tensor
cutlass_encode_and_reorder_int4b(Tensor B) -> Tensor
cutlass_encode_and_reorder_int4b_grouped(Tensor b_tensors) -> (Tensor, Tensor)
cutlass_w4a8_moe_mm(Tensor! out_tensors, Tensor a_tensors, Tensor b_tensors, Tensor a_scales, Tensor b_scales, Tensor b_group_scales, int b_group_size, Tensor expert_offsets, Tensor problem_sizes, Tensor a_strides, Tensor b_strides, Tensor c_strides, Tensor group_scale_strides, str? maybe_schedule) -> ()
allspark_w8a16_gemm(Tensor a, Tensor b_qweight, Tensor b_scales, Tensor? b_qzeros, SymInt n, SymInt group_size, SymInt sm_count, SymInt sm_version, SymInt CUBLAS_M_THRESHOLD, bool has_zp, bool n32k16_reorder) -> Tensor
rearrange_kn_weight_as_n32k16_order(Tensor b_qweight, Tensor b_scales, Tensor? b_zeros, bool has_zp, Tensor! b_qweight_reorder, Tensor! b_scales_reorder, Tensor!? b_zeros_reorder, int K, int N, int N_32align) -> ()
ggml_mul_mat_vec_a8(Tensor W, Tensor X, int type, SymInt row) -> Tensor
ggml_mul_mat_a8(Tensor W, Tensor X, int type, SymInt row) -> Tensor
ggml_moe_a8(Tensor X, Tensor W, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, int type, SymInt row, SymInt top_k, SymInt tokens) -> Tensor
ggml_moe_a8_vec(Tensor X, Tensor W, Tensor topk_ids, int top_k, int type, SymInt row, SymInt tokens) -> Tensor
ggml_moe_get_block_size(int type) -> int
cutlass_moe_mm(Tensor! out_tensors, Tensor a_tensors, Tensor b_tensors, Tensor a_scales, Tensor b_scales, Tensor expert_offsets, Tensor problem_sizes, Tensor a_strides, Tensor b_strides, Tensor c_strides, bool per_act_token, bool per_out_ch) -> ()
get_cutlass_moe_mm_data(Tensor topk_ids, Tensor! expert_offsets, Tensor! problem_sizes1, Tensor! problem_sizes2, Tensor! input_permutation, Tensor! output_permutation, int num_experts, int n, int k, Tensor? blockscale_offsets) -> ()
get_cutlass_moe_mm_problem_sizes(Tensor topk_ids, Tensor! problem_sizes1, Tensor! problem_sizes2, int num_experts, int n, int k, Tensor? blockscale_offsets, bool? force_swap_ab) -> ()
get_cutlass_moe_mm_problem_sizes_from_expert_offsets(Tensor expert_first_token_offset, Tensor! problem_sizes1, Tensor! problem_sizes2, int n, int k, bool swap_ab) -> ()
get_cutlass_pplx_moe_mm_data(Tensor! expert_offsets, Tensor! problem_sizes1, Tensor! problem_sizes2, Tensor expert_num_tokens, int num_local_experts, int padded_m, int n, int k) -> ()
get_cutlass_batched_moe_mm_data(Tensor! expert_offsets, Tensor! problem_sizes1, Tensor! problem_sizes2, Tensor expert_num_tokens, int num_local_experts, int padded_m, int n, int k) -> ()
cutlass_blockwise_scaled_grouped_mm(Tensor! output, Tensor a, Tensor b, Tensor scales_a, Tensor scales_b, Tensor problem_sizes, Tensor expert_offsets) -> ()
selective_scan_fwd(Tensor! u, Tensor! delta, Tensor! A, Tensor! B, Tensor! C, Tensor? D_, Tensor!? z_, Tensor? delta_bias_, bool delta_softplus, Tensor? query_start_loc, Tensor? cache_indices, Tensor? has_initial_state, Tensor! ssm_states, int pad_slot_id, int block_size, Tensor? block_idx_first_scheduled_token, Tensor? block_idx_last_scheduled_token, Tensor? initial_state_idx) -> ()
""",
    "_C_cache_ops": """
swap_blocks(Tensor src, Tensor! dst, int block_size_in_bytes, Tensor block_mapping) -> ()
copy_blocks(Tensor(a!)[] key_caches, Tensor[](b!) value_caches, Tensor block_mapping) -> ()
copy_blocks_mla(Tensor(a!)[] kv_caches, Tensor block_mapping) -> ()
reshape_and_cache(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()
reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()
concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor scale) -> ()
concat_and_cache_mla_rope_fused(Tensor positions, Tensor! q_pe, Tensor! k_pe, Tensor kv_c, Tensor cos_sin_cache, bool is_neox, Tensor slot_mapping, Tensor! kv_cache, str kv_cache_dtype, Tensor kv_cache_scale) -> ()
convert_fp8(Tensor! dst_cache, Tensor src_cache, float scale, str kv_cache_dtype) -> ()
gather_and_maybe_dequant_cache(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, Tensor token_to_seq, int num_tokens, str kv_cache_dtype, Tensor scale, Tensor? seq_starts) -> ()
cp_gather_cache(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, int batch_size, Tensor? seq_starts) -> ()
cp_gather_and_upconvert_fp8_kv_cache(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor seq_lens, Tensor workspace_starts, int batch_size) -> ()
indexer_k_quant_and_cache(Tensor k, Tensor! kv_cache, Tensor slot_mapping, int quant_block_size, str kv_cache_dtype) -> ()
cp_gather_indexer_k_quant_cache(Tensor kv_cache, Tensor! dst_k, Tensor! dst_scale, Tensor block_table, Tensor cu_seq_lens) -> ()
""",
    "_moe_C": """
topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, bool renormalize, Tensor? bias) -> ()
topk_sigmoid(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, bool renormalize, Tensor? bias) -> ()
grouped_topk(Tensor scores, int n_group, int topk_group, int topk, bool renormalize, float routed_scaling_factor, Tensor bias, int scoring_func) -> (Tensor, Tensor)
moe_sum(Tensor input, Tensor! output) -> ()
dsv3_router_gemm(Tensor! output, Tensor mat_a, Tensor mat_b) -> ()
moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map) -> ()
batched_moe_align_block_size(int max_tokens_per_batch, int block_size, Tensor expert_num_tokens, Tensor! sorted_token_ids, Tensor! experts_ids, Tensor! num_tokens_post_pad) -> ()
moe_lora_align_block_size(Tensor topk_ids, Tensor token_lora_mapping, int num_experts, int block_size, int max_loras, int max_num_tokens_padded, int max_num_m_blocks, Tensor! sorted_token_ids, Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor! adapter_enabled, Tensor! lora_ids, Tensor? maybe_expert_map) -> ()
moe_wna16_gemm(Tensor input, Tensor! output, Tensor b_qweight, Tensor b_scales, Tensor? b_qzeros, Tensor? topk_weights, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_pad, int top_k, int BLOCK_SIZE_M, int BLOCK_SIZE_N, int BLOCK_SIZE_K, int bit) -> Tensor
moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none, Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none, Tensor! workspace, Tensor sorted_token_ids, Tensor! expert_ids, Tensor! num_tokens_past_padded, Tensor! topk_weights, int moe_block_size, int top_k, bool mul_topk_weights, int b_type_id, int size_m, int size_n, int size_k, bool is_full_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float, int thread_k, int thread_n, int blocks_per_sm) -> Tensor
moe_permute(Tensor input, Tensor topk_ids, Tensor token_expert_indices, Tensor? expert_map, int n_expert, int n_local_expert, int topk, Tensor! permuted_input, Tensor! expert_first_token_offset, Tensor! inv_permuted_idx, Tensor! permuted_idx) -> ()
moe_unpermute(Tensor permuted_hidden_states, Tensor topk_weights, Tensor inv_permuted_idx, Tensor? expert_first_token_offset, int topk, Tensor! hidden_states) -> ()
moe_permute_unpermute_supported() -> bool
shuffle_rows(Tensor input_tensor, Tensor dst2src_map, Tensor! output_tensor) -> ()
""",
    "_C_cuda_utils": """
get_device_attribute(int attribute, int device_id) -> int
get_max_shared_memory_per_block_device_attribute(int device_id) -> int
""",
    "_rocm_C": """
paged_attention(Tensor! out, Tensor exp_sums, Tensor max_logits, Tensor tmp_out, Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, Tensor? query_start_loc, int block_size, int max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, Tensor? fp8_out_scale, str mfma_type) -> ()
LLMM1(Tensor in_a, Tensor in_b, int rows_per_block) -> Tensor
wvSplitK(Tensor in_a, Tensor in_b, Tensor? in_bias, int CuCount) -> Tensor
wvSplitKQ(Tensor in_a, Tensor in_b, Tensor? in_bias, Tensor! out_c, Tensor scale_a, Tensor scale_b, int CuCount) -> ()
wvSplitKrc(Tensor in_a, Tensor in_b, Tensor? in_bias, int CuCount) -> Tensor
""",
    "_C_custom_ar": """
init_custom_ar(int[] ipc_tensors, Tensor rank_data, int rank, bool fully_connected) -> int
all_reduce(int fa, Tensor inp, Tensor! out, int reg_buffer, int reg_buffer_sz_bytes) -> ()
dispose(int fa) -> ()
meta_size() -> int
register_buffer(int fa, int[] ipc_ptrs) -> ()
get_graph_buffer_ipc_meta(int fa) -> (int[], int[])
register_graph_buffers(int fa, int[][] handles, int[][] offsets) -> ()
allocate_shared_buffer_and_handle(int size) -> (int, Tensor)
open_mem_handle(Tensor mem_handle) -> int
free_shared_buffer(int buffer) -> ()
init_custom_qr(int rank, int world_size, int? qr_max_size=None) -> int
qr_destroy(int fa) -> ()
qr_get_handle(int fa) -> Tensor
qr_open_handles(int _fa, Tensor[](b!) handles) -> ()
qr_all_reduce(int fa, Tensor inp, Tensor out, int quant_level, bool cast_bf2half) -> ()
qr_max_size() -> int
""",
    "vllm": """
flashinfer_rotary_embedding(Tensor positions, Tensor(a1!) query, Tensor(a2!) key, SymInt head_size, Tensor cos_sin_cache, bool is_neox) -> ()
""",
}

# Ops with other arguments in vLLM 0.22, and its new ops. These schemas replace those above.
SCHEMAS_0_22 = {
    "_C": """
merge_attn_states(Tensor! output, Tensor!? output_lse, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse, int!? prefill_tokens_with_context, Tensor? output_scale=None) -> ()
fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids, int forced_token_heads_per_warp=-1) -> ()
rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()
silu_and_mul_with_clamp(Tensor! result, Tensor input, float limit) -> ()
silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub=None, bool is_scale_transposed=False) -> ()
persistent_topk(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) -> ()
static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()
per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()
scaled_fp4_quant(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout) -> (Tensor, Tensor)
scaled_fp4_quant.out(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, Tensor(a!) output, Tensor(b!) output_scale) -> ()
get_cutlass_moe_mm_data(Tensor topk_ids, Tensor! expert_offsets, Tensor! problem_sizes1, Tensor! problem_sizes2, Tensor! input_permutation, Tensor! output_permutation, int num_experts, int n, int k, Tensor? blockscale_offsets, bool is_gated) -> ()
selective_scan_fwd(Tensor! u, Tensor! delta, Tensor! A, Tensor! B, Tensor! C, Tensor? D_, Tensor!? z_, Tensor? delta_bias_, bool delta_softplus, Tensor? query_start_loc, Tensor? cache_indices, Tensor? has_initial_state, Tensor! ssm_states, int null_block_id, int block_size, Tensor? block_idx_first_scheduled_token, Tensor? block_idx_last_scheduled_token, Tensor? initial_state_idx, Tensor? cu_chunk_seqlen, Tensor? last_chunk_indices) -> ()
mxfp4_experts_quant(Tensor! output, Tensor! output_scale, Tensor input, Tensor input_offset_by_experts, Tensor output_scale_offset_by_experts, int n_experts) -> ()
silu_and_mul_mxfp4_experts_quant(Tensor! output, Tensor! output_scale, Tensor input, Tensor input_offset_by_experts, Tensor output_scale_offset_by_experts, int n_experts) -> ()
cutlass_mxfp4_group_mm(Tensor! out, Tensor a, Tensor b, Tensor a_blockscale, Tensor b_blockscales, Tensor problem_sizes, Tensor expert_offsets, Tensor sf_offsets) -> ()
mxfp8_experts_quant(Tensor input, Tensor problem_sizes, Tensor expert_offsets, Tensor blockscale_offsets, Tensor! quant_output, Tensor! scale_factor) -> ()
cutlass_mxfp8_grouped_mm(Tensor a, Tensor b, Tensor sfa, Tensor sfb, Tensor! out, Tensor problem_sizes, Tensor expert_offsets, Tensor blockscale_offsets) -> ()
fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(Tensor q_in, Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache, int q_head_padded, float eps, int cache_block_size) -> Tensor
minimax_allreduce_rms(Tensor input, Tensor norm_weight, Tensor workspace, int rank, int nranks, float eps) -> Tensor
minimax_allreduce_rms_qk(Tensor qkv, Tensor norm_weight_q, Tensor norm_weight_k, Tensor workspace, int q_size, int kv_size, int rank, int nranks, float eps) -> (Tensor, Tensor)
""",
    "_C_cache_ops": """
swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, bool is_src_access_order_any=False) -> ()
concat_mla_q(Tensor ql_nope, Tensor q_pe, Tensor! q_out) -> ()
""",
    "_moe_C": """
topk_softplus_sqrt(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, bool renormalize, float routed_scaling_factor, Tensor? bias, Tensor? input_ids, Tensor? tid2eid) -> ()
""",
    "vllm": """
lora_shrink(Tensor inputs, Tensor[] lora_a_weights, Tensor(a2!) output_tensor, Tensor token_lora_mapping, Tensor token_indices_sorted_by_lora_ids, Tensor num_tokens_per_lora, Tensor lora_token_start_loc, Tensor lora_ids, Tensor no_lora_flag_cpu, Tensor num_active_loras, float scaling) -> ()
lora_expand(Tensor inputs, Tensor[] lora_b_weights, Tensor(a2!) output_tensor, Tensor token_lora_mapping, Tensor token_indices_sorted_by_lora_ids, Tensor num_tokens_per_lora, Tensor lora_token_start_loc, Tensor lora_ids, Tensor no_lora_flag_cpu, Tensor num_active_loras, SymInt offset_start=0, bool add_inputs=False) -> ()
""",
}

# Signatures of the functions of `vllm._custom_ops` and related modules.
SIGNATURES = """
paged_attention_v1(out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, tp_rank=0, blocksparse_local_blocks=0, blocksparse_vert_stride=0, blocksparse_block_size=64, blocksparse_head_sliding_step=0)
paged_attention_v2(out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, tp_rank=0, blocksparse_local_blocks=0, blocksparse_vert_stride=0, blocksparse_block_size=64, blocksparse_head_sliding_step=0)
paged_attention_rocm(out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, query_start_loc, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, fp8_out_scale=None, mfma_type='f16')
merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None)
convert_vertical_slash_indexes(q_seqlens, kv_seqlens, vertical_indexes, slash_indexes, context_size, block_size_M, block_size_N, causal=True)
convert_vertical_slash_indexes_mergehead(q_seqlens, kv_seqlens, vertical_indexes, slash_indexes, vertical_indices_count, slash_indices_count, context_size, block_size_M, block_size_N, causal=True)
sm100_cutlass_mla_decode(out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, scale, num_kv_splits)
sm100_cutlass_mla_get_workspace_size(max_seq_len, num_batches, sm_count, num_kv_splits)
swap_blocks(src, dst, block_size_in_bytes, block_mapping)
copy_blocks(key_caches, value_caches, block_mapping)
copy_blocks_mla(kv_caches, block_mapping)
reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)
concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale)
convert_fp8(output, input, scale=1.0, kv_dtype='fp8')
gather_and_maybe_dequant_cache(src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype, scale, seq_starts=None)
cp_gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts=None)
cp_gather_and_upconvert_fp8_kv_cache(src_cache, dst, block_table, seq_lens, workspace_starts, batch_size)
indexer_k_quant_and_cache(k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype)
cp_gather_indexer_k_quant_cache(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)
rms_norm(out, input, weight, epsilon)
fused_add_rms_norm(input, residual, weight, epsilon)
rms_norm_dynamic_per_token_quant(input, weight, epsilon, quant_dtype, scale_ub=None, residual=None)
rms_norm_per_block_quant(input, weight, epsilon, quant_dtype, group_size, scale_ub=None, residual=None, is_scale_transposed=False)
fused_qk_norm_rope(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, cos_sin_cache, is_neox, position_ids)
rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
apply_repetition_penalties_cuda(logits, prompt_mask, output_mask, repetition_penalties)
apply_repetition_penalties_torch(logits, prompt_mask, output_mask, repetition_penalties)
apply_repetition_penalties(logits, prompt_mask, output_mask, repetition_penalties)
get_device_attribute(attribute, device)
get_max_shared_memory_per_block_device_attribute(device)
scaled_fp8_quant(input, scale=None, num_token_padding=None, scale_ub=None, use_per_token_if_dynamic=False, output=None, group_shape=None)
scaled_int8_quant(input, scale=None, azp=None, symmetric=True)
per_token_group_quant_fp8(x, group_size, eps=1e-10, dtype=None, column_major_scales=False, tma_aligned_scales=False, out_q=None, use_ue8m0=None)
per_token_group_quant_fp8_packed_for_deepgemm(x, group_size, eps=1e-10, use_ue8m0=None, out_q=None)
per_token_group_quant_int8(x, group_size, eps=1e-10, dtype=torch.int8)
scaled_fp4_quant(input, input_global_scale, is_sf_swizzled_layout=True, backend='none')
scaled_fp4_experts_quant(input_tensor, input_global_scale, expert_offsets, blockscale_offsets, topk)
silu_and_mul_scaled_fp4_experts_quant(input_tensor, input_global_scale, expert_offsets, blockscale_offsets, topk)
hadacore_transform(x, inplace=True)
permute_cols(a, perm)
ggml_dequantize(W, quant_type, m, n, dtype)
awq_dequantize(qweight, scales, zeros, split_k_iters, thx, thy)
awq_gemm(input, qweight, scales, qzeros, split_k_iters)
gptq_gemm(a, b_q_weight, b_gptq_qzeros, b_gptq_scales, b_g_idx, use_exllama, use_v2_format, bit)
gptq_shuffle(q_weight, q_perm, bit)
marlin_gemm(a, c, b_q_weight, b_bias, b_scales, a_scales, global_scale, b_zeros, g_idx, perm, workspace, b_q_type, size_m, size_n, size_k, is_k_full=True, use_atomic_add=False, use_fp32_reduce=False, is_zp_float=False)
gptq_marlin_gemm(a, c, b_q_weight, b_bias, b_scales, a_scales, global_scale, b_zeros, g_idx, perm, workspace, b_q_type, size_m, size_n, size_k, is_k_full=True, use_atomic_add=False, use_fp32_reduce=False, is_zp_float=False)
gptq_marlin_repack(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False)
awq_marlin_repack(b_q_weight, size_k, size_n, num_bits, is_a_8bit=False)
marlin_int4_fp8_preprocess(qweight, qzeros_or_none=None, inplace=False)
gptq_marlin_24_gemm(a, b_q_weight, b_meta, b_scales, workspace, b_q_type, size_m, size_n, size_k)
machete_supported_schedules(a_type, b_type, group_scales_type, group_zeros_type=None, channel_scales_type=None, token_scales_type=None, out_type=None)
machete_mm(a, b_q, b_type, out_type=None, b_group_scales=None, b_group_zeros=None, b_group_size=None, b_channel_scales=None, a_token_scales=None, schedule=None)
machete_prepack_B(b_q_weight, a_type, b_type, group_scales_type)
dsv3_fused_a_gemm(output, mat_a, mat_b)
cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias=None)
cutlass_scaled_mm_azp(a, b, scale_a, scale_b, out_dtype, azp_adj, azp=None, bias=None)
cutlass_scaled_mm_supports_fp8(cuda_device_capability)
cutlass_scaled_mm_supports_block_fp8(cuda_device_capability)
cutlass_scaled_mm_supports_fp4(cuda_device_capability)
cutlass_group_gemm_supported(cuda_device_capability)
cutlass_sparse_scaled_mm_supported(cuda_device_capability)
cutlass_sparse_compress(a)
cutlass_scaled_sparse_mm(a, bt_nzs, bt_meta, scale_a, scale_b, out_dtype, bias=None)
cutlass_scaled_fp4_mm(a, b, block_scale_a, block_scale_b, alpha, out_dtype)
cutlass_fp4_moe_mm(out_tensors, a_tensors, b_tensors, a_scales, b_scales, alphas, problem_sizes, expert_offsets, sf_offsets)
cutlass_w4a8_mm(a, b_q, b_group_scales, b_group_size, b_channel_scales, a_token_scales, out_type=None, maybe_schedule=None)
cutlass_pack_scale_fp8(scales)
cutlass_encode_and_reorder_int4b(b)
cutlass_encode_and_reorder_int4b_grouped(b_tensors)
cutlass_w4a8_moe_mm(out_tensors, a_tensors, b_tensors, a_scales, b_scales, b_group_scales, b_group_size, expert_offsets, problem_sizes, a_strides, b_strides, c_strides, group_scale_strides, maybe_schedule=None)
allspark_w8a16_gemm(a, b_qweight, b_scales, b_qzeros, n, group_size, sm_count, sm_version, CUBLAS_M_THRESHOLD, has_zp, n32k16_reorder)
allspark_repack_weight(qweight, scale, zero_point=None, has_zp=False)
ggml_mul_mat_vec_a8(W, X, quant_type, row)
ggml_mul_mat_a8(W, X, quant_type, row)
ggml_moe_a8(X, W, sorted_token_ids, expert_ids, num_tokens_post_padded, quant_type, row, top_k, tokens)
ggml_moe_a8_vec(X, W, topk_ids, top_k, quant_type, row, tokens)
ggml_moe_get_block_size(quant_type)
LLMM1(a, b, rows_per_block)
wvSplitK(a, b, cu_count, bias=None)
wvSplitKQ(a, b, out_dtype, scale_a, scale_b, cu_count, bias=None)
wvSplitKrc(a, b, cu_count, bias=None)
topk_softmax(topk_weights, topk_ids, token_expert_indices, gating_output, renormalize=False, e_score_correction_bias=None)
topk_sigmoid(topk_weights, topk_ids, token_expert_indices, gating_output, renormalize=False, e_score_correction_bias=None)
grouped_topk(scores, num_expert_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0)
moe_sum(input, output)
dsv3_router_gemm(hidden_states, router_weight, output_dtype)
moe_align_block_size(topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad, expert_map=None)
batched_moe_align_block_size(max_tokens_per_batch, block_size, expert_num_tokens, sorted_ids, expert_ids, num_tokens_post_pad)
moe_lora_align_block_size(topk_ids, token_lora_mapping, num_experts, block_size, max_loras, max_num_tokens_padded, max_num_m_blocks, sorted_token_ids, experts_ids, num_tokens_post_pad, adapter_enabled, lora_ids, expert_map=None)
moe_wna16_gemm(input, output, b_qweight, b_scales, b_qzeros, topk_weights, sorted_token_ids, experts_ids, num_tokens_post_pad, top_k, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, bit)
moe_wna16_marlin_gemm(input, output, b_qweight, b_bias, b_scales, a_scales, global_scale, b_qzeros, g_idx, perm, workspace, sorted_token_ids, expert_ids, num_tokens_past_padded, topk_weights, moe_block_size, top_k, mul_topk_weights, b_q_type, size_m, size_n, size_k, is_k_full, use_atomic_add, use_fp32_reduce, is_zp_float, thread_k=-1, thread_n=-1, blocks_per_sm=-1)
moe_permute(hidden_states, a1q_scale, topk_ids, n_expert, n_local_expert=-1, expert_map=None, permuted_hidden_states=None)
moe_unpermute(out, permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset=None)
moe_permute_unpermute_supported()
shuffle_rows(input_tensor, dst2src_map)
cutlass_moe_mm(out_tensors, a_tensors, b_tensors, a_scales, b_scales, expert_offsets, problem_sizes, a_strides, b_strides, c_strides, per_act_token, per_out_ch)
get_cutlass_moe_mm_data(topk_ids, expert_offsets, problem_sizes1, problem_sizes2, input_permutation, output_permutation, num_experts, n, k, blockscale_offsets=None)
get_cutlass_moe_mm_problem_sizes(topk_ids, problem_sizes1, problem_sizes2, num_experts, n, k, blockscale_offsets=None, force_swap_ab=None)
get_cutlass_moe_mm_problem_sizes_from_expert_offsets(expert_first_token_offset, problem_sizes1, problem_sizes2, n, k, swap_ab)
get_cutlass_pplx_moe_mm_data(expert_offsets, problem_sizes1, problem_sizes2, expert_num_tokens, num_local_experts, padded_m, n, k)
get_cutlass_batched_moe_mm_data(expert_offsets, problem_sizes1, problem_sizes2, expert_num_tokens, num_local_experts, padded_m, n, k)
cutlass_blockwise_scaled_grouped_mm(output, a, b, scales_a, scales_b, problem_sizes, expert_offsets)
selective_scan_fwd(u, delta, A, B, C, D_, z_, delta_bias_, delta_softplus, query_start_loc, cache_indices, has_initial_state, ssm_states, pad_slot_id, block_size=1024, block_idx_first_scheduled_token=None, block_idx_last_scheduled_token=None, initial_state_idx=None)
init_custom_ar(ipc_tensors, rank_data, rank, fully_connected)
all_reduce(fa, inp, out, reg_buffer, reg_buffer_sz_bytes)
dispose(fa)
meta_size()
register_buffer(fa, ipc_tensors)
get_graph_buffer_ipc_meta(fa)
register_graph_buffers(fa, handles, offsets)
allocate_shared_buffer_and_handle(size)
open_mem_handle(mem_handle)
free_shared_buffer(ptr)
init_custom_qr(rank, world_size, qr_max_size=None)
qr_destroy(fa)
qr_get_handle(fa)
qr_open_handles(fa, handles)
qr_all_reduce(fa, inp, out, quant_level, cast_bf2half=False)
qr_max_size()
"""
