// reshape_and_cache_groups: reshape_and_cache for many tokens, which group_slots has sorted by groups of adjacent
// slots.
//
//     key_cache[block, h, d / X, offset, d % X] = key[t, h, d]      value_cache[block, h, d, offset] = value[t, h, d]
//     for every slot with a mark of every listed group, and the token t of the slot; fp8: x / scale, rounded
//
// The slots of a group are adjacent in both caches: their tokens are stored together, in whole sectors, for any order
// of slot_mapping.
//
// Threads: a piece is COLUMNS elements of the keys, or of the values, of one group's tokens. A block transposes a piece
// in shared memory and stores it, then goes on to piece blockIdx.x + gridDim.x: how many groups there are is known on
// the device only.
//
// Constants
//     scalar_t      element type of key and value
//     cache_t       element type of the caches: scalar_t or an fp8 type
//     ROW_SIZE      elements of a token: heads * head size
//     GROUP         slots of a group, at most 32 and at most NUM_THREADS; divides BLOCK_SIZE
//     X             innermost dimension of key_cache
//     LOAD_VEC      elements of key and value in one memory access; divides ROW_SIZE and COLUMNS
//     KEY_VEC       elements of key_cache in one memory access; divides X and COLUMNS
//     RUN           elements of value_cache in one memory access; divides GROUP
//     COLUMNS       elements of each token in a piece; a multiple of 16

#include "cache.cuh"

using bits_t = word_of<int(sizeof(cache_t))>::type;
constexpr int PITCH = COLUMNS + 16 / int(sizeof(cache_t));  // rows begin on different banks
constexpr uint32_t PARTS = ceil_div(ROW_SIZE, COLUMNS);
static_assert(ROW_SIZE % LOAD_VEC == 0 && COLUMNS % LOAD_VEC == 0 && X % KEY_VEC == 0 && COLUMNS % KEY_VEC == 0);
static_assert(BLOCK_SIZE % GROUP == 0 && GROUP % RUN == 0 && GROUP <= 32 && GROUP <= NUM_THREADS);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1536 / NUM_THREADS)
reshape_and_cache_groups(const scalar_t* key,     // [num_tokens, ROW_SIZE]
                         const scalar_t* value,   // [num_tokens, ROW_SIZE]
                         cache_t* key_cache,      // [num_blocks, ROW_SIZE / X, BLOCK_SIZE, X]
                         cache_t* value_cache,    // [num_blocks, ROW_SIZE, BLOCK_SIZE]
                         const float* k_scale,    // one element
                         const float* v_scale,    // one element
                         const uint32_t* marks,   // [num_blocks * BLOCK_SIZE / GROUP]
                         const uint32_t* tokens,  // [num_blocks * BLOCK_SIZE]
                         const uint32_t* groups,  // [*count]
                         const uint32_t* count,   // one element
                         int64_t key_stride, int64_t value_stride) {
    await_previous_kernel();
    __shared__ alignas(16) bits_t tile[GROUP * PITCH];
    __shared__ uint32_t sources[GROUP];  // the token of each slot; for a slot without a token, any token of the group
    const uint32_t thread = thread_of<NUM_THREADS>();
    const uint64_t pieces = uint64_t(*count) * (2 * PARTS);
    if (blockIdx.x >= pieces) return;
    uint32_t group = groups[blockIdx.x / (2 * PARTS)], mark = marks[group];
    for (uint64_t at = blockIdx.x; at < pieces; at += gridDim.x) {
        const uint32_t part = at % (2 * PARTS);
        const bool is_value = part >= PARTS;
        const int first_column = int(part % PARTS) * COLUMNS;
        const uint32_t columns = ROW_SIZE % COLUMNS ? min(COLUMNS, ROW_SIZE - first_column) : COLUMNS;
        if (thread < GROUP) {
            const uint32_t offset = mark >> thread & 1 ? thread : lowest_bit(mark);
            sources[thread] = tokens[int64_t(group) * GROUP + offset];
        }
        // The number of the next group is loaded early, and its mark while the tokens of this group are stored.
        const uint32_t next_group = at + gridDim.x < pieces ? groups[(at + gridDim.x) / (2 * PARTS)] : group;
        const Quotient over_scale(is_same<cache_t, scalar_t> ? 1.0f : is_value ? *v_scale : *k_scale);
        __syncthreads();

        const scalar_t* source = (is_value ? value : key) + first_column;
        const int64_t stride = is_value ? value_stride : key_stride;
        using vec_t = Vec<scalar_t, LOAD_VEC>;
        each_piece<NUM_THREADS, GROUP, COLUMNS / LOAD_VEC, BATCH>(
            [&](int row, int piece) {  // after the last column, the last one is loaded and not used
                return vec_t::load(source + int64_t(sources[row]) * stride +
                                   min(piece * LOAD_VEC, int(columns) - LOAD_VEC));
            },
            [&](int row, int piece, const vec_t& vec) {
                const auto encoded = encode<cache_t>(vec, over_scale);
                bits_t* to = tile + row * PITCH + piece * LOAD_VEC;
                reinterpret_cast<Vec<bits_t, LOAD_VEC>*>(to)->template word<LOAD_VEC>(0) =
                    encoded.template word<LOAD_VEC>(0);
            });
        __syncthreads();

        const uint32_t next_mark = marks[next_group];
        const int64_t block = group / (BLOCK_SIZE / GROUP);
        const int begin = int(group % (BLOCK_SIZE / GROUP)) * GROUP;  // first slot of the group in its block
        if (is_value) {
            constexpr uint32_t RUNS = GROUP / RUN, WHOLE = (1ull << RUN) - 1;
            bits_t* to =
                reinterpret_cast<bits_t*>(value_cache) + (block * ROW_SIZE + first_column) * BLOCK_SIZE + begin;
            for (uint32_t i = thread; i < columns * RUNS; i += NUM_THREADS) {
                const uint32_t column = i / RUNS, offset = i % RUNS * RUN, wanted = mark >> offset & WHOLE;
                const bits_t* from = tile + offset * PITCH + column;
                bits_t* run = to + int64_t(column) * BLOCK_SIZE + offset;
                Vec<bits_t, RUN> vec;
#pragma unroll
                for (int j = 0; j < RUN; ++j) vec.data[j] = from[j * PITCH];
                if (wanted == WHOLE) {
                    vec.store(run);
                } else {
#pragma unroll
                    for (int j = 0; j < RUN; ++j) {
                        if (wanted >> j & 1) run[j] = vec.data[j];
                    }
                }
            }
        } else {
            bits_t* to = reinterpret_cast<bits_t*>(key_cache) + (block * ROW_SIZE * BLOCK_SIZE) + begin * X;
            for (uint32_t i = thread; i < GROUP * columns / KEY_VEC; i += NUM_THREADS) {
                const uint32_t offset = i % GROUP, column = i / GROUP * KEY_VEC, element = first_column + column;
                const auto vec = *reinterpret_cast<const Vec<bits_t, KEY_VEC>*>(tile + offset * PITCH + column);
                if (mark >> offset & 1)
                    vec.store(to + int64_t(element / X) * (BLOCK_SIZE * X) + offset * X + element % X);
            }
        }
        group = next_group;
        mark = next_mark;
    }
}
