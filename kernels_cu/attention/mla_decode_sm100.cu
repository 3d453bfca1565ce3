// mla_decode_sm100: MLA decode attention in CUDA Tile C++ (tile.cuh), for tcgen05 on sm_100 and sm_103. Computes what
// mla_decode.cu does for queries and a cache of one 16-bit type, with the same splits and partial results.
//
// A block takes ROWS heads of a sequence, a split, and half of the latent vector's values: the accumulators of all 512
// would be all of tensor memory. Both halves compute the scores, so entries are read from the L2 cache twice. TMA
// gathers the entries of TOKENS tokens by the numbers of their slots, in three parts: the block's own half, which is
// key and value, the other half, and the rotated key. The number of a token that does not exist is out of range.
//
// Constants
//     scalar_t       element type of queries, cache and out: half_t or bf16_t
//     table_t, length_t, PAGE_SIZE, LISTS_SLOTS, QUERY_TOKENS, HAS_LENGTHS, HAS_LSE    of mla_decode.cu
//     ROWS, TOKENS    heads of a block, and entries of a tile: powers of two

#include "number.cuh"
#include "tile.cuh"

constexpr int LATENT_SIZE = 512, HALF = 256, ROPE_SIZE = 64, SPLIT_UNIT = 16;
constexpr float LOWEST = -1e30f,
                HIDDEN = -2e30f;  // row max of no keys; logit of a token that a head does not attend to

template <int M, typename T> TILE_FUNCTION auto column_of(T x) { return full_tile<T, M, 1>(x); }
template <typename X> TILE_FUNCTION auto over_tokens(X x) { return spread<ROWS, TOKENS>(x); }
template <typename X> TILE_FUNCTION auto over_values(X x) { return spread<ROWS, HALF>(x); }
TILE_FUNCTION int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

