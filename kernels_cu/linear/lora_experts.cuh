// lora_experts.cuh: the pairs of a token and an expert that a CTA multiplies by LoRA adapters, with their weights.
//
// Choice k of token t is the pair t * top_k + k. Adapter l of expert e is weight l * num_experts + e; with num_experts
// 1, all experts share the weight of an adapter.
//
// SORTED: adapter l has a list of its pairs, as moe_lora_align_block_size makes it, in blocks of block_size slots with
// one expert each. Tiles of slots follow each other, adapter by adapter; a tile has one adapter. Otherwise tiles are of
// pairs in their order, and the adapter is that of the token.
#pragma once
#include "lora_slices.cuh"

template <bool SORTED, typename index_t>
struct ExpertLists {
    const index_t* expert_ids;              // [max_loras, num_blocks]; [num_pairs] unless SORTED
    const int32_t* adapter_enabled;         // [max_loras]
    const int32_t* token_lora_mapping;      // [num_pairs / top_k]; null if SORTED
    const int32_t* sorted_token_ids;        // [max_loras, num_slots]
    const int32_t* num_tokens_post_padded;  // [max_loras]
    const int32_t* lora_ids;                // [num_lora_ids]
    int64_t num_pairs;
    int top_k, max_loras, num_experts, num_slots, num_blocks, block_size, num_lora_ids;

    // Row `local` of tile number `tile` of ROWS rows. Every lane of the warp takes part, with the same tile.
    template <int ROWS>
    DEVICE LoraRow row(int tile, int local) const {
        int64_t pair = -1, lora = -1, expert = -1;
        if constexpr (SORTED) {
            const int tiles = ceil_div(num_slots, ROWS), slot = tile % tiles * ROWS + local;
            lora = tile / tiles;
            // All loads are in flight together. The list of an adapter that is not named or enabled is uninitialised.
            const bool is_slot = local < ROWS && slot < num_slots && slot / block_size < num_blocks;
            const int end = num_tokens_post_padded[lora], enabled = adapter_enabled[lora];
            if (is_slot) {
                pair = sorted_token_ids[lora * num_slots + slot];
                expert = expert_ids[lora * num_blocks + slot / block_size];
            }
            bool is_named = false;
            for (int i = threadIdx.x % WARP_SIZE; i < num_lora_ids; i += WARP_SIZE) is_named |= lora_ids[i] == lora;
            if (!any_lane(is_named) || !enabled || slot >= end) pair = -1;
        } else if (local < ROWS && int64_t(tile) * ROWS + local < num_pairs) {
            pair = int64_t(tile) * ROWS + local;
            lora = token_lora_mapping[pair / top_k];
            expert = expert_ids[pair];
            if (lora < 0 || lora >= max_loras || !adapter_enabled[lora]) expert = -1;
        }
        if (num_experts == 1 && expert > 0) expert = 0;
        const bool exists = pair >= 0 && pair < num_pairs, has_lora = exists && expert >= 0 && expert < num_experts;
        return {pair, has_lora ? int(lora * num_experts + expert) : -1, exists};
    }
};
