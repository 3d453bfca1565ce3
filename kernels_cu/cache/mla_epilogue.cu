// mla_epilogue: what comes between the projections and the attention of multi-head latent attention: it writes queries,
// keys and values of heads and the cache entry of a token, with RoPE and conversion to fp8.
//
//     q_out[t, h] = [q_nope[t, h], rope(q_pe[t, h])]         k_out[t, h] = [k_nope[t, h], rope(k_pe[t])]
//     v_out[t, h] = v[t, h]                                  k_cache[block, offset] = [kv_c[t], rope(k_pe[t])]
//     fp8: x * scale_inv, rounded and saturating             where block, offset = divmod(slot_mapping[t], BLOCK_SIZE)
//     rope(x): rotates the pairs (2j, 2j + 1) if APPLY_ROPE: x' = x * cos - y * sin,  y' = y * cos + x * sin, with row
//     position_ids[t] of cos_sin_cache, in float32
//     entry_t uint8_t: an entry = [512 fp8 values, four float32 scales s, 64 elements rope(k_pe)], value = e4m3(x / s),
//     s = the smallest power of two not below max(max |x| / 448, 1e-4) for each 128 elements x of kv_c
//
// An entry is written for a slot that exists, of a token with a position in the table. Other tokens are not rotated.
//
// Thread mapping: the vectors of 8 elements that a token needs are numbered, those of its entry first, then those of q,
// k and v of each head. A thread has one vector. If entries have scales, 16 adjacent lanes share one.
//
// Constants
//     scalar_t      element type of q_nope, q_pe, k_nope, v and kv_c, of two bytes
//     pe_t          element type of k_pe: scalar_t, or the fp8 type of k_out, copied
//     query_t, key_t, value_t   element types of q_out, k_out and v_out: scalar_t or an fp8 type
//     entry_t       element type of k_cache: scalar_t, an fp8 type, or uint8_t for entries with scales
//     slot_t        element type of slot_mapping
//     position_t    element type of position_ids
//     NUM_HEADS     heads of a token
//     Q_SIZE, K_SIZE, V_SIZE   elements of a head of q_out, k_out and v_out; 0 without these
//     Q_FIRST       first element of a head of q_out that is written
//     IN_PLACE      q_out has the queries, too, and q_nope is null
//     Q_SPLIT       q_pe is a tensor of its own, else it follows q_nope in a head
//     LATENT_SIZE   elements of kv_c; 0 without a cache
//     ROPE_SIZE     elements of a head of q_pe and of k_pe
//     APPLY_ROPE    whether they are rotated
//     BLOCK_SIZE    slots of a block of k_cache
//     ACCESS_SIZE   elements in one memory access, but for k_cache
//     ANGLE_ACCESS  elements of cos_sin_cache in one memory access
//     ENTRY_ACCESS  elements of k_cache in one memory access

#include "cache.cuh"
#include "paged.cuh"
#include "reduce.cuh"
#include "rotary.cuh"

constexpr int VEC_SIZE = 8, PAIRS = VEC_SIZE / 2, HALF = ROPE_SIZE / 2, TILE_SIZE = 128;
constexpr bool SCALES = is_same<entry_t, uint8_t>;
constexpr int ENTRY_ITEMS = LATENT_SIZE ? (LATENT_SIZE + ROPE_SIZE) / VEC_SIZE : 0;
constexpr int Q_ITEMS = (Q_SIZE - Q_FIRST) / VEC_SIZE, K_ITEMS = K_SIZE / VEC_SIZE, V_ITEMS = V_SIZE / VEC_SIZE;
constexpr int HEAD_ITEMS = Q_ITEMS + K_ITEMS + V_ITEMS;
constexpr int ITEMS = ENTRY_ITEMS + NUM_HEADS * HEAD_ITEMS;
// Tiles of entries begin at lanes that are multiples of 16.
constexpr int TOKEN_ITEMS = SCALES ? ceil_div(ITEMS, 16) * 16 : ITEMS;
constexpr int SCALE_BYTES = LATENT_SIZE, ROPE_BYTES = LATENT_SIZE + LATENT_SIZE / TILE_SIZE * 4;  // offsets in an entry
constexpr int CODE_ACCESS = ENTRY_ACCESS < 8 ? ENTRY_ACCESS : 8, SCALE_ACCESS = ENTRY_ACCESS < 4 ? ENTRY_ACCESS : 4;
using vec_t = Vec<scalar_t, VEC_SIZE>;

