// decode_logits.cuh: the logits of a step of attention_decode: queries in shared memory, MMAs with keys, and masks.
//
//     S^T = K Q^T,   l = softcap(scale * S) + slope * (token - length + 1), or -inf where a token is not attended
//
// A lane holds PRODUCT_SUMS accumulators of each tile of 16 tokens and TILE_HEADS heads: accumulator i belongs to token
// sum_row(lane, i / LANE_HEADS) and head sum_head(lane, i % LANE_HEADS) (decode_operand.cuh).
//
// The constants in capitals that are not defined here are those of attention_decode.cu.
#pragma once
#include "decode_tile.cuh"

using logits_t = float[TILES][COLUMNS][PRODUCT_SUMS];

// QUERY_LANES lanes share a head, and load QUERY_VEC elements of it at a time.
constexpr int QUERY_VEC = 16 / sizeof(scalar_t), QUERY_VECS = QUERY_SIZE / QUERY_VEC;
constexpr int QUERY_LANES = QUERY_VECS <= 8 ? 8 : QUERY_VECS <= 16 ? 16 : 32;
static_assert(QUERY_SIZE % QUERY_VEC == 0 && HEAD_SIZE % QUERY_VEC == 0);

// A lane's part of QUERY_BATCH heads, as loaded. All loads of a batch are in flight together.
constexpr int QUERY_BATCH = 2, LANE_VECS = ceil_div(QUERY_VECS, QUERY_LANES);
struct QueryBatch {
    Vec<scalar_t, QUERY_VEC> vecs[QUERY_BATCH][LANE_VECS];

    // The first head of the lane in batch `batch`, and the distance to its next one.
    static DEVICE int stride() { return int(blockDim.x) / QUERY_LANES; }
    static DEVICE int first_head(int batch) { return int(threadIdx.x) / QUERY_LANES + batch * QUERY_BATCH * stride(); }

    // query_of(head) is the address of a head's query.
    template <typename F>
    DEVICE void load(int batch, int num_heads, F query_of) {
#pragma unroll
        for (int i = 0; i < QUERY_BATCH * LANE_VECS; ++i) {
            const int vec = i % LANE_VECS * QUERY_LANES + int(threadIdx.x) % QUERY_LANES;
            const int head = min(first_head(batch) + i / LANE_VECS * stride(), num_heads - 1);
            vecs[i / LANE_VECS][i % LANE_VECS] = Vec<scalar_t, QUERY_VEC>::template load<QUERY_ACCESS>(
                query_of(head) + min(vec * QUERY_VEC, HEAD_SIZE - QUERY_VEC));
        }
    }
};

// Copies the queries of a CTA to shared memory, with zeros for heads and elements that do not exist. `loaded` is the
// first batch. units[head] becomes the factor from a score of the head to its logit: key_unit, and with an fp8 cache
// also the inverse of the power of two that scales the query into the range of float16.
template <typename F>
DEVICE void
prepare_queries(product_t* queries, float* units, int num_heads, float key_unit, QueryBatch& loaded, F query_of) {
    constexpr int ACCESS = QUERY_STRIDE % 8 == 0 ? 8 : 4;
    const int lane = threadIdx.x % QUERY_LANES, stride = QueryBatch::stride();
    for (int batch = 0; QueryBatch::first_head(batch) < HEADS; ++batch) {
        if (batch > 0) loaded.load(batch, num_heads, query_of);
#pragma unroll
        for (int b = 0; b < QUERY_BATCH; ++b) {
            const int head = QueryBatch::first_head(batch) + b * stride;
            float x[LANE_VECS][QUERY_VEC], absmax = 0.0f, factor = 1.0f;
#pragma unroll
            for (int i = 0; i < LANE_VECS; ++i) {
                const bool inside = head < num_heads && (i * QUERY_LANES + lane) * QUERY_VEC < HEAD_SIZE;
                loaded.vecs[b][i].to_floats(x[i]);
#pragma unroll
                for (int j = 0; j < QUERY_VEC; ++j) {
                    if (!inside) x[i][j] = 0.0f;
                    absmax = fmaxf(absmax, fabsf(x[i][j]));
                }
            }
            if constexpr (IS_FP8) {
#pragma unroll
                for (int mask = QUERY_LANES / 2; mask > 0; mask /= 2) absmax = fmaxf(absmax, shfl_xor(absmax, mask));
                factor = inverse_power_of_two(absmax);
            }
            if (head >= HEADS) continue;
#pragma unroll
            for (int i = 0; i < LANE_VECS; ++i) {
                const int element = (i * QUERY_LANES + lane) * QUERY_VEC;
#pragma unroll
                for (int j = 0; j < QUERY_VEC; j += ACCESS) {
                    float part[ACCESS];
#pragma unroll
                    for (int k = 0; k < ACCESS; ++k) part[k] = IS_FP8 ? x[i][j + k] * factor : x[i][j + k];
                    if (QUERY_VECS % QUERY_LANES > 0 && element >= QUERY_SIZE) continue;
                    Vec<product_t, ACCESS>::from_floats(part).store_shared(queries + head * QUERY_STRIDE + element + j);
                }
            }
            if (lane == 0) units[head] = key_unit * (IS_FP8 ? 1.0f / factor : 1.0f);
        }
    }
}

