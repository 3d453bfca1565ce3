// ggml_dequantize: a matrix in one of GGUF's quantised types, in floating point.
//
//     out[e] = T(element e % LENGTH of block e / LENGTH), in float32, rounded once more
//
// A block of threads takes TILE_VECS vectors of eight elements for each thread: it copies their blocks of the format, which lie
// one after another, to shared memory as they are, and beside them the format's grid, if it has one. Then neighbouring threads
// decode neighbouring vectors, so that stores are whole lines.
//
// Constants
//     scalar_t       element type of out
//     FORMAT         the type, as ggml.cuh names it
//     TILE_VECS      vectors of a thread
//     ACCESS         bytes in one access to W
//     OUT_ACCESS     elements in one access to out
//     NUM_THREADS    threads in the block
//     MIN_BLOCKS     blocks a multiprocessor should hold: bounds the registers

#include "async.cuh"
#include "ggml.cuh"

constexpr int VEC_SIZE = 16 / sizeof(scalar_t);
constexpr int BLOCK_VECS = FORMAT::LENGTH / 8;
constexpr int TILE = NUM_THREADS * TILE_VECS;                    // vectors
constexpr int TILE_BYTES = TILE / BLOCK_VECS * FORMAT::BYTES;    // a multiple of 16
constexpr int ROUNDS = ceil_div(TILE_BYTES, NUM_THREADS * ACCESS);
constexpr int GRID_BYTES = FORMAT::GRID_SIZE * sizeof(uint16_t);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
ggml_dequantize(scalar_t* out,      // [num_vecs * 8]
                const uint8_t* W,   // [num_vecs / BLOCK_VECS, BYTES]
                int64_t num_vecs) {
    await_previous_kernel();
    __shared__ alignas(16) uint8_t shared[GRID_BYTES + TILE_BYTES];
    const uint16_t* grid = reinterpret_cast<const uint16_t*>(shared);
    const uint8_t* const tile = shared + GRID_BYTES;
    const int64_t first = int64_t(blockIdx.x) * TILE;
    const unsigned vecs = unsigned(min(num_vecs - first, int64_t(TILE)));
    const int bytes = int(vecs) / BLOCK_VECS * FORMAT::BYTES;
    W += int64_t(blockIdx.x) * TILE_BYTES;
#pragma unroll (ACCESS == 16 ? ROUNDS : 1)
    for (int i = 0; i < ROUNDS; ++i) {
        const int at = (threadIdx.x + i * NUM_THREADS) * ACCESS;
        if (at >= bytes) break;
        if constexpr (ACCESS >= 4) {
            cp_async<ACCESS>(shared + GRID_BYTES + at, W + at);
        } else {
            *reinterpret_cast<Vec<uint8_t, ACCESS>*>(shared + GRID_BYTES + at) = Vec<uint8_t, ACCESS>::load(W + at);
        }
    }
    if constexpr (GRID_BYTES > 0) {
        static_assert(GRID_BYTES % 16 == 0 && GRID_BYTES <= NUM_THREADS * 16);
        const int at = threadIdx.x * 16;
        if (at < GRID_BYTES) cp_async<16>(shared + at, reinterpret_cast<const uint8_t*>(FORMAT::table()) + at);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < TILE_VECS; ++i) {
        const unsigned vec = threadIdx.x + i * NUM_THREADS;
        if (vec >= vecs) break;
        float x[8];
        FORMAT::decode(tile + vec / BLOCK_VECS * FORMAT::BYTES, vec % BLOCK_VECS, grid, x);
#pragma unroll
        for (int j = 0; j < 8; j += VEC_SIZE) {
            float part[VEC_SIZE];
#pragma unroll
            for (int k = 0; k < VEC_SIZE; ++k) part[k] = x[j + k];
            Vec<scalar_t, VEC_SIZE>::from_floats(part).template store<OUT_ACCESS>(out + (first + vec) * 8 + j);
        }
    }
}
