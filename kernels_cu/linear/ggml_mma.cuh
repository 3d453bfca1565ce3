// ggml_mma.cuh: dequantizes the quants of GGUF types to MMA fragments, and sums X per group for minima and offsets.
#pragma once
#include "ggml_tile.cuh"
#include "product.cuh"

// A quant becomes an exact number by OR-ing it into the mantissa of 128.0 (bfloat16) or 1024.0 (float16), where the ulp
// is 1. With RAISE, `pairs_of_quants` leaves bfloat16 values raised by RAISED = 128 + OFFSET. RAISED is 0, and the bias
// is always subtracted, for float16, where 1024 is too large compared with the quants, and for bfloat16 quants of 8
// bits.
template <typename FORMAT_T, typename T>
constexpr int RAISED = is_same<T, bf16_t> && FORMAT_T::LARGEST < 128 ? 128 + FORMAT_T::OFFSET : 0;

// Converts four quants to two pairs of T, exactly: quant - OFFSET, plus RAISED if RAISE.
template <typename FORMAT_T, typename T, bool RAISE>
DEVICE void pairs_of_quants(uint32_t quants, uint32_t& low, uint32_t& high) {
    constexpr bool IS_HALF = is_same<T, half_t>, IS_WIDE = !IS_HALF && FORMAT_T::LARGEST > 127;
    const uint32_t places = IS_WIDE ? quants & 127 * ONES : quants;  // the low bits of the mantissa
    low = byte_perm(places, IS_HALF ? 0x64 : 0x43, 0x4140);
    high = byte_perm(places, IS_HALF ? 0x64 : 0x43, 0x4342);
    if constexpr (RAISE && RAISED<FORMAT_T, T> != 0) return;
    Vec<T, 2> pairs[2], offsets[2];
    pairs[0].template word<2>(0) = low;
    pairs[1].template word<2>(0) = high;
    if constexpr (IS_WIDE) {  // bit 7 of a quant does not fit: subtract 128 if it is set, else 256
        static_assert(FORMAT_T::OFFSET == 128);
        const uint32_t exponents = ~quants & 128 * ONES;
        offsets[0].template word<2>(0) = byte_perm(exponents, 0x43, 0x4140);
        offsets[1].template word<2>(0) = byte_perm(exponents, 0x43, 0x4342);
    } else {
        offsets[0] = offsets[1] = Vec<T, 2>::full((IS_HALF ? 1024.0f : 128.0f) + FORMAT_T::OFFSET);
    }
    low = (pairs[0] - offsets[0]).template word<2>(0);
    high = (pairs[1] - offsets[1]).template word<2>(0);
}

// Two ones of type T in a word.
template <typename T>
constexpr uint32_t ONE_PAIR = is_same<T, half_t> ? 0x3c003c00 : 0x3f803f80;

// Sums X over each of GROUPS groups by MMA, and subtracts minima times these sums. A lane holds the sums of LANE_GROUPS
// groups, from first_group() on, and supplies the minima of its rows of W in these groups.
template <typename T, int TILES, bool = ON_MATRIX_CORES>
struct GroupSums;

// AMD matrix cores: one group at a time, by an MMA of ones and X.
template <typename T, int TILES>
struct GroupSums<T, TILES, true> {
    static constexpr int GROUPS = 1, LANE_GROUPS = 1;
    static DEVICE int first_group(int) { return 0; }
    float sums[TILES][PRODUCT_SUMS] = {};

    // Adds the group's elements of each row of X; b holds them as fragments.
    template <int WORDS>
    DEVICE void add(const uint32_t (&b)[TILES][WORDS], int, int) {
        uint32_t ones[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) ones[i] = ONE_PAIR<T>;
#pragma unroll
        for (int j = 0; j < TILES; ++j) product<T>(sums[j], ones, b[j]);
    }

    // results -= minima times sums, summed over the groups.
    DEVICE void subtract(float (&results)[TILES][PRODUCT_SUMS], const float (&minima)[LANE_ROWS][1]) const {
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
#pragma unroll
            for (int i = 0; i < PRODUCT_SUMS; ++i) {
                results[j][i] = fmaf(-minima[i / ROW_SUMS][0], sums[j][i], results[j][i]);
            }
        }
    }
};

// mma.sync: eight groups at a time. A lane's four words of row g of X, two B fragments, also form one A fragment: row g
// of that holds the first word of either B fragment, and row g + 8 the second. Column c of the other operand is ones at
// the elements of group c, and zeros elsewhere. So the lane gets both parts of row g's sums in groups 2t and 2t + 1 (t
// is lane % 4). Added up, they are the two elements of a B fragment with K = groups, for the MMA with the minima. Each
// operand of that MMA is split into two TF32 numbers, 22 bits of mantissa together; the MMA of both low parts is
// omitted.
template <typename T, int TILES>
struct GroupSums<T, TILES, false> {
    static constexpr int GROUPS = 8, LANE_GROUPS = 2;
    static DEVICE int first_group(int lane) { return lane % 4 * 2; }
    float sums[TILES][4] = {};

    // Adds 32 elements of each row of X, which b holds: the first 16 to group `first`, the others to group `second`.
    DEVICE void add(const uint32_t (&b)[TILES][4], int first, int second) {
        const int g = lane_row(threadIdx.x % 32);
        const uint32_t columns[2] = {g == first ? ONE_PAIR<T> : 0, g == second ? ONE_PAIR<T> : 0};
#pragma unroll
        for (int j = 0; j < TILES; ++j) mma_m16n8k16<T>(sums[j], b[j], columns);
    }

    // results -= minima times sums, summed over the groups.
    DEVICE void subtract(float (&results)[TILES][4], const float (&minima)[2][2]) const {
        if constexpr (PYOPS_TURING) subtract_by_fma(results, minima);
        else subtract_by_mma(results, minima);
    }

private:
    // The total of the lane's row of tile j in its group `own`.
    DEVICE float total_of(int j, int own) const { return sums[j][own] + sums[j][own + 2]; }
    // Turing has no TF32: each lane fetches minima of its rows and totals of its columns, group by group.
    DEVICE void subtract_by_fma(float (&results)[TILES][4], const float (&minima)[2][2]) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int owner = group / LANE_GROUPS, own = group % LANE_GROUPS;
            const float rows[2] = {shfl<4>(minima[0][own], owner), shfl<4>(minima[1][own], owner)};
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const float total = total_of(j, own);
#pragma unroll
                for (int column = 0; column < 2; ++column) {
                    const float of_column = shfl<32>(total, (2 * t + column) * 4 + owner);
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        results[j][2 * row + column] = fmaf(-rows[row], of_column, results[j][2 * row + column]);
                    }
                }
            }
        }
    }
    DEVICE void subtract_by_mma(float (&results)[TILES][4], const float (&minima)[2][2]) const {
        const float rows[4] = {minima[0][0], minima[1][0], minima[0][1], minima[1][1]};
        uint32_t high_rows[4], low_rows[4];
        split_tf32(rows, high_rows, low_rows);
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const float columns[2] = {total_of(j, 0), total_of(j, 1)};
            uint32_t high[2], low[2];
            split_tf32(columns, high, low);
            float products[4] = {};
            mma_m16n8k8(products, low_rows, high);
            mma_m16n8k8(products, high_rows, low);
            mma_m16n8k8(products, high_rows, high);
#pragma unroll
            for (int i = 0; i < 4; ++i) results[j][i] -= products[i];
        }
    }
};
