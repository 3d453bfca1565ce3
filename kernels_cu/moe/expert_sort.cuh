// expert_sort.cuh: rows in the order of their experts; rows of one expert in their own order (a stable counting sort).
//
// A row is one choice of one token: row t of num_rows = num_tokens * topk belongs to token t / topk. The blocks of a
// cluster share the rows: each block has a contiguous share, and each of its warps a contiguous share of the block's.
//
//     count   each warp counts the rows of each bin (an expert, mostly) in shared memory
//     locate  an exclusive prefix sum turns each count into the output index of the warp's first row of the bin: it
//             follows the rows of lower bins, then of the same bin in lower-ranked blocks, then in lower warps
//     assign  each warp reads its rows again, in order, and assigns each row the next output index of its bin
//
// Blocks wait for each other only within their cluster, and no result depends on timing.

#pragma once
#include "cluster.cuh"
#include "radix_select.cuh"
#include "vec.cuh"

constexpr int NO_BIN = -1;  // bin of a skipped row

// The mask of lanes that hold the same low BITS bits of `value` as the caller. Every lane of the warp takes part.
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

// CLUSTER blocks of NUM_THREADS threads; BIN_BITS bits hold the number of bins. A lane has at most KEPT rows and keeps
// their bins in registers from `count` to `assign`; if KEPT is 0, a lane has any number of rows, and `assign` reads the
// ids again.
template <typename ID, int NUM_THREADS, int CLUSTER, int BIN_BITS, int KEPT>
struct ExpertSort {
    static constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;
    // Rows that a lane loads before it uses the first. `count` reads the ids from DRAM, `assign` hits a cache.
    static constexpr int COUNT_BATCH = 8, ASSIGN_BATCH = 4;
    static constexpr int WARP_BATCH = 8;  // warps: a thread loads their counts of a bin before it uses the first

    const ID* ids;       // the expert that each row chose
    uint32_t* counts;    // [sort_warps, bins]: rows of a warp in a bin; after `locate`, output index of its next row
    uint32_t* of_block;  // [bins]: rows of the block in a bin, if CLUSTER > 1
    uint32_t* rows_of;   // [bins]: rows of the cluster in a bin; the same memory where a cluster is one block
    uint32_t* begin;     // [bins]: output index of the first row of a bin
    int bins, sort_warps, first_row, end_row;
    int kept_bin[KEPT > 0 ? KEPT : 1];        // bin of each kept row; NO_BIN past the last row
    uint32_t kept_rank[KEPT > 0 ? KEPT : 1];  // rows of the same bin that precede the row in its warp

    // The first num_sort_warps warps of each block have warp_rows rows each, a multiple of WARP_SIZE. Dynamic shared
    // memory holds (num_sort_warps + 2) * bins words, plus `bins` words if CLUSTER > 1.
    DEVICE ExpertSort(uint4* memory, const ID* topk_ids, int num_bins, int num_sort_warps, int warp_rows, int num_rows)
        : ids(topk_ids), bins(num_bins), sort_warps(num_sort_warps) {
        counts = reinterpret_cast<uint32_t*>(memory);
        of_block = counts + sort_warps * bins;
        rows_of = CLUSTER == 1 ? of_block : of_block + bins;
        begin = rows_of + bins;
        const int warp = threadIdx.x / WARP_SIZE;
        const int first = warp < sort_warps ? (int(blockIdx.y) * sort_warps + warp) * warp_rows : num_rows;
        first_row = min(first, num_rows);
        end_row = min(first_row + warp_rows, num_rows);
    }

    // The caller's thread index within the cluster, and the cluster's thread count.
    static DEVICE int cluster_thread() { return blockIdx.y * NUM_THREADS + threadIdx.x; }
    static constexpr int CLUSTER_THREADS = CLUSTER * NUM_THREADS;

    DEVICE uint32_t* own_counts() const { return counts + threadIdx.x / WARP_SIZE * bins; }

