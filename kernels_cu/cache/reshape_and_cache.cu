// reshape_and_cache: writes keys and values of tokens into the slots of a packed cache.
//
//     key_cache[block, h, d / X, offset, d % X] = key[t, h, d]      value_cache[block, h, d, offset] = value[t, h, d]
//     where block, offset = divmod(slot_mapping[t], BLOCK_SIZE)     fp8: x / scale, rounded
//     A slot that does not exist is skipped.
//
// Within a cache block, the stride between slots is X elements for keys and one element for values. So a CTA takes
// TOKENS tokens and COLUMNS elements of each, transposes them in shared memory, and stores them slot by slot. Values of
// RUN tokens are stored by one access if their slots are adjacent and begin at a multiple of RUN, else one by one.
//
// Threads: blockIdx.x counts groups of tokens, blockIdx.y groups of columns; blockIdx.z is 0 for keys, 1 for values.
//
// Constants
//     scalar_t      element type of key and value
//     cache_t       element type of the caches: scalar_t or an fp8 type
//     slot_t        element type of slot_mapping
//     ROW_SIZE      elements of a token: heads * head size
//     X             innermost dimension of key_cache
//     LOAD_VEC      elements of key and value in one memory access; divides ROW_SIZE and COLUMNS
//     KEY_VEC       elements of key_cache in one memory access; divides X and COLUMNS
//     RUN           elements of value_cache in one memory access; divides BLOCK_SIZE
//     TOKENS        tokens of a CTA; at most NUM_THREADS
//     COLUMNS       elements of each token in a CTA; a multiple of 16

#include "async.cuh"
#include "cache.cuh"
#include "paged.cuh"

using bits_t = word_of<int(sizeof(cache_t))>::type;
constexpr int PITCH = COLUMNS + 16 / int(sizeof(cache_t));  // rows begin on different banks
static_assert(ROW_SIZE % LOAD_VEC == 0 && COLUMNS % LOAD_VEC == 0 && X % KEY_VEC == 0 && COLUMNS % KEY_VEC == 0);
static_assert(BLOCK_SIZE % RUN == 0 && TOKENS <= NUM_THREADS);

template <int N>
DEVICE Vec<bits_t, N>& bits_at(bits_t* tile, int token, int column) {
    return *reinterpret_cast<Vec<bits_t, N>*>(tile + token * PITCH + column);
}

