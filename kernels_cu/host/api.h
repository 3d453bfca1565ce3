// api.h: what a kernel asks of the runtime, which lives in a library of its own.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define HOST_API __attribute__((visibility("default")))

namespace host {

struct Index {
    unsigned x, y, z;
};

// Where the running thread is. A thread keeps its place, so the compiler may ask once.
HOST_API __attribute__((const)) Index thread_index();
HOST_API __attribute__((const)) Index block_index();
HOST_API __attribute__((const)) Index block_size();
HOST_API __attribute__((const)) Index grid_size();
HOST_API __attribute__((const)) unsigned lane_index();

// Wait for every thread of the block.
HOST_API void block_barrier(const char* file, int line);

// Wait for every thread of the cluster: of the blocks that follow each other in y.
HOST_API void cluster_barrier(const char* file, int line);
// Read what block `rank` of the cluster has where this one has `own`, in shared memory.
HOST_API void read_of_block(void* to, const void* own, unsigned rank, size_t bytes);

// Wait for the named lanes of the warp. The last to arrive runs `combine` over what each of them brought.
using Combine = void (*)(void* const* payloads, uint64_t lanes);
HOST_API void warp_collective(const char* name, uint64_t lanes, void* payload, Combine combine, const char* file, int line);
// The same, which also orders the lanes' memory accesses.
HOST_API void warp_barrier(uint64_t lanes, const char* file, int line);

// Shared memory: the place of an array that stands in the source, and of what the launch asked for.
struct Slot {
    uint64_t launch;
    size_t offset;
};
HOST_API void* static_shared(Slot& slot, size_t bytes, size_t alignment);
HOST_API void* dynamic_shared();

// Tell of an access that the compiler does not see.
enum class Access : uint8_t { READ, WRITE, ATOMIC };
HOST_API void access(const void* address, size_t bytes, Access kind);
// Move bytes without telling of it.
HOST_API void move_untold(void* to, const void* from, size_t bytes);

// Copies to shared memory, which happen no sooner than they are waited for.
HOST_API void copy_async(void* to, const void* from, unsigned bytes, unsigned valid_bytes);
HOST_API void commit_copies();
HOST_API void wait_for_copies(unsigned groups_in_flight);

// End the launch.
[[noreturn]] HOST_API void fail(const char* kind, const char* message, const char* file, int line);

}  // namespace host
