// api.h: the functions of the runtime that kernels call. The runtime is a library of its own.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define HOST_API __attribute__((visibility("default")))

namespace host {

struct Index { unsigned x, y, z; };

// Indices of the running thread. They never change for a thread, so the compiler may call once and keep the result.
HOST_API __attribute__((const)) Index thread_index();
HOST_API __attribute__((const)) Index block_index();
HOST_API __attribute__((const)) Index block_size();
HOST_API __attribute__((const)) Index grid_size();
HOST_API __attribute__((const)) unsigned lane_index();

// Wait for every thread of the block.
HOST_API void block_barrier(const char* file, int line);

// Wait for every thread of the cluster, which is a run of consecutive blocks in y.
HOST_API void cluster_barrier(const char* file, int line);
// Copy bytes of shared memory from block `rank` of the cluster, from the address that `own` has in the calling block.
HOST_API void read_of_block(void* to, const void* own, unsigned rank, size_t bytes);

// Wait for the lanes of the warp whose bits are set in `lanes`. The last to arrive calls combine(payloads, lanes), with
// the payload of each lane at its index.
using Combine = void (*)(void* const* payloads, uint64_t lanes);
HOST_API void
warp_collective(const char* name, uint64_t lanes, void* payload, Combine combine, const char* file, int line);
// Wait for the lanes of the warp whose bits are set in `lanes`; this also orders their memory accesses.
HOST_API void warp_barrier(uint64_t lanes, const char* file, int line);

// Shared memory. A Slot is the offset of one static array, found anew in each launch; dynamic_shared is the memory
// whose size the launch gives.
struct Slot {
    uint64_t launch;
    size_t offset;
};
HOST_API void* static_shared(Slot& slot, size_t bytes, size_t alignment);
HOST_API void* dynamic_shared();

// Check and record an access that the compiler does not instrument.
enum class Access : uint8_t { READ, WRITE, ATOMIC };
HOST_API void record_access(const void* address, size_t bytes, Access kind);
// Check the address of a load that a device makes and the host does not.
HOST_API void check_load(const void* address, size_t bytes);
// Copy bytes without recording an access.
HOST_API void copy_unrecorded(void* to, const void* from, size_t bytes);

// Asynchronous copies to shared memory. A copy happens when the thread waits for its group, no sooner.
HOST_API void copy_async(void* to, const void* from, unsigned bytes, unsigned valid_bytes);
HOST_API void commit_copies();
HOST_API void wait_for_copies(unsigned groups_in_flight);

// End the launch with a fault.
[[noreturn]] HOST_API void fail(const char* kind, const char* message, const char* file, int line);

}  // namespace host
