// expert_sort.cuh: rows in the order of their experts; rows of one expert in their own order (a stable counting sort).
//
// A row is one choice of one token: row t of num_rows = num_tokens * topk belongs to token t / topk. The blocks of a
// cluster share the rows: each block has a contiguous share, and each of its warps a contiguous share of the block's.
//
//     count   each warp counts the rows of each bin (an expert, mostly) in shared memory
//     locate  each count becomes a place: that of the warp's first row of the bin, behind the rows of the bins before,
//             of the blocks before and of the warps before
//     place   each warp goes through its rows again, in order, and gives each row the next place of its bin
//
// Blocks wait for each other only within their cluster, and no result depends on timing.

#pragma once
#include "cluster.cuh"
#include "select.cuh"
#include "vec.cuh"

constexpr int NO_BIN = -1;  // of a row that is skipped

// A bit for each lane of the warp whose value has the same low BITS bits. Every lane of the warp takes part.
template <int BITS>
DEVICE lane_mask_t lanes_with(int value) {
    lane_mask_t lanes = ALL_LANES;
#pragma unroll
    for (int bit = 0; bit < BITS; ++bit) {
        const bool is_set = value >> bit & 1;
        const lane_mask_t set = ballot(is_set);
        lanes &= is_set ? set : ~set;
    }
    return lanes;
}

// NUM_THREADS threads of each of CLUSTER blocks; BIN_BITS bits hold the number of bins.
template <int NUM_THREADS, int CLUSTER, int BIN_BITS>
struct ExpertSort {
    static constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;
    // Rows of a lane that are loaded before the first is used. `count` reads memory, `place` finds them in a cache.
    static constexpr int COUNT_BATCH = 8, PLACE_BATCH = 4;

    uint32_t* counts;    // [sort_warps, bins]: rows of a warp in a bin; from `locate` on, the place of its next row
    uint32_t* of_block;  // [bins]: rows of the block in a bin
    uint32_t* rows_of;   // [bins]: rows of the cluster in a bin; the same memory where a cluster is one block
    uint32_t* begin;     // [bins + 1]: place of the first row of a bin; the last is the end of all
    int bins, sort_warps, first_row, end_row;

    // The first num_sort_warps warps of each block have rows. Dynamic shared memory holds (num_sort_warps + 2) * bins
    // words, `bins` words more if CLUSTER > 1, and one more.
    DEVICE ExpertSort(uint4* memory, int num_bins, int num_sort_warps, int64_t num_rows)
        : bins(num_bins), sort_warps(num_sort_warps) {
        counts = reinterpret_cast<uint32_t*>(memory);
        of_block = counts + sort_warps * bins;
        rows_of = CLUSTER == 1 ? of_block : of_block + bins;
        begin = rows_of + bins;
        const int warp = threadIdx.x / WARP_SIZE;
        const int64_t step = int64_t(CLUSTER) * sort_warps * WARP_SIZE;
        const int64_t warp_rows = (num_rows + step - 1) / step * WARP_SIZE;
        const int64_t first = warp < sort_warps ? (int64_t(blockIdx.y) * sort_warps + warp) * warp_rows : num_rows;
        first_row = int(min(first, num_rows));
        end_row = int(min(first + warp_rows, num_rows));
    }

    // The number of the caller among the threads of the cluster, and the number of them.
    static DEVICE int cluster_thread() { return blockIdx.y * NUM_THREADS + threadIdx.x; }
    static constexpr int CLUSTER_THREADS = CLUSTER * NUM_THREADS;

