// top_k_per_row: where the topK largest of each segment of a row are, from left to right; of equal ones the first.
//
//     segment of row r   [rowStarts[r], rowEnds[r]), or [0, seq_lens[r / next_n] - next_n + r % next_n + 1), cut to the columns
//     indices[r]         positions in it; 0, 1, ..., -1, -1, ... if it is not longer than topK
//
// 1. Candidates go to shared memory: all of the segment; or of a long one, of which topK is a small part, what is as large as
//    a sample says. Should that be less than topK or more than there is room for, all is read from memory again below.
// 2. The k-th largest is found by its digits, 11, 11 and 10 bits from the left, with a histogram each; the last digits are not
//    looked at if all with the first ones are taken.
// 3. A bit for each place says what is larger, another what is equal; counted from the left they say what goes where.
//
// All of a segment lies in its order; else candidate i of thread t is at i * NUM_THREADS + t, with its place.
//
// A block has a segment, or the blocks of a cluster a piece of it each, which add up their histograms and count what the
// pieces before theirs have.
//
// Constants
//     DECODE        segments are given by seq_lens
//     CLUSTER       blocks that share a row and run together
//     VEC_SIZE      elements in one memory access: 4, or 1 where elements lie apart
//     NUM_THREADS   threads in the block

#include "cluster.cuh"
#include "reduce.cuh"
#include "select.cuh"
#include "span.cuh"
#include "top_k.cuh"

using vec_t = Vec<uint32_t, VEC_SIZE>;
constexpr int SAMPLES = CLUSTER * NUM_THREADS * VEC_SIZE;  // a vector of each thread
constexpr uint32_t ABSENT = ~0u;                           // the lowest: its key is 0
constexpr int WINDOW = 32 * NUM_THREADS;                   // places whose bits are looked at together: counts have 16 bits
static_assert(WINDOW <= 1 << 15);

DEVICE vec_t keys_of(vec_t vec) {
#pragma unroll
    for (int j = 0; j < VEC_SIZE; ++j) vec.data[j] = ordered_bits(vec.data[j]);
    return vec;
}

