// hadamard: the Walsh-Hadamard transform of rows, in natural order and orthonormal, in float32.
//
//     out[r, i] = sum_j (-1)^popcount(i & j) * x[r, j] / sqrt(SIZE)
//
// The transform has one butterfly step for each bit of an element's index: it adds and subtracts the two elements that
// differ in that index bit. A thread has vectors of its row (row.cuh), so that the bits of an index, from the lowest,
// say:
//
//     the element in a vector  |  one of GROUP = 32 threads  |  one of GROUPS groups of threads  |  the thread's vector
//
// Steps within a thread (first and last kind of bit) come first, in registers. If the row has one group, the steps
// between threads are shuffles. Otherwise the row goes through shared memory twice (function `exchange`): a thread
// first gets one element of each of a group's 32 threads, then elements of every group, as vectors again, which it
// stores.
//
// Constants:
//     SIZE          elements in a row, a power of two
//     ACCESS        elements in one memory access; divides VEC_SIZE
//     ROW_THREADS   threads that share a row: up to 32, or the whole block
//     ROUNDS        parts in which a row goes through shared memory, SIZE / ROUNDS floats at a time

#include "row.cuh"

using row_t = Row<scalar_t, SIZE, VEC_SIZE, ROW_THREADS, true, ACCESS>;

constexpr int ELEMENTS = row_t::THREAD_VECS * VEC_SIZE;  // elements of a thread
constexpr int GROUP = 32;                                // threads of a group
constexpr int GROUPS = ceil_div(ROW_THREADS, GROUP);
constexpr int PART = ELEMENTS / ROUNDS;  // elements of a thread that go through shared memory at a time
constexpr int SHARE = PART / GROUPS;     // elements of each group that a thread has in the end

// 1 / sqrt(SIZE) = BEFORE * AFTER. BEFORE is a power of two, so that scaled elements are exact, and with them every sum
// that float32 holds; AFTER is 1 or sqrt(2), and rounds once. Constants: clang would call the function for every
// element.
constexpr float halved(int size) { return size == 1 ? 1.0f : 0.5f * halved(size < 4 ? 1 : size / 4); }
constexpr float BEFORE = halved(SIZE);
constexpr float AFTER = BEFORE * BEFORE * SIZE == 1.0f ? 1.0f : 1.414213562373095049f;

// The butterfly steps between elements v[i] and v[i + distance], for distance = FIRST, 2 * FIRST, ... below COUNT.
template <int FIRST, int COUNT>
DEVICE void butterflies(float (&v)[COUNT]) {
#pragma unroll
    for (int distance = FIRST; distance < COUNT; distance *= 2) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i & distance) continue;
            const float a = v[i], b = v[i + distance];
            v[i] = a + b;
            v[i + distance] = a - b;
        }
    }
}

// Where the element with index `number` lies in shared memory. The swizzle avoids bank conflicts in both access
// patterns of `exchange`: 8 threads move adjacent vectors of four, and 32 threads move single elements.
DEVICE constexpr int swizzled(int number) { return number ^ (number >> 5 & 28) ^ (number >> 3 & 4); }
// swizzled(first + second), given of_first = swizzled(first), for numbers without a common bit, second a multiple of 4.
// of_first depends on the thread and is computed once; the rest is computed at compile time.
DEVICE constexpr int swizzled(int of_first, int second) {
    return (of_first ^ (swizzled(second) & 28)) + (second & ~31);
}

// The index in the row of element i of thread 0.
DEVICE constexpr int offset_of(int i) { return i / VEC_SIZE * ROW_THREADS * VEC_SIZE + i % VEC_SIZE; }

// The butterfly steps within and between groups of threads, for PART elements of each thread. Writes results to `out`.
DEVICE void exchange(scalar_t* out, const float* v, float* shared) {
    constexpr int WORD = SHARE < 4 ? SHARE : 4;
    constexpr int PIECE = SHARE < VEC_SIZE ? SHARE : VEC_SIZE;
    using quad_t = Vec<float, 4>;
    using word_t = Vec<float, WORD>;
    const int thread = threadIdx.x;

    const int thread_base = swizzled(thread * VEC_SIZE);
#pragma unroll
    for (int i = 0; i < PART; i += 4) {
        quad_t quad;
#pragma unroll
        for (int j = 0; j < 4; ++j) quad.data[j] = v[i + j];
        *reinterpret_cast<quad_t*>(shared + swizzled(thread_base, offset_of(i))) = quad;
    }
    __syncthreads();

#pragma unroll
    for (int first = 0; first < PART; first += GROUP) {
        const int place = first / GROUP * ROW_THREADS + thread;
        const int base = swizzled(place / VEC_SIZE * GROUP * VEC_SIZE + place % VEC_SIZE);
        float group[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) group[i] = shared[swizzled(base, i * VEC_SIZE)];
        butterflies<1>(group);
#pragma unroll
        for (int i = 0; i < GROUP; ++i) shared[swizzled(base, i * VEC_SIZE)] = group[i];
    }
    __syncthreads();

    const int column = thread % GROUP * VEC_SIZE + offset_of(thread / GROUP * SHARE);
    const int base = swizzled(column);
    float shares[PART];
#pragma unroll
    for (int i = 0; i < PART; i += WORD) {
        const int number = offset_of(i % SHARE) + i / SHARE * GROUP * VEC_SIZE;
        const word_t word = *reinterpret_cast<const word_t*>(shared + swizzled(base, number));
#pragma unroll
        for (int j = 0; j < WORD; ++j) shares[i + j] = word[j];
    }
    butterflies<SHARE>(shares);
#pragma unroll
    for (int i = 0; i < PART; i += PIECE) {
        float vec[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j) vec[j] = AFTER * shares[i + j];
        const int number = column + offset_of(i % SHARE) + i / SHARE * GROUP * VEC_SIZE;
        Vec<scalar_t, PIECE>::from_floats(vec).template store<(ACCESS < PIECE ? ACCESS : PIECE)>(out + number);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
hadamard(scalar_t* out,      // [num_rows, SIZE]
         const scalar_t* x,  // [num_rows, SIZE]
         int64_t num_rows, int64_t out_stride, int64_t x_stride) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    const RowIndex<NUM_THREADS, ROW_THREADS> at(num_rows);
    const row_t row = row_t::load_once(x + at.row * x_stride, at.active);
    float v[ELEMENTS];
    row.for_each([&](int i, int column) {
        float vec[VEC_SIZE];
        row.get(i, column).to_floats(vec);
        // Elements are scaled before the steps: no sum overflows if the scaled magnitudes of the row add up to a float.
#pragma unroll
        for (int j = 0; j < VEC_SIZE; ++j) v[i * VEC_SIZE + j] = BEFORE * vec[j];
    });
    butterflies<1>(v);
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
            for (int j = 0; j < VEC_SIZE; ++j) vec[j] = AFTER * v[i * VEC_SIZE + j];
            row_t::store(out, i, column, Vec<scalar_t, VEC_SIZE>::from_floats(vec));
        });
    } else {
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if (round > 0) __syncthreads();
            exchange(out + offset_of(round * PART), v + round * PART, reinterpret_cast<float*>(memory));
        }
    }
}
