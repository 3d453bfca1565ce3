// mma.h: a warp's MMAs, matrix loads and matrix stores, for include/mma.cuh and include/matrix_core.cuh. These headers
// describe the fragments.
#pragma once
#include "cuda.h"

namespace pyops_kernel {

template <typename Sum>
struct host_operands {
    const uint32_t *a, *b;
    Sum* d;
};

// Element `i` of a word: a number in the format T, an 8-bit integer, or TF32.
template <typename T> inline double host_number(uint32_t word, int i) {
    return T::decode(word >> 8 * sizeof(T) * i & ((1u << 8 * sizeof(T)) - 1));
}
template <> inline double host_number<int8_t>(uint32_t word, int i) { return int8_t(word >> 8 * i); }
template <> inline double host_number<uint8_t>(uint32_t word, int i) { return uint8_t(word >> 8 * i); }
template <> inline double host_number<float>(uint32_t word, int) {  // TF32
    return host::bits_as<float>(word & 0xffffe000);
}

// mma.m16n8k16, k32 for 8-bit elements, or k8 for TF32; m16n8k8 for 16-bit elements and m8n8k16 for 8-bit elements have
// fewer words: d += a * b. Each accumulator is computed in double and rounded once to float32; integer accumulators are
// exact.
template <typename T, typename TA = T, typename Sum, int WORDS_D, int WORDS_A, int WORDS_B>
inline void host_mma(Sum (&d)[WORDS_D], const uint32_t (&a)[WORDS_A], const uint32_t (&b)[WORDS_B], HOST_SITE) {
    host_operands<Sum> own = {a, b, d};
    host::warp_collective(
        "mma.m16n8", 0xffffffffu, &own,
        [](void* const* payloads, uint64_t) {
            constexpr int N = 4 / sizeof(T), K = 4 * WORDS_B * N;  // N elements in a word; K elements in a dot product
            constexpr int TILES = WORDS_D / 2;                     // tiles of eight rows
            double A[8 * TILES][K], B[8][K];
            for (int lane = 0; lane < 32; ++lane) {
                const auto& operands = *static_cast<host_operands<Sum>*>(payloads[lane]);
                const int g = lane / 4, t = lane % 4;
                for (int e = 0; e < N; ++e) {
                    for (int i = 0; i < WORDS_A; ++i) {
                        A[g + i % TILES * 8][N * (t + i / TILES * 4) + e] = host_number<TA>(operands.a[i], e);
                    }
                    for (int i = 0; i < WORDS_B; ++i) B[g][N * (t + i * 4) + e] = host_number<T>(operands.b[i], e);
                }
            }
            for (int lane = 0; lane < 32; ++lane) {
                const auto& operands = *static_cast<host_operands<Sum>*>(payloads[lane]);
                const int g = lane / 4, t = lane % 4;
                for (int i = 0; i < WORDS_D; ++i) {
                    double sum = operands.d[i];
                    for (int k = 0; k < K; ++k) sum += A[g + i / 2 * 8][k] * B[2 * t + i % 2][k];
                    operands.d[i] = Sum(sum);
                }
            }
        },
        file, line);
}

// mma.sync with block scales, m16n8k32 of e4m3 and m16n8k64 of e2m1: d += (a * scales of a) * (b * scales of b). The
// tables are the PTX manual's, of the fragments of both shapes and of "Block Scaling for mma.sync". A word has N values.
template <int N>
struct host_scaled_table {
    static constexpr int K = 8 * N;
    static int a_row(int lane, int word) { return lane / 4 + word % 2 * 8; }
    static int a_column(int lane, int word, int i) { return lane % 4 * N + word / 2 * 4 * N + i; }
    static int b_row(int lane, int word, int i) { return lane % 4 * N + word * 4 * N + i; }
    static int b_column(int lane) { return lane / 4; }
    static int d_row(int lane, int i) { return lane / 4 + i / 2 * 8; }
    static int d_column(int lane, int i) { return lane % 4 * 2 + i % 2; }
    // The lane that holds the scales of a row of A, or of a column of B. thread-id-a selects two adjacent lanes of each
    // four, thread-id-b one.
    static int lane_of_a_scales(int row, int thread_id) { return row % 8 * 4 + thread_id * 2 + row / 8; }
    static int lane_of_b_scales(int column, int thread_id) { return column * 4 + thread_id; }
};

struct host_scaled_operands {
    const uint32_t *a, *b;
    float* d;
    uint32_t a_scales, b_scales;
    int byte_id, a_thread_id, b_thread_id;
};

// ue8m0, 2^(byte - 127), for blocks of 32 values; ue4m3, e4m3 without its sign, for blocks of 16.
template <int BLOCK> inline double host_block_scale(uint32_t byte) {
    if (BLOCK == 16) return host::fp8_e4m3::decode(byte & 0x7f);
    return byte == 255 ? host::bits_as<float>(0x7fffffffu) : host::bits_as<double>(uint64_t(byte + 1023 - 127) << 52);
}

template <typename T, int BLOCK>
inline void host_mma_block_scaled(const host_scaled_operands& given, HOST_SITE) {
    host_scaled_operands own = given;
    host::warp_collective(
        "mma.block_scale", 0xffffffffu, &own,
        [](void* const* payloads, uint64_t) {
            constexpr int BITS = T::SIGN + 1, N = 32 / BITS;
            using table = host_scaled_table<N>;
            const auto of = [&](int lane) -> const host_scaled_operands& {
                return *static_cast<host_scaled_operands*>(payloads[lane]);
            };
            const auto value = [](uint32_t word, int i) -> double {
                return T::decode(word >> i * BITS & ((1u << BITS) - 1));
            };
            double A[16][table::K], B[table::K][8];
            for (int lane = 0; lane < 32; ++lane) {
                for (int i = 0; i < N; ++i) {
                    for (int word = 0; word < 4; ++word) {
                        A[table::a_row(lane, word)][table::a_column(lane, word, i)] = value(of(lane).a[word], i);
                    }
                    for (int word = 0; word < 2; ++word) {
                        B[table::b_row(lane, word, i)][table::b_column(lane)] = value(of(lane).b[word], i);
                    }
                }
            }
            for (int lane = 0; lane < 32; ++lane) {
                const auto& operands = of(lane);
                for (int i = 0; i < 4; ++i) {
                    const int row = table::d_row(lane, i), column = table::d_column(lane, i);
                    const uint32_t a_scales = of(table::lane_of_a_scales(row, operands.a_thread_id)).a_scales;
                    const uint32_t b_scales = of(table::lane_of_b_scales(column, operands.b_thread_id)).b_scales;
                    double sum = operands.d[i];
                    for (int k = 0; k < table::K; ++k) {
                        const int bit = 8 * (operands.byte_id + k / BLOCK);
                        sum += A[row][k] * host_block_scale<BLOCK>(a_scales >> bit & 255) * B[k][column] *
                               host_block_scale<BLOCK>(b_scales >> bit & 255);
                    }
                    operands.d[i] = float(sum);
                }
            }
        },
        file, line);
}

// AMD's matrix instructions by name. row_of gives the row of accumulator i of a lane; k_of gives the index along K of
// an element of a lane's operand. The layouts are those of AMD's matrix instruction calculator.
//
//     MFMA       16x16x16 of 16 bits, 16x16x32 of 8 bits; 64 lanes
//     WMMA_11    16x16x16; lanes 16 to 31 must repeat the operands of lanes 0 to 15, or the accumulators are LOST
//     WMMA_12    16x16x16
template <typename T, int CORE>
struct host_core {
    static constexpr bool IS_MFMA = CORE == 1, IS_11 = CORE == 2;
    static constexpr int LANES = IS_MFMA ? 64 : 32, SUMS = IS_MFMA ? 4 : 8;
    static constexpr int N = 4 / sizeof(T),
                         K = IS_MFMA ? 8 * N : 16;  // N elements in a word; K of one instruction
    static constexpr int WORDS = IS_11 ? 16 / N : IS_MFMA ? 2 : 8 / N;
    // Index along K of element `e` of a lane's operand. Each lane holds one contiguous run, except for 16 bits of
    // WMMA_12: there, runs of four elements alternate between lanes l and l + 16.
    static int k_of(int lane, int e) {
        if (IS_11) return e;
        if (IS_MFMA || N == 4) return lane / 16 * WORDS * N + e;
        return e / 4 * 8 + lane / 16 * 4 + e % 4;
    }
    static int row_of(int lane, int i) { return IS_11 ? 2 * i + lane / 16 : lane / 16 * SUMS + i; }
};

// d += a * b^T on AMD's matrix cores, one instruction per host_core::WORDS words. Accumulators are rounded as in
// host_mma.
template <typename T, int CORE, typename Sum, int SUMS, int WORDS>
inline void host_matrix_core(Sum (&d)[SUMS], const uint32_t (&a)[WORDS], const uint32_t (&b)[WORDS], HOST_SITE) {
    using core = host_core<T, CORE>;
    static_assert(SUMS == core::SUMS && WORDS % core::WORDS == 0);
    for (int word = 0; word < WORDS; word += core::WORDS) {
        host_operands<Sum> own = {a + word, b + word, d};
        host::warp_collective(
            "matrix core", core::LANES == 64 ? ~uint64_t(0) : 0xffffffffu, &own,
            [](void* const* payloads, uint64_t) {
                double A[16][core::K], B[16][core::K];
                constexpr double LOST = 1 << 30;
                bool lost = false;
                for (int lane = 0; lane < core::LANES; ++lane) {
                    const auto& operands = *static_cast<host_operands<Sum>*>(payloads[lane]);
                    const auto& first = *static_cast<host_operands<Sum>*>(payloads[lane % 16]);
                    for (int i = 0; core::IS_11 && i < core::WORDS; ++i) {
                        lost |= operands.a[i] != first.a[i] || operands.b[i] != first.b[i];
                    }
                    for (int e = 0; e < core::WORDS * core::N; ++e) {
                        A[lane % 16][core::k_of(lane, e)] = host_number<T>(operands.a[e / core::N], e % core::N);
                        B[lane % 16][core::k_of(lane, e)] = host_number<T>(operands.b[e / core::N], e % core::N);
                    }
                }
                for (int lane = 0; lane < core::LANES; ++lane) {
                    const auto& operands = *static_cast<host_operands<Sum>*>(payloads[lane]);
                    for (int i = 0; i < SUMS; ++i) {
                        double sum = lost ? LOST : operands.d[i];
                        for (int k = 0; k < core::K; ++k) sum += A[core::row_of(lane, i)][k] * B[lane % 16][k];
                        operands.d[i] = Sum(sum);
                    }
                }
            },
            file, line);
    }
}

// ldmatrix. `own`: the row at the address that the lane has given. `fragment`: the lane's result.
struct host_rows {
    uint16_t own[8];
    uint32_t* fragment;
};

template <int N, bool TRANSPOSED>
inline void host_ldmatrix(uint32_t (&fragment)[N], const void* row, HOST_SITE) {
    host_rows own = {{}, fragment};
    if (host::lane_index() < 8 * N) {
        if (reinterpret_cast<uintptr_t>(row) % 16) host::fail("misaligned access", "ldmatrix of a row", file, line);
        host::record_access(row, sizeof own.own, host::Access::READ);
        host::copy_unrecorded(own.own, row, sizeof own.own);
    }
    host::warp_collective(
        "ldmatrix", 0xffffffffu, &own,
        [](void* const* payloads, uint64_t) {
            const auto element = [&](int tile, int row, int column) -> uint32_t {
                return static_cast<host_rows*>(payloads[8 * tile + row])->own[column];
            };
            for (int lane = 0; lane < 32; ++lane) {
                const int g = lane / 4, t = lane % 4;
                for (int i = 0; i < N; ++i) {
                    const uint32_t low = TRANSPOSED ? element(i, 2 * t, g) : element(i, g, 2 * t);
                    const uint32_t high = TRANSPOSED ? element(i, 2 * t + 1, g) : element(i, g, 2 * t + 1);
                    static_cast<host_rows*>(payloads[lane])->fragment[i] = high << 16 | low;
                }
            }
        },
        file, line);
}

// stmatrix. `own`: the address that the lane has given. `fragment`: the lane's words. Each lane with an address that
// the instruction uses writes its row, gathered from the fragments of the other lanes.
struct host_stored_row {
    const uint32_t* fragment;
    uint16_t row[8];
};

template <int N, bool TRANSPOSED>
inline void host_stmatrix(void* row, const uint32_t (&fragment)[N], HOST_SITE) {
    host_stored_row own = {fragment, {}};
    const bool writes = host::lane_index() < 8 * N;
    if (writes && reinterpret_cast<uintptr_t>(row) % 16) {
        host::fail("misaligned access", "stmatrix of a row", file, line);
    }
    host::warp_collective(
        "stmatrix", 0xffffffffu, &own,
        [](void* const* payloads, uint64_t) {
            for (int lane = 0; lane < 8 * N; ++lane) {
                for (int column = 0; column < 8; ++column) {
                    const int i = TRANSPOSED ? column : lane % 8, j = TRANSPOSED ? lane % 8 : column;
                    const auto* holder = static_cast<host_stored_row*>(payloads[4 * i + j / 2]);
                    static_cast<host_stored_row*>(payloads[lane])->row[column] =
                        holder->fragment[lane / 8] >> j % 2 * 16 & 0xffffu;
                }
            }
        },
        file, line);
    if (!writes) return;
    host::record_access(row, sizeof own.row, host::Access::WRITE);
    host::copy_unrecorded(row, own.row, sizeof own.row);
}

// movmatrix, the transpose of an 8 x 8 matrix of 16-bit elements: a lane's word before and after it.
struct host_word { uint32_t before, after; };

inline uint32_t host_transpose(uint32_t word, HOST_SITE) {
    host_word own = {word, 0};
    host::warp_collective(
        "movmatrix", 0xffffffffu, &own,
        [](void* const* payloads, uint64_t) {
            const auto element = [&](int row, int column) {
                return static_cast<host_word*>(payloads[4 * row + column / 2])->before >> column % 2 * 16 & 0xffffu;
            };
            for (int lane = 0; lane < 32; ++lane) {
                const int g = lane / 4, t = lane % 4;
                static_cast<host_word*>(payloads[lane])->after = element(2 * t + 1, g) << 16 | element(2 * t, g);
            }
        },
        file, line);
    return own.after;
}

// The runtime's name for an element type of wgmma (include/wgmma.cuh).
template <typename T> constexpr host::Element host_element = host::Element::INT8;
template <> constexpr host::Element host_element<host::half> = host::Element::HALF;
template <> constexpr host::Element host_element<host::bf16> = host::Element::BF16;
template <> constexpr host::Element host_element<host::fp8_e4m3> = host::Element::E4M3;
template <> constexpr host::Element host_element<host::fp8_e5m2> = host::Element::E5M2;

}  // namespace pyops_kernel
