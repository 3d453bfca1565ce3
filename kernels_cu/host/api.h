// api.h: the functions of the runtime that kernels call. The runtime is a library of its own.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define HOST_API __attribute__((visibility("default")))

namespace host {

struct Index { unsigned x, y, z; };

// Indices of the running thread. They are constant for a thread, so the compiler may call once and keep the result.
HOST_API __attribute__((const)) Index thread_index();
HOST_API __attribute__((const)) Index block_index();
HOST_API __attribute__((const)) Index block_size();
HOST_API __attribute__((const)) Index grid_size();
HOST_API __attribute__((const)) unsigned lane_index();

// Waits for every thread of the block.
HOST_API void block_barrier(const char* file, int line);

// Waits for every thread of the cluster, which is a run of consecutive blocks in y.
HOST_API void cluster_barrier(const char* file, int line);
// Copies bytes from shared memory of block `rank` of the cluster, from the address that `own` has in the calling block.
HOST_API void read_of_block(void* to, const void* own, unsigned rank, size_t bytes);

// Waits for the lanes of the warp that `lanes` selects. The last lane to arrive calls combine(payloads, lanes), with
// the payload of each lane at its index.
using Combine = void (*)(void* const* payloads, uint64_t lanes);
HOST_API void
warp_collective(const char* name, uint64_t lanes, void* payload, Combine combine, const char* file, int line);
// Waits for the lanes of the warp that `lanes` selects, and orders their memory accesses.
HOST_API void warp_barrier(uint64_t lanes, const char* file, int line);

// Shared memory. A Slot is the offset of one static array, determined again in each launch. dynamic_shared is the
// memory with the size that the launch gives.
struct Slot {
    uint64_t launch;
    size_t offset;
};
HOST_API void* static_shared(Slot& slot, size_t bytes, size_t alignment);
HOST_API void* dynamic_shared();

// Flags of collective/rank_barrier.cuh, by which ranks signal progress to each other (ranks.h). A flag publishes one of
// these: everything that its block did, by a release (ALL); or, relaxed, that its rank's kernel has begun (START), and
// that the block's reads are over (READS).
enum class Flagged : uint8_t { ALL, START, READS };
HOST_API void store_flag(uint32_t* flag, uint32_t value, Flagged what);
HOST_API bool await_flag(const uint32_t* flag, uint32_t value, unsigned from);
HOST_API void store_packet(void* address, unsigned long long packet);
HOST_API unsigned long long await_packet(const void* address, uint32_t meeting, unsigned from);
HOST_API void give_up();

// Checks and records an access that the compiler does not instrument.
enum class Access : uint8_t { READ, WRITE, ATOMIC };
HOST_API void record_access(const void* address, size_t bytes, Access kind);
// Checks the address of a load that a device performs and the host does not.
HOST_API void check_load(const void* address, size_t bytes);
// Checks that an address is in global memory, for an instruction that accepts no other.
HOST_API void expect_global(const void* address);
// Copies bytes without recording an access.
HOST_API void copy_unrecorded(void* to, const void* from, size_t bytes);

// Asynchronous copies to shared memory. A copy happens only when the thread waits for its group.
HOST_API void copy_async(void* to, const void* from, unsigned bytes, unsigned valid_bytes);
HOST_API void commit_copies();
HOST_API void wait_for_copies(unsigned groups_in_flight);

// Barriers of include/barrier.cuh. An mbarrier is identified by its address in the calling block; `rank` is a block of
// the cluster.
HOST_API unsigned elected_lane();
HOST_API void mbarrier_init(const void* barrier, unsigned arrivals);
HOST_API void mbarrier_arrive(const void* barrier, unsigned announced_bytes);
HOST_API void mbarrier_arrive_cluster(const void* barrier, unsigned rank);
HOST_API void mbarrier_wait(const void* barrier, unsigned parity);
HOST_API void copies_arrive(const void* barrier);
HOST_API void fence_mbarrier_init();
HOST_API void fence_proxy_async();
HOST_API void named_barrier(unsigned number, unsigned num_threads, bool waits);

// TMA copies of include/tma.cuh. `map` is a TensorMap, `at` holds `rank` coordinates, innermost first, and `blocks` has
// a bit for each block of the cluster.
enum class Swizzle : uint32_t { NONE, BYTES32, BYTES64, BYTES128 };
constexpr unsigned MAX_DIMENSIONS = 5;
// The 128 bytes of a tensor map on the host, as tensor_map.py writes them: dimensions innermost first, strides in
// bytes.
struct TensorMap {
    uint64_t address;
    uint64_t strides[MAX_DIMENSIONS - 1];
    uint32_t magic, rank, element_bytes;
    Swizzle swizzle;
    uint32_t sizes[MAX_DIMENSIONS];  // 2^32 elements are 0
    uint32_t box[MAX_DIMENSIONS];
    uint32_t reserved[8];
};
static_assert(sizeof(TensorMap) == 128);
HOST_API void tma_load(void* to, const void* map, const void* barrier, const int* at, unsigned rank);
HOST_API void
tma_load_multicast(void* to, const void* map, const void* barrier, const int* at, unsigned rank, unsigned blocks);
HOST_API void tma_store(const void* map, const void* from, const int* at, unsigned rank);
HOST_API void bulk_load(void* to, const void* from, unsigned bytes, const void* barrier);
HOST_API void bulk_load_multicast(void* to, const void* from, unsigned bytes, const void* barrier, unsigned blocks);
HOST_API void bulk_store(void* to, const void* from, unsigned bytes);
HOST_API void bulk_copy_to_block(void* to, const void* from, unsigned bytes, const void* barrier, unsigned rank);
HOST_API void store_async(void* to, const void* barrier, unsigned rank, const uint32_t (&words)[4]);
HOST_API void bulk_commit();
HOST_API void bulk_wait(unsigned groups_in_flight);

// Warpgroup MMAs of include/wgmma.cuh.
enum class Element : uint32_t { HALF, BF16, E4M3, E5M2, INT8 };
struct Product {
    Element element;
    unsigned columns;
    bool a_transposed, b_transposed, accumulate;
    const uint32_t* a_registers;  // fragment of A in registers; null: A is in shared memory at a_descriptor
    uint64_t a_descriptor, b_descriptor;
};
HOST_API uint64_t shared_offset(const void* address);
HOST_API void wgmma(const Product& product, void* d);
HOST_API void wgmma_fence();
HOST_API void wgmma_commit();
HOST_API void wgmma_wait(unsigned groups_in_flight);
HOST_API void set_registers(unsigned count, unsigned min_blocks, bool more);

// Ends the launch with a fault.
[[noreturn]] HOST_API void fail(const char* kind, const char* message, const char* file, int line);

}  // namespace host
