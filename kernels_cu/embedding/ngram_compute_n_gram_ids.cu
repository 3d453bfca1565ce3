// ngram_compute_n_gram_ids: for each token, the hashed ids of the n-grams that end with it.
//
//     n_gram_ids[i, c] = exclusive_ne_embedder_size_sums[c]
//                      + (sum over j < n of (table[row, column - j] * ne_weights[c, j] mod m)) mod m
//     c = (n - 2) * NE_K + k for n = 2 ... NE_N and k = 0 ... NE_K - 1;  m = ne_mods[c]
//     row, column = row_indices[r], column_starts[r] + i - exclusive_req_len_sums[r]    for the request r of token i
//
// The sum ends before the first j with column - j < 0 or with a negative entry of the table. Nothing is written for a
// token without a request, a row or column outside the table, or m < 1.
//
// Threads: one id per thread, numbered token after token. A thread finds its request by binary search.
//
// Constants
//     NE_N          the longest n-gram
//     NE_K          ids of an n-gram of each length

#include "paged.cuh"

constexpr int CONFIGS = (NE_N - 1) * NE_K;

// a mod m for m >= 1, never negative.
DEVICE int64_t floor_mod(int64_t a, int64_t m) {
    const int64_t rest = a % m;
    return rest < 0 ? rest + m : rest;
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
ngram_compute_n_gram_ids(const int32_t* ne_weights,                       // [NE_N - 1, NE_K, NE_N]
                         const int32_t* ne_mods,                          // [NE_N - 1, NE_K]
                         const int32_t* exclusive_ne_embedder_size_sums,  // [CONFIGS + 1]
                         const int32_t* exclusive_req_len_sums,           // [num_requests + 1]
                         const int32_t* ne_token_table,                   // [table_rows, table_columns]
                         const int64_t* row_indices,                      // [num_requests]
                         const int32_t* column_starts,                    // [num_requests]
                         int32_t* n_gram_ids,                             // [num_tokens, CONFIGS]
                         int64_t num_tokens, int64_t num_requests, int64_t table_rows, int64_t table_columns,
                         int64_t table_stride) {
    await_previous_kernel();
    const int64_t at = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
    const int64_t token = int64_t(uint64_t(at) / CONFIGS);
    const int config = int(uint64_t(at) % CONFIGS);
    if (token >= num_tokens) return;
    const int64_t request = count_up_to(exclusive_req_len_sums, num_requests + 1, 1, token) - 1;
    const int64_t mod = ne_mods[config];
    if (request < 0 || request >= num_requests || mod < 1) return;
    const int64_t row = row_indices[request];
    const int64_t column = int64_t(column_starts[request]) + token - exclusive_req_len_sums[request];
    if (row < 0 || row >= table_rows || column < 0 || column >= table_columns) return;
    const int32_t* last = ne_token_table + row * table_stride + column;
    const int length = config / NE_K + 2;
    int64_t sum = 0;
#pragma unroll
    for (int j = 0; j < NE_N; ++j) {
        if (j >= length || j > column || last[-j] < 0) break;
        sum += floor_mod(int64_t(last[-j]) * ne_weights[config * NE_N + j], mod);
    }
    n_gram_ids[at] = int32_t(uint32_t(sum % mod + exclusive_ne_embedder_size_sums[config]));
}
