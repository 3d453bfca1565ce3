// sampling_row: draws a token of each row: a cluster of blocks has the row, one piece per block.
//
//     samples[row] = the first t with sum_{i <= t} w_i > floor(r * sum w / 2^64)   r = philox(seeds[row], offsets[row])
//
// w: weights of the tokens, 0 for a token that a filter removes. r = 0 if the temperature asks for the likeliest token.
// samples[row] = -1 if all weights are 0. The filters:
//
//     top-k   keeps the top_k[row] largest logits, and logits that equal the smallest of them
//     top-p   keeps, of these, the largest whose weights add up to top_p[row] of the sum, and logits that equal the
//             smallest of them
//
// With a top_k that is not too large, the row is read once: its candidates for top-k go to the shared memory of the
// cluster's first block (row_candidates.cuh), which searches them for the thresholds of top-k and top-p, and then for
// the token at which the running sum of weights exceeds the random number. Otherwise, or if they do not fit:
//
// 1. Load: each block copies its piece to shared memory. Every thread computes its maximum; the cluster shares the
//    smallest and the largest of these maxima.
// 2. top-k: the k-th largest of the threads' maxima is a lower bound of the k-th largest logit. Logits from the bound
//    on are counted by key.
// 3. top-p: without top-k, a first pass adds the weights of all logits to coarse bins, with a counter per lane so that
//    the lanes of a warp never add to the same one. Then the weights of the logits in the bin that reaches top_p (or,
//    with top-k, of the logits that top-k keeps) are added up by key.
// 4. Draw: each block shares the total weight it keeps. The random number selects a block, which finds the token.
//
// Keys are floats mapped to integers of the same order; key_search.cuh finds thresholds. In steps 2 and 3, each thread
// has one bit per logit that marks it as a candidate.
//
// Thread mapping: block (row, rank) has piece `rank` of a row, thread t the vectors i * NUM_THREADS + t of the piece.
// Logits beyond the piece are -inf.
//
// Constants:
//     IN_SHARED     whether blocks keep their pieces in shared memory; else every pass reads them from memory, mostly L2
//     HAS_OFFSETS, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P, HAS_TEMPERATURE   false when that argument is null
//     CLUSTER       blocks that share a row, one cluster
//     VECTORS       vectors of four logits per thread
//     BATCH         vectors of a thread in flight unless IN_SHARED: a divisor of VECTORS
//     BITS          log2 of the bins of a search
//     CAPACITY      candidates that fit in dynamic shared memory, 8 bytes each; 0 without top_k

#include "async.cuh"
#include "philox.cuh"
#include "row_candidates.cuh"

