// ggml_dequantize: a matrix in one of GGUF's quantised types in floating point.
//
//     out[e] = T(element e % LENGTH of format block e / LENGTH), decoded in float32, rounded once    T: dtype of out
//
// A block of threads decodes a tile of NUM_THREADS * TILE_VECS vectors, eight elements each. It copies the tile's
// format blocks, which are contiguous, to shared memory as they are, after the format's codebook (grid), if it has one.
// Then adjacent threads decode adjacent vectors, so that a warp stores whole cache lines.
//
// Constants:
//     FORMAT         the GGUF type, a struct of ggml.cuh
//     TILE_VECS      vectors per thread
//     ACCESS         bytes in one access to W
//     OUT_ACCESS     elements in one access to out

#include "async.cuh"
#include "ggml.cuh"

constexpr int VEC_SIZE = 16 / sizeof(scalar_t);
constexpr int BLOCK_VECS = FORMAT::LENGTH / 8;
constexpr int TILE = NUM_THREADS * TILE_VECS;                  // in vectors
constexpr int TILE_BYTES = TILE / BLOCK_VECS * FORMAT::BYTES;  // a multiple of 16
constexpr int COPIES = ceil_div(TILE_BYTES / ACCESS, NUM_THREADS);
constexpr int GRID_BYTES = FORMAT::GRID_SIZE * sizeof(uint16_t);

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
ggml_dequantize(scalar_t* out,     // [num_vecs * 8]
                const uint8_t* W,  // [num_vecs / BLOCK_VECS, BYTES]
                int64_t num_vecs) {
    await_previous_kernel();
    __shared__ alignas(16) uint8_t shared[GRID_BYTES + TILE_BYTES];
    const uint16_t* grid = reinterpret_cast<const uint16_t*>(shared);
    const uint8_t* const tile = shared + GRID_BYTES;
    const int64_t first = int64_t(blockIdx.x) * TILE;
    const unsigned vecs = unsigned(min(num_vecs - first, int64_t(TILE)));
    const int bytes = int(vecs) / BLOCK_VECS * FORMAT::BYTES;
    W += int64_t(blockIdx.x) * TILE_BYTES;
#pragma unroll(ACCESS == 16 ? COPIES : 1)
    for (int i = 0; i < COPIES; ++i) {
        const int byte = (threadIdx.x + i * NUM_THREADS) * ACCESS;
        if (byte >= bytes) break;
        if constexpr (ACCESS >= 4) {
            cp_async<ACCESS>(shared + GRID_BYTES + byte, W + byte);
        } else {
            *reinterpret_cast<Vec<uint8_t, ACCESS>*>(shared + GRID_BYTES + byte) = Vec<uint8_t, ACCESS>::load(W + byte);
        }
    }
    if constexpr (GRID_BYTES > 0) {
        static_assert(GRID_BYTES % 16 == 0 && GRID_BYTES <= NUM_THREADS * 16);
        const int byte = threadIdx.x * 16;
        if (byte < GRID_BYTES) cp_async<16>(shared + byte, reinterpret_cast<const uint8_t*>(FORMAT::table()) + byte);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < TILE_VECS; ++i) {
        const unsigned vec = threadIdx.x + i * NUM_THREADS;
        if (vec >= vecs) break;
        float x[8];
        decode<FORMAT>(tile + vec / BLOCK_VECS * FORMAT::BYTES, vec % BLOCK_VECS, grid, x);
#pragma unroll
        for (int j = 0; j < 8; j += VEC_SIZE) {
            float part[VEC_SIZE];
#pragma unroll
            for (int k = 0; k < VEC_SIZE; ++k) part[k] = x[j + k];
            Vec<scalar_t, VEC_SIZE>::from_floats(part).template store<OUT_ACCESS>(out + (first + vec) * 8 + j);
        }
    }
}
