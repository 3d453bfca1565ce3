// decode_logits.cuh: the logits of a step of attention_decode: queries in shared memory, their products with keys, and
// masks.
//
//     S^T = K Q^T,   l = softcap(scale * S) + slope * (token - length + 1), or -inf where a token is not attended
//
// Tokens are the rows of S^T, and the few query heads of a block are its columns. Of each tile of 16 tokens and 8 heads
// a lane holds four elements: element i is in row g + i / 2 * 8 and column 2t + i % 2, with g = lane / 4 and t = lane %
// 4 (mma.cuh).
//
// The constants in capitals that are not defined here are those of attention_decode.cu.
#pragma once
#include "decode_tile.cuh"

using logits_t = float[TILES][COLUMNS][4];

// Copies the queries of a block to shared memory, with zeros for heads and elements that do not exist; query_of(head)
// is where the query of a head lies. units[head] becomes the factor from a product of the head to its logit: key_unit,
// and with a cache of fp8 the inverse of the power of two that brings the query into the range of float16.
template <typename F>
DEVICE void prepare_queries(product_t* queries, float* units, int num_heads, float key_unit, F query_of) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int head = warp; head < HEADS; head += int(blockDim.x) / 32) {
        const scalar_t* from = query_of(head);
        float factor = 1.0f;
        if (IS_FP8) {
            float absmax = 0.0f;
            for (int i = lane; i < HEAD_SIZE && head < num_heads; i += 32) {
                absmax = fmaxf(absmax, fabsf(to_float(from[i])));
            }
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) absmax = fmaxf(absmax, shfl_xor(absmax, mask));
            factor = inverse_power_of_two(absmax);
        }
        for (int i = lane; i < QUERY_SIZE; i += 32) {
            const bool inside = head < num_heads && i < HEAD_SIZE;
            const float x = inside ? to_float(from[i]) : 0.0f;
            queries[head * QUERY_STRIDE + i] = from_float<product_t>(IS_FP8 ? x * factor : x);
        }
        if (lane == 0) units[head] = key_unit * (IS_FP8 ? 1.0f / factor : 1.0f);
    }
}

// S^T = K Q^T.
DEVICE void multiply_keys(logits_t& s, const Keys& keys, const product_t* queries, int g, int t) {
#pragma unroll
    for (int i = 0; i < TILES * COLUMNS * 4; ++i) s[i / (COLUMNS * 4)][i / 4 % COLUMNS][i % 4] = 0.0f;
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS * COLUMNS; ++i) {
        const int c = i / COLUMNS, column = i % COLUMNS;
        const product_t* q = queries + (column * 8 + g) * QUERY_STRIDE + (4 * c + t) * CHUNK;
        if constexpr (IS_FP8) {
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const uint2 terms = *reinterpret_cast<const uint2*>(q + 4 * w);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    uint32_t a[2], b[2];
                    fp8_to_half<cache_t>(component(keys.rows[tile][0][c], w), a);
                    fp8_to_half<cache_t>(component(keys.rows[tile][1][c], w), b);
                    mma_m16n8k16<product_t>(s[tile][column], {a[0], b[0], a[1], b[1]}, {terms.x, terms.y});
                }
            }
        } else {
            const uint4 terms = *reinterpret_cast<const uint4*>(q);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const uint4 low = keys.rows[tile][0][c], high = keys.rows[tile][1][c];
                mma_m16n8k16<product_t>(s[tile][column], {low.x, high.x, low.y, high.y}, {terms.x, terms.y});
                mma_m16n8k16<product_t>(s[tile][column], {low.z, high.z, low.w, high.w}, {terms.z, terms.w});
            }
        }
    }
}

// Turns the products of one column of tiles in `s` into logits, and raises max_logit to the largest of the lane's
// logits. unit, slope and max_logit belong to the lane's two heads of the column. Bit 2 * tile + half of `attended` is
// set if the token of row g + half * 8 of the tile is attended. The step begins at token `start` of a sequence of
// `length` tokens.
DEVICE void
finish_logits(logits_t& s, int column, const float (&unit)[2], const float (&slope)[2], float logits_soft_cap,
              unsigned attended, int start, int length, int g, float (&max_logit)[2]) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& logit = s[tile][column][i];
            logit = logit_of<HAS_SOFTCAP>(logit, unit[i % 2], logits_soft_cap);
            if (HAS_ALIBI) {
                const int token = start + token_of(tile, g + i / 2 * 8);
                logit = fmaf(slope[i % 2], float(token + 1 - length), logit);
            }
            if (!(attended >> (2 * tile + i / 2) & 1)) logit = minus_infinity();
            max_logit[i % 2] = fmaxf(max_logit[i % 2], logit);
        }
    }
#pragma unroll
    for (int mask = 4; mask <= 16; mask *= 2) {
        max_logit[0] = fmaxf(max_logit[0], shfl_xor(max_logit[0], mask));
        max_logit[1] = fmaxf(max_logit[1], shfl_xor(max_logit[1], mask));
    }
}
