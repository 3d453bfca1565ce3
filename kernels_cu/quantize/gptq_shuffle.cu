// gptq_shuffle: the rows of a weight of GPTQ in another order, and the fields of its words as a product wants them, in place.
//
//     row r of the result is row q_perm[r], or zeros where there is no such row; without PERMUTED, row r
//     a unit of FIELDS rows is a string of UNIT_WORDS words, field f before at bit BITS * f, after that at
//         2 and 4 bits: f / 2 * BITS for even f, 16 more for odd f, so that neighbours lie in one place of both halves
//         3 bits: so in words of ten fields each; bit j of fields 30 and 31 is bit 15 and 31 of word j
//         8 bits: where it was
//
// A thread makes a unit of one column; threads beside it make the columns beside it. An order of rows is read from a copy of
// the weight, which a launch with SAVING has made before.
//
// Constants
//     BITS           of a field: 2, 3, 4 or 8
//     SAVING         copy the weight, nothing else
//     PERMUTED       the rows are in another order
//     NUM_THREADS    threads in the block
//     ROW_THREADS    threads that share a row of units; divides NUM_THREADS
//     PLANES         the grid has more blocks than fit in its second dimension

#include "chunk.cuh"

constexpr int UNIT_WORDS = BITS == 3 ? 3 : 1;
constexpr int FIELDS = 32 * UNIT_WORDS / BITS;
constexpr uint32_t MASK = (1 << BITS) - 1;

// Field f of a unit whose words lie `stride` apart.
DEVICE uint32_t field_of(const uint32_t* unit, int64_t stride, int f) {
    const int word = f * BITS / 32, bit = f * BITS % 32;
    uint32_t field = unit[word * stride] >> bit;
    if (bit + BITS > 32) field |= unit[(word + 1) * stride] << (32 - bit);
    return field & MASK;
}

DEVICE void place(uint32_t (&words)[UNIT_WORDS], int f, uint32_t field) {
    if constexpr (BITS == 8) {
        words[0] |= field << f * BITS;
    } else if constexpr (BITS == 3) {
        if (f < 30) {
            words[f / 10] |= field << (f % 10 / 2 * BITS + f % 2 * 16);
        } else {
#pragma unroll
            for (int j = 0; j < UNIT_WORDS; ++j) words[j] |= (field >> j & 1) << (f % 2 * 16 + 15);
        }
    } else {
        words[0] |= field << (f / 2 * BITS + f % 2 * 16);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 4)
gptq_shuffle(uint32_t* q_weight,      // [num_units * UNIT_WORDS, num_columns]
             const int32_t* q_perm,   // [num_units * FIELDS]
             uint32_t* saved,         // [num_units * UNIT_WORDS, num_columns]
             int64_t num_units, int64_t num_columns) {
    await_previous_kernel();
    const Chunk<NUM_THREADS, ROW_THREADS, 1, PLANES> at(num_units, num_columns);
    if (!at.inside) return;
    const int64_t first = at.row * UNIT_WORDS * num_columns + at.column;
    uint32_t words[UNIT_WORDS] = {};
    if constexpr (SAVING) {
#pragma unroll
        for (int j = 0; j < UNIT_WORDS; ++j) words[j] = q_weight[first + j * num_columns];
        q_weight = saved;
    } else {
#pragma unroll
        for (int f = 0; f < FIELDS; ++f) {
            if constexpr (PERMUTED) {
                const int32_t row = q_perm[at.row * FIELDS + f];
                if (row < 0 || row >= num_units * FIELDS) continue;
                const uint32_t* unit = saved + int64_t(row / FIELDS * UNIT_WORDS) * num_columns + at.column;
                place(words, f, field_of(unit, num_columns, row % FIELDS));
            } else {
                place(words, f, field_of(q_weight + first, num_columns, f));
            }
        }
    }
#pragma unroll
    for (int j = 0; j < UNIT_WORDS; ++j) q_weight[first + j * num_columns] = words[j];
}