// S^T = K Q^T for part `part` of the keys; S^T += if it is not the lane's first part.
DEVICE void multiply_keys(logits_t& s, const Keys& keys, const product_t* queries, int lane, int part, bool is_first) {
    if (is_first) {
#pragma unroll
        for (int i = 0; i < TILES * COLUMNS * PRODUCT_SUMS; ++i) {
            s[i / (COLUMNS * PRODUCT_SUMS)][i / PRODUCT_SUMS % COLUMNS][i % PRODUCT_SUMS] = 0.0f;
        }
    }
    // If registers are short, queries are loaded from shared memory in every step.
    const int own = MATRIX_CORE == WMMA_11 || PIECES > 1 ? made_anew(lane) : lane;
    // Query words loaded at once: those of one MMA or two, by one access or two.
    constexpr int TERMS = KEY_WORDS < 4 && !IS_FP8 ? 4 : KEY_WORDS, ACCESS = TERMS < 4 ? TERMS : 4;
#pragma unroll
    for (int i = 0; i < KEY_CHUNKS * CHUNK_WORDS * COLUMNS; i += TERMS) {
        const int column = i / TERMS % COLUMNS, first = i / (TERMS * COLUMNS) * TERMS;
        const int c = part * KEY_CHUNKS + first / CHUNK_WORDS, head = column * TILE_HEADS + operand_head(own);
        const product_t* q =
            queries + head * QUERY_STRIDE + (KEY_LANES * c + cache_run(own)) * CHUNK + first % CHUNK_WORDS * 2;
        uint32_t terms[TERMS];
        order_loads();
#pragma unroll
        for (int k = 0; k < TERMS; k += ACCESS) {
            const auto loaded = *reinterpret_cast<const Vec<uint32_t, ACCESS>*>(q + 2 * k);
#pragma unroll
            for (int j = 0; j < ACCESS; ++j) terms[k + j] = loaded.data[j];
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int k = 0; k < TERMS; k += KEY_WORDS) {
                uint32_t tokens[KEY_WORDS * CACHE_ROWS], heads[KEY_WORDS];
                operand_of_rows<KEY_WORDS>(tokens, [&](int row, int word) {
                    const int at = (first + k) / (IS_FP8 ? 2 : 1) + word;
                    return keys.rows[tile][row][at / 4][at % 4];
                });
#pragma unroll
                for (int j = 0; j < KEY_WORDS; ++j) heads[j] = terms[k + j];
                multiply_cache<product_t>(s[tile][column], tokens, heads);
            }
        }
    }
}

// The scores of a warp in shared memory, through which the slices of a step add theirs.
constexpr bool HAS_SLICES = SLICES > 1;
constexpr int SLICE_SCORES = TILES * COLUMNS * WARP_SIZE;  // float4s, four scores each, of a warp
DEVICE void leave_scores(float4* to, const logits_t& s, int lane) {
#pragma unroll
    for (int i = 0; i < TILES * COLUMNS; ++i) {
        const float (&own)[PRODUCT_SUMS] = s[i / COLUMNS][i % COLUMNS];
        to[i * WARP_SIZE + lane] = float4{own[0], own[1], own[2], own[3]};
    }
}

// The sum of the scores of all slices, in an order that does not depend on the slice: slices agree on the row max.
DEVICE void add_scores(logits_t& s, const float4* of_slices, int lane) {
#pragma unroll
    for (int i = 0; i < TILES * COLUMNS; ++i) {
        float (&sum)[PRODUCT_SUMS] = s[i / COLUMNS][i % COLUMNS];
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            const float4 part = of_slices[slice * SLICE_SCORES + i * WARP_SIZE + lane];
            const float parts[] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) sum[k] = slice == 0 ? parts[k] : sum[k] + parts[k];
        }
    }
}

