// reshape_and_cache_groups: reshape_and_cache for many tokens, whose slots are known by groups (group_slots).
//
//     key_cache[block, h, d / X, offset, d % X] = key[t, h, d]      value_cache[block, h, d, offset] = value[t, h, d]
//     for every slot of every listed group that has a mark and its token t; fp8: the codes of x / scale
//
// Slots of a group are neighbours in both caches, so tokens that go there are written together, in whole sectors, wherever they
// lie in slot_mapping. A thread block takes COLUMNS elements of a group's tokens, turns them around in shared memory, and writes
// them; then those of another group, because how many there are is not known before. blockIdx.x counts pieces of groups: keys and
// values, COLUMNS elements each.
//
// Constants
//     scalar_t      element type of key and value
//     cache_t       element type of the caches: scalar_t or an fp8 type
//     ROW_SIZE      elements of a token: heads * head size
//     BLOCK_SIZE    slots of a cache block
//     GROUP         slots of a group, at most 32; divides BLOCK_SIZE
//     X             neighbouring elements of a key
//     LOAD_VEC      elements of key and value in one memory access; divides ROW_SIZE and COLUMNS
//     KEY_VEC       elements of key_cache in one memory access; divides X and COLUMNS
//     RUN           elements of value_cache in one memory access; divides GROUP
//     COLUMNS       elements of each token; a multiple of 16
//     BATCH         vectors that a thread reads before it writes one
//     NUM_THREADS   threads in the block; at least GROUP

#include "cache.cuh"

using bits_t = word_of<int(sizeof(cache_t))>::type;
constexpr int PITCH = COLUMNS + 16 / int(sizeof(cache_t));  // the odd number of 16 bytes spreads rows over the banks
constexpr uint32_t PARTS = ceil_div(ROW_SIZE, COLUMNS);
static_assert(ROW_SIZE % LOAD_VEC == 0 && COLUMNS % LOAD_VEC == 0 && X % KEY_VEC == 0 && COLUMNS % KEY_VEC == 0);
static_assert(BLOCK_SIZE % GROUP == 0 && GROUP % RUN == 0 && GROUP <= 32 && GROUP <= NUM_THREADS);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1536 / NUM_THREADS)
reshape_and_cache_groups(const scalar_t* key,       // [num_tokens, ROW_SIZE]
                         const scalar_t* value,     // [num_tokens, ROW_SIZE]
                         cache_t* key_cache,        // [num_blocks, ROW_SIZE / X, BLOCK_SIZE, X]
                         cache_t* value_cache,      // [num_blocks, ROW_SIZE, BLOCK_SIZE]
                         const float* k_scale,      // one element
                         const float* v_scale,      // one element
                         const uint32_t* marks,     // [num_blocks * BLOCK_SIZE / GROUP]
                         const uint32_t* tokens,    // [num_blocks * BLOCK_SIZE]
                         const uint32_t* groups,    // [*count]
                         const uint32_t* count,     // one element
                         int64_t key_stride, int64_t value_stride) {
    await_previous_kernel();
    __shared__ alignas(16) bits_t tile[GROUP * PITCH];
    __shared__ uint32_t sources[GROUP];  // the token of each slot; where it has none, another one's
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
        // The next group is asked for early, and its mark while this one's tokens are written.
        const uint32_t next_group = at + gridDim.x < pieces ? groups[(at + gridDim.x) / (2 * PARTS)] : group;
        const Quotient over_scale(is_same<cache_t, scalar_t> ? 1.0f : is_value ? *v_scale : *k_scale);
        __syncthreads();

        const scalar_t* source = (is_value ? value : key) + first_column;
        const int64_t stride = is_value ? value_stride : key_stride;
        using vec_t = Vec<scalar_t, LOAD_VEC>;
        each_piece<NUM_THREADS, GROUP, COLUMNS / LOAD_VEC, BATCH>(
            [&](int row, int piece) {  // behind the last column, the last is read in vain
                return vec_t::load(source + int64_t(sources[row]) * stride + min(piece * LOAD_VEC, int(columns) - LOAD_VEC));
            },
            [&](int row, int piece, const vec_t& vec) {
                const auto kept = encode<cache_t>(vec, over_scale);
                bits_t* to = tile + row * PITCH + piece * LOAD_VEC;
                reinterpret_cast<Vec<bits_t, LOAD_VEC>*>(to)->template word<LOAD_VEC>(0) = kept.template word<LOAD_VEC>(0);
            });
        __syncthreads();

        const uint32_t next_mark = marks[next_group];
        const int64_t block = group / (BLOCK_SIZE / GROUP);
        const int begin = int(group % (BLOCK_SIZE / GROUP)) * GROUP;  // of the group in the block
        if (is_value) {
            constexpr uint32_t RUNS = GROUP / RUN, WHOLE = (1ull << RUN) - 1;
            bits_t* to = reinterpret_cast<bits_t*>(value_cache) + (block * ROW_SIZE + first_column) * BLOCK_SIZE + begin;
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
                if (mark >> offset & 1) vec.store(to + int64_t(element / X) * (BLOCK_SIZE * X) + offset * X + element % X);
            }
        }
        group = next_group;
        mark = next_mark;
    }
}