    // Calls visit(row, bin) for the warp's rows, WARP_SIZE of them at a time. A lane past the last row calls it with
    // row >= end_row and NO_BIN. bin_of(row, id) is the bin of an existing row.
    template <int BATCH, typename BIN, typename VISIT>
    DEVICE void each_row(BIN bin_of, VISIT visit) const {
        const int lane = threadIdx.x % WARP_SIZE;
        for (int first = first_row; first < end_row; first += BATCH * WARP_SIZE) {
            ID id[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) id[i] = ids[min(first + i * WARP_SIZE + lane, end_row - 1)];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int row = first + i * WARP_SIZE + lane;
                if (first + i * WARP_SIZE < end_row) visit(row, row < end_row ? bin_of(row, id[i]) : NO_BIN);
            }
        }
    }

    // Warp-aggregated atomicAdd of 1 to own[bin]: returns the old own[bin] plus the number of lower lanes with the
    // same bin. Every lane of the warp takes part; the result is undefined for NO_BIN.
    static DEVICE uint32_t rank(uint32_t* own, int bin) {
        const lane_mask_t lanes_before = (lane_mask_t(1) << threadIdx.x % WARP_SIZE) - 1;
        const lane_mask_t same = lanes_with<BIN_BITS>(bin);
        const int before = count_bits(same & lanes_before);
        uint32_t next = 0;
        // The lowest lane of each bin adds for all lanes of the bin.
        if (bin != NO_BIN && before == 0) next = atomicAdd(own + bin, uint32_t(count_bits(same)));
        return shfl<WARP_SIZE>(next, lowest_bit(same)) + before;
    }

    // Every thread of the cluster calls `count` and the functions below. Each thread calls meanwhile() once, while the
    // loads of ids are in flight. Barriers in `count` order its writes before all later writes of the cluster.
    template <typename BIN, typename MEANWHILE>
    DEVICE void count(BIN bin_of, MEANWHILE meanwhile) {
        const int lane = threadIdx.x % WARP_SIZE;
        ID id[KEPT > 0 ? KEPT : 1];
        if (KEPT > 0 && first_row < end_row) {
#pragma unroll
            for (int i = 0; i < KEPT; ++i) id[i] = ids[min(first_row + i * WARP_SIZE + lane, end_row - 1)];
        }
        for (int i = threadIdx.x; i < sort_warps * bins; i += NUM_THREADS) counts[i] = 0;
        meanwhile();
        __syncthreads();
        if constexpr (KEPT > 0) {
#pragma unroll
            for (int i = 0; i < KEPT; ++i) {
                const int first = first_row + i * WARP_SIZE;
                if (first >= end_row) break;
                kept_bin[i] = first + lane < end_row ? bin_of(first + lane, id[i]) : NO_BIN;
                kept_rank[i] = rank(own_counts(), kept_bin[i]);
            }
        } else {
            uint32_t* const own = own_counts();
            each_row<COUNT_BATCH>(bin_of, [&](int, int bin) {
                if (bin != NO_BIN) atomicAdd(own + bin, 1u);
            });
        }
        __syncthreads();
        if constexpr (CLUSTER > 1) {
            for (int bin = threadIdx.x; bin < bins; bin += NUM_THREADS) of_block[bin] = rows_of_block(bin);
            sync_cluster<CLUSTER>();
        }
    }

    // Calls visit(address, rows) for each warp in order, where `rows` is the warp's count of the bin at `address`.
    template <typename VISIT>
    DEVICE void each_count(int bin, VISIT visit) const {
        for (int first = 0; first < sort_warps; first += WARP_BATCH) {
            uint32_t rows[WARP_BATCH];
#pragma unroll
            for (int i = 0; i < WARP_BATCH; ++i) rows[i] = counts[min(first + i, sort_warps - 1) * bins + bin];
#pragma unroll
            for (int i = 0; i < WARP_BATCH; ++i) {
                if (first + i < sort_warps) visit(counts + (first + i) * bins + bin, rows[i]);
            }
        }
    }

    DEVICE uint32_t rows_of_block(int bin) const {
        uint32_t sum = 0;
        each_count(bin, [&](uint32_t*, uint32_t rows) { sum += rows; });
        return sum;
    }

    // Exclusive prefix sum over bins of space_of(rows), the output slots that a bin with `rows` rows takes. Calls
    // visit(bin, slot, rows, before) with the bin's first slot, its rows in the cluster, and its rows in lower-ranked
    // blocks. Returns the total number of slots.
    template <typename SPACE, typename VISIT>
    DEVICE uint32_t scan(SPACE space_of, VISIT visit) const {
        __shared__ uint32_t partial[2][NUM_WARPS];
        uint32_t slots = 0;
        int turn = 0;
        for (int first = 0; first < bins; first += NUM_THREADS) {
            const int bin = first + int(threadIdx.x);
            uint32_t rows = 0, before = 0, all;
            if (CLUSTER == 1 && bin < bins) rows = rows_of_block(bin);
            if (CLUSTER > 1 && bin < bins) {
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank) {
                    const uint32_t of_rank = load_of_block<CLUSTER>(of_block + bin, rank);
                    if (rank < int(blockIdx.y)) before += of_rank;
                    rows += of_rank;
                }
            }
            const uint32_t slot = slots + sum_before<NUM_THREADS>(space_of(rows), partial[turn], all);
            if (bin < bins) visit(bin, slot, rows, before);
            slots += all;
            turn ^= 1;
        }
        __syncthreads();
        return slots;
    }

    // `scan` that stores its results: `begin`, `rows_of`, and in `counts` the output index of each warp's first row.
    template <typename SPACE>
    DEVICE uint32_t locate(SPACE space_of) const {
        return scan(space_of, [&](int bin, uint32_t slot, uint32_t rows, uint32_t before) {
            begin[bin] = slot;
            rows_of[bin] = rows;
            uint32_t next = slot + before;
            each_count(bin, [&](uint32_t* of_warp, uint32_t warp_rows) {
                *of_warp = next;
                next += warp_rows;
            });
        });
    }

    // Calls visit(row, bin, slot) for each row, where `slot` is its output index (undefined for NO_BIN). `bin_of` is
    // the same as in `count`.
    template <typename BIN, typename VISIT>
    DEVICE void assign(BIN bin_of, VISIT visit) const {
        uint32_t* const own = own_counts();
        if constexpr (KEPT > 0) {
#pragma unroll
            for (int i = 0; i < KEPT; ++i) {
                const int row = first_row + i * WARP_SIZE + int(threadIdx.x % WARP_SIZE);
                if (row < end_row) visit(row, kept_bin[i], kept_rank[i] + own[max(kept_bin[i], 0)]);
            }
        } else {
            each_row<ASSIGN_BATCH>(bin_of, [&](int row, int bin) {
                const uint32_t next = rank(own, bin);
                if (row < end_row) visit(row, bin, next);
            });
        }
    }

    // Binary search for the last bin with begin <= slot: the bin that owns output slot `slot`, if any bin does. An
    // empty bin is never returned, unless all bins are empty.
    DEVICE int bin_at(uint32_t slot) const {
        int bin = 0;
#pragma unroll
        for (int step = 1 << (BIN_BITS - 1); step > 0; step /= 2) {
            if (bin + step < bins && begin[bin + step] <= slot) bin += step;
        }
        return bin;
    }
};

// The bin of expert `id`: the id itself, or its local id from expert_map (HAS_MAP); `other` if that is outside
// 0 ... num_bins - 1.
template <bool HAS_MAP>
DEVICE int local_expert(int64_t id, const int32_t* expert_map, int64_t num_experts, int num_bins, int other) {
    if (id < 0 || id >= num_experts) return other;
    const int expert = HAS_MAP ? expert_map[id] : int(id);
    return expert < 0 || expert >= num_bins ? other : expert;
}