    // Calls visit(row, bin) for the warp's rows, WARP_SIZE of them at a time. A lane without a row calls with a row of
    // end_row or more, and NO_BIN. bin_of(row) is the bin of an existing row.
    template <int BATCH, typename BIN, typename VISIT>
    DEVICE void each_row(BIN bin_of, VISIT visit) const {
        const int lane = threadIdx.x % WARP_SIZE;
        for (int first = first_row; first < end_row; first += BATCH * WARP_SIZE) {
            int bin[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) bin[i] = bin_of(min(first + i * WARP_SIZE + lane, end_row - 1));
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int row = first + i * WARP_SIZE + lane;
                visit(row, row < end_row ? bin[i] : NO_BIN);
            }
        }
    }

    // Every thread calls, as of the functions below.
    template <typename BIN>
    DEVICE void count(BIN bin_of) const {
        for (int i = threadIdx.x; i < sort_warps * bins; i += NUM_THREADS) counts[i] = 0;
        __syncthreads();
        uint32_t* const own = counts + threadIdx.x / WARP_SIZE * bins;
        each_row<COUNT_BATCH>(bin_of, [&](int, int bin) {
            if (bin != NO_BIN) atomicAdd(own + bin, 1u);
        });
        __syncthreads();
        for (int bin = threadIdx.x; bin < bins; bin += NUM_THREADS) {
            uint32_t sum = 0;
#pragma unroll 8
            for (int warp = 0; warp < sort_warps; ++warp) sum += counts[warp * bins + bin];
            of_block[bin] = sum;
        }
        sync_cluster<CLUSTER>();
    }

    // Gives each bin space for space_of(rows of the bin) places, and calls visit(bin, place, rows, before): the first
    // place of the bin, its rows, and how many of its rows blocks before this one have. Returns the number of all
    // places.
    template <typename SPACE, typename VISIT>
    DEVICE uint32_t scan(SPACE space_of, VISIT visit) const {
        __shared__ uint32_t partial[2][NUM_WARPS];
        uint32_t places = 0;
        int turn = 0;
        for (int first = 0; first < bins; first += NUM_THREADS) {
            const int bin = first + int(threadIdx.x);
            uint32_t rows = 0, before = 0, all;
            if (bin < bins) {
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank) {
                    const uint32_t of_rank = load_of_block<CLUSTER>(of_block + bin, rank);
                    if (rank < int(blockIdx.y)) before += of_rank;
                    rows += of_rank;
                }
            }
            const uint32_t place = places + sum_before<NUM_THREADS>(space_of(rows), partial[turn], all);
            if (bin < bins) visit(bin, place, rows, before);
            places += all;
            turn ^= 1;
        }
        __syncthreads();
        return places;
    }

    // The same, and keeps what it finds: `begin`, `rows_of`, and in `counts` the places of warps.
    template <typename SPACE>
    DEVICE uint32_t locate(SPACE space_of) const {
        const uint32_t places = scan(space_of, [&](int bin, uint32_t place, uint32_t rows, uint32_t before) {
            begin[bin] = place;
            rows_of[bin] = rows;
            uint32_t next = place + before;
#pragma unroll 8
            for (int warp = 0; warp < sort_warps; ++warp) {
                const uint32_t of_warp = counts[warp * bins + bin];
                counts[warp * bins + bin] = next;
                next += of_warp;
            }
        });
        if (threadIdx.x == 0) begin[bins] = places;
        __syncthreads();
        return places;
    }

    // Calls visit(row, bin, place) for each row; `place` means nothing if bin is NO_BIN.
    template <typename BIN, typename VISIT>
    DEVICE void place(BIN bin_of, VISIT visit) const {
        uint32_t* const own = counts + threadIdx.x / WARP_SIZE * bins;
        const lane_mask_t lanes_before = (lane_mask_t(1) << threadIdx.x % WARP_SIZE) - 1;
        each_row<PLACE_BATCH>(bin_of, [&](int row, int bin) {
            const lane_mask_t same = lanes_with<BIN_BITS>(bin);
            const int before = count_bits(same & lanes_before);
            uint32_t next = 0;
            // The first lane of each bin takes places for all of them.
            if (bin != NO_BIN && before == 0) next = atomicAdd(own + bin, uint32_t(count_bits(same)));
            const uint32_t place = shfl<WARP_SIZE>(next, lowest_bit(same)) + before;
            if (row < end_row) visit(row, bin, place);
        });
    }

    // Calls visit(bin) for each bin, by every lane of the warp that has the bin.
    template <typename VISIT>
    DEVICE void each_bin(VISIT visit) const {
        for (int bin = cluster_thread() / WARP_SIZE; bin < bins; bin += CLUSTER * NUM_WARPS) visit(bin);
    }
};

// The bin of the expert that row `row` chose: the expert's own number, or the number that expert_map gives it on this
// device; `other` if there is none from 0 to num_bins - 1.
template <bool HAS_MAP, typename ID>
DEVICE int
local_expert(const ID* topk_ids, const int32_t* expert_map, int64_t num_experts, int num_bins, int other, int row) {
    const int64_t id = topk_ids[row];
    if (id < 0 || id >= num_experts) return other;
    const int expert = HAS_MAP ? expert_map[id] : int(id);
    return expert < 0 || expert >= num_bins ? other : expert;
}
