// philox.cuh: counter-based random numbers, Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1,
// 2, 3").

#pragma once
#include "platform.cuh"

// 64 random bits: the first two words of Philox4x32-10 with the key `seed` and the counter (offset, third, fourth).
DEVICE uint64_t philox(uint64_t seed, uint64_t offset, uint32_t third = 0, uint32_t fourth = 0) {
    uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    uint32_t word[4] = {uint32_t(offset), uint32_t(offset >> 32), third, fourth};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t even = uint64_t(0xd2511f53u) * word[0], odd = uint64_t(0xcd9e8d57u) * word[2];
        word[0] = uint32_t(odd >> 32) ^ word[1] ^ key[0];
        word[1] = uint32_t(odd);
        word[2] = uint32_t(even >> 32) ^ word[3] ^ key[1];
        word[3] = uint32_t(even);
        key[0] += 0x9e3779b9u;
        key[1] += 0xbb67ae85u;
    }
    return uint64_t(word[1]) << 32 | word[0];
}

// The upper 64 bits of a * b. With random bits a and a limit b: a random number below the limit, uniform to within
// 2^-64.
DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) {
    const uint64_t low = (a & 0xffffffffu) * (b & 0xffffffffu), cross = (a >> 32) * (b & 0xffffffffu);
    const uint64_t other = (a & 0xffffffffu) * (b >> 32),
                   middle = (low >> 32) + (cross & 0xffffffffu) + (other & 0xffffffffu);
    return (a >> 32) * (b >> 32) + (cross >> 32) + (other >> 32) + (middle >> 32);
}
