// fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert: applies RMS norm and RoPE to the query heads of DeepSeek-V4's
// attention and RoPE to the shared key, and writes the quantized key into a slot of a paged cache.
//
//     q_out[t, h] = rope(x / sqrt(mean(x^2) + eps)) for x = q_in[t, h];  0 for h >= NUM_HEADS
//     key         = T(rope(kv[t]));   rope(x): rotates elements 448 to 511 in pairs (448 + 2j, 449 + 2j):
//                   x' = x * cos - y * sin,  y' = y * cos + x * sin, with row position_ids[t] of cos_sin_cache
//     s[g]        = the smallest power of two not below max(max |key|, 1e-4) / 448 over group g of 64 elements, g < 7
//     a block of k_cache = BLOCK_SIZE entries [448 elements e4m3(key / s), 64 elements of key], then BLOCK_SIZE entries
//                   [7 biased exponents of s, a byte of 0]
//
// Computed in float32 and rounded once to T, the dtype of q_in. NaN is ignored in the maximum and stored as -448. If
// cos_sin_cache has no row for its position, a token is not rotated and its key is not written. A key without an
// existing slot is not written either.
//
// Thread mapping: 32 lanes share a head. Lane i holds elements 8i to 8i + 7 and 256 + 8i to 263 + 8i, so that the last
// eight lanes hold the rotated elements, and eight lanes share a group of the cache. The padded heads of a token and
// then its key are distributed round-robin: lane group g of the token takes heads g, g + GROUPS, and so on.
//
// Constants
//     scalar_t        T: element type of q_in, kv and q_out, of two bytes
//     slot_t          element type of slot_mapping
//     position_t      element type of position_ids
//     NUM_HEADS       heads of q_in
//     PADDED_HEADS    heads of q_out
//     BLOCK_SIZE      slots of a block of k_cache
//     ROUNDS          heads of a group of lanes
//     ACCESS_SIZE     elements of q_in, kv and q_out in one memory access
//     ANGLE_ACCESS    elements of cos_sin_cache in one memory access
//     ENTRY_ACCESS    bytes of k_cache in one memory access

#include "cache.cuh"
#include "paged.cuh"
#include "reduce.cuh"

constexpr int VEC_SIZE = 8, LANES = 32, VECS = 2, PAIRS = VEC_SIZE / 2;
constexpr int HEAD_SIZE = VECS * LANES * VEC_SIZE, ROPE_SIZE = 64, NOPE_SIZE = HEAD_SIZE - ROPE_SIZE;
constexpr int HALF = ROPE_SIZE / 2, QUANT_SIZE = 64, QUANT_LANES = QUANT_SIZE / VEC_SIZE;
constexpr int ENTRY_BYTES = NOPE_SIZE + 2 * ROPE_SIZE, SCALE_BYTES = NOPE_SIZE / QUANT_SIZE + 1;
constexpr int HEADS = PADDED_HEADS + 1;  // the key is the last
constexpr int GROUPS = ceil_div(HEADS, ROUNDS);
constexpr int CODE_ACCESS = ENTRY_ACCESS < 8 ? ENTRY_ACCESS : 8;
using vec_t = Vec<scalar_t, VEC_SIZE>;

// Vector `i` of the lane begins at this element of a head.
DEVICE int element_of(int i, int lane) { return (i * LANES + lane) * VEC_SIZE; }

