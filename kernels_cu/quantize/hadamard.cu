// hadamard: the Walsh-Hadamard transform of rows, in natural order and orthonormal, in float32.
//
//     out[r, i] = sum_j (-1)^popcount(i & j) * x[r, j] / sqrt(SIZE)
//
// One step for each bit of a number: sums and differences of elements whose numbers differ in that bit. A thread has vectors
// of its row (row.cuh): from the lowest, the bits of a number say where in a vector, which of 32 threads, which of such
// groups, and which of the thread's vectors. Steps within a thread come first. Those between 32 threads go by shuffles where
// they are a row's only ones; else the row goes through shared memory twice, so that a thread first has the elements of a
// whole group at one place, and then of all groups. The last are vectors again, which it writes.
//
// Constants
//     scalar_t      element type of out and x
//     SIZE          elements in a row, a power of two
//     VEC_SIZE      elements in a vector
//     ACCESS        elements in one memory access; divides VEC_SIZE
//     NUM_THREADS   threads in the block
//     ROW_THREADS   threads that share a row: up to 32, or all of the block
//     ROUNDS        in so many parts the row goes through SIZE / ROUNDS floats of shared memory
//     MIN_BLOCKS    blocks a multiprocessor should hold: bounds the registers

#include "row.cuh"

using row_t = Row<scalar_t, SIZE, VEC_SIZE, ROW_THREADS, true, false, ACCESS>;

constexpr int ELEMENTS = row_t::THREAD_VECS * VEC_SIZE;  // of a thread
constexpr int GROUP = 32;
constexpr int GROUPS = ceil_div(ROW_THREADS, GROUP);
constexpr int PART = ELEMENTS / ROUNDS;  // elements of a thread that go through shared memory at a time
constexpr int SHARE = PART / GROUPS;     // of those of each group, what a thread has in the end

constexpr float reciprocal_root(int size) {
    return size == 1 ? 1.0f : size == 2 ? 0.707106781186547524f : 0.5f * reciprocal_root(size / 4);
}

// The steps between elements of a thread that lie FIRST, 2 * FIRST, ... apart.
template <int FIRST, int COUNT>
DEVICE void steps(float (&v)[COUNT]) {
#pragma unroll
    for (int apart = FIRST; apart < COUNT; apart *= 2) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i & apart) continue;
            const float a = v[i], b = v[i + apart];
            v[i] = a + b;
            v[i + apart] = a - b;
        }
    }
}

// Where element `number` of the row lies in shared memory, so that neither 8 threads that move neighbouring words of four
// nor 32 that move single elements of one place meet in a bank. The bits of a number do not mix, so that what depends on
// the thread can be found once: `mixed` of one number, and another that has no bit of it.
DEVICE constexpr int mixed(int number) { return number ^ (number >> 5 & 28) ^ (number >> 3 & 4); }
DEVICE constexpr int mixed(int of_first, int second) { return (of_first ^ (mixed(second) & 28)) + (second & ~31); }

// The number of element i of a thread, without the part of its place in the row.
DEVICE constexpr int number_of(int i) { return i / VEC_SIZE * ROW_THREADS * VEC_SIZE + i % VEC_SIZE; }

// The steps between groups of threads and within them, of PART elements of each thread; then `out` has them.
DEVICE void exchange(scalar_t* out, const float* v, float* shared) {
    constexpr int WORD = SHARE < 4 ? SHARE : 4;
    constexpr int PIECE = SHARE < VEC_SIZE ? SHARE : VEC_SIZE;
    using four_t = Vec<float, 4>;
    using word_t = Vec<float, WORD>;
    const int thread = threadIdx.x;

    const int own = mixed(thread * VEC_SIZE);
#pragma unroll
    for (int i = 0; i < PART; i += 4) {
        four_t four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four.data[j] = v[i + j];
        *reinterpret_cast<four_t*>(shared + mixed(own, number_of(i))) = four;
    }
    __syncthreads();

#pragma unroll
    for (int first = 0; first < PART; first += GROUP) {
        const int place = first / GROUP * ROW_THREADS + thread;
        const int base = mixed(place / VEC_SIZE * GROUP * VEC_SIZE + place % VEC_SIZE);
        float group[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) group[i] = shared[mixed(base, i * VEC_SIZE)];
        steps<1>(group);
#pragma unroll
        for (int i = 0; i < GROUP; ++i) shared[mixed(base, i * VEC_SIZE)] = group[i];
    }
    __syncthreads();

    const int column = thread % GROUP * VEC_SIZE + number_of(thread / GROUP * SHARE);
    const int base = mixed(column);
    float shares[PART];
#pragma unroll
    for (int i = 0; i < PART; i += WORD) {
        const int number = number_of(i % SHARE) + i / SHARE * GROUP * VEC_SIZE;
        const word_t word = *reinterpret_cast<const word_t*>(shared + mixed(base, number));
#pragma unroll
        for (int j = 0; j < WORD; ++j) shares[i + j] = word[j];
    }
    steps<SHARE>(shares);
#pragma unroll
    for (int i = 0; i < PART; i += PIECE) {
        float vec[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j) vec[j] = shares[i + j];
        const int number = column + number_of(i % SHARE) + i / SHARE * GROUP * VEC_SIZE;
        Vec<scalar_t, PIECE>::from_floats(vec).template store<(ACCESS < PIECE ? ACCESS : PIECE)>(out + number);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
hadamard(scalar_t* out,       // [num_rows, SIZE]
         const scalar_t* x,   // [num_rows, SIZE]
         int64_t num_rows, int64_t out_stride, int64_t x_stride) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    const row_t row = row_t::load_once(x + at.row * x_stride, at.active);
    float v[ELEMENTS];
    row.for_each([&](int i, int column) {
        float vec[VEC_SIZE];
        row.get(i, column).to_floats(vec);
        // Before the sums, so that none of them leaves the range of the result.
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[i * VEC_SIZE + j] = vec[j] * reciprocal_root(SIZE);
    });
    steps<1>(v);
    out += at.row * out_stride;
    if constexpr (GROUPS == 1) {
#pragma unroll
        for (int mask = 1; mask < ROW_THREADS; mask *= 2) {
            const float sign = threadIdx.x & mask ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) v[i] = fmaf(sign, v[i], shfl_xor(v[i], mask));
        }
        if (!at.active) return;
        row.for_each([&](int i, int column) {
            float vec[VEC_SIZE];
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) vec[j] = v[i * VEC_SIZE + j];
            row_t::store(out, i, column, Vec<scalar_t, VEC_SIZE>::from_floats(vec));
        });
    } else {
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if (round > 0) __syncthreads();
            exchange(out + number_of(round * PART), v + round * PART, reinterpret_cast<float*>(memory));
        }
    }
}