// Elements that lie together are on their way to the cache before anyone knows which are wanted: some, if a block has a row.
DEVICE void prefetch_row(const uint32_t* row, int64_t columns) {
    constexpr int LINE = 32, MOST = 8192;
    for (int i = threadIdx.x * LINE; CLUSTER == 1 && VEC_SIZE > 1 && i < min(columns, int64_t(MOST)); i += NUM_THREADS * LINE) {
        prefetch_line(row + i);
    }
}

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
top_k_per_row(int32_t* indices,          // [numRows, topK]
              const uint32_t* logits,    // [numRows, columns], bits of float
              const int32_t* rowStarts,  // [numRows]
              const int32_t* rowEnds,    // [numRows]
              const int32_t* seq_lens,   // [ceil(numRows / next_n)]
              int next_n, int64_t columns, int64_t stride0, int64_t stride1, int64_t topK,
              int64_t capacity) {        // candidates of a thread, of 8 bytes with their place, and one more, in shared memory
    prefetch_row(logits + blockIdx.x * stride0, columns);
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    __shared__ uint32_t bins[2][MOST_BINS];  // of a digit and of the one after
    __shared__ uint32_t groups[CLUSTER > 1 ? 2 : 1][MOST_BINS / GROUP_BINS];
    __shared__ uint32_t larger[NUM_THREADS];
    __shared__ uint32_t equal[NUM_THREADS];
    __shared__ uint32_t partial[2][NUM_THREADS / WARP_SIZE];
    __shared__ Found<uint32_t> found;
    __shared__ uint32_t totals[4];  // candidates, and whether there are too many; the larger and the equal ones
    const int64_t row = blockIdx.x;

    const Segment segment = segment_of<DECODE>(rowStarts, rowEnds, seq_lens, next_n, columns);
    const int length = segment.length;
    for (int i = threadIdx.x; i < MOST_BINS; i += NUM_THREADS) bins[0][i] = bins[1][i] = 0;
    if (threadIdx.x < 4) totals[threadIdx.x] = 0;
    indices += row * topK;
    if (length <= topK) {
        if (blockIdx.y == 0) take_all<NUM_THREADS>(indices, length, topK);
        return;
    }

    // The block's piece. The place of an element is that of its vector times VEC_SIZE, and its own in that.
    const int piece_size = ceil_div(length, CLUSTER), from = min(int(blockIdx.y) * piece_size, length);
    const Span<uint32_t, VEC_SIZE> piece(
        logits + row * stride0 + (segment.begin + from) * stride1, min(piece_size, length - from), stride1);
    const int vectors = piece.vectors(), places = vectors * VEC_SIZE;

    // The bin of a digit in which the wanted-th largest lies of all keys that all blocks' visit(f) gives to f, and that begin
    // with `prefix`.
    int turn = 0;
    const auto find = [&](const Digit digit, uint32_t prefix, uint32_t wanted, auto visit) {
        uint32_t* const own = bins[turn];
        uint32_t* const next = bins[turn ^ 1];
        visit([&](uint32_t key, int) {
            if (digit.matches(key, prefix)) atomicAdd(&own[digit.of(key)], 1u);
        });
        __syncthreads();
        if constexpr (CLUSTER == 1) {
            turn ^= 1;
            for (int i = threadIdx.x; i < MOST_BINS; i += NUM_THREADS) next[i] = 0;
            return find_from_above<NUM_THREADS>(
                digit.bins, [&](int bin) { return own[bin]; }, [&](uint32_t) { return wanted; }, partial[0], &found);
        } else {
            uint32_t* const sums = groups[turn];
            turn ^= 1;
            for (int group = threadIdx.x / 32; group < digit.bins / GROUP_BINS; group += NUM_THREADS / 32) {
                const uint32_t sum = lane_reduce<Sum, 32>(own[group * GROUP_BINS + threadIdx.x % 32]);
                if (threadIdx.x % 32 == 0) sums[group] = sum;
            }
            sync_cluster<CLUSTER>();  // so that the digit before is no longer looked at by anyone
            for (int i = threadIdx.x - WARP_SIZE; i >= 0 && i < MOST_BINS; i += NUM_THREADS - WARP_SIZE) next[i] = 0;
            const auto of_all = [&](const uint32_t* word) {
                uint32_t sum = 0;
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank) sum += load_of_block<CLUSTER>(word, rank);
                return sum;
            };
            return find_in_groups(
                digit.bins, [&](int group) { return of_all(sums + group); }, [&](int bin) { return of_all(own + bin); },
                wanted, &found);
        }
    };

    // What a sample holds above the candidates: as much as topK is of the segment, and more, so that hardly ever it is less.
    const float wanted = float(topK) * SAMPLES / float(length) * 1.25f + 16.0f;
    const bool fits = ceil_div(places, NUM_THREADS) <= 2 * capacity;
    const bool whole = fits && (wanted > SAMPLES / 8 || piece_size <= 4 * NUM_THREADS * VEC_SIZE);
    uint32_t* const keys = reinterpret_cast<uint32_t*>(memory);
    int* const at = reinterpret_cast<int*>(keys + (capacity + 1) * NUM_THREADS);  // places of candidates that are not all
    int candidates = 0;
    uint32_t least = 0;  // what a candidate is at least; 0 without candidates
    if (!whole && wanted <= SAMPLES / 2) {
        const vec_t sample = piece.load(int(int64_t(threadIdx.x) * vectors / NUM_THREADS), ABSENT);
        __syncthreads();
        const uint32_t bin = find(Digit(0), 0, uint32_t(wanted), [&](auto f) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) f(ordered_bits(sample.data[j]), 0);
        }).bin;
        least = max(bin << Digit(0).shift, 1u);  // above what is absent
    }
    if (whole || least > 0) {
        piece.template for_each<NUM_THREADS, 4>(ABSENT, [&](const vec_t& vec, int first) {
            const vec_t here = keys_of(vec);
            const int place = first + piece.head;
            if (whole) {
                *reinterpret_cast<vec_t*>(keys + place) = here;
                return;
            }
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) {
                // Written whether it counts or not, where the next one will be: a branch would take longer.
                const int slot = min(candidates, int(capacity)) * NUM_THREADS + threadIdx.x;
                keys[slot] = here.data[j];
                at[slot] = place + j;
                candidates += here.data[j] >= least;
            }
        });
    }
    bool kept = least > 0;
    if (kept) {
        if (candidates > capacity) atomicOr(&totals[1], 1u);
        const uint32_t count = lane_reduce<Sum, WARP_SIZE>(uint32_t(candidates));
        if (threadIdx.x % WARP_SIZE == 0) atomicAdd(&totals[0], count);
        sync_cluster<CLUSTER>();
        int64_t all = 0;
        for (int rank = 0; rank < CLUSTER; ++rank) {
            all += load_of_block<CLUSTER>(totals, rank);
            kept = kept && !load_of_block<CLUSTER>(totals + 1, rank);
        }
        kept = kept && all >= topK;
    } else {
        __syncthreads();
    }

    // f(key, place) for every candidate of the thread, or for everything. What is absent has the lowest key.
    const auto for_each = [&](auto f) {
        const auto of_vector = [&](const vec_t& vec, int place) {
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) f(vec.data[j], place + j);
        };
        if (whole) {
#pragma unroll 1
            for (int i = threadIdx.x; i < vectors; i += NUM_THREADS) {
                of_vector(*reinterpret_cast<const vec_t*>(keys + i * VEC_SIZE), i * VEC_SIZE);
            }
        } else if (kept) {
#pragma unroll 1
            for (int i = 0; i < candidates; ++i) f(keys[i * NUM_THREADS + threadIdx.x], at[i * NUM_THREADS + threadIdx.x]);
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < vectors; i += NUM_THREADS) of_vector(keys_of(piece.load(i, ABSENT)), i * VEC_SIZE);
        }
    };
    uint32_t threshold = 0, ties = uint32_t(topK);  // what is above is taken, and the first `ties` that equal it
