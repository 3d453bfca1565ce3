// prefill_sm100: attention prefill in CUDA Tile C++ (tile.cuh), for tcgen05 on sm_100 and sm_103. Computes what
// prefill_mma.cu does, over a paged KV cache or ragged tensors, without ALiBi slopes and fp8.
//
//     l_ij = softcap(scale * q_i . k_j)                               limit_i - window < j <= limit_i
//     out_i = sum_j exp(l_ij - m_i) v_j / (sum_j exp(l_ij - m_i) + 1e-6),   m_i = max_j l_ij
//
// with limit_i = length - num_queries + i if CAUSAL, else length - 1. After FlashAttention-2 (Dao 2023,
// arXiv:2307.08691).
//
// Rows and their tiles are those of prefill_mma.cu: a row for each query token and each query head of a KV head (GQA
// packing). TMA gathers the queries of a block by the numbers of their rows, and scatters rows of out likewise.
//
// A block goes through KV tiles of TOKENS keys: first those in which each row sees each key, then the others, where the
// mask hides keys. Where a page of the cache, or a ragged tensor, has whole tiles, TMA loads the former as they are.
// The keys and values of all other tiles are gathered by the numbers of their slots. The number of a token that is out
// of range, or in an invalid block, is out of range, too: TMA reads no slot after the end of the sequence.
//
// Constants
//     scalar_t, table_t, length_t, starts_t, HEAD_SIZE, VALUE_SIZE, RAGGED, BLOCK_SIZE, GROUP, CAUSAL, HAS_SOFTCAP,
//     HAS_SINKS, HAS_LSE    of prefill_mma.cu; HEAD_SIZE and VALUE_SIZE are multiples of 8
//     ROWS, TOKENS    rows of a block, and keys of a KV tile: powers of two
//     HEAD_TILE, VALUE_TILE    powers of two, at least HEAD_SIZE and VALUE_SIZE

#include "number.cuh"
#include "tile.cuh"

constexpr float LOWEST = -1e30f, HIDDEN = -2e30f;  // row max of no keys; logit of a key that a row does not see
constexpr bool HAS_WHOLE_TILES = RAGGED || BLOCK_SIZE % TOKENS == 0;  // whether slots of a KV tile follow each other

template <int M, typename T> TILE_FUNCTION auto column_of(T x) { return full_tile<T, M, 1>(x); }
template <typename X> TILE_FUNCTION auto over_tokens(X x) { return spread<ROWS, TOKENS>(x); }
template <typename X> TILE_FUNCTION auto over_values(X x) { return spread<ROWS, VALUE_TILE>(x); }
template <typename T> TILE_FUNCTION T least(T x, T y) { return x < y ? x : y; }
template <typename T> TILE_FUNCTION T most(T x, T y) { return x < y ? y : x; }