// Converts the scores `s` of one column of tiles to logits, and raises max_logit to the largest of the lane's logits.
// unit, slope and max_logit belong to the lane's heads of the column. Bit tile * SUM_ROWS + i of `attended` is set if
// the lane's token i of the tile is attended; with HAS_TOKENS, each of the lane's heads has TILES * SUM_ROWS such bits.
// The step begins at token `start` of a sequence of `length` tokens, up to the CTA's first query token.
DEVICE void finish_logits(logits_t& s, int column, const float (&unit)[LANE_HEADS], const float (&slope)[LANE_HEADS],
                          float logits_soft_cap, unsigned attended, int start, int length, int lane,
                          float (&max_logit)[LANE_HEADS]) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < PRODUCT_SUMS; ++i) {
            const int head = i % LANE_HEADS, row = i / LANE_HEADS;
            float& logit = s[tile][column][i];
            logit = logit_of<HAS_SOFTCAP>(logit, unit[head], logits_soft_cap);
            if (HAS_ALIBI) {
                const int token = start + token_of(tile, sum_row(lane, row));
                const int own = length + token_of_column(column * TILE_HEADS + sum_head(lane, head));
                logit = fmaf(slope[head], float(token + 1 - own), logit);
            }
            const int first_bit = HAS_TOKENS ? (column * LANE_HEADS + head) * TILES * SUM_ROWS : 0;
            if (!(attended >> (first_bit + SUM_ROWS * tile + row) & 1)) logit = minus_infinity();
            max_logit[head] = fmaxf(max_logit[head], logit);
        }
    }
#pragma unroll
    for (int mask = FIRST_HEAD_MASK; mask < WARP_SIZE; mask *= 2) {
#pragma unroll
        for (int head = 0; head < LANE_HEADS; ++head) {
            max_logit[head] = fmaxf(max_logit[head], shfl_xor(max_logit[head], mask));
        }
    }
}

// Packs the lane's rounded probabilities of a tile into an MMA operand: one word for two elements.
constexpr int HEAD_WORDS = ON_MATRIX_CORES ? SHORT_WORDS : 2;
template <int WORDS>
DEVICE void finish_probabilities(uint32_t (&words)[WORDS]) {
    if constexpr (ON_MATRIX_CORES) {
        finish_operand(words);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) words[i] = transpose_8x8(words[i]);
    }
}

// P^T of a step: the operands p_hi + p_lo in the MMA's type; with an fp8 cache p_hi alone.
using probabilities_t = uint32_t[TILES][COLUMNS][HEAD_WORDS];

// The online softmax of one column of tiles. On entry exp_sum and o, of the lane's heads of the column, are relative to
// max_logit. `larger` is the row max including this step's logits s. On return max_logit is `larger`, exp_sum and o are
// rescaled to it, exp_sum includes the step's probabilities, and p_hi and p_lo hold their operands.
DEVICE void take_probabilities(const logits_t& s, int column, const float (&larger)[LANE_HEADS],
                               float (&max_logit)[LANE_HEADS], float (&exp_sum)[LANE_HEADS],
                               float (&o)[ROWS][PRODUCT_SUMS], probabilities_t& p_hi, probabilities_t& p_lo) {
    bool grows = false;
#pragma unroll
    for (int i = 0; i < LANE_HEADS; ++i) grows |= larger[i] > max_logit[i];
    if (any_lane(grows)) {
        float correction[LANE_HEADS];
#pragma unroll
        for (int i = 0; i < LANE_HEADS; ++i) {
            correction[i] = relative_exp2(max_logit[i], larger[i]);
            exp_sum[i] *= correction[i];
            max_logit[i] = larger[i];
        }
#pragma unroll
        for (int i = 0; i < ROWS * PRODUCT_SUMS; ++i)
            o[i / PRODUCT_SUMS][i % PRODUCT_SUMS] *= correction[i % LANE_HEADS];
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        float exact[PRODUCT_SUMS], hi[PRODUCT_SUMS];
#pragma unroll
        for (int i = 0; i < PRODUCT_SUMS; ++i) {
            exact[i] = probability_of<product_t>(s[tile][column][i], max_logit[i % LANE_HEADS]);
            exp_sum[i % LANE_HEADS] += exact[i];
        }
#pragma unroll
        for (int pair = 0; pair < PRODUCT_SUMS / 2; ++pair) {
            const uint32_t word = pack_pair<product_t>(exact[2 * pair], exact[2 * pair + 1]);
            unpack_pair<product_t>(word, hi[2 * pair], hi[2 * pair + 1]);
            p_hi[tile][column][pair] = word;
            if constexpr (!IS_FP8) {
                p_lo[tile][column][pair] =
                    pack_pair<product_t>(exact[2 * pair] - hi[2 * pair], exact[2 * pair + 1] - hi[2 * pair + 1]);
            }
        }
        finish_probabilities(p_hi[tile][column]);
        if constexpr (!IS_FP8) finish_probabilities(p_lo[tile][column]);
    }
}
