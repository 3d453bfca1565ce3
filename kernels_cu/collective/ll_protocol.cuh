// ll_protocol.cuh: the low-latency protocol (LL in NCCL): data is stored together with the number of its meeting
// (rank_barrier.cuh), and needs neither flag nor fence.
//
// A packet is 8 bytes, stored and loaded atomically: 4 bytes of data and the meeting number. A rank stores its input as
// packets into the memory of every rank, itself included, and polls its own memory until the packets of all ranks have
// the number. So data takes one store, whereas a read after a meeting takes a fence, a flag, and the round trip of the
// read; the price is twice the bytes.
//
// Packets are double-buffered by the parity of the meeting number. A rank that has all packets of a meeting knows that
// every other rank has begun this kernel, so that rank's previous kernel has ended and has read the buffer that the
// next meeting overwrites.
//
// Constants
//     PACKET_BYTES   bytes for packets after the signals of a rank

#pragma once
#include "rank_barrier.cuh"

// Stores two packets; each 8-byte half is stored atomically.
DEVICE void store_packets(uint64_t* address, uint64_t first, uint64_t second) {
#if PYOPS_CUDA
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(first), "l"(second) : "memory");
#elif PYOPS_HIP
    __scoped_atomic_store_n(address, first, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
    __scoped_atomic_store_n(address + 1, second, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
#else
    host::store_packet(address, first);
    host::store_packet(address + 1, second);
#endif
}
// Loads two packets. The host backend waits until both have number `meeting` or more, or until rank `from`, which
// stores them, can no longer do so.
DEVICE void load_packets(const uint64_t* address, uint32_t meeting, int from, uint64_t& first, uint64_t& second) {
#if PYOPS_CUDA
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(address) : "memory");
#elif PYOPS_HIP
    first = __scoped_atomic_load_n(address, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
    second = __scoped_atomic_load_n(address + 1, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
#else
    first = host::await_packet(address, meeting, from);
    second = host::await_packet(address + 1, meeting, from);
#endif
}

// The packets of a message of `num_vecs` vectors of 16 bytes. A vector is four packets: two adjacent ones in each half
// of the rank's message.
template <int WORLD_SIZE, typename T, int VEC_SIZE>
struct Packets {
    using vec_t = Vec<T, VEC_SIZE>;
    static constexpr int PACKED = 4 / int(sizeof(T));  // elements per packet

    const World<WORLD_SIZE>& world;
    int64_t num_vecs;
    Signals* ranks[WORLD_SIZE];

    DEVICE Packets(const World<WORLD_SIZE>& world, int64_t num_vecs) : world(world), num_vecs(num_vecs) {
#pragma unroll
        for (int i = 0; i < WORLD_SIZE; ++i) ranks[i] = world.of(i);
    }
    // The address in the memory of `owner` of half `half` of vector i of rank `from`.
    DEVICE uint64_t* place(Signals* owner, int from, int half, int64_t i) const {
        char* packets = reinterpret_cast<char*>(owner) + SIGNAL_BYTES + world.meeting % 2 * (PACKET_BYTES / 2);
        return reinterpret_cast<uint64_t*>(packets) + ((from * 2 + half) * num_vecs + i) * 2;
    }
    DEVICE void send(int64_t i, const vec_t& x) const {
        uint64_t packets[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            packets[k] = uint64_t(world.meeting) << 32 | x.template word<PACKED>(k * PACKED);
        }
#pragma unroll
        for (int other = 0; other < WORLD_SIZE; ++other) {
            store_packets(place(ranks[other], world.rank, 0, i), packets[0], packets[1]);
            store_packets(place(ranks[other], world.rank, 1, i), packets[2], packets[3]);
        }
    }
    // x = the sum of vector i over the ranks in float32, in the order of ranks. Waits for the packets.
    DEVICE void sum(float (&x)[VEC_SIZE], int64_t i) const {
        uint64_t packets[WORLD_SIZE][4];
        Patience patience;
        for (;;) {
#pragma unroll
            for (int from = 0; from < WORLD_SIZE; ++from) {
                load_packets(place(world.own, from, 0, i), world.meeting, from, packets[from][0], packets[from][1]);
                load_packets(place(world.own, from, 1, i), world.meeting, from, packets[from][2], packets[from][3]);
            }
            uint32_t missing = 0;  // a bit for each rank
#pragma unroll
            for (int k = 0; k < 4 * WORLD_SIZE; ++k) {
                missing |= uint32_t(uint32_t(packets[k / 4][k % 4] >> 32) != world.meeting) << k / 4;
            }
            if (!missing) break;
            patience.spend(missing, world.meeting, world.lost);
        }
        patience.end(world.lost);
#pragma unroll
        for (int from = 0; from < WORLD_SIZE; ++from) {
            vec_t vec;
            float y[VEC_SIZE];
#pragma unroll
            for (int k = 0; k < 4; ++k) vec.template word<PACKED>(k * PACKED) = uint32_t(packets[from][k]);
            vec.to_floats(y);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) x[j] = from ? x[j] + y[j] : y[j];
        }
    }
};