#pragma unroll 1
    for (int number = 0; number < 3; ++number) {
        const Digit digit(number);
        const auto place = find(digit, threshold, ties, for_each);
        threshold |= place.bin << digit.shift;
        ties = place.wanted;
        if (place.held == place.wanted && threshold > 0) {
            threshold -= 1;
            ties = 0;
            break;
        }
    }

    uint32_t larger_before = 0, equal_before = 0;  // in pieces and windows before
    if constexpr (CLUSTER > 1) {
        uint32_t above = 0, same = 0;
        for_each([&](uint32_t key, int place) {
            above += key > threshold;
            same += key == threshold && piece.exists(place - piece.head);
        });
        above = lane_reduce<Sum, WARP_SIZE>(above);
        same = lane_reduce<Sum, WARP_SIZE>(same);
        if (threadIdx.x % WARP_SIZE == 0) {
            atomicAdd(&totals[2], above);
            atomicAdd(&totals[3], same);
        }
        sync_cluster<CLUSTER>();
        for (unsigned rank = 0; rank < blockIdx.y; ++rank) {
            larger_before += load_of_block<CLUSTER>(totals + 2, rank);
            equal_before += load_of_block<CLUSTER>(totals + 3, rank);
        }
    }

    turn = 0;
#pragma unroll 1
    for (int window = 0; window < places; window += WINDOW) {
        // Each thread has as few places as there are threads for.
        const int window_places = min(places - window, WINDOW);
        const int bits = window_places <= 8 * NUM_THREADS ? 8 : window_places <= 16 * NUM_THREADS ? 16 : 32;
        const int first = int(threadIdx.x) * bits;
        uint32_t own_larger = 0, own_equal = 0;
        if (whole) {
            for (int i = 0; i < bits && first + i < window_places; i += VEC_SIZE) {
                const int place = window + first + i;
                const vec_t vec = *reinterpret_cast<const vec_t*>(keys + place);
#pragma unroll
                for (int j = 0; j < VEC_SIZE; ++j) {
                    own_larger |= uint32_t(vec.data[j] > threshold) << (i + j);
                    own_equal |= uint32_t(vec.data[j] == threshold && piece.exists(place + j - piece.head)) << (i + j);
                }
            }
        } else {
            larger[threadIdx.x] = equal[threadIdx.x] = 0;
            __syncthreads();
            for_each([&](uint32_t key, int place) {
                const unsigned bit = place - window;
                if (bit >= WINDOW || key < threshold || !piece.exists(place - piece.head)) return;
                atomicOr((key > threshold ? larger : equal) + bit / 32, 1u << bit % 32);
            });
            __syncthreads();
            own_larger = larger[first / 32] >> first % 32 & ~0u >> (32 - bits);
            own_equal = equal[first / 32] >> first % 32 & ~0u >> (32 - bits);
            __syncthreads();
        }
        uint32_t all;
        const uint32_t held =
            sum_before<NUM_THREADS>(uint32_t(count_bits(own_larger) | count_bits(own_equal) << 16), partial[turn ^= 1], all);
        uint32_t seen = equal_before + (held >> 16), slot = larger_before + (held & 0xffff) + min(seen, ties);
        for (uint32_t rest = own_larger | own_equal; rest; rest &= rest - 1) {
            const int bit = lowest_bit(rest);
            if (own_equal >> bit & 1 && seen++ >= ties) continue;
            indices[slot++] = from + window + first + bit - piece.head;
        }
        larger_before += all & 0xffff;
        equal_before += all >> 16;
    }
    if constexpr (CLUSTER > 1) sync_cluster<CLUSTER>();  // the blocks behind may still read what this one counted
}