extern "C" __tile_global__ void
mla_decode_sm100(scalar_t* out,                        // [num_seqs, num_heads, LATENT_SIZE]
                 float* lse,                           // [num_seqs, num_heads]
                 float* tmp_out,                       // [num_seqs, num_heads, max_splits, LATENT_SIZE]
                 float* max_logits,                    // [num_seqs, num_heads, max_splits]
                 float* exp_sums,                      // [num_seqs, num_heads, max_splits]
                 const scalar_t* q_nope,               // [num_seqs, num_heads, LATENT_SIZE]
                 const scalar_t* q_pe,                 // [num_seqs, num_heads, ROPE_SIZE]
                 const scalar_t* kv_c_and_k_pe_cache,  // [num_pages, PAGE_SIZE, an entry]
                 const length_t* seq_lens,             // [num_seqs]
                 const table_t* page_table,            // [num_seqs, max_pages]
                 int64_t num_heads, int64_t num_pages, int64_t max_tokens, int64_t max_splits, int64_t min_split,
                 int64_t out_stride, int64_t nope_stride, int64_t nope_head_stride, int64_t pe_stride,
                 int64_t pe_head_stride, int64_t page_stride, int64_t slot_stride, int64_t table_stride,
                 int64_t table_step, int64_t length_step, float scale) {
    const uint32_t groups = (uint32_t(num_heads) + ROWS - 1) / ROWS, half = block_index().x % 2;
    const uint32_t group = block_index().x / 2 % groups;
    const int64_t seq = block_index().x / 2 / groups, split = block_index().y;
    // The splits of splits.cuh.
    int64_t length = HAS_LENGTHS ? int64_t(seq_lens[seq * length_step]) : max_tokens;
    length = length < 0 ? 0 : length < max_tokens ? length : max_tokens;
    const int64_t even = round_up((length + max_splits - 1) / max_splits, SPLIT_UNIT);
    const int64_t size = even < min_split ? min_split : even, begin = split * size;
    if (split > 0 && begin >= length) return;
    const int end = int(begin + size < length ? begin + size : length);
    const bool direct = length <= size;

    const uint32_t heads = uint32_t(num_heads);
    const View<const scalar_t, ROWS, HALF> nope{assume_aligned(q_nope + seq * assume_multiple<8>(nope_stride)), heads,
                                                LATENT_SIZE, assume_multiple<8>(nope_head_stride)};
    const View<const scalar_t, ROWS, ROPE_SIZE> pe{assume_aligned(q_pe + seq * assume_multiple<8>(pe_stride)), heads,
                                                   ROPE_SIZE, assume_multiple<8>(pe_head_stride)};
    const auto own_query = nope.load(group, half), other_query = nope.load(group, 1 - half);
    const auto rotated_query = pe.load(group, 0);

    // The cache: a matrix with a row for each slot. A page begins `step` rows after the last one.
    const int64_t pitch = assume_multiple<8>(slot_stride), step = page_stride / slot_stride;
    const uint32_t slots = uint32_t((num_pages - 1) * step + PAGE_SIZE);
    const View<const scalar_t, TOKENS, HALF> latent{assume_aligned(kv_c_and_k_pe_cache), slots, LATENT_SIZE, pitch};
    const View<const scalar_t, TOKENS, ROPE_SIZE> rotated{assume_aligned(kv_c_and_k_pe_cache + LATENT_SIZE), slots,
                                                          ROPE_SIZE, pitch};
    const int64_t unit = LISTS_SLOTS ? 1 : PAGE_SIZE;  // tokens of an element of the table
    const View<const table_t, TOKENS, 1> table{page_table + seq * table_stride, uint32_t(max_tokens / unit), 1,
                                               LISTS_SLOTS ? 1 : table_step};

    auto row_max = column_of<ROWS>(LOWEST), row_sum = column_of<ROWS>(0.0f);
    auto accum = full_tile<float, ROWS, HALF>(0.0f);
    for (int start = int(begin); start < end; start += TOKENS) {
        const auto positions = row_numbers<TOKENS>() + column_of<TOKENS>(start);
        const auto found = table.gather(cast<uint32_t>(positions / column_of<TOKENS>(int(unit))), 0);
        const auto zero = column_of<TOKENS>(table_t(0)), size_of_page = column_of<TOKENS>(table_t(PAGE_SIZE));
        const auto listed = found / size_of_page, pages = LISTS_SLOTS ? listed : found;
        const auto exists =
            (positions < column_of<TOKENS>(end)) & (found >= zero) & (pages < column_of<TOKENS>(table_t(num_pages)));
        const auto page = cast<int32_t>(select_of(exists, pages, zero));
        const auto of_list = cast<int32_t>(select_of(exists, found - listed * size_of_page, zero));
        const auto of_page = positions - positions / column_of<TOKENS>(PAGE_SIZE) * column_of<TOKENS>(PAGE_SIZE);
        const auto slot = LISTS_SLOTS ? of_list : of_page;
        const auto numbers = select_of(exists, page * column_of<TOKENS>(int(step)) + slot, column_of<TOKENS>(-1));
        const auto at = cast<uint32_t>(numbers);
        const auto own = latent.gather(at, half);

        auto scores = multiply_nt(own_query, own, full_tile<float, ROWS, TOKENS>(0.0f));
        scores = multiply_nt(other_query, latent.gather(at, 1 - half), scores);
        scores = multiply_nt(rotated_query, rotated.gather(at, 0), scores);
        auto seen = over_tokens(transpose(numbers)) >= full_tile<int32_t, ROWS, TOKENS>(0);
        if constexpr (QUERY_TOKENS > 1) {
            const auto row = row_numbers<ROWS>() + column_of<ROWS>(int(group * ROWS));
            const auto query_token = row / column_of<ROWS>(int(num_heads) / QUERY_TOKENS);
            const auto attended = query_token + column_of<ROWS>(int(length) - QUERY_TOKENS + 1);
            seen = seen & (over_tokens(transpose(positions)) < over_tokens(attended));
        }
        const auto logits = select_of(seen, scores * full_tile<float, ROWS, TOKENS>(scale * LOG2_E),
                                      full_tile<float, ROWS, TOKENS>(HIDDEN));
        const auto larger = larger_of(row_max, max_of_rows(logits)), factor = exp2_of(row_max - larger);
        const auto weights = exp2_of(logits - over_tokens(larger));
        row_sum = row_sum * factor + sum_of_rows(weights);
        accum = multiply_nn(cast<scalar_t>(weights), own, accum * over_values(factor));
        row_max = larger;
    }

    // The combine adds the formula's epsilon of 1e-6 to partial results; 1e-20 only guards against 0 / 0.
    const auto result =
        accum * over_values(column_of<ROWS>(1.0f) / (row_sum + column_of<ROWS>(direct ? 1e-6f : 1e-20f)));
    if (direct) {
        const View<scalar_t, ROWS, HALF> whole{assume_aligned(out + seq * assume_multiple<8>(out_stride)), heads,
                                               LATENT_SIZE, LATENT_SIZE};
        whole.store(group, half, cast<scalar_t>(result));
        if constexpr (HAS_LSE) {
            const View<float, ROWS, 1> results_lse{lse + seq * num_heads, heads, 1, 1};
            if (half == 0) results_lse.store(group, 0, (row_max + log2_of(row_sum)) * column_of<ROWS>(LN_2));
        }
    } else {
        const int64_t row = seq * num_heads * max_splits + split;
        const View<float, ROWS, HALF> part{assume_aligned(tmp_out + row * LATENT_SIZE), heads, LATENT_SIZE,
                                           max_splits * LATENT_SIZE};
        part.store(group, half, result);
        const View<float, ROWS, 1> largest{max_logits + row, heads, 1, max_splits};
        const View<float, ROWS, 1> total{exp_sums + row, heads, 1, max_splits};
        if (half == 0) {
            largest.store(group, 0, row_max * column_of<ROWS>(LN_2));
            total.store(group, 0, row_sum);
        }
    }
}
