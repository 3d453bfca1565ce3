// deepseek_v4_insert: applies RMS norm and RoPE to the query heads of DeepSeek-V4's attention and RoPE to the shared
// key, and writes the key into a slot of a paged cache.
//
//     q_out[t, h] = rope(x / sqrt(mean(x^2) + eps)) for x = q_in[t, h];  0 for h >= NUM_HEADS
//     key         = rope(kv[t]);   rope(x): rotates elements 448 to 511 in pairs (448 + 2j, 449 + 2j):
//                   x' = x * cos - y * sin,  y' = y * cos + x * sin, with row position_ids[t] of cos_sin_cache
//     entry       = T(key), or e4m3(key / k_scale) if entry_t is an fp8 type; else bytes, with groups of GROUP elements:
//     s[g]        = the smallest power of two not below max(max |T(key)|, 1e-4) / 448 over group g
//     GROUP = 64: a block of k_cache = BLOCK_SIZE entries [448 elements e4m3(T(key) / s), 64 elements of T(key)], then
//                   BLOCK_SIZE entries [7 biased exponents of s, a byte of 0]
//     GROUP = 32: an entry = [512 elements e4m3(T(key) / s), 16 biased exponents of s]
//
// Computed in float32 and rounded once to T, the dtype of kv; fp8 queries are e4m3(q * q_scale_inv), not rounded
// before. NaN is ignored in the maximum and stored as -448 in fp8. If cos_sin_cache has no row for its position, a
// token is not rotated and its key is not written. A key without an existing slot is not written either.
//
// Thread mapping: 32 lanes share a head. Lane i holds elements 8i to 8i + 7 and 256 + 8i to 263 + 8i, so that the last
// eight lanes hold the rotated elements, and adjacent lanes share a group of the cache. The padded heads of a token and
// then its key are distributed round-robin: lane group g of the token takes heads g, g + GROUPS, and so on.
//
// Constants
//     scalar_t        T: element type of q_in and kv, of two bytes
//     query_t         element type of q_out: T or an fp8 type
//     entry_t         element type of k_cache: T, an fp8 type, or uint8_t for bytes
//     slot_t          element type of slot_mapping
//     position_t      element type of position_ids
//     NUM_HEADS       heads of q_in
//     PADDED_HEADS    heads of q_out; 0 for keys alone
//     APPLY_NORM      queries are normalised
//     APPLY_ROPE      queries are rotated
//     IN_PLACE        q_out has the queries, too, and q_in is null
//     INTERLEAVED     a token's queries are [32, heads, 16] in memory, else [heads, 512]
//     BLOCK_SIZE      slots of a block of k_cache
//     GROUP           elements that share a scale in a cache of bytes
//     ROUNDS          heads of a group of lanes
//     ACCESS_SIZE     elements of q_in, kv and q_out in one memory access
//     ANGLE_ACCESS    elements of cos_sin_cache in one memory access
//     ENTRY_ACCESS    elements of k_cache in one memory access

#include "cache.cuh"
#include "paged.cuh"
#include "reduce.cuh"
#include "rotary.cuh"

constexpr int VEC_SIZE = 8, LANES = 32, VECS = 2, PAIRS = VEC_SIZE / 2;
constexpr int HEAD_SIZE = VECS * LANES * VEC_SIZE, ROPE_SIZE = 64, NOPE_SIZE = HEAD_SIZE - ROPE_SIZE;
constexpr int HALF = ROPE_SIZE / 2, CHUNK = 16;  // CHUNK: adjacent elements of a head in the interleaved layout
constexpr bool BYTES = is_same<entry_t, uint8_t>, TAIL_SCALES = GROUP == 64;
constexpr int CODES = TAIL_SCALES ? NOPE_SIZE : HEAD_SIZE;  // quantized elements of an entry of bytes
constexpr int ENTRY_BYTES = NOPE_SIZE + 2 * ROPE_SIZE,
              SCALE_BYTES = 8;           // of an entry, and of its scales after the block
constexpr int HEADS = PADDED_HEADS + 1;  // the key is the last
constexpr int GROUPS = ceil_div(HEADS, ROUNDS);
constexpr int CODE_ACCESS = ENTRY_ACCESS < 8 ? ENTRY_ACCESS : 8;
using vec_t = Vec<scalar_t, VEC_SIZE>;

// Vector `i` of the lane begins at this element of a head.
DEVICE int element_of(int i, int lane) { return (i * LANES + lane) * VEC_SIZE; }

// The offset of an element of a head among the queries of a token.
DEVICE int64_t in_queries(int element, int head, int heads, int64_t head_stride) {
    if constexpr (!INTERLEAVED) return head * head_stride + element;
    return (int64_t(element / CHUNK) * heads + head) * CHUNK + element % CHUNK;
}

// The fp8 quants of x * reciprocal.
template <typename code_t>
DEVICE Vec<code_t, VEC_SIZE> codes_of(const float (&x)[VEC_SIZE], float reciprocal) {
    constexpr float largest = Codes<code_t>::largest;
    float y[VEC_SIZE];
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) y[j] = fminf(fmaxf(ieee_multiply(x[j], reciprocal), -largest), largest);
    return Vec<code_t, VEC_SIZE>::from_floats(y);
}

