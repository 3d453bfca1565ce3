// clocked.h: hooks of the CLOCKED runtime that files of both runtimes call. The other runtime defines only the last
// one.
#pragma once
#include "state.h"

namespace host {

// Defined in clocks.h.
inline bool has_seen(uint16_t thread, uint32_t time);
inline void clocks_of_barrier();
inline void clocks_of_warp(Thread* warp, uint64_t lanes);
inline void clocks_of_cluster();

// Defined in cells.h.
inline void allocate_clocked(size_t offset, size_t bytes);
inline void check_clocked(size_t offset, size_t bytes, Access kind, const void* pc);
inline void read_by_clocks(unsigned rank, size_t offset, size_t size, const void* pc);

// Defined in barriers.h.
inline int describe_wait(char* text, size_t room, const Thread& thread);
inline bool awaited_phase_has_ended(unsigned thread);

// Defined in in_flight.h.
inline bool land_copy();
inline void land_copy_early();
inline void check_exit();

// Defined in registers.h.
inline void check_registers(const char* address, size_t bytes, Access kind, const void* pc);

// Defined in wgmma.h.
inline void begin_clocked_cluster();
inline void end_clocked_block(unsigned rank);

// Defined in ranks.h, for launches of several ranks in either runtime.
inline void ranks_at_barrier();

}  // namespace host