// Rotates the pairs of `x`, which are elements of a head from `element` on.
DEVICE void turn(float (&x)[VEC_SIZE], const float (&cosine)[PAIRS], const float (&sine)[PAIRS]) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
        const float a = x[2 * j], b = x[2 * j + 1];
        x[2 * j] = a * cosine[j] - b * sine[j];
        x[2 * j + 1] = b * cosine[j] + a * sine[j];
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(const scalar_t* q_in,            // [num_tokens, NUM_HEADS, 512]
                                                  const scalar_t* kv,              // [num_tokens, 512]
                                                  uint8_t* k_cache,                // [num_blocks, bytes]
                                                  const slot_t* slot_mapping,      // [num_slots]
                                                  const position_t* position_ids,  // [num_tokens]
                                                  const float* cos_sin_cache,      // [max_position, 64]
                                                  scalar_t* q_out,                 // [num_tokens, PADDED_HEADS, 512]
                                                  int64_t num_tokens, int64_t num_slots, int64_t num_blocks,
                                                  int64_t max_position, int64_t q_stride, int64_t q_head_stride,
                                                  int64_t kv_stride, int64_t block_stride, int64_t slot_mapping_stride,
                                                  int64_t positions_stride, float eps) {
    await_previous_kernel();
    const int lane = threadIdx.x % LANES;
    const uint64_t group = (uint64_t(blockIdx.x) * NUM_THREADS + threadIdx.x) / LANES;
    const bool exists = group < uint64_t(num_tokens) * GROUPS;
    const int64_t token = exists ? group / GROUPS : 0;
    const int first = group % GROUPS;

    vec_t vecs[ROUNDS][VECS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int head = first + round * GROUPS;
#pragma unroll
        for (int i = 0; i < VECS; ++i) {
            vecs[round][i] = vec_t::full(0.0f);
            const scalar_t* from =
                head < NUM_HEADS ? q_in + token * q_stride + head * q_head_stride : kv + token * kv_stride;
            if (exists && (head < NUM_HEADS || head == PADDED_HEADS)) {
                vecs[round][i] = vec_t::load<ACCESS_SIZE>(from + element_of(i, lane));
            }
        }
    }
    const int64_t position = position_ids[token * positions_stride];
    const bool turns = position >= 0 && position < max_position;
    const int rope = element_of(VECS - 1, lane) - NOPE_SIZE;  // the first rotated element of the lane, if not negative
    float cosine[PAIRS], sine[PAIRS];
    if (turns && rope >= 0) {
        const float* angles = cos_sin_cache + position * ROPE_SIZE + rope / 2;
        load_floats<ANGLE_ACCESS>(angles, cosine);
        load_floats<ANGLE_ACCESS>(angles + HALF, sine);
    }

#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int head = first + round * GROUPS;
        const bool is_key = head == PADDED_HEADS;
        float x[VECS][VEC_SIZE];
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < VECS; ++i) {
            vecs[round][i].to_floats(x[i]);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) sum += x[i][j] * x[i][j];
        }
        sum = lane_reduce<Sum, LANES>(sum);  // for the key, too: all lanes of a warp must take part
        const float inverse_rms = is_key ? 1.0f : rsqrtf(sum / HEAD_SIZE + eps);
        float max_abs[VECS];
#pragma unroll
        for (int i = 0; i < VECS; ++i) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) x[i][j] *= inverse_rms;
            if (i == VECS - 1 && turns && rope >= 0) turn(x[i], cosine, sine);
            vecs[round][i] = vec_t::from_floats(x[i]);
            max_abs[i] = lane_reduce<Max, QUANT_LANES>(vecs[round][i].absmax());
        }
        if (!exists || head >= HEADS) continue;
        if (!is_key) {
#pragma unroll
            for (int i = 0; i < VECS; ++i) {
                if (head >= NUM_HEADS) vecs[round][i] = vec_t::full(0.0f);
                vecs[round][i].template store<ACCESS_SIZE>(q_out + (token * PADDED_HEADS + head) * HEAD_SIZE +
                                                           element_of(i, lane));
            }
            continue;
        }
        if (token >= num_slots || !turns) continue;
        const int64_t slot = slot_mapping[token * slot_mapping_stride];
        const int64_t entry = Pages<BLOCK_SIZE>{num_blocks, block_stride, ENTRY_BYTES}.at_slot(slot);
        if (entry == NOWHERE) continue;
        const int64_t scales = Pages<BLOCK_SIZE>{num_blocks, block_stride, SCALE_BYTES}.at_slot(slot);
        uint8_t* scale_bytes = k_cache + scales + BLOCK_SIZE * ENTRY_BYTES;
#pragma unroll
        for (int i = 0; i < VECS; ++i) {
            const int element = element_of(i, lane);
            if (element >= NOPE_SIZE) {
                Vec<uint8_t, 16> bytes;
                bytes.word<16>(0) = vecs[round][i].template word<VEC_SIZE>(0);
                bytes.template store<ENTRY_ACCESS>(k_cache + entry + NOPE_SIZE + 2 * (element - NOPE_SIZE));
                if (element == NOPE_SIZE) scale_bytes[SCALE_BYTES - 1] = 0;
                continue;
            }
            const float scale = power_of_two_above(ieee_divide(fmaxf(max_abs[i], 1e-4f), Codes<fp8_e4m3_t>::largest));
            const float reciprocal = ieee_divide(1.0f, scale);
            float v[VEC_SIZE];
            vecs[round][i].to_floats(v);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                v[j] = fminf(fmaxf(v[j] * reciprocal, -Codes<fp8_e4m3_t>::largest), Codes<fp8_e4m3_t>::largest);
            }
            Vec<uint8_t, VEC_SIZE> codes;
            codes.word<VEC_SIZE>(0) = Vec<fp8_e4m3_t, VEC_SIZE>::from_floats(v).template word<VEC_SIZE>(0);
            codes.template store<CODE_ACCESS>(k_cache + entry + element);
            if (element % QUANT_SIZE == 0) scale_bytes[element / QUANT_SIZE] = exponent_of(scale);
        }
    }
}
