// indexer_k_quant_and_cache: quantises a token's indexer key by groups and writes it into the indexer's paged cache.
//
//     s = max(max |x|, 1e-4) / 448, rounded up to a power of two if POWER_OF_TWO
//     for a group x of GROUP_SIZE elements; NaN is ignored in the maximum
//     K[offset] = e4m3(x / s), S[offset, group] = s          in the cache block `block`
//     where block, offset = divmod(slot_mapping[t], BLOCK_SIZE); a slot that does not exist is skipped
//
// A cache block holds the fp8 keys K of all its slots, then the scales S of all its slots.
//
// Threads: LANES lanes share a group and hold all of it in registers.
//
// Constants
//     scalar_t       element type of k
//     slot_t         element type of slot_mapping
//     HEAD_SIZE      elements of a key
//     GROUP_SIZE     elements under one scale; divides HEAD_SIZE
//     POWER_OF_TWO   scales are powers of two
//     VEC_SIZE       divides GROUP_SIZE
//     SCALE_ACCESS   bytes of a scale in one memory access
//     LANES          lanes that share a group

#include "cache.cuh"
#include "paged.cuh"
#include "quant.cuh"
#include "reduce.cuh"

constexpr int GROUPS = HEAD_SIZE / GROUP_SIZE;
constexpr int LANE_VECS = ceil_div(GROUP_SIZE / VEC_SIZE, LANES);
using vec_t = Vec<scalar_t, VEC_SIZE>;
static_assert(HEAD_SIZE % GROUP_SIZE == 0 && GROUP_SIZE % VEC_SIZE == 0);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
indexer_k_quant_and_cache(const scalar_t* k,           // [num_tokens, HEAD_SIZE]
                          uint8_t* kv_cache,           // [num_blocks, BLOCK_SIZE, HEAD_SIZE + 4 * GROUPS]
                          const slot_t* slot_mapping,  // [num_tokens]
                          int64_t num_tokens, int64_t num_blocks, int64_t slot_mapping_stride, int64_t k_stride,
                          int64_t block_stride) {
    await_previous_kernel();
    const int64_t index = int64_t(blockIdx.x) * (NUM_THREADS / LANES) + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    const int64_t token = uint64_t(index) / GROUPS;
    const int group = uint64_t(index) % GROUPS;
    const bool inside = token < num_tokens;

    vec_t vecs[LANE_VECS];
    float absmax = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_VECS; ++i) {
        const int element = (lane + i * LANES) * VEC_SIZE;
        vecs[i] = vec_t::full(0.0f);
        if (inside && element < GROUP_SIZE) vecs[i] = vec_t::load(k + token * k_stride + group * GROUP_SIZE + element);
        absmax = fmaxf(absmax, vecs[i].absmax());
    }
    absmax = lane_reduce<Max, LANES>(absmax);
    const int64_t slot = inside ? int64_t(slot_mapping[token * slot_mapping_stride]) : -1;
    if (slot < 0 || slot >= num_blocks * BLOCK_SIZE) return;
    float scale = ieee_divide(fmaxf(absmax, 1e-4f), Codes<fp8_e4m3_t>::largest);
    if (POWER_OF_TWO) scale = power_of_two_above(scale);

    uint8_t* block = kv_cache + int64_t(uint64_t(slot) / BLOCK_SIZE) * block_stride;
    const int offset = uint64_t(slot) % BLOCK_SIZE;
    const Quotient over_scale(scale);
#pragma unroll
    for (int i = 0; i < LANE_VECS; ++i) {
        const int element = (lane + i * LANES) * VEC_SIZE;
        if (element >= GROUP_SIZE) continue;
        Vec<uint8_t, VEC_SIZE> codes;
        codes.template word<VEC_SIZE>(0) = encode<fp8_e4m3_t>(vecs[i], over_scale).template word<VEC_SIZE>(0);
        codes.store(block + offset * HEAD_SIZE + group * GROUP_SIZE + element);
    }
    if (lane == 0) store_float<SCALE_ACCESS>(block + BLOCK_SIZE * HEAD_SIZE + (offset * GROUPS + group) * 4, scale);
}