constexpr int VEC = 4, ELEMENTS = VECTORS * VEC, WORDS = ceil_div(ELEMENTS, 32), WORD_VECS = 32 / VEC;
constexpr int LOW_BITS = 20;  // bits in the low part of a weight (struct PartsOf)
using weights_t = Weights<HAS_TEMPERATURE, HAS_MIN_P, LOW_BITS>;
using parts_t = PartsOf<LOW_BITS>;
using search_t = KeySearch<NUM_THREADS, BITS, parts_t>;
constexpr int BINS = search_t::BINS, COARSE_BINS = search_t::COARSE_BINS;
// Two totals fit in 32 bits: a block's high parts, each up to 2^15, and the low parts of a coarse counter, below 2^20.
static_assert(ELEMENTS * NUM_THREADS < 1 << 17);
static_assert(IN_SHARED || VECTORS % BATCH == 0);

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
sampling_row(int32_t* samples,          // [num_rows]
             const scalar_t* logits,    // [num_rows, vocab_size]
             const int64_t* seeds,      // [num_rows]
             const int64_t* offsets,    // [num_rows]
             const int32_t* top_k,      // [num_rows]
             const float* top_p,        // [num_rows]
             const float* min_p,        // [num_rows]
             const float* temperature,  // [num_rows]
             int64_t vocab_size, int64_t logits_stride, int64_t piece_size) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];             // [CAPACITY] candidates; [VECTORS, NUM_THREADS] if IN_SHARED
    __shared__ uint32_t bins[4 * BINS];           // low and high parts of one refinement, then of the next
    __shared__ uint64_t groups[2 * COARSE_BINS];  // each the total of GROUP_BINS bins
    __shared__ uint64_t partial[2][NUM_THREADS / WARP_SIZE];
    __shared__ Found<uint64_t> found;
    __shared__ uint32_t extremes[2];  // smallest and largest of the block's thread_max_key
    __shared__ uint32_t offered[4];   // of the block's candidates (RowCandidates)
    __shared__ uint64_t sum_of_block;
    using vec_t = Vec<scalar_t, VEC>;
    vec_t* const vectors = reinterpret_cast<vec_t*>(memory) + threadIdx.x;
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t row = blockIdx.x, first = min(int64_t(blockIdx.y) * piece_size, vocab_size);
    const Span<scalar_t, VEC> piece(logits + row * logits_stride + first, int(min(piece_size, vocab_size - first)));

    const int k = HAS_TOP_K ? top_k[row] : 0;
    const bool has_top_k = k > 0 && k < vocab_size, has_top_p = HAS_TOP_P && top_p[row] < 1.0f;
    const auto random_of = [&](const weights_t& weights) {
        return weights.is_greedy() ? 0 : philox(seeds[row], HAS_OFFSETS ? offsets[row] : 0);
    };
    const auto wanted_count = [&](uint64_t all) { return min(uint64_t(k), all); };
    const auto wanted_weight = [&](uint64_t all) {
        const float p = has_top_p ? top_p[row] : 1.0f;
        const double share = p > 0.0f ? ceil(double(p) * double(all)) : 0.0;
        return share < 1.0 ? uint64_t(1) : min(uint64_t(share), all);
    };

    search_t search{bins, groups, &found};
    for (int i = threadIdx.x; i < 4 * BINS; i += NUM_THREADS) bins[i] = 0;
    if (threadIdx.x < 2) extremes[threadIdx.x] = offered[threadIdx.x] = threadIdx.x ? 0 : ~0u;
    if (threadIdx.x == 3) offered[3] = 0;
    __syncthreads();

    if constexpr (CAPACITY > 0) {
        RowCandidates<scalar_t, VEC, CLUSTER, NUM_THREADS, VECTORS> candidates{reinterpret_cast<uint64_t*>(memory),
                                                                               offered, CAPACITY};
        weights_t weights(0.0f, temperature, min_p, row);  // its row max follows
        const uint64_t random = random_of(weights);
        uint32_t min_key;
        if (has_top_k && candidates.is_worthwhile(k) && candidates.find(search, piece, int(first), k, min_key)) {
            if (blockIdx.y > 0) return;
            uint32_t max_key = 0;
            candidates.for_each([&](uint32_t key, uint32_t) { max_key = max(max_key, key); });
            max_key = lane_reduce<Max, WARP_SIZE>(max_key);
            if (lane == 0) atomicMax(extremes + 1, max_key);
            __syncthreads();
            max_key = extremes[1];
            weights.largest = number_of(max_key);
            // Three searches: the smallest key of top-k, by counts; that of top-p, by weights; the token, by weights.
            // Without top-p its search keeps all that has a weight. Tokens in their order are falling keys.
            enum { TOP_K, TOP_P, TOKEN };
            const uint32_t last = uint32_t(vocab_size) - 1;
            KeyRange range{min_key, max_key};
            uint32_t threshold = MIN_KEY;
#pragma unroll 1
            for (int step = TOP_K; max_key >= MIN_KEY && step <= TOKEN; ++step) {
                search.kept_weight = 0;
                do {
                    const auto wanted = [&](uint64_t all) {
                        return step == TOP_K ? wanted_count(all) : wanted_weight(all);
                    };
                    search.refine<1>(range, wanted, [&](auto f) {
                        candidates.for_each([&](uint32_t key, uint32_t token) {
                            const uint32_t at = step == TOKEN ? last - token : key;
                            if (key < threshold || !range.holds(at)) return;
                            f(at, step == TOP_K ? parts_t{1, 0} : weights.of(number_of(key)));
                        });
                    });
                } while (step == TOKEN ? range.low < range.high : !range.is_found);
                if (step == TOP_K) {
                    range = {threshold = range.low, max_key};
                } else if (step == TOP_P) {
                    uint64_t sum;
                    threshold = range.low;
                    sum_before<NUM_THREADS>(search.kept_weight, partial[0], sum);
                    range = {0, last, multiply_high(random, sum) + 1};
                }
            }
            if (threadIdx.x == 0) samples[row] = max_key < MIN_KEY ? -1 : int32_t(last - range.low);
            return;
        }
    }

    const scalar_t absent = from_float<scalar_t>(minus_infinity());
    if constexpr (IN_SHARED) {
#pragma unroll 1
        for (int i = 0; i < VECTORS; ++i) {
            const int number = i * NUM_THREADS + int(threadIdx.x);
            if (piece.is_whole(number)) {
                cp_async<int(sizeof(vec_t))>(vectors + i * NUM_THREADS, piece.base + number * VEC);
            } else {
                vectors[i * NUM_THREADS] = piece.load(number, absent);
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
    }

    // f(x, word, bit) for every vector of the thread: x its logits, `bit` of candidates[word] the bit of the first one.
    const auto for_each = [&](auto f) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const int end = min(WORD_VECS, VECTORS - w * WORD_VECS);
            const auto visit = [&](const vec_t& vec, int i) {
                float x[VEC];
                vec.to_floats(x);
#pragma unroll
                for (int j = 0; j < VEC; ++j) x[j] = clean(x[j]);
                f(x, w, i * VEC);
            };
            if constexpr (IN_SHARED) {
#pragma unroll 2
                for (int i = 0; i < end; ++i) visit(vectors[(w * WORD_VECS + i) * NUM_THREADS], i);
            } else {
#pragma unroll 1
                for (int i = 0; i < end; i += BATCH) {
                    vec_t batch[BATCH];
                    const int first = (w * WORD_VECS + i) * NUM_THREADS + int(threadIdx.x);
                    piece.template load_batch<NUM_THREADS>(first, absent, batch);
#pragma unroll
                    for (int b = 0; b < BATCH; ++b) visit(batch[b], i + b);
                }
            }
        }
    };
    float largest = minus_infinity();
    for_each([&](const auto& x, int, int) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) largest = ieee_max(largest, x[j]);
    });
    const uint32_t thread_max_key = key_of(largest);
    {
        // A thread with only -inf logits is left out of the minimum.
        const uint32_t low = lane_reduce<Min, WARP_SIZE>(thread_max_key >= MIN_KEY ? thread_max_key : ~0u);
        const uint32_t high = lane_reduce<Max, WARP_SIZE>(thread_max_key);
        if (lane == 0) {
            atomicMin(extremes, low);
            atomicMax(extremes + 1, high);
        }
    }
    sync_cluster<CLUSTER>();
    // The smallest and the largest of the threads' largest keys.
    const uint32_t min_thread_key = lane_reduce<Min, WARP_SIZE>(load_of_block<CLUSTER>(extremes, lane % CLUSTER));
    const uint32_t max_key = lane_reduce<Max, WARP_SIZE>(load_of_block<CLUSTER>(extremes + 1, lane % CLUSTER));
    if (max_key < MIN_KEY) {
        if (blockIdx.y == 0 && threadIdx.x == 0) samples[row] = -1;
        sync_cluster<CLUSTER>();
        return;
    }
    const weights_t weights(number_of(max_key), temperature, min_p, row);

    uint32_t candidates[WORDS];  // one bit per logit of the thread: set while the logit is a candidate
    // f(logit, key) for every candidate in `range`. Candidates outside the range are dropped; with keeps_above, those
    // above the range stay.
    const auto for_each_candidate = [&](const KeyRange& range, bool keeps_above, auto f) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
