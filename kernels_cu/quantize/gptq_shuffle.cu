// gptq_shuffle: permutes the rows of a GPTQ weight and rearranges the fields of its words for the GEMM, in place.
//
//     row r of the result is row q_perm[r], or zeros if there is no such row; without PERMUTED, row r
//     A unit is FIELDS rows of one column: UNIT_WORDS words, with field f at bit BITS * f. The result has field f
//         2 and 4 bits: at bit f / 2 * BITS, + 16 for odd f: a pair of fields has the same offset in both half words
//         3 bits: the same, ten fields in each of three words; bit j of fields 30 and 31 is bit 15 and 31 of word j
//         8 bits: at bit 8 * f, as before
//
// A thread rearranges one unit; adjacent threads take adjacent columns. With PERMUTED, rows are read from
// `saved`, a copy of the weight that an earlier launch with SAVING has made.
//
// Constants:
//     BITS           bits of a field: 2, 3, 4 or 8
//     SAVING         true: only copy the weight to saved
//     PERMUTED       true: rows are permuted by q_perm

#include "elementwise.cuh"

constexpr int UNIT_WORDS = BITS == 3 ? 3 : 1;
constexpr int FIELDS = 32 * UNIT_WORDS / BITS;
constexpr uint32_t MASK = (1 << BITS) - 1;

// Field f of the unit that starts at *unit; consecutive words of a unit have stride `stride`.
DEVICE uint32_t field_of(const uint32_t* unit, int64_t stride, int f) {
    const int word = f * BITS / 32, bit = f * BITS % 32;
    uint32_t field = unit[word * stride] >> bit;
    if (bit + BITS > 32) field |= unit[(word + 1) * stride] << (32 - bit);
    return field & MASK;
}

// Sets field f of the rearranged unit; its bits must be 0 before.
DEVICE void put_field(uint32_t (&words)[UNIT_WORDS], int f, uint32_t field) {
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
gptq_shuffle(uint32_t* q_weight,     // [num_units * UNIT_WORDS, num_columns]
             const int32_t* q_perm,  // [num_units * FIELDS]
             uint32_t* saved,        // [num_units * UNIT_WORDS, num_columns]
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
                put_field(words, f, field_of(unit, num_columns, row % FIELDS));
            } else {
                put_field(words, f, field_of(q_weight + first, num_columns, f));
            }
        }
    }
#pragma unroll
    for (int j = 0; j < UNIT_WORDS; ++j) q_weight[first + j * num_columns] = words[j];
}
