// rotary_embedding: rotary embedding of query and key heads, in place.
//
//     x' = T(T(x * cos) - T(y * sin)),   y' = T(T(y * cos) + T(x * sin))
//
// or, if angles are float32 and T is not, x' = T(x * cos - y * sin), y' = T(y * cos + x * sin) in float32,
// for the pairs (x, y) of ROTARY_DIM elements of each head, from element rope_dim_offset on (rotary.cuh). cos and sin
// belong to the position of the token; INVERSE rotates by the negative angle.
//
// With three AXES (multimodal positions) a token has three positions, and each pair takes the position of one axis: the
// first SECTION_T pairs that of axis 0, the next SECTION_H pairs that of axis 1, the rest that of axis 2. INTERLEAVED:
// pairs are assigned to the axes round-robin until axis 1 or 2 has all of its pairs; after that, axis 0 gets the pairs
// of that axis.
//
// A token with a position that is not in the table is left as it is.
//
// Threads: a thread rotates PAIRS pairs of up to THREAD_HEADS heads of a token, and loads cos and sin once for all
// heads (HeadIndex in rotary.cuh). The loads of the heads are issued before the position is needed.
//
// Constants
//     scalar_t       T: element type of query and key
//     angle_t        element type of cos_sin_cache: T or float
//     position_t     element type of positions
//     NUM_HEADS_Q    heads of query
//     NUM_HEADS_K    heads of key; 0 if key is null
//     ROTARY_DIM     elements of a head that are rotated
//     IS_NEOX        which elements make a pair
//     INVERSE        sines are negated
//     AXES           positions of a token: 1 or 3
//     SECTION_T      pairs of axis 0, if there are three axes
//     SECTION_H      pairs of axis 1
//     INTERLEAVED    pairs are assigned to the axes round-robin
//     LEADING        leading dimensions that number the tokens: 1 or 2
//     PAIRS          adjacent pairs of a thread; divides ROTARY_DIM / 2; their cosines fit into 16 bytes
//     ACCESS_SIZE    elements of query or key in one memory access
//     CACHE_ACCESS   elements of cos_sin_cache in one memory access
//     THREAD_HEADS   the largest number of heads of a thread
//     BLOCK_GROUPS   threads of a block that share a token and an offset in its heads

#include "rotary.cuh"

constexpr int HALF = ROTARY_DIM / 2;
constexpr int SECTION_W = HALF - SECTION_T - SECTION_H;
using angles_t = Vec<angle_t, PAIRS>;
using pairs_t = Pairs<scalar_t, PAIRS, HALF, IS_NEOX, ACCESS_SIZE>;

// The position axis of a pair.
constexpr DEVICE int axis_of(int pair) {
    if (INTERLEAVED) {
        return pair % 3 == 1 && pair < 3 * SECTION_H ? 1 : pair % 3 == 2 && pair < 3 * SECTION_W ? 2 : 0;
    }
    return pair < SECTION_T ? 0 : pair < SECTION_T + SECTION_H ? 1 : 2;
}

// Cosines or sines of PAIRS pairs from `first` on. `table` begins at the cosines or the sines of row 0 of the cache.
DEVICE angles_t load_angles(const angle_t* table, const int64_t (&position)[AXES], int first) {
    angles_t angles = angles_t::load<CACHE_ACCESS>(table + position[0] * ROTARY_DIM + first);
    if constexpr (AXES == 3) {
#pragma unroll
        for (int axis = 1; axis < AXES; ++axis) {
            const angles_t other = angles_t::load<CACHE_ACCESS>(table + position[axis] * ROTARY_DIM + first);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                if (axis_of(first + i) == axis) angles.data[i] = other.data[i];
            }
        }
    }
    return angles;
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
rotary_embedding(const position_t* positions,   // [AXES, num_tokens]
                 scalar_t* query,               // [num_tokens, NUM_HEADS_Q, head_size]
                 scalar_t* key,                 // [num_tokens, NUM_HEADS_K, head_size] or null
                 const angle_t* cos_sin_cache,  // [max_position, ROTARY_DIM]
                 int64_t num_tokens, int size1, int64_t max_position, int64_t rope_dim_offset, int64_t axis_stride,
                 int64_t positions_stride0, int64_t positions_stride1, int64_t query_stride0, int64_t query_stride1,
                 int64_t query_head_stride, int64_t key_stride0, int64_t key_stride1, int64_t key_head_stride) {
    await_previous_kernel();
    const HeadIndex<NUM_THREADS, HALF / PAIRS, NUM_HEADS_Q + NUM_HEADS_K, THREAD_HEADS, BLOCK_GROUPS> at(num_tokens);
    if (!at.inside) return;
    const int first = at.lane * PAIRS;
    positions += token_offset<LEADING>(at.token, size1, positions_stride0, positions_stride1);
    query += token_offset<LEADING>(at.token, size1, query_stride0, query_stride1) + rope_dim_offset;
    key += token_offset<LEADING>(at.token, size1, key_stride0, key_stride1) + rope_dim_offset;
    const auto address = [&](int head) {
        return head < NUM_HEADS_Q ? query + head * query_head_stride : key + (head - NUM_HEADS_Q) * key_head_stride;
    };

    int64_t position[AXES];
#pragma unroll
    for (int axis = 0; axis < AXES; ++axis) position[axis] = positions[axis * axis_stride];
    pairs_t pairs[THREAD_HEADS];
    at.for_each([&](int i, int head) { pairs[i] = pairs_t::load(address(head), first); });

#pragma unroll
    for (int axis = 0; axis < AXES; ++axis) {
        if (position[axis] < 0 || position[axis] >= max_position) return;
    }
    const angles_t cosine = load_angles(cos_sin_cache, position, first);
    angles_t sine = load_angles(cos_sin_cache + HALF, position, first);
    if constexpr (INVERSE) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) sine.data[i] = from_float<angle_t>(-to_float(sine.data[i]));
    }
    at.for_each([&](int i, int head) {
        turn_by(pairs[i].x, pairs[i].y, cosine, sine);
        pairs[i].store(address(head), first);
    });
}