// What a vector belongs to.
enum Part { NONE, ENTRY, QUERY, KEY, VALUE };

// Stores x, in fp8 times *scale_inv, or times 1 without a scale.
template <int ACCESS, typename T>
DEVICE void put(T* to, const float (&x)[VEC_SIZE], const float* scale_inv) {
    constexpr bool PLAIN = is_same<T, scalar_t>;
    float y[VEC_SIZE];
    const float factor = PLAIN || scale_inv == nullptr ? 1.0f : *scale_inv;
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) y[j] = PLAIN ? x[j] : ieee_multiply(x[j], factor);
    Vec<T, VEC_SIZE>::from_floats(y).template store<ACCESS>(to);
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1280 / NUM_THREADS)
mla_epilogue(const scalar_t* q_nope,          // [num_tokens, NUM_HEADS, Q_SIZE - ROPE_SIZE]
             const scalar_t* q_pe,            // [num_tokens, NUM_HEADS, ROPE_SIZE]
             const scalar_t* k_nope,          // [num_tokens, NUM_HEADS, K_SIZE - ROPE_SIZE]
             const pe_t* k_pe,                // [num_tokens, ROPE_SIZE]
             const scalar_t* v,               // [num_tokens, NUM_HEADS, V_SIZE]
             const scalar_t* kv_c,            // [num_tokens, LATENT_SIZE]
             query_t* q_out,                  // [num_tokens, NUM_HEADS, Q_SIZE]
             key_t* k_out,                    // [num_tokens, NUM_HEADS, K_SIZE]
             value_t* v_out,                  // [num_tokens, NUM_HEADS, V_SIZE]
             entry_t* k_cache,                // [num_blocks, BLOCK_SIZE, LATENT_SIZE + ROPE_SIZE or bytes]
             const slot_t* slot_mapping,      // [num_slots]
             const position_t* position_ids,  // [num_tokens]
             const float* cos_sin_cache,      // [max_position, ROPE_SIZE]
             const float* q_scale_inv, const float* k_scale_inv, const float* v_scale_inv,
             const float* cache_scale_inv,  // one element each
             int64_t num_tokens, int64_t num_slots, int64_t num_blocks, int64_t max_position, int64_t q_stride,
             int64_t q_head_stride, int64_t q_pe_stride, int64_t q_pe_head_stride, int64_t k_stride,
             int64_t k_head_stride, int64_t k_pe_stride, int64_t v_stride, int64_t v_head_stride, int64_t kv_c_stride,
             int64_t q_out_stride, int64_t q_out_head_stride, int64_t k_out_stride, int64_t k_out_head_stride,
             int64_t v_out_stride, int64_t v_out_head_stride, int64_t block_stride, int64_t slot_stride,
             int64_t slot_mapping_stride, int64_t positions_stride, int64_t table_stride) {
    await_previous_kernel();
    const uint64_t index = uint64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    const int64_t token = index / TOKEN_ITEMS;
    const int item = index % TOKEN_ITEMS;
    const int of_heads = max(item - ENTRY_ITEMS, 0);
    const int64_t head = of_heads / max(HEAD_ITEMS, 1);
    const int piece = of_heads % max(HEAD_ITEMS, 1);
    Part part = item < ENTRY_ITEMS ? ENTRY : piece < Q_ITEMS ? QUERY : piece < Q_ITEMS + K_ITEMS ? KEY : VALUE;
    if (token >= num_tokens || item >= ITEMS) part = NONE;

    int64_t position = 0, entry = NOWHERE;
    bool rotates = APPLY_ROPE;
    if (APPLY_ROPE && part != NONE) {
        position = position_ids[token * positions_stride];
        rotates = position >= 0 && position < max_position;
    }
    if (part == ENTRY && token < num_slots && (rotates || !APPLY_ROPE)) {
        const Pages<BLOCK_SIZE> pages{num_blocks, block_stride, slot_stride};
        entry = pages.at_slot(slot_mapping[token * slot_mapping_stride]);
    }

    // `element` of the row that is written; `rope`, the first of the vector's elements that rotate, if not negative.
    int element = item * VEC_SIZE, rope = element - LATENT_SIZE;
    const scalar_t* from = kv_c + token * kv_c_stride + element;
    if (part == QUERY) {
        element = Q_FIRST + piece * VEC_SIZE;
        rope = element - (Q_SIZE - ROPE_SIZE);
        const scalar_t* heads = IN_PLACE ? reinterpret_cast<const scalar_t*>(q_out) : q_nope;
        from = heads + token * q_stride + head * q_head_stride + element;
        if (Q_SPLIT && rope >= 0) from = q_pe + token * q_pe_stride + head * q_pe_head_stride + rope;
    } else if (part == KEY) {
        element = (piece - Q_ITEMS) * VEC_SIZE;
        rope = element - (K_SIZE - ROPE_SIZE);
        from = k_nope + token * k_stride + head * k_head_stride + element;
    } else if (part == VALUE) {
        element = (piece - Q_ITEMS - K_ITEMS) * VEC_SIZE;
        rope = -1;
        from = v + token * v_stride + head * v_head_stride + element;
    }
    const bool shared_key = (part == ENTRY || part == KEY) && rope >= 0;  // a vector of k_pe
    const pe_t* pe = k_pe + token * k_pe_stride + rope;

    key_t* key_to = k_out + token * k_out_stride + head * k_out_head_stride + element;
    if (!is_same<pe_t, scalar_t> && shared_key) {
        if (part == KEY) {
            const auto bits = Vec<uint8_t, VEC_SIZE>::load<ACCESS_SIZE>(reinterpret_cast<const uint8_t*>(pe));
            bits.store<ACCESS_SIZE>(reinterpret_cast<uint8_t*>(key_to));
        }
        part = NONE;
    }
    if (shared_key) from = reinterpret_cast<const scalar_t*>(pe);
    vec_t vec = vec_t::full(0.0f);
    if (part != NONE && (part != ENTRY || entry != NOWHERE)) vec = vec_t::load<ACCESS_SIZE>(from);
    float x[VEC_SIZE];
    vec.to_floats(x);
    if (APPLY_ROPE && rotates && rope >= 0 && part != NONE) {
        float cosine[PAIRS], sine[PAIRS];
        const float* angles = cos_sin_cache + position * table_stride + rope / 2;
        load_floats<ANGLE_ACCESS>(angles, cosine);
        load_floats<ANGLE_ACCESS>(angles + HALF, sine);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) rotate(x[2 * j], x[2 * j + 1], cosine[j], sine[j]);
    }

    if constexpr (SCALES) {
        constexpr float largest = Codes<fp8_e4m3_t>::largest;
        const float max_abs = lane_reduce<Max, TILE_SIZE / VEC_SIZE>(vec.absmax());  // all lanes of a warp take part
        if (part == ENTRY && entry != NOWHERE) {
            uint8_t* bytes = reinterpret_cast<uint8_t*>(k_cache) + entry;
            if (rope >= 0) {
                Vec<uint8_t, 16> rotated;
                rotated.word<16>(0) = (APPLY_ROPE ? vec_t::from_floats(x) : vec).template word<VEC_SIZE>(0);
                rotated.store<ENTRY_ACCESS>(bytes + ROPE_BYTES + rope * 2);
            } else {
                const float scale = power_of_two_above(fmaxf(ieee_divide(max_abs, largest), 1e-4f));
                Vec<uint8_t, VEC_SIZE> quants;
                quants.word<VEC_SIZE>(0) = encode<fp8_e4m3_t>(vec, Quotient(scale)).template word<VEC_SIZE>(0);
                quants.store<CODE_ACCESS>(bytes + element);
                if (element % TILE_SIZE == 0) {
                    store_float<SCALE_ACCESS>(bytes + SCALE_BYTES + element / TILE_SIZE * 4, scale);
                }
            }
        }
    } else {
        if (part == ENTRY && entry != NOWHERE) put<CODE_ACCESS>(k_cache + entry + element, x, cache_scale_inv);
    }
    if (part == QUERY) {
        put<ACCESS_SIZE>(q_out + token * q_out_stride + head * q_out_head_stride + element, x, q_scale_inv);
    } else if (part == KEY) {
        put<ACCESS_SIZE>(key_to, x, k_scale_inv);
    } else if (part == VALUE) {
        put<ACCESS_SIZE>(v_out + token * v_out_stride + head * v_out_head_stride + element, x, v_scale_inv);
    }
}
