// moe_align: rows in the order of their experts, each expert's rows padded to a multiple of block_size.
//
//     sorted_token_ids    for each expert in order: its rows, in order, padded with num_rows to a multiple of
//                         block_size; num_rows after the last expert
//     experts_ids         the expert of each block of block_size slots; -1 after the last used block
//     num_tokens_post_pad slots of all experts, padding included
//     scatter_idx         with HAS_SCATTER: t for row t, -1 for a row that is skipped
//
// Row t of num_tokens * topk is a choice of token t / topk. A row is skipped if its expert does not exist or is not on
// this device. With LORA, blockIdx.x is an adapter, which has its own outputs for the rows of its tokens. Outputs of
// an adapter that is not enabled, or that lora_ids does not name, are not written.
//
// Threads: one cluster of CLUSTER blocks sorts all rows (expert_sort.cuh). All its threads fill the outputs with
// padding.
//
// Constants
//     id_t          element type of topk_ids
//     BIN_BITS      bits that hold the number of experts
//     CLUSTER       blocks that share the rows, one cluster
//     KEPT          most rows of a lane, kept in registers; 0: rows are read again (expert_sort.cuh)
//     HAS_MAP       expert_map gives the numbers of experts on this device
//     LORA          one alignment for each adapter
//     HAS_SCATTER   false when scatter_idx is null

#include "expert_sort.cuh"

using sort_t = ExpertSort<id_t, NUM_THREADS, CLUSTER, BIN_BITS, KEPT>;

// Fills elements[0 ... count - 1] by all threads of the cluster: whole 16-byte words, and single elements at the ends.
DEVICE void fill(int32_t* elements, int64_t count, int32_t value) {
    constexpr int PER_WORD = 4;
    const int64_t head = min(count, int64_t(-(uint64_t(elements) / sizeof(int32_t)) % PER_WORD));
    const int64_t words = (count - head) / PER_WORD, tail = head + words * PER_WORD;
    Vec<int32_t, PER_WORD> word;
#pragma unroll
    for (int i = 0; i < PER_WORD; ++i) word.data[i] = value;
    const int thread = sort_t::cluster_thread();
    for (int64_t i = thread; i < words; i += sort_t::CLUSTER_THREADS) word.store(elements + head + i * PER_WORD);
    if (thread < head) elements[thread] = value;
    if (thread < count - tail) elements[tail + thread] = value;
}

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
moe_align(const id_t* topk_ids,               // [num_tokens, topk]
          const int32_t* expert_map,          // [map_size]
          const int32_t* token_lora_mapping,  // [num_tokens]
          const int32_t* adapter_enabled,     // [max_loras]
          const int32_t* lora_ids,            // [num_lora_ids]
          int32_t* sorted_token_ids,          // [num_slots], of each adapter
          int32_t* experts_ids,               // [num_blocks], of each adapter
          int32_t* num_tokens_post_pad,       // one element, of each adapter
          int32_t* scatter_idx,               // [num_rows]
          int64_t num_rows, int64_t num_experts, int64_t num_ids, int64_t block_size, int64_t num_slots,
          int64_t num_blocks, int64_t topk, int64_t num_lora_ids, int sort_warps, int warp_rows) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ int is_named;
    const int lora = blockIdx.x;
    if constexpr (LORA) {
        if (threadIdx.x == 0) is_named = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < num_lora_ids; i += NUM_THREADS) {
            if (lora_ids[i] == lora) atomicExch(&is_named, 1);
        }
        __syncthreads();
        if (!is_named || !adapter_enabled[lora]) return;
        sorted_token_ids += lora * num_slots;
        experts_ids += lora * num_blocks;
        num_tokens_post_pad += lora;
    }

    sort_t sort(memory, topk_ids, int(num_experts), sort_warps, warp_rows, int(num_rows));
    const auto expert_of = [&](int row, id_t id) {
        if (LORA && token_lora_mapping[row / int(topk)] != lora) return NO_BIN;
        return local_expert<HAS_MAP>(id, expert_map, num_ids, sort.bins, NO_BIN);
    };
    // All slots and blocks are filled with padding while the ids are in flight; slots with rows are overwritten below.
    sort.count(expert_of, [&] {
        fill(sorted_token_ids, num_slots, int32_t(num_rows));
        fill(experts_ids, num_blocks, -1);
    });
    const uint32_t size = uint32_t(block_size);
    const uint32_t slots = sort.locate([&](uint32_t rows) { return (rows + size - 1) / size * size; });
    if (sort.cluster_thread() == 0) *num_tokens_post_pad = int32_t(slots);
    // The last threads come first: they are those without rows, if there are any.
    for (int64_t i = sort.CLUSTER_THREADS - 1 - sort.cluster_thread(); i * size < slots; i += sort.CLUSTER_THREADS) {
        experts_ids[i] = sort.bin_at(uint32_t(i * size));
    }
    sort.assign(expert_of, [&](int row, int expert, uint32_t slot) {
        if (expert != NO_BIN) sorted_token_ids[slot] = row;
        if constexpr (HAS_SCATTER) scatter_idx[row] = expert != NO_BIN ? row : -1;
    });
    leave_cluster<CLUSTER>();
}
