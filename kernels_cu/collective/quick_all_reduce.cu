// quick_all_reduce: an all-reduce (sum) that quantizes the data on the links to 4, 6 or 8 bits.
//
//     sum[i] = D(E(input_0[i])) + D(E(input_1[i])) + ...    each sum rounded to T
//     out[i] = D(E(sum[i]))                                 T: compute dtype
//     E, D: s = T(-e / 2^(BITS-1)), q = clip(round(x / s)), x ~ T(q * s); e: the element of largest magnitude in a
//     quantization block, the negative one in a tie; q = 0 if s = 0. So e is quantized to -2^(BITS-1), exactly. A
//     quantization block with a NaN or an infinity becomes NaN.
//
// A tile is 8 adjacent vectors of 8 elements, held by 8 adjacent threads; its elements at even positions are one
// quantization block, and those at odd positions the other. Rank r sums slice r, 1 / WORLD_SIZE of the tiles. In the
// scratch memory of a rank, section p holds slice p of its input, quantized, and section WORLD_SIZE holds the quantized
// sum of its own slice. A section is, for each vector, a word with the low four bits of its 8 quants; then their high
// bits; then two scales for each tile. With BITS = 16 it is the unquantized elements. Thread t of block b takes vector
// b * NUM_THREADS + t of a slice, and every gridDim.x * NUM_THREADS after it, in every phase.
//
// Constants
//     WORLD_SIZE     ranks
//     BITS           4, 6 or 8; 16 for no quantization
//     SIGNAL_BYTES   offset of a rank's scratch memory from its signals
//     NUM_THREADS    threads in the block
//     compute_t      T: scalar_t, or float16 for bfloat16

#include "reduce.cuh"
#include "rank_barrier.cuh"

using input_t = Vec<scalar_t, 8>;
using vec_t = Vec<compute_t, 8>;
constexpr int HIGH_BITS = BITS == 16 ? 0 : BITS - 4;  // high bits of a quant
constexpr int HALF = 1 << (BITS - 1);                 // quants are stored with this offset
using high_t = word_of<BITS == 8 ? 4 : 2>::type;

// One section of the scratch memory: a slice.
struct Section {
    char* memory;
    int64_t num_vecs;

    static DEVICE int64_t bytes(int64_t num_vecs) {
        return BITS == 16 ? num_vecs * 16 : num_vecs * (4 + HIGH_BITS) + num_vecs / 8 * 4;
    }
    DEVICE uint32_t* low() const { return reinterpret_cast<uint32_t*>(memory); }
    DEVICE high_t* high() const { return reinterpret_cast<high_t*>(memory + num_vecs * 4); }
    DEVICE compute_t* scales() const { return reinterpret_cast<compute_t*>(memory + num_vecs * (4 + HIGH_BITS)); }

    // Quantizes and stores vector i. Every thread of the warp calls; only active threads store.
    DEVICE void store(int64_t i, const float (&x)[8], bool active) const {
        if constexpr (BITS == 16) {
            if (active) vec_t::from_floats(x).store(reinterpret_cast<compute_t*>(memory) + i * 8);
        } else {
            float scale[2];
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                float most = 0.0f, least = 0.0f, not_finite = 0.0f;
#pragma unroll
                for (int j = odd; j < 8; j += 2) {
                    most = fmaxf(most, x[j]);
                    least = fminf(least, x[j]);
                    not_finite += x[j] - x[j];  // NaN, or 0
                }
                most = lane_reduce<Max, 8>(most);
                least = lane_reduce<Min, 8>(least);
                not_finite = lane_reduce<Sum, 8>(not_finite);
                scale[odd] = round_to<compute_t>((most > -least ? -most : -least) / HALF) + not_finite;
            }
            uint32_t low_bits = 0, high_bits = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float s = scale[j % 2], ratio = s == 0.0f ? 0.0f : x[j] / s;
                const uint32_t code = round_to_int(fminf(fmaxf(ratio, -HALF), HALF - 1)) + HALF;
                low_bits |= (code & 15) << 4 * j;
                high_bits |= HIGH_BITS ? (code >> 4) << HIGH_BITS * j : 0;
            }
            if (!active) return;
            low()[i] = low_bits;
            if constexpr (HIGH_BITS > 0) high()[i] = high_t(high_bits);
            if (i % 8 < 2) scales()[i / 8 * 2 + i % 8] = from_float<compute_t>(i % 8 ? scale[1] : scale[0]);
        }
    }
    DEVICE void load(int64_t i, float (&x)[8]) const {
        if constexpr (BITS == 16) {
            vec_t::load(reinterpret_cast<const compute_t*>(memory) + i * 8).to_floats(x);
        } else {
            const uint32_t low_bits = low()[i];
            uint32_t high_bits = 0;
            if constexpr (HIGH_BITS > 0) high_bits = high()[i];
            const float scale[2] = {to_float(scales()[i / 8 * 2]), to_float(scales()[i / 8 * 2 + 1])};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                uint32_t code = low_bits >> 4 * j & 15;
                if constexpr (HIGH_BITS > 0) code |= (high_bits >> HIGH_BITS * j & ((1 << HIGH_BITS) - 1)) << 4;
                x[j] = float(int(code) - HALF) * scale[j % 2];
            }
            vec_t::from_floats(x).to_floats(x);
        }
    }
};

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
quick_all_reduce(scalar_t* out,            // [num_vecs * 8]
                 const scalar_t* input,    // [num_vecs * 8]
                 const uint64_t* signals,  // [8]: address of the signals of each rank
                 LostRank* lost,           // [8]: report on each rank that the kernel gave up
                 Signals* own_signals, int64_t num_vecs, int64_t slice, int rank) {
    await_previous_kernel();
    World<WORLD_SIZE> world(signals, own_signals, lost, rank);
    const int64_t first = int64_t(blockIdx.x) * NUM_THREADS, step = int64_t(gridDim.x) * NUM_THREADS;
    const auto section = [&](int of, int number) {
        return Section{world.template scratch<char>(of) + number * Section::bytes(slice), slice};
    };
    for (int64_t base = first; base < slice; base += step) {
        const int64_t i = base + threadIdx.x;
        for (int other = 0; other < WORLD_SIZE; ++other) {
            const int64_t at = other * slice + i;
            float x[8] = {};
            if (i < slice && at < num_vecs) {
                input_t::load(input + at * 8).to_floats(x);
                vec_t::from_floats(x).to_floats(x);
            }
            section(rank, other).store(i, x, i < slice);
        }
    }
    world.meet<Flagged::ALL>();
    for (int64_t base = first; base < slice; base += step) {
        const int64_t i = base + threadIdx.x;
        float sum[8] = {};
        if (i < slice) {
            section(0, rank).load(i, sum);
            for (int other = 1; other < WORLD_SIZE; ++other) {
                float x[8];
                section(other, rank).load(i, x);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += x[j];
                vec_t::from_floats(sum).to_floats(sum);
            }
        }
        section(rank, WORLD_SIZE).store(i, sum, i < slice);
    }
    world.meet<Flagged::ALL>();
    for (int64_t i = first + threadIdx.x; i < slice; i += step) {
        for (int other = 0; other < WORLD_SIZE; ++other) {
            const int64_t at = other * slice + i;
            float x[8];
            if (at >= num_vecs) break;
            section(other, WORLD_SIZE).load(i, x);
            input_t::from_floats(x).store(out + at * 8);
        }
    }
    world.leave();
}