// x, or its fp8 quants under a scale with this reciprocal.
template <typename T>
DEVICE Vec<T, VEC_SIZE> stored(const float (&x)[VEC_SIZE], float reciprocal) {
    if constexpr (is_same<T, scalar_t>) {
        return vec_t::from_floats(x);
    } else {
        return codes_of<T>(x, reciprocal);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
deepseek_v4_insert(const scalar_t* q_in,            // [num_tokens, NUM_HEADS, 512]
                   const scalar_t* kv,              // [num_tokens, 512]
                   entry_t* k_cache,                // [num_blocks, bytes] or [num_blocks, BLOCK_SIZE, 512]
                   const slot_t* slot_mapping,      // [num_slots]
                   const position_t* position_ids,  // [num_tokens]
                   const float* cos_sin_cache,      // [max_position, 64]
                   const float* k_scale,            // one element, for fp8 entries
                   const float* q_scale_inv,        // one element, for fp8 queries
                   query_t* q_out,                  // [num_tokens, PADDED_HEADS, 512]
                   int64_t num_tokens, int64_t num_slots, int64_t num_blocks, int64_t max_position, int64_t q_stride,
                   int64_t q_head_stride, int64_t kv_stride, int64_t block_stride, int64_t slot_stride,
                   int64_t slot_mapping_stride, int64_t positions_stride, float eps) {
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
            const int element = element_of(i, lane);
            const scalar_t* queries = IN_PLACE ? reinterpret_cast<const scalar_t*>(q_out) : q_in;
            const scalar_t* query = queries + token * q_stride + in_queries(element, head, NUM_HEADS, q_head_stride);
            const scalar_t* from = head < NUM_HEADS ? query : kv + token * kv_stride + element;
            if (exists && (head < NUM_HEADS || head == PADDED_HEADS)) vecs[round][i] = vec_t::load<ACCESS_SIZE>(from);
        }
    }
    const int64_t position = position_ids[token * positions_stride];
    const bool rotates = position >= 0 && position < max_position;
    const int rope = element_of(VECS - 1, lane) - NOPE_SIZE;  // the first rotated element of the lane, if not negative
    float cosine[PAIRS], sine[PAIRS];
    if (rotates && rope >= 0) {
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
        if constexpr (APPLY_NORM) sum = lane_reduce<Sum, LANES>(sum);  // for the key, too: all lanes must take part
        const float inverse_rms = is_key || !APPLY_NORM ? 1.0f : rsqrtf(sum / HEAD_SIZE + eps);
        float max_abs[VECS];
#pragma unroll
        for (int i = 0; i < VECS; ++i) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) x[i][j] = APPLY_NORM ? ieee_multiply(x[i][j], inverse_rms) : x[i][j];
            if (i == VECS - 1 && rotates && rope >= 0 && (is_key || APPLY_ROPE)) {
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) rotate(x[i][2 * j], x[i][2 * j + 1], cosine[j], sine[j]);
            }
            if constexpr (BYTES) max_abs[i] = lane_reduce<Max, GROUP / VEC_SIZE>(vec_t::from_floats(x[i]).absmax());
        }
        if (!exists || head >= HEADS) continue;
        if (!is_key) {
            const float reciprocal = is_same<query_t, scalar_t> ? 1.0f : *q_scale_inv;
#pragma unroll
            for (int i = 0; i < VECS; ++i) {
                auto out = stored<query_t>(x[i], reciprocal);
                if (head >= NUM_HEADS) out = out.full(0.0f);
                out.template store<ACCESS_SIZE>(q_out + token * PADDED_HEADS * HEAD_SIZE +
                                                in_queries(element_of(i, lane), head, PADDED_HEADS, HEAD_SIZE));
            }
            continue;
        }
        if (token >= num_slots || !rotates) continue;
        const int64_t slot = slot_mapping[token * slot_mapping_stride];
        const int64_t at = Pages<BLOCK_SIZE>{num_blocks, block_stride, slot_stride}.at_slot(slot);
        if (at == NOWHERE) continue;
        if constexpr (!BYTES) {
            const float reciprocal = is_same<entry_t, scalar_t> ? 1.0f : ieee_divide(1.0f, *k_scale);
#pragma unroll
            for (int i = 0; i < VECS; ++i) {
                stored<entry_t>(x[i], reciprocal).template store<CODE_ACCESS>(k_cache + at + element_of(i, lane));
            }
        } else {
            uint8_t* bytes_of_cache = reinterpret_cast<uint8_t*>(k_cache);
            uint8_t* entry = bytes_of_cache + at;
            uint8_t* scale_bytes = entry + HEAD_SIZE;
            if constexpr (TAIL_SCALES) {
                scale_bytes = bytes_of_cache + Pages<BLOCK_SIZE>{num_blocks, block_stride, SCALE_BYTES}.at_slot(slot) +
                              BLOCK_SIZE * ENTRY_BYTES;
            }
#pragma unroll
            for (int i = 0; i < VECS; ++i) {
                const int element = element_of(i, lane);
                const vec_t rounded = vec_t::from_floats(x[i]);
                if (element >= CODES) {
                    Vec<uint8_t, 16> bytes;
                    bytes.word<16>(0) = rounded.template word<VEC_SIZE>(0);
                    bytes.template store<ENTRY_ACCESS>(entry + CODES + 2 * (element - CODES));
                    if (element == CODES) scale_bytes[SCALE_BYTES - 1] = 0;
                    continue;
                }
                constexpr float largest = Codes<fp8_e4m3_t>::largest;
                const float scale = power_of_two_above(ieee_divide(fmaxf(max_abs[i], 1e-4f), largest));
                float v[VEC_SIZE];
                rounded.to_floats(v);
                Vec<uint8_t, VEC_SIZE> quants;
                quants.word<VEC_SIZE>(0) = codes_of<fp8_e4m3_t>(v, ieee_divide(1.0f, scale)).template word<VEC_SIZE>(0);
                quants.template store<CODE_ACCESS>(entry + element);
                if (element % GROUP == 0) scale_bytes[element / GROUP] = exponent_of(scale);
            }
        }
    }
}
