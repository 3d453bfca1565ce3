# ruff: noqa: E501
"""The schemas of vLLM 0.33's torch ops on GPUs that differ from those of 0.22 or are new, and the ops that are gone.

The ops of ROCm alone are among them; those of vLLM's CPU backend are not.
"""

from __future__ import annotations

SCHEMAS_0_33 = {
    "_C": """
marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor
gptq_marlin_repack(Tensor b_q_weight, SymInt size_k, SymInt size_n, int num_bits, bool is_a_8bit) -> Tensor
dsv3_fused_a_gemm(Tensor! output, Tensor mat_a, Tensor mat_b, bool enable_pdl=False) -> ()
rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()
fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()
fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(Tensor q_in, Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache, int q_head_padded, float eps, int cache_block_size, bool apply_q_norm=True, bool kv_mxfp8=False, bool apply_q_rope=True, bool is_q_interleaved=False) -> Tensor
silu_and_mul_with_clamp(Tensor! result, Tensor input, float limit, float alpha=1.0, float beta=0.0) -> ()
gptq_gemm(Tensor a, Tensor b_q_weight, Tensor b_gptq_qzeros, Tensor b_gptq_scales, bool use_exllama, bool use_v2_format, int bit) -> Tensor
gptq_shuffle(Tensor! q_weight, int bit) -> ()
direct_dcp_a2a_lse_reduce(Tensor partial_output, Tensor partial_lse, Tensor? seq_lens, Tensor? query_start_loc, Tensor peer_output_ptrs, Tensor peer_lse_ptrs, Tensor peer_signal_ptrs, Tensor! received_output, Tensor! received_lse, Tensor! received_signal, Tensor! epoch, Tensor! combined_output, int world_size, int rank, int max_num_tokens, bool is_lse_base_on_e) -> ()
direct_dcp_kv_gather(Tensor local_kv, Tensor! received_kv, Tensor! received_signal, Tensor! completion, Tensor! epoch, Tensor! gathered_kv, int world_size, int rank, int max_gathered_tokens, int kv_mc_ptr, int signal_mc_ptr) -> ()
direct_dcp_q_gather(Tensor local_query, Tensor! final_query, Tensor! received_signal, Tensor! completion, Tensor! epoch, int world_size, int rank, int max_num_tokens, int padded_num_heads, int query_mc_ptr, int signal_mc_ptr) -> ()
mxfp4_experts_quant_supported(int cuda_device_capability) -> bool
fp32_router_gemm(Tensor! output, Tensor mat_a, Tensor mat_b) -> ()
fused_deepseek_v4_kv_rope_insert(Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache, int cache_block_size, Tensor? fp8_scale=None, bool kv_mxfp8=False) -> ()
fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(Tensor! q, Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache, float eps, int cache_block_size, bool apply_q_norm=True) -> ()
fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(Tensor q, Tensor kv, Tensor! q_fp8, Tensor! k_cache, Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache, Tensor fp8_scale, Tensor q_fp8_scale_inv, float eps, int cache_block_size, bool apply_q_norm=True) -> ()
fused_kimi_k3_mla_key_concat_kv_cache_insert(Tensor! q, Tensor k_nope, Tensor k_pe, Tensor kv_c_normed, Tensor! k_out, Tensor! k_cache, Tensor slot_mapping, int cache_block_size, Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()
fused_kimi_k3_mla_key_concat_ds_mla_insert(Tensor! q, Tensor k_nope, Tensor k_pe, Tensor kv_c_normed, Tensor! k_out, Tensor! k_cache, Tensor slot_mapping, int cache_block_size, Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()
fused_kimi_k3_mla_kv_concat(Tensor k_nope, Tensor k_pe, Tensor! k_out) -> ()
fused_kimi_k3_mla_kv_concat_quant_fp8(Tensor k_nope, Tensor k_pe, Tensor v, Tensor! k_fp8, Tensor! v_fp8) -> ()
fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert(Tensor q, Tensor k_nope, Tensor k_pe, Tensor kv_c_normed, Tensor v, Tensor! q_fp8, Tensor! k_fp8, Tensor! v_fp8, Tensor! k_cache, Tensor slot_mapping, Tensor q_scale_inv, Tensor k_scale_inv, Tensor v_scale_inv, Tensor cache_scale_inv, int cache_block_size, Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()
fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(Tensor ql_nope, Tensor q_pe, Tensor kv_c_normed, Tensor k_pe, Tensor! mqa_q, Tensor! k_cache, Tensor slot_mapping, int cache_block_size, Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()
fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert(Tensor ql_nope, Tensor q_pe, Tensor kv_c_normed, Tensor k_pe, Tensor! mqa_q, Tensor! k_cache, Tensor slot_mapping, Tensor q_scale_inv, Tensor cache_scale_inv, int cache_block_size, Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()
fused_kimi_k3_mla_decode_q_concat_ds_mla_insert(Tensor ql_nope, Tensor q_pe, Tensor kv_c_normed, Tensor k_pe, Tensor! mqa_q, Tensor! k_cache, Tensor slot_mapping, int cache_block_size, Tensor? position_ids=None, Tensor? cos_sin_cache=None) -> ()
fused_qknorm_rope_cache(Tensor! q_out, Tensor! k_out, Tensor! v_out, Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, Tensor positions, Tensor slot_mapping, Tensor! k_cache, Tensor! v_cache, int head_dim, int num_q_heads, int num_kv_heads, int rotary_pairs, float epsilon, float norm_weight_bias, str kv_cache_dtype=\"auto\", Tensor? k_scale=None, Tensor? v_scale=None) -> ()
fused_muse_spark_qknorm_rope_kv_insert(Tensor! qkv, Tensor positions, int num_heads, int num_kv_heads, int head_dim, float eps, Tensor? cos_sin_cache, int rotary_dim, Tensor? slot_mapping, Tensor!? kv_cache, int block_size, str kv_cache_dtype, Tensor? k_scale=None, Tensor? v_scale=None, Tensor!? q_fp8_out=None, Tensor? q_scale=None) -> ()
fused_minimax_m3_qknorm_rope_kv_insert(Tensor! qkv, Tensor q_norm_weight, Tensor k_norm_weight, Tensor cos_sin_cache, Tensor positions, int num_heads, int num_kv_heads, int rotary_dim, float eps, Tensor? index_q_norm_weight, Tensor? index_k_norm_weight, int num_index_heads, Tensor? slot_mapping, Tensor? index_slot_mapping, Tensor!? kv_cache, Tensor!? index_cache, int block_size, Tensor!? q_out, Tensor!? index_q_out, str kv_cache_dtype, bool skip_index_branch=False, Tensor!? q_fp8_out=None, float q_fp8_scale=1.0, Tensor? kv_k_scale=None, Tensor? kv_v_scale=None) -> ()
fused_kda_decode(Tensor x, Tensor weight, Tensor? bias, Tensor! conv_state, Tensor raw_g, Tensor raw_beta, Tensor A_log, Tensor dt_bias, Tensor state_indices, Tensor! state, Tensor! out, float? lower_bound=None, Tensor? output_gate=None, Tensor? norm_weight=None, float norm_eps=1e-5) -> ()
fused_gdn_decode_post_conv_mtp(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor state_indices, Tensor cu_seqlens, Tensor num_accepted_tokens, Tensor! state, Tensor output_gate, Tensor norm_weight, Tensor! out, float scale, float norm_eps=1e-5, str output_gate_activation='silu') -> ()
fused_kda_prologue(Tensor q, Tensor k, Tensor v, Tensor raw_g, Tensor raw_beta, Tensor A_log, Tensor dt_bias, Tensor! qg, Tensor! w, Tensor! u, Tensor! kg_t, Tensor! aqk, Tensor! decay, Tensor cu_seqlens, Tensor chunk_indices, Tensor? conv_weight, Tensor(e!)? conv_state, Tensor? conv_state_indices, Tensor? conv_has_initial_state, float scale, float lower_bound) -> ()
fused_kda_chunk(Tensor qg, Tensor w, Tensor u, Tensor kg_t, Tensor aqk, Tensor decay, Tensor? initial_state, Tensor(a!)? final_state, Tensor! out, Tensor cu_seqlens, Tensor chunk_offsets, float scale, Tensor(b!)? group_state, int groups, Tensor(c!)? checkpoint_state=None, Tensor? checkpoint_offsets=None, Tensor? checkpoint_state_indices=None, Tensor(d!)? state_cache=None, Tensor? state_indices=None, Tensor? has_initial_state=None) -> ()
beam_allreduce_norm(Tensor input, Tensor residual, Tensor? post_weight, Tensor? next_weight, Tensor! hidden, Tensor!? normalized, int buffer_ptrs, Tensor! flags, int multicast_ptr, int local_ptr, int world, int rank, float post_eps, float next_eps, float x_scale, float r_scale, bool post_norm, bool next_norm, bool scaled, bool one_shot, bool small_batch, Tensor? experts, Tensor? expert_weights, Tensor? permutation, float routed_scale) -> ()
beam_allreduce(Tensor input, Tensor! output, int buffer_ptrs, Tensor! flags, int multicast_ptr, int world, int rank) -> ()
kimi_k3_attn_res(Tensor! prefix, Tensor? delta, Tensor! blocks, Tensor norm_weight, Tensor qk_weight, Tensor? output_norm_weight, Tensor! output, int num_blocks, int block_write_idx, float eps, float output_norm_eps) -> ()
cooperative_topk(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) -> ()
muse_spark_mul_tanh_soft_cap(Tensor! out, Tensor input, float multiplier, float soft_cap_temp) -> ()
situ_and_mul(Tensor! out, Tensor input, float beta=1.0, float linear_beta=-1.0) -> ()
situ_and_mul_quant(Tensor! out, Tensor! scale, Tensor input, float beta=1.0, float linear_beta=-1.0, int group_size=0, Tensor? num_valid_tokens=None, int topk=1) -> ()
masked_moe_activation(Tensor! out, Tensor input, Tensor valid_token_counts, str activation, float clamp_limit=0.0, float alpha=1.0, float beta=0.0, float situ_beta=1.0, float situ_linear_beta=-1.0) -> ()
relu_squared(Tensor! out, Tensor input) -> ()
vocab_parallel_embedding(Tensor! out, Tensor input_ids, Tensor weight, int org_vocab_start_index, int org_vocab_end_index, int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index) -> ()
ngram_compute_n_gram_ids(int ne_n, int ne_k, Tensor(a!) ne_weights, Tensor(b!) ne_mods, Tensor(c!) exclusive_ne_embedder_size_sums, Tensor(d!) exclusive_req_len_sums, Tensor(e!) ne_token_table, Tensor(f!) row_indices, Tensor(g!) column_starts, Tensor(h!) n_gram_ids) -> ()
octave_cache_store(Tensor key, Tensor value, Tensor! cache, Tensor slot_mapping, Tensor k_signs, Tensor v_signs, int fmt) -> ()
octave_decode(Tensor! out, Tensor query, Tensor cache, Tensor block_table, Tensor q_to_req, Tensor q_to_klen, Tensor! mid_o, Tensor k_signs, Tensor v_signs, float sm_scale, int num_kv_splits, int fmt, int query_group, bool use_wmma) -> ()
octave_decode_sparse(Tensor! out, Tensor query, Tensor cache, Tensor block_table, Tensor q_to_req, Tensor indices, Tensor! mid_o, Tensor k_signs, Tensor v_signs, float sm_scale, int num_kv_splits, int fmt, Tensor? positions=None, Tensor? wtab=None, Tensor? wtags=None, Tensor? stab=None, Tensor? stags=None) -> ()
octave_window_store(Tensor key, Tensor value, Tensor slot_mapping, Tensor positions, Tensor! wtab, Tensor! wtags, Tensor! wlocks, Tensor! stab, Tensor! stags, Tensor! slocks) -> ()
octave_rotate(Tensor! x, Tensor signs, bool k_layout, bool inverse) -> ()
octave_prefill(Tensor! out, Tensor q, Tensor k, Tensor v, Tensor cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, int max_query_len, float sm_scale, int fmt) -> ()
""",
    "_C_cache_ops": """
reshape_and_cache(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, bool interleaved_v=False) -> ()
concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor scale, bool skip_scale=False) -> ()
cp_gather_and_upconvert_fp8_kv_cache(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor workspace_starts, int batch_size, Tensor? seq_starts, Tensor? host_cache=None, Tensor? host_row_ids=None, Tensor? device_row_ids=None) -> ()
concat_and_cache_mla_grouped(Tensor kv_c, Tensor k_pe, Tensor kv_cache_ptrs, Tensor slot_mapping, int block_size, int block_stride, int entry_stride, Tensor? kv_scales=None, str kv_cache_dtype='auto') -> ()
hisparse_resolve_residency(Tensor host_cache, Tensor! hot_cache, Tensor hot_block_table, Tensor global_indices, Tensor! hot_indices, Tensor! device_global_indices, Tensor! lru_slots, Tensor? request_state_indices, int region_stride, int max_union_rows, Tensor(a!)? miss_mask=None, Tensor(b!)? stats=None, Tensor(c!)? attention_indices=None, int attention_block_stride=0, Tensor? request_ids=None, Tensor? source_block_table=None, int source_block_size=0, Tensor(d!)? resolved_global_indices=None, Tensor(e!)? valid_counts=None, Tensor(f!)? swap_host_physical_rows=None, Tensor(g!)? swap_device_physical_rows=None, Tensor(h!)? swap_counts=None, Tensor? resident_block_table=None, int resident_block_size=0, int resident_null_block=0) -> ()
hisparse_invalidate_written_slots(Tensor! device_global_indices, Tensor request_state_indices, Tensor req_id_per_token, Tensor written_slots) -> ()
hisparse_gather_plan(Tensor host_cache, Tensor! hot_cache, Tensor global_indices, Tensor hot_indices, Tensor miss_mask, Tensor? request_state_indices, Tensor(a!)? attention_indices=None, int attention_block_stride=0) -> ()
hisparse_gather_compact(Tensor host_cache, Tensor! hot_cache, Tensor miss_global_indices, Tensor miss_hot_indices, Tensor miss_counts) -> ()
cp_gather_and_upconvert_nvfp4_kv_cache(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor workspace_starts, int batch_size) -> ()
""",
    "_moe_C": """
topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, bool renormalize, Tensor? bias, Tensor? is_padding) -> ()
topk_sigmoid(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, bool renormalize, Tensor? bias, float routed_scaling_factor, Tensor? is_padding) -> ()
topk_softplus_sqrt(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, bool renormalize, float routed_scaling_factor, Tensor? bias, Tensor? input_ids, Tensor? tid2eid, Tensor? is_padding, Tensor? bias_vl=None, int image_sentinel_lo=0) -> ()
moe_sum(Tensor input, Tensor! output, Tensor? topk_ids=None, Tensor? expert_map=None) -> ()
moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map, Tensor(a!)? scatter_idx=None) -> ()
moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none, Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor! workspace, Tensor sorted_token_ids, Tensor! expert_ids, Tensor! num_tokens_past_padded, Tensor! topk_weights, int moe_block_size, int top_k, bool mul_topk_weights, int b_type_id, int size_m, int size_n, int size_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float, int thread_k, int thread_n, int blocks_per_sm) -> Tensor
fused_globalize_align_block_size(Tensor! topk_idx, Tensor psum, int rank_expert_offset, int global_num_experts, int local_num_experts, int block_size, Tensor! sorted_ids, Tensor! expert_ids, Tensor! num_tokens_post_pad, Tensor(a!)? scatter_idx=None) -> ()
moe_permute_with_scratch(Tensor input, Tensor topk_ids, Tensor token_expert_indices, Tensor? expert_map, int n_expert, int n_local_expert, int topk, Tensor! permuted_input, Tensor! expert_first_token_offset, Tensor! inv_permuted_idx, Tensor! permuted_idx, Tensor! sort_workspace, Tensor! permuted_experts_id, Tensor! sorted_row_idx, Tensor! topk_ids_for_sort) -> ()
moe_prepare_scatter(Tensor topk_ids, Tensor token_expert_indices, Tensor? expert_map, int n_expert, int n_local_expert, Tensor! expert_first_token_offset, Tensor! scatter_idx, Tensor! sort_workspace, Tensor! sorted_experts, Tensor! sorted_rows, Tensor! topk_ids_for_sort) -> ()
moe_permute_sort_workspace_size(int num_expanded_rows, int n_expert) -> int
""",
    "_rocm_C": """
paged_attention(Tensor! out, Tensor exp_sums, Tensor max_logits, Tensor tmp_out, Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, Tensor? query_start_loc, int block_size, int max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, Tensor? fp8_out_scale, str mfma_type, bool use_interleaved_v_cache=False) -> ()
wvSplitK_int4_g(Tensor in_a, Tensor in_b, Tensor in_scale, Tensor? in_zero_points, Tensor? in_bias, int CuCount, int group_size) -> Tensor
mxfp4_w4a8_gemv_rdna3(Tensor a, Tensor b_q, Tensor b_scale) -> Tensor
gptq_gemm_rdna3(Tensor a, Tensor b_q_weight, Tensor b_qzeros, Tensor b_scales, bool use_v2_format) -> Tensor
gptq_gemm_rdna3_wmma(Tensor a, Tensor b_q_weight, Tensor b_qzeros, Tensor b_scales, bool use_v2_format) -> Tensor
moe_gptq_gemm_rdna3(Tensor a, Tensor! c, Tensor b_q_weight, Tensor b_scales, Tensor b_qzeros, Tensor topk_weights, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, int top_k, int block_size_m, bool mul_topk_weight, int output_topk) -> ()
""",
    "_C_custom_ar": """
register_buffer(int fa, int[] ipc_tensors) -> ()
free_shared_buffer(int ptr) -> ()
custom_all_gather(int fa, Tensor inp, Tensor! out, int reg_buffer, int reg_buffer_sz_bytes) -> ()
mnnvl_lamport_all_gather(int fa, Tensor inp, Tensor! out, int local_buffer, int multicast_buffer, int epoch_buffer, int stage_sz_bytes) -> ()
custom_reduce_scatter(int fa, Tensor inp, Tensor! out, int reg_buffer, int reg_buffer_sz_bytes) -> ()
mnnvl_lamport_reduce_scatter(int fa, Tensor inp, Tensor! out, int local_buffer, int epoch_buffer, int stage_sz_bytes) -> ()
mnnvl_multimem_reduce_scatter(int fa, Tensor inp, Tensor! out, int local_buffer, int multicast_buffer, int stage_sz_bytes, int block_limit) -> ()
""",
    "_flashkda_C": """
get_workspace_size(int T_total, int H, int N=1) -> int
fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, Tensor(c!) workspace, Tensor A_log, Tensor dt_bias, float lower_bound, Tensor? initial_state=None, Tensor(b!)? final_state=None, Tensor? cu_seqlens=None, Tensor(d!)? checkpoint_state=None, Tensor? checkpoint_offsets=None) -> ()
""",
    "vllm": """
fused_moe_lora(Tensor(a0!) output, Tensor qcurr_hidden_states, Tensor[] lora_a_stacked, Tensor[] lora_b_stacked, Tensor topk_weights, Tensor? sorted_token_ids, Tensor expert_ids, Tensor? num_tokens_post_padded, Tensor token_lora_mapping, SymInt max_lora_rank, SymInt top_k_num, Tensor lora_ids, Tensor num_active_loras, Tensor adapter_enabled, SymInt shrink_block_size_m, SymInt shrink_block_size_n, SymInt shrink_block_size_k, SymInt shrink_group_size_m, SymInt shrink_num_warps, SymInt shrink_num_stages, SymInt shrink_split_k, SymInt expand_block_size_m, SymInt expand_block_size_n, SymInt expand_block_size_k, SymInt expand_group_size_m, SymInt expand_num_warps, SymInt expand_num_stages, SymInt expand_split_k, bool mul_routed_weight=False, bool fully_sharded=False, SymInt offset=0, bool add_inputs=True) -> ()
""",
}

# Ops of the earlier versions that 0.33 does not have.
REMOVED_0_33 = frozenset(
    [
        "paged_attention_v1",
        "paged_attention_v2",
        "convert_vertical_slash_indexes",
        "convert_vertical_slash_indexes_mergehead",
        "permute_cols",
        "ggml_dequantize",
        "gptq_marlin_gemm",
        "gptq_marlin_24_gemm",
        "cutlass_sparse_scaled_mm_supported",
        "cutlass_sparse_compress",
        "cutlass_scaled_sparse_mm",
        "allspark_w8a16_gemm",
        "rearrange_kn_weight_as_n32k16_order",
        "ggml_mul_mat_vec_a8",
        "ggml_mul_mat_a8",
        "ggml_moe_a8",
        "ggml_moe_a8_vec",
        "ggml_moe_get_block_size",
        "get_cutlass_moe_mm_problem_sizes",
        "get_cutlass_pplx_moe_mm_data",
        "cutlass_blockwise_scaled_grouped_mm",
        "copy_blocks",
        "copy_blocks_mla",
        "dsv3_router_gemm",
        "mxfp8_experts_quant",
        "cutlass_mxfp8_grouped_mm",
        "minimax_allreduce_rms",
    ]
)
