// mla_upconvert: converts a paged cache of latent entries of 656 bytes ("fp8_ds_mla") to 16-bit entries, for sparse
// attention of many query tokens, which would convert each entry once for every list that has it.
//
//     entries[s, i] = T(x[s, i] * scale[s, i / 128])     i < 512
//     entries[s, 512 + i] = rope[s, i]                   i < 64; 16-bit elements already
//
// Thread mapping: 32 threads per slot; a thread converts two runs of 8 elements with a stride of 256, and eight threads
// copy 8 elements of the rotated key each. Stores are not evict-first: the lists read the entries from L2.
//
// Constants
//     query_t        T: half_t or bf16_t
//     cache_t        fp8_e4m3_t
//     PAGE_SIZE      slots of a page of the cache
//     IS_DS_MLA      true (mla_entry.cuh)

#include "mla_entry.cuh"

constexpr int LANES = 32, VEC_SIZE = 8, HALF = LATENT_SIZE / 2;  // HALF: elements between the two runs of a thread
static_assert(IS_DS_MLA);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 2048 / NUM_THREADS)
mla_upconvert(query_t* entries,                    // [num_slots, ENTRY_SIZE]
              const cache_t* kv_c_and_k_pe_cache,  // [num_slots / PAGE_SIZE, PAGE_SIZE, an entry]
              int64_t num_slots, int64_t page_stride, int64_t slot_stride) {
    await_previous_kernel();
    const int64_t slot = int64_t(blockIdx.x) * (NUM_THREADS / LANES) + threadIdx.x / LANES;
    if (slot >= num_slots) return;
    const int lane = threadIdx.x % LANES, at = lane * VEC_SIZE;
    const cache_t* const from = kv_c_and_k_pe_cache + slot / PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride;
    query_t* const to = entries + slot * ENTRY_SIZE;
    const bool has_rope = lane < ROPE_SIZE / VEC_SIZE;
    uint2 values[2];
    float scales[2];
    uint4 rope{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int element = half * HALF + at;
        values[half] = *reinterpret_cast<const uint2*>(from + element);
        scales[half] = reinterpret_cast<const float*>(from + SCALES_AT)[element / SCALED_SIZE];
    }
    if (has_rope) rope = *reinterpret_cast<const uint4*>(from + ROPE_AT + lane * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 elements[1];
        widen_scaled_fp8<query_t>(values[half], scales[half], elements);
        *reinterpret_cast<uint4*>(to + half * HALF + at) = elements[0];
    }
    if (has_rope) *reinterpret_cast<uint4*>(to + LATENT_SIZE + at) = rope;
}