#pragma unroll 1
            for (uint32_t rest = candidates[w]; rest; rest &= rest - 1) {
                const int bit = lowest_bit(rest);
                const int i = (w * WORD_VECS + bit / VEC) * NUM_THREADS;
                const scalar_t* const vec = IN_SHARED ? vectors[i].data : piece.base + (i + int(threadIdx.x)) * VEC;
                const float x = clean(to_float(vec[bit % VEC]));
                if (range.holds(key_of(x))) {
                    f(x, key_of(x));
                } else if (!keeps_above || key_of(x) < range.low) {
                    candidates[w] &= ~(rest & -rest);
                }
            }
        }
    };
    const auto select_candidates = [&](const KeyRange& range) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) candidates[w] = 0;
        for_each([&](const auto& x, int w, int bit) {
            uint32_t bits = 0;
#pragma unroll
            for (int j = 0; j < VEC; ++j) bits |= uint32_t(range.holds(key_of(x[j]))) << j;
            candidates[w] |= bits << bit;
        });
    };

    uint32_t threshold = MIN_KEY;
    if (has_top_k) {
        KeyRange range{min_thread_key, max_key};
        const auto wanted_of_maxima = [&](uint64_t all) { return uint64_t(k) <= all ? uint64_t(k) : uint64_t(0); };
        const auto visit_maximum = [&](auto f) {
            if (thread_max_key >= MIN_KEY) f(thread_max_key, parts_t{1, 0});
        };
        const bool is_bound =
            k <= CLUSTER * NUM_THREADS && search.refine<CLUSTER>(range, wanted_of_maxima, visit_maximum);
        range = {is_bound ? range.low : MIN_KEY, max_key};
        select_candidates(range);
        while (!range.is_found) {
            search.refine<CLUSTER>(range, wanted_count, [&](auto f) {
                for_each_candidate(range, true, [&](float, uint32_t key) { f(key, parts_t{1, 0}); });
            });
        }
        threshold = range.low;
    }
    search.kept_weight = 0;
    if (has_top_p) {
        KeyRange range{threshold, max_key};
        if (!has_top_k) {
            const Coarse<COARSE_BINS> coarse(weights, number_of(min_thread_key));
            for_each([&](const auto& x, int, int) {
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const parts_t weight = weights.of(x[j]);
                    uint32_t* const counter = bins + (coarse.bin(x[j]) * GROUP_BINS + threadIdx.x % GROUP_BINS);
                    if (weight.low) atomicAdd(counter, weight.low);
                    if (weight.high) atomicAdd(counter + 2 * BINS, weight.high);
                }
            });
            search.find<CLUSTER>(bins, bins + 2 * BINS, COARSE_BINS, false, range, wanted_weight);
            const uint32_t bin_index = found.bin;
            if (threadIdx.x < COARSE_BINS && threadIdx.x > bin_index)
                search.kept_weight = groups[(search.half ^ 1) * COARSE_BINS + threadIdx.x];
            if (bin_index > 0) range.low = key_of(coarse.begin(bin_index));
            range.high = min(max_key, key_of(coarse.begin(bin_index + 1)) - 1);
            range.wanted = found.wanted;
            select_candidates(range);
        }
        while (!range.is_found) {
            search.refine<CLUSTER>(range, wanted_weight, [&](auto f) {
                for_each_candidate(range, false, [&](float x, uint32_t key) { f(key, weights.of(x)); });
            });
        }
        threshold = range.low;
    } else if (has_top_k) {
        for_each_candidate({threshold, max_key}, false,
                           [&](float x, uint32_t) { search.kept_weight += weights.of(x).whole(); });
    } else {
        parts_t sum;
        for_each([&](const auto& x, int, int) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                const parts_t weight = weights.of(x[j]);
                sum.low += weight.low;
                sum.high += weight.high;
            }
        });
        search.kept_weight = sum.whole();
    }

    uint64_t own;
    sum_before<NUM_THREADS>(search.kept_weight, partial[0], own);
    if (threadIdx.x == 0) sum_of_block = own;
    sync_cluster<CLUSTER>();
    const uint64_t up_to = sum_to_lane(lane < CLUSTER ? load_of_block<CLUSTER>(&sum_of_block, lane) : 0);
    sync_cluster<CLUSTER>();
    const uint64_t target = multiply_high(random_of(weights), shfl<WARP_SIZE>(up_to, WARP_SIZE - 1));
    const uint64_t before = shfl<WARP_SIZE>(up_to, blockIdx.y) - own;
    if (target < before || target - before >= own) return;
    const auto weigh = [&](int i, uint64_t (&w)[VEC]) {
        const vec_t vec = IN_SHARED ? reinterpret_cast<const vec_t*>(memory)[i] : piece.load(i, absent);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const float x = clean(vec[j]);
            w[j] = key_of(x) >= threshold ? weights.of(x).whole() : 0;
        }
    };
    const auto take = [&](int i, int j, uint64_t) { samples[row] = int32_t(first) + piece.element(i) + j; };
    find_by_weight<NUM_THREADS, VEC>(target - before, VECTORS * NUM_THREADS, weigh, take, partial);
}