extern "C" __tile_global__ void
prefill_sm100(scalar_t* out,                 // [num_tokens, num_heads, VALUE_SIZE]
              float* lse,                    // [num_heads, num_tokens]
              const scalar_t* query,         // [num_tokens, num_heads, HEAD_SIZE]
              const scalar_t* key_cache,     // [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
              const scalar_t* value_cache,   // likewise, with VALUE_SIZE
              const table_t* block_tables,   // [num_seqs, max_tokens / BLOCK_SIZE]
              const length_t* seq_lens,      // [num_seqs]; RAGGED: cu_seqlens_k [num_seqs + 1]
              const starts_t* cu_seqlens_q,  // [num_seqs + 1]
              const float* sinks,            // [num_heads]
              int64_t num_tiles, int64_t num_tokens, int64_t num_seqs, int64_t num_kv_heads, int64_t min_tokens,
              int64_t num_blocks, int64_t max_tokens, int64_t sliding_window, int64_t out_stride, int64_t query_stride,
              int64_t table_stride, int64_t table_step, int64_t length_step, int64_t starts_step,
              int64_t key_block_stride, int64_t key_token_stride, int64_t key_head_stride, int64_t value_block_stride,
              int64_t value_token_stride, int64_t value_head_stride, float scale, float logits_soft_cap) {
    // The sequence: the last one that begins at the tile or before. The later tiles of a sequence take longer under
    // CAUSAL, and come first.
    const int64_t tile_number = num_tiles - 1 - block_index().x;
    const auto first_tile_of = [&](int64_t seq) {
        return int64_t(cu_seqlens_q[seq * starts_step]) * GROUP / ROWS + seq;
    };
    int64_t low = 0, high = num_seqs;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (first_tile_of(middle) <= tile_number) low = middle + 1;
        else high = middle;
    }
    const int64_t seq = low - 1;
    if (seq < 0) return;
    const int64_t first_token = cu_seqlens_q[seq * starts_step], end_token = cu_seqlens_q[(seq + 1) * starts_step];
    if (first_token < 0 || end_token > num_tokens || first_token >= end_token) return;
    const int64_t tokens = end_token - first_token, first_row = (tile_number - first_tile_of(seq)) * ROWS;
    if (tokens < min_tokens || first_row < 0 || first_row >= tokens * GROUP) return;
    int64_t length = seq_lens[seq * length_step], first_key = 0;
    if constexpr (RAGGED) {
        const int64_t end_key = seq_lens[(seq + 1) * length_step];
        first_key = length;
        length = 0 <= first_key && first_key <= end_key && end_key <= max_tokens ? end_key - first_key : 0;
    }
    length = least(most(length, int64_t(0)), max_tokens);

    // The rows: token, head, and the last key that a row sees.
    const uint32_t kv_head = block_index().y;
    const int last_row = int(least(first_row + ROWS, tokens * GROUP)) - 1, context = int(length - tokens);
    const auto rows = row_numbers<ROWS>() + column_of<ROWS>(int(first_row));
    const auto row_tokens = rows / column_of<ROWS>(GROUP);
    const auto row_heads = rows - row_tokens * column_of<ROWS>(GROUP) + column_of<ROWS>(int(kv_head * GROUP));
    const auto exists = rows <= column_of<ROWS>(last_row);
    const auto limits = column_of<ROWS>(CAUSAL ? context : int(length) - 1) + row_tokens * column_of<ROWS>(int(CAUSAL));
    const int oldest = CAUSAL ? context + int(first_row) / GROUP : int(length) - 1;
    const int newest = CAUSAL ? context + last_row / GROUP : int(length) - 1;
    const int window = sliding_window < max_tokens ? int(sliding_window) : 0;
    const int64_t num_heads = num_kv_heads * GROUP;
    // The numbers of the rows in a tensor with `step` rows for each token.
    const auto numbers_of = [&](auto numbers) {
        return cast<uint32_t>(select_of(exists, numbers, column_of<ROWS>(-1)));
    };
    const auto rows_of = [&](int64_t step) {
        const auto all_tokens = row_tokens + column_of<ROWS>(int(first_token));
        return numbers_of(all_tokens * column_of<ROWS>(int(step)) + row_heads);
    };
    const int64_t query_step = query_stride / HEAD_SIZE, out_step = out_stride / VALUE_SIZE;
    const View<const scalar_t, ROWS, HEAD_TILE> queries{
        assume_aligned(query), uint32_t((num_tokens - 1) * query_step + num_heads), HEAD_SIZE, HEAD_SIZE};
    const auto q = queries.gather(rows_of(query_step), 0);

    // Keys and values by the numbers of their slots: rows of a matrix.
    const int64_t block_step = RAGGED ? 1 : key_block_stride / key_token_stride;
    const int64_t value_step = RAGGED ? 1 : value_block_stride / value_token_stride;
    const int64_t key_pitch = assume_multiple<8>(RAGGED ? key_block_stride : key_token_stride);
    const int64_t value_pitch = assume_multiple<8>(RAGGED ? value_block_stride : value_token_stride);
    const View<const scalar_t, TOKENS, HEAD_TILE> keys{assume_aligned(key_cache + kv_head * key_head_stride),
                                                       uint32_t((num_blocks - 1) * block_step + BLOCK_SIZE), HEAD_SIZE,
                                                       key_pitch};
    const View<const scalar_t, TOKENS, VALUE_TILE> values{assume_aligned(value_cache + kv_head * value_head_stride),
                                                          uint32_t((num_blocks - 1) * value_step + BLOCK_SIZE),
                                                          VALUE_SIZE, value_pitch};
    const table_t* const blocks = block_tables + seq * table_stride;

    auto row_max = column_of<ROWS>(LOWEST), row_sum = column_of<ROWS>(0.0f);
    auto accum = full_tile<float, ROWS, VALUE_TILE>(0.0f);
    // Adds a tile of keys and values. `visible` hides logits.
    const auto add = [&](auto key_tile, auto value_tile, auto visible) {
        const auto zero = full_tile<float, ROWS, TOKENS>(0.0f);
        auto logits = multiply_nt(q, key_tile, zero);
        if constexpr (HAS_SOFTCAP) {
            const auto capped = tanh_of(logits * full_tile<float, ROWS, TOKENS>(scale / logits_soft_cap));
            logits = visible(capped * full_tile<float, ROWS, TOKENS>(logits_soft_cap * LOG2_E));
        } else {
            logits = visible(logits * full_tile<float, ROWS, TOKENS>(scale * LOG2_E));
        }
        const auto larger = larger_of(row_max, max_of_rows(logits)), factor = exp2_of(row_max - larger);
        const auto weights = exp2_of(logits - over_tokens(larger));
        row_sum = row_sum * factor + sum_of_rows(weights);
        accum = multiply_nn(cast<scalar_t>(weights), value_tile, accum * over_values(factor));
        row_max = larger;
    };

    const int first = window > 0 ? most(oldest - window + 1, 0) : 0, first_tile = first / TOKENS;
    const int end_tile = most((newest + TOKENS) / TOKENS, first_tile);
    int seen_tile = window > 0 ? most((newest - window + TOKENS) / TOKENS, first_tile) : first_tile;
    int seen_end = HAS_WHOLE_TILES ? most((oldest + 1) / TOKENS, seen_tile) : seen_tile;
    if constexpr (HAS_WHOLE_TILES) {
        for (int i = seen_tile; i < seen_end; ++i) {
            int64_t row = first_key + int64_t(i) * TOKENS, value_row = row;
            float hidden = 0.0f;
            if constexpr (!RAGGED) {
                const int64_t block = int64_t(blocks[i * TOKENS / BLOCK_SIZE * table_step]);
                const bool is_valid = block >= 0 && block < num_blocks;
                const int64_t slot = i * TOKENS % BLOCK_SIZE;
                row = (is_valid ? block : num_blocks) * block_step + slot;
                value_row = (is_valid ? block : num_blocks) * value_step + slot;
                hidden = is_valid ? 0.0f : HIDDEN;
            }
            const auto visible = [&](auto logits) { return logits + full_tile<float, ROWS, TOKENS>(hidden); };
            add(keys.load_from(uint32_t(row), 0), values.load_from(uint32_t(value_row), 0), visible);
        }
    }
    const int before = seen_tile - first_tile, masked = before + end_tile - seen_end;
    for (int i = 0; i < masked; ++i) {
        const int start = (i < before ? first_tile + i : seen_end + i - before) * TOKENS;
        const auto positions = row_numbers<TOKENS>() + column_of<TOKENS>(start);
        const auto in_sequence = positions < column_of<TOKENS>(int(length));
        const auto none = column_of<TOKENS>(-1);
        auto key_rows = select_of(in_sequence, positions + column_of<TOKENS>(int(first_key)), none);
        auto value_rows = key_rows;
        if constexpr (!RAGGED) {
            const auto pages = positions / column_of<TOKENS>(BLOCK_SIZE);
            const auto slots = positions - pages * column_of<TOKENS>(BLOCK_SIZE);
            const View<const table_t, TOKENS, 1> table{blocks, uint32_t(max_tokens / BLOCK_SIZE), 1, table_step};
            const auto found = table.gather(cast<uint32_t>(pages), 0);
            const auto is_valid = in_sequence & (found >= column_of<TOKENS>(table_t(0))) &
                                  (found < column_of<TOKENS>(table_t(num_blocks)));
            const auto block = select_of(is_valid, cast<int32_t>(found), column_of<TOKENS>(0));
            key_rows = select_of(is_valid, block * column_of<TOKENS>(int(block_step)) + slots, none);
            value_rows = select_of(is_valid, block * column_of<TOKENS>(int(value_step)) + slots, none);
        }
        const auto columns = over_tokens(transpose(positions)), last = over_tokens(limits);
        const auto is_there = over_tokens(transpose(key_rows)) >= full_tile<int32_t, ROWS, TOKENS>(0);
        auto seen = is_there & (columns <= last);
        if (window > 0) seen = seen & (columns > last - full_tile<int32_t, ROWS, TOKENS>(window));
        const auto visible = [&](auto logits) {
            return select_of(seen, logits, full_tile<float, ROWS, TOKENS>(HIDDEN));
        };
        add(keys.gather(cast<uint32_t>(key_rows), 0), values.gather(cast<uint32_t>(value_rows), 0), visible);
    }

    if constexpr (HAS_SINKS) {
        const View<const float, ROWS, 1> all{sinks, uint32_t(num_heads), 1, 1};
        const auto sink = all.gather(numbers_of(row_heads), 0) * column_of<ROWS>(LOG2_E);
        const auto larger = larger_of(row_max, sink), factor = exp2_of(row_max - larger);
        row_sum = row_sum * factor + exp2_of(sink - larger);
        accum = accum * over_values(factor);
        row_max = larger;
    }
    const auto quotient = column_of<ROWS>(1.0f) / (row_sum + column_of<ROWS>(1e-6f));
    const View<scalar_t, ROWS, VALUE_TILE> results{
        assume_aligned(out), uint32_t((num_tokens - 1) * out_step + num_heads), VALUE_SIZE, VALUE_SIZE};
    results.scatter(rows_of(out_step), 0, cast<scalar_t>(accum * over_values(quotient)));
    if constexpr (HAS_LSE) {
        const View<float, ROWS, 1> results_lse{lse, uint32_t(num_heads * num_tokens), 1, 1};
        const auto all_tokens = row_tokens + column_of<ROWS>(int(first_token));
        const auto numbers = row_heads * column_of<ROWS>(int(num_tokens)) + all_tokens;
        results_lse.scatter(numbers_of(numbers), 0, (row_max + log2_of(row_sum)) * column_of<ROWS>(LN_2));
    }
}