// Whether the CTA has RUN tokens from `token` on, with adjacent slots.
DEVICE bool begins_run(const slot_t* slots, int token) {
    if (token < 0 || token + RUN > TOKENS) return false;
    for (int i = 1; i < RUN; ++i) {
        if (slots[token + i] != int64_t(slots[token]) + i) return false;
    }
    return true;
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1024 / NUM_THREADS)
reshape_and_cache(const scalar_t* key,         // [num_tokens, ROW_SIZE]
                  const scalar_t* value,       // [num_tokens, ROW_SIZE]
                  cache_t* key_cache,          // [num_blocks, ROW_SIZE / X, BLOCK_SIZE, X]
                  cache_t* value_cache,        // [num_blocks, ROW_SIZE, BLOCK_SIZE]
                  const slot_t* slot_mapping,  // [num_tokens]
                  const float* k_scale,        // one element
                  const float* v_scale,        // one element
                  int64_t num_tokens, int64_t num_blocks, int64_t slot_mapping_stride, int64_t key_stride,
                  int64_t value_stride) {
    await_previous_kernel();
    __shared__ alignas(16) bits_t tile[TOKENS * PITCH];
    __shared__ slot_t slots[TOKENS];
    __shared__ int begins[TOKENS];  // 0: stored with an earlier token or not at all; 1: alone; 2: first of a run
    __shared__ int pieces[TOKENS];  // the tokens whose `begins` is not 0, in order
    const bool is_value = blockIdx.z;
    const int64_t first_token = int64_t(blockIdx.x) * TOKENS;
    const int first_column = blockIdx.y * COLUMNS;
    const int columns = min(COLUMNS, ROW_SIZE - first_column);

    const bool has_token = threadIdx.x < TOKENS && first_token + threadIdx.x < num_tokens;
    if (has_token) {  // this copy is in flight together with the loads of keys and values
        cp_async<sizeof(slot_t)>(slots + threadIdx.x, slot_mapping + (first_token + threadIdx.x) * slot_mapping_stride);
    }
    cp_async_commit();
    const scalar_t* source = (is_value ? value : key) + first_column;
    const int64_t stride = is_value ? value_stride : key_stride;
    const Quotient over_scale(is_same<cache_t, scalar_t> ? 1.0f : is_value ? *v_scale : *k_scale);
    using vec_t = Vec<scalar_t, LOAD_VEC>;
    constexpr int ROW_VECS = COLUMNS / LOAD_VEC;
    each_piece<NUM_THREADS, TOKENS, ROW_VECS, (TOKENS * ROW_VECS < 2 * NUM_THREADS ? 1 : 2)>(
        [&](int token, int piece) {  // after the last token or column, the last one is loaded and not used
            return vec_t::load(source + min(first_token + token, num_tokens - 1) * stride +
                               min(piece * LOAD_VEC, columns - LOAD_VEC));
        },
        [&](int token, int piece, const vec_t& vec) {
            const auto encoded = encode<cache_t>(vec, over_scale);
            bits_at<LOAD_VEC>(tile, token, piece * LOAD_VEC).template word<LOAD_VEC>(0) =
                encoded.template word<LOAD_VEC>(0);
        });
    cp_async_wait<0>();
    if (threadIdx.x < TOKENS) {
        const int64_t slot = has_token ? int64_t(slots[threadIdx.x]) : -1;
        slots[threadIdx.x] = slot < num_blocks * BLOCK_SIZE ? slot : -1;
    }
    __syncthreads();

    if (!is_value) {
        for (int at = threadIdx.x; at < TOKENS * (columns / KEY_VEC); at += NUM_THREADS) {
            const int token = at % TOKENS, column = at / TOKENS * KEY_VEC;
            const int64_t slot = slots[token];
            if (slot < 0) continue;
            const int64_t block = uint64_t(slot) / BLOCK_SIZE, offset = uint64_t(slot) % BLOCK_SIZE;
            const int element = first_column + column;
            bits_t* to = reinterpret_cast<bits_t*>(key_cache) +
                         ((block * (ROW_SIZE / X) + element / X) * BLOCK_SIZE + offset) * X;
            bits_at<KEY_VEC>(tile, token, column).store(to + element % X);
        }
        return;
    }

    if (threadIdx.x < TOKENS) {
        const int64_t slot = slots[threadIdx.x];
        const int ahead = slot < 0 ? 0 : int(slot % RUN);
        const bool joined = slot >= 0 && begins_run(slots, int(threadIdx.x) - ahead);
        begins[threadIdx.x] = slot < 0 || (joined && ahead) ? 0 : joined ? 2 : 1;
    }
    __syncthreads();
    int num_pieces = 0;
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
        if (begins[token] && token == threadIdx.x) pieces[num_pieces] = token;
        num_pieces += begins[token] != 0;
    }
    __syncthreads();

    for (int at = threadIdx.x; at < num_pieces * columns; at += NUM_THREADS) {
        const int token = pieces[at % num_pieces], column = at / num_pieces;
        const int64_t slot = slots[token];
        const int64_t block = uint64_t(slot) / BLOCK_SIZE, offset = uint64_t(slot) % BLOCK_SIZE;
        bits_t* to =
            reinterpret_cast<bits_t*>(value_cache) + (block * ROW_SIZE + first_column + column) * BLOCK_SIZE + offset;
        if (begins[token] == 2) {
            Vec<bits_t, RUN> run;
#pragma unroll
            for (int i = 0; i < RUN; ++i) run.data[i] = tile[(token + i) * PITCH + column];
            run.store(to);
        } else {
            *to = tile[token * PITCH + column];
        }
    }
}
