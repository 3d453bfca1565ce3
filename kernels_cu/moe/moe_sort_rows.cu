// moe_sort_rows: where moe_permute puts each row, experts in turn.
//
//     inv_permuted_idx[t]           place of row t among all rows, sorted by their experts; rows of other devices last
//     permuted_idx[place]           row t, or num_rows for a row of another device
//     expert_first_token_offset[e]  place of the first row of expert e; the last element counts the rows of this device
//
// Rows of one expert stay in order, and so do the rows of other devices: those whose expert does not exist or has no
// number from 0 to num_local - 1 on this device.
//
// Threads: a cluster of CLUSTER blocks has all rows (expert_sort.cuh).
//
// Constants
//     id_t          element type of topk_ids
//     BIN_BITS      bits that hold the number of experts on this device, and one more
//     CLUSTER       blocks that share the rows, one cluster
//     KEPT          rows of a lane at most, or 0 (expert_sort.cuh)
//     HAS_MAP       expert_map gives the numbers of experts on this device

#include "expert_sort.cuh"

using sort_t = ExpertSort<id_t, NUM_THREADS, CLUSTER, BIN_BITS, KEPT>;

extern "C" __global__ void CLUSTER_OF(CLUSTER) LAUNCH_BOUNDS(NUM_THREADS, 1)
moe_sort_rows(const id_t* topk_ids,                 // [num_rows]
              const int32_t* token_expert_indices,  // [num_rows], not read
              const int32_t* expert_map,            // [num_experts]
              int64_t* expert_first_token_offset,   // [num_local + 1]
              int32_t* inv_permuted_idx,            // [num_rows]
              int32_t* permuted_idx,                // [num_rows]
              int64_t num_rows, int64_t num_experts, int64_t num_local, int sort_warps, int warp_rows) {
    await_previous_kernel();
    extern __shared__ uint4 memory[];
    const int others = int(num_local);  // the bin of rows of other devices
    sort_t sort(memory, topk_ids, others + 1, sort_warps, warp_rows, int(num_rows));
    const auto expert_of = [&](int, id_t id) {
        return local_expert<HAS_MAP>(id, expert_map, num_experts, others, others);
    };
    sort.count(expert_of, [] {});
    sort.locate([](uint32_t rows) { return rows; });
    for (int i = sort.cluster_thread(); i <= others; i += sort.CLUSTER_THREADS) {
        expert_first_token_offset[i] = sort.begin[i];
    }
    sort.place(expert_of, [&](int row, int expert, uint32_t place) {
        inv_permuted_idx[row] = int32_t(place);
        permuted_idx[place] = expert == others ? int32_t(num_rows) : row;
    });
    leave_cluster<CLUSTER>();
}
