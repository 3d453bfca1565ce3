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

    // A tile in use, and the number of them all. SORTED: slots of a list; otherwise pairs in their order.
    struct Tile { int lora, tile, count; };

    // Tile number `number` of ROWS rows. Every lane of the warp takes part, with the same number. The list of an
    // adapter that is not named or enabled is uninitialised.
    template <int ROWS>
    DEVICE Tile tile(int number) const {
        if constexpr (!SORTED) return {-1, number, int(ceil_div(num_pairs, int64_t(ROWS)))};
        Tile found = {-1, 0, 0};
        for (int first = 0; first < max_loras; first += WARP_SIZE) {
            const int lane = threadIdx.x % WARP_SIZE, lora = first + lane;
            const bool exists = lora < max_loras, enabled = exists && adapter_enabled[lora];
            const int end = exists ? num_tokens_post_padded[lora] : 0;
            bool is_named = false;
            for (int i = 0; i < num_lora_ids; ++i) is_named |= lora_ids[i] == lora;
            const int tiles = enabled && is_named ? ceil_div(min(max(end, 0), num_slots), ROWS) : 0;
            int until = tiles;  // of this adapter and the ones before
#pragma unroll
            for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
                const int before = shfl<WARP_SIZE>(until, max(lane - distance, 0));
                if (lane >= distance) until += before;
            }
            until += found.count;
            const lane_mask_t here = ballot(number >= until - tiles && number < until);
            if (here != 0) {
                const int at = lowest_bit(here);
                found.lora = first + at;
                found.tile = number - shfl<WARP_SIZE>(until - tiles, at);
            }
            found.count = shfl<WARP_SIZE>(until, WARP_SIZE - 1);
        }
        return found;
    }
    // Row `local` of a tile of ROWS rows.
    template <int ROWS>
    DEVICE LoraRow row(const Tile& of, int local) const {
        int64_t pair = -1, lora = of.lora, expert = -1;
        if constexpr (SORTED) {
            const int slot = of.tile * ROWS + local;
            const int end = num_tokens_post_padded[lora];
            if (local < ROWS && slot < min(end, num_slots) && slot / block_size < num_blocks) {
                pair = sorted_token_ids[lora * num_slots + slot];
                expert = expert_ids[lora * num_blocks + slot / block_size];
            }
        } else if (local < ROWS && int64_t(of.tile) * ROWS + local < num_pairs) {
            pair = int64_t(of.tile) * ROWS + local;
            lora = token_lora_mapping[pair / top_k];
            expert = expert_ids[pair];
            if (lora < 0 || lora >= max_loras || !adapter_enabled[lora]) expert = -1;
        }
        if (num_experts == 1 && expert > 0) expert = 0;
        const bool exists = pair >= 0 && pair < num_pairs, has_lora = exists && expert >= 0 && expert < num_experts;
        return {pair, has_lora ? int(lora * num_experts + expert) : -1, exists};
    }
};
