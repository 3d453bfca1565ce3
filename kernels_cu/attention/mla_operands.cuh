// mla_operands.cuh: operands of the MMAs (m16n8k16) of mla_decode_small_h.
//
// Four adjacent lanes have 16 elements each of a panel of an entry: lane t has elements 16t to 16t + 15. An MMA takes
// four elements of each lane. The elements of a query are in the same order.
#pragma once
#include "mla_entry.cuh"
#include "mma.cuh"

constexpr int PANEL_SIZE = 64, LATENT_PANELS = LATENT_SIZE / PANEL_SIZE;  // panels of an entry or a query
constexpr int HEADS = 16, QUERY_BYTES = HEADS * ENTRY_SIZE * 2;
constexpr int RUN = 32 * 16;  // bytes of an operand: 16 per lane

DEVICE void load_words(const uint8_t* shared, uint32_t* words) {
    const uint4 x = *reinterpret_cast<const uint4*>(shared);
    words[0] = x.x;
    words[1] = x.y;
    words[2] = x.z;
    words[3] = x.w;
}

// Loads N = 4 or 8 pairs of elements in the type of the queries. ARE_CODES: the elements are fp8, and are multiplied by
// `scale` and rounded. Otherwise they are loaded unchanged.
template <bool ARE_CODES, int N>
DEVICE void load_elements(const uint8_t* shared, float scale, uint32_t (&pairs)[N]) {
    uint32_t words[ARE_CODES ? N / 2 : N];
#pragma unroll
    for (int i = 0; i < N / (ARE_CODES ? 8 : 4); ++i) load_words(shared + i * 16, words + i * 4);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if constexpr (ARE_CODES) {
            uint32_t halves[2];
            float low, high;
            fp8_to_half<fp8_e4m3_t>(words[i / 2], halves);
            unpack_pair<half_t>(halves[i % 2], low, high);
            pairs[i] = pack_pair<query_t>(low * scale, high * scale);
        } else {
            pairs[i] = words[i];
        }
    }
}

// Stores the queries of HEADS heads as A operands, RUN bytes of shared memory for each MMA, with zeros for heads that
// do not exist. `load(head, i)` loads elements i to i + 7 of a head. Eight threads load a head;
// in a CTA of 64 threads they load two heads.
template <int NUM_THREADS, typename F>
DEVICE void store_queries(uint8_t* operands, F load) {
    constexpr int PANELS = ENTRY_SIZE / 64, ROUNDS = ceil_div(HEADS * 8, NUM_THREADS);
    if (threadIdx.x >= HEADS * 8) return;
    const int part = threadIdx.x % 8;
    Vec<query_t, 8> x[ROUNDS][PANELS];
#pragma unroll
    for (int i = 0; i < ROUNDS * PANELS; ++i) {
        x[i / PANELS][i % PANELS] = load((i / PANELS * NUM_THREADS + threadIdx.x) / 8, (i % PANELS * 8 + part) * 8);
    }
#pragma unroll
    for (int i = 0; i < ROUNDS * PANELS; ++i) {
        const int head = (i / PANELS * NUM_THREADS + threadIdx.x) / 8;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            // Elements 16t to 16t + 15 of a panel. For each MMA a lane holds two pairs of elements for each of the heads
            // g and g + 8.
            const int t = part / 2, product = i % PANELS * 4 + part % 2 * 2 + j / 4, lane = head % 8 * 4 + t;
            *reinterpret_cast<uint32_t*>(operands + product * RUN + lane * 16 + (j / 2 % 2 * 2 + head / 8) * 4) =
                x[i / PANELS][i % PANELS].template word<2>(j);
        }
    }
}
