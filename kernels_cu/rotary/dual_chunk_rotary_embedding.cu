// dual_chunk_rotary_embedding: rotary embedding of keys by their positions, and of queries in five versions.
//
//     x' = T(T(x * cos) - T(y * sin)),   y' = T(T(y * cos) + T(x * sin))
//
// for the pairs (x, y) of the first ROTARY_DIM elements of each head (rotary.cuh). The angles of a token at position p,
// with c = p % chunk_len, are
//
//     key         row p of cos_sin_k_cache
//     query 0     row c of cos_sin_q_cache
//     query 1     row c of cos_sin_qc_cache
//     query 2     the last row of cos_sin_qc_cache
//     query 3     row c of cos_sin_qc_no_clamp_cache
//     query 4     row c of cos_sin_q_inter_cache
//
// The other elements of a head are copied. If a token's position is not in cos_sin_k_cache, its heads are copied.
//
// Threads: a thread takes PAIRS pairs of up to THREAD_HEADS heads of a token, and loads them once for all versions
// (HeadIndex in rotary.cuh).
//
// Constants
//     scalar_t       T: element type of everything but positions
//     position_t     element type of positions
//     NUM_HEADS_Q    heads of query
//     NUM_HEADS_K    heads of key
//     HEAD_SIZE      elements of a head
//     ROTARY_DIM     elements of a head that are rotated
//     IS_NEOX        which elements make a pair
//     PAIRS          adjacent pairs of a thread; divides ROTARY_DIM / 2
//     ACCESS_SIZE    elements of a head in one memory access
//     CACHE_ACCESS   elements of a table in one memory access
//     REST_ACCESS    elements in one memory access of the copy
//     THREAD_HEADS   the largest number of heads of a thread
//     BLOCK_GROUPS   threads of a block that share a token and an offset in its heads

#include "rotary.cuh"

constexpr int HALF = ROTARY_DIM / 2;
constexpr int LANES = HALF / PAIRS;
constexpr int VERSIONS = 5;  // versions of a query; version number 5 is the key
using vec_t = Vec<scalar_t, PAIRS>;
using pairs_t = Pairs<scalar_t, PAIRS, HALF, IS_NEOX, ACCESS_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
dual_chunk_rotary_embedding(scalar_t* query_out,               // [num_tokens, VERSIONS, NUM_HEADS_Q, HEAD_SIZE]
                            scalar_t* key_out,                 // [num_tokens, NUM_HEADS_K, HEAD_SIZE]
                            const position_t* positions,       // [num_tokens]
                            const scalar_t* query,             // [num_tokens, NUM_HEADS_Q, HEAD_SIZE]
                            const scalar_t* key,               // [num_tokens, NUM_HEADS_K, HEAD_SIZE]
                            const scalar_t* cos_sin_k_cache,   // [max_position, ROTARY_DIM]
                            const scalar_t* cos_sin_q_cache,   // [chunk_len, ROTARY_DIM]
                            const scalar_t* cos_sin_qc_cache,  // [chunk_len, ROTARY_DIM]
                            const scalar_t* cos_sin_qc_no_clamp_cache,  // [chunk_len, ROTARY_DIM]
                            const scalar_t* cos_sin_q_inter_cache,      // [chunk_len, ROTARY_DIM]
                            int64_t num_tokens, int64_t max_position, int chunk_len, int64_t positions_stride,
                            int64_t query_out_stride, int64_t key_out_stride, int64_t key_out_head_stride,
                            int64_t query_stride, int64_t query_head_stride, int64_t key_stride,
                            int64_t key_head_stride) {
    await_previous_kernel();
    const HeadIndex<NUM_THREADS, LANES, NUM_HEADS_Q + NUM_HEADS_K, THREAD_HEADS, BLOCK_GROUPS> at(num_tokens);
    if (!at.inside) return;
    const int first = at.lane * PAIRS;
    query_out += at.token * query_out_stride;
    key_out += at.token * key_out_stride;
    query += at.token * query_stride;
    key += at.token * key_stride;
    const auto source = [&](int head) {
        return head < NUM_HEADS_Q ? query + head * query_head_stride : key + (head - NUM_HEADS_Q) * key_head_stride;
    };

    const int64_t position = positions[at.token * positions_stride];
    pairs_t pairs[THREAD_HEADS];
    at.for_each([&](int i, int head) { pairs[i] = pairs_t::load(source(head), first); });
    const bool turns = position >= 0 && position < max_position;
    const int64_t key_row = turns ? position : 0;
    const int64_t row = uint32_t(key_row) % uint32_t(chunk_len);

#pragma unroll
    for (int version = 0; version <= VERSIONS; ++version) {
        const scalar_t* angles = version == 0   ? cos_sin_q_cache + row * ROTARY_DIM
                                 : version == 1 ? cos_sin_qc_cache + row * ROTARY_DIM
                                 : version == 2 ? cos_sin_qc_cache + int64_t(chunk_len - 1) * ROTARY_DIM
                                 : version == 3 ? cos_sin_qc_no_clamp_cache + row * ROTARY_DIM
                                 : version == 4 ? cos_sin_q_inter_cache + row * ROTARY_DIM
                                                : cos_sin_k_cache + key_row * ROTARY_DIM;
        const vec_t cosine = vec_t::load<CACHE_ACCESS>(angles + first);
        const vec_t sine = vec_t::load<CACHE_ACCESS>(angles + HALF + first);
        at.for_each([&](int i, int head) {
            if ((head < NUM_HEADS_Q) != (version < VERSIONS)) return;
            scalar_t* to = version < VERSIONS ? query_out + (version * NUM_HEADS_Q + head) * HEAD_SIZE
                                              : key_out + (head - NUM_HEADS_Q) * key_out_head_stride;
            pairs_t turned = pairs[i];
            if (turns) turn(turned.x, turned.y, cosine, sine);
            turned.store(to, first);
            copy_elements<LANES, HEAD_SIZE - ROTARY_DIM, REST_ACCESS>(to + ROTARY_DIM, source(head) + ROTARY_DIM,
                                                                      at.lane);
        });
    }
}
