// mma.cuh: matrix products by a warp of 32 lanes (tensor cores), and the loads and conversions of their fragments.
//
// A fragment is the part of a tile that one lane holds: words of two 16-bit elements, the lower index in the lower
// half. With g = lane / 4 and t = lane % 4, a lane holds
//
//     a[i]: row g + i % 2 * 8, columns 2t + i / 2 * 8 and the next       of A [16, 16]
//     b[i]: rows 2t + i * 8 and the next, column g                       of B [16, 8]
//     d[i]: row g + i / 2 * 8, column 2t + i % 2                         of D [16, 8], in float32
//
// Words of four 8-bit elements have twice as many columns of A and rows of B: columns 4t + i / 2 * 16 and the next three
// of A [16, 32], rows 4t + i * 16 and the next three of B [32, 8].
//
// AMD's matrix cores have other shapes: kernels that include this file do not run there.

#pragma once
#include "vec.cuh"

static_assert(!PYOPS_HIP, "AMD's matrix cores have other shapes");

#ifdef __CUDA_ARCH__
constexpr int ARCHITECTURE = __CUDA_ARCH__;  // 900 for sm_90
#else
constexpr int ARCHITECTURE = 0;
#endif

// D += A * B, the elements of A and B of type T: half_t or bf16_t.
template <typename T>
DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static_assert(is_same<T, half_t> || is_same<T, bf16_t>);
#if PYOPS_CUDA
#define PYOPS_MMA(FORMAT)                                          \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." FORMAT "." FORMAT \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "                \
        "{%8, %9}, {%0, %1, %2, %3};"                              \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (is_same<T, half_t>) PYOPS_MMA("f16");
    else PYOPS_MMA("bf16");
#undef PYOPS_MMA
#elif PYOPS_HOST
    host_mma<T>(d, a, b);
#endif
}

// Whether mma_m16n8k32 takes elements of type T here. Where it does not, fp8_to_half and two products by mma_m16n8k16
// take its place. (Data-centre GPUs from sm_90 on have the instruction, too, but not in hardware: the compiler converts
// the elements anew for every product.)
template <typename T>
constexpr bool MULTIPLIES_BYTES = is_same<T, int8_t> || ((PYOPS_HOST || ARCHITECTURE == 890 || ARCHITECTURE >= 1200) &&
                                                         (is_same<T, fp8_e4m3_t> || is_same<T, fp8_e5m2_t>));

// D += A * B, the elements of A and B of type T: fp8_e4m3_t or fp8_e5m2_t, and D in float; or int8_t, and D in int32_t.
template <typename T, typename Sum>
DEVICE void mma_m16n8k32(Sum (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static_assert(MULTIPLIES_BYTES<T>);
#if PYOPS_CUDA
#define PYOPS_MMA(SUM, FORMAT, CONSTRAINT)                                       \
    asm("mma.sync.aligned.m16n8k32.row.col." SUM "." FORMAT "." FORMAT "." SUM   \
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"       \
        : CONSTRAINT(d[0]), CONSTRAINT(d[1]), CONSTRAINT(d[2]), CONSTRAINT(d[3]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (is_same<T, int8_t>) PYOPS_MMA("s32", "s8", "+r");
    else if constexpr (is_same<T, fp8_e4m3_t>) PYOPS_MMA("f32", "e4m3", "+f");
    else PYOPS_MMA("f32", "e5m2", "+f");
#undef PYOPS_MMA
#elif PYOPS_HOST
    host_mma<T>(d, a, b);
#endif
}

// Loads N (1, 2 or 4) tiles of 8 x 8 16-bit elements from shared memory. `row` of lane 8i + j is the address of row j
// of tile i, a multiple of 16 bytes. Word i of the fragment gets row g, columns 2t and the next of tile i; if
// TRANSPOSED, rows 2t and the next, column g.
template <int N, bool TRANSPOSED = false>
DEVICE void ldmatrix(uint32_t (&fragment)[N], const void* row) {
    static_assert(N == 1 || N == 2 || N == 4);
#if PYOPS_CUDA
    const uint32_t from = __cvta_generic_to_shared(row);
#define PYOPS_LDMATRIX(SHAPE, REGISTERS, ...)                                               \
    if constexpr (TRANSPOSED)                                                               \
        asm volatile("ldmatrix.sync.aligned.m8n8." SHAPE ".trans.shared.b16 " REGISTERS ";" \
                     : __VA_ARGS__                                                          \
                     : "r"(from)                                                            \
                     : "memory");                                                           \
    else                                                                                    \
        asm volatile("ldmatrix.sync.aligned.m8n8." SHAPE ".shared.b16 " REGISTERS ";"       \
                     : __VA_ARGS__                                                          \
                     : "r"(from)                                                            \
                     : "memory")
    if constexpr (N == 1) {
        PYOPS_LDMATRIX("x1", "{%0}, [%1]", "=r"(fragment[0]));
    } else if constexpr (N == 2) {
        PYOPS_LDMATRIX("x2", "{%0, %1}, [%2]", "=r"(fragment[0]), "=r"(fragment[1]));
    } else {
        PYOPS_LDMATRIX("x4", "{%0, %1, %2, %3}, [%4]", "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]),
                       "=r"(fragment[3]));
    }
#undef PYOPS_LDMATRIX
#elif PYOPS_HOST
    host_ldmatrix<N, TRANSPOSED>(fragment, row);
#endif
}

// Stores N (1, 2 or 4) tiles of 8 x 8 16-bit elements to shared memory, from where ldmatrix would load them: `row` of
// lane 8i + j is the address of row j of tile i, a multiple of 16 bytes. From sm_90 on.
template <int N, bool TRANSPOSED = false>
DEVICE void stmatrix(void* row, const uint32_t (&fragment)[N]) {
    static_assert(N == 1 || N == 2 || N == 4);
#if PYOPS_CUDA
    static_assert(N > 0 && __CUDA_ARCH__ >= 900, "stmatrix exists from sm_90 on");
    const uint32_t to = __cvta_generic_to_shared(row);
#define PYOPS_STMATRIX(SHAPE, REGISTERS, ...)                                                     \
    if constexpr (TRANSPOSED)                                                                     \
        asm volatile("stmatrix.sync.aligned.m8n8." SHAPE ".trans.shared.b16 [%0], " REGISTERS ";" \
                     :                                                                            \
                     : "r"(to), __VA_ARGS__                                                       \
                     : "memory");                                                                 \
    else                                                                                          \
        asm volatile("stmatrix.sync.aligned.m8n8." SHAPE ".shared.b16 [%0], " REGISTERS ";"       \
                     :                                                                            \
                     : "r"(to), __VA_ARGS__                                                       \
                     : "memory")
    if constexpr (N == 1) {
        PYOPS_STMATRIX("x1", "{%1}", "r"(fragment[0]));
    } else if constexpr (N == 2) {
        PYOPS_STMATRIX("x2", "{%1, %2}", "r"(fragment[0]), "r"(fragment[1]));
    } else {
        PYOPS_STMATRIX("x4", "{%1, %2, %3, %4}", "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]),
                       "r"(fragment[3]));
    }
#undef PYOPS_STMATRIX
#elif PYOPS_HOST
    host_stmatrix<N, TRANSPOSED>(row, fragment);
#endif
}

// Transposes a tile of 8 x 8 16-bit elements. Each lane holds row g, columns 2t and the next, before and after.
DEVICE uint32_t transpose_8x8(uint32_t word) {
#if PYOPS_CUDA
    uint32_t result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
#elif PYOPS_HOST
    return host_transpose(word);
#endif
}

// Transposes a matrix of 4 x 4 words: lane t of four neighbouring lanes holds column t before, and row t after. Every
// lane of the warp calls.
DEVICE void transpose_4x4(uint32_t (&words)[4]) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
        const bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & mask) continue;
            const uint32_t other = shfl_xor(upper ? words[i] : words[i + mask], mask);
            if (upper) words[i] = other;
            else words[i + mask] = other;
        }
    }
}

// Two 16-bit elements of T in a word of a fragment, `low` in the lower half.
template <typename T>
DEVICE uint32_t pack_pair(float low, float high) {
    Vec<T, 2> pair;
    store_pair<T>(pair.data, low, high);
    return pair.template word<2>(0);
}
template <typename T>
DEVICE void unpack_pair(uint32_t word, float& low, float& high) {
    Vec<T, 2> pair;
    pair.template word<2>(0) = word;
    load_pair<T>(pair.data, low, high);
}

// A word of the lower (HIGH: upper) halves of two words, the half of `low` first.
template <bool HIGH>
DEVICE uint32_t pack_halves(uint32_t low, uint32_t high) {
    return __byte_perm(low, high, HIGH ? 0x7632 : 0x5410);
}

// A word of the two lower (HIGH: upper) bytes of each of two words, alternating, a byte of `low` first.
template <bool HIGH>
DEVICE uint32_t pack_bytes(uint32_t low, uint32_t high) {
    return __byte_perm(low, high, HIGH ? 0x7362 : 0x5140);
}

// Four fp8 elements as two words of float16 pairs; float16 holds every fp8 number.
template <typename T>
DEVICE void fp8_to_half(uint32_t codes, uint32_t (&halves)[2]) {
    constexpr bool IS_E5M2 = is_same<T, fp8_e5m2_t>, IS_FNUZ = is_same<T, fp8_e4m3fnuz_t>;
    constexpr bool HAS_INSTRUCTION = PYOPS_CUDA && ARCHITECTURE >= 890 && !IS_FNUZ;
    if constexpr (HAS_INSTRUCTION) {
#if PYOPS_CUDA
        // CUDA's header shifts the upper half of a word down first; the instruction can read it where it is.
#define PYOPS_FP8(FORMAT)                                                                                      \
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2." FORMAT " %0, low; cvt.rn.f16x2." FORMAT \
        " %1, high;}"                                                                                          \
        : "=r"(halves[0]), "=r"(halves[1])                                                                     \
        : "r"(codes))
        if constexpr (IS_E5M2) PYOPS_FP8("e5m2x2");
        else PYOPS_FP8("e4m3x2");
#undef PYOPS_FP8
#endif
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // Two codes in the upper bytes of halves. One of e5m2 is float16 without its last bits.
            const uint32_t bytes = __byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);
            halves[i] = bytes;
            if constexpr (!IS_E5M2) {
                // Exponent and mantissa of e4m3, in their places in float16, are a number 2^-8 (FNUZ: 2^-7) times as
                // large, and so are those of subnormal numbers.
                const uint32_t sign = bytes & 0x80008000u, magnitude = bytes & 0x7f007f00u;
                Vec<half_t, 2> pair;
                pair.template word<2>(0) = sign | magnitude >> 1;
                pair = pair * Vec<half_t, 2>::full(IS_FNUZ ? 128.0f : 256.0f);
                // The sign bit of each half that is NaN: of -0, or of the largest magnitude. It becomes 0x7e00.
                const uint32_t is_nan =
                    IS_FNUZ ? sign & ~(magnitude + 0x7f007f00u) : (magnitude + 0x01000100u) & 0x80008000u;
                halves[i] = pair.template word<2>(0) | (is_nan - (is_nan >> 6));
            }
        }
    }
}

// Four e4m3 elements (not FNUZ) as two words of bfloat16 pairs; bfloat16 holds every fp8 number.
DEVICE void fp8_to_bf16(uint32_t codes, uint32_t (&pairs)[2]) {
    if constexpr (PYOPS_CUDA && ARCHITECTURE >= 890) {
        // Four conversions of a pair take less time than the nine integer operations below.
        fp8_to_half<fp8_e4m3_t>(codes, pairs);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float low, high;
            unpack_pair<half_t>(pairs[i], low, high);
            pairs[i] = pack_pair<bf16_t>(low, high);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // Exponent and mantissa, in their places in bfloat16, are a number 2^-120 times as large, and so are those
            // of subnormal numbers.
            const uint32_t bytes = __byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);
            const uint32_t magnitude = bytes & 0x7f007f00u;
            Vec<bf16_t, 2> pair;
            pair.template word<2>(0) = (bytes & 0x80008000u) | magnitude >> 4;
            pair = pair * Vec<bf16_t, 2>::full(0x1p120f);
            // The sign bit of each half that is NaN: of the largest magnitude. It becomes 0x7fc0.
            const uint32_t is_nan = (magnitude + 0x01000100u) & 0x80008000u;
            pairs[i] = pair.template word<2>(0) | (is_nan - (is_nan >> 9));
        }
    }
}

// 16 e4m3 elements as elements of T.
template <typename T>
DEVICE void widen_fp8(uint4 codes, uint4 (&elements)[2]) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t pairs[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (is_same<T, half_t>) fp8_to_half<fp8_e4m3_t>(words[i], pairs[i]);
        else fp8_to_bf16(words[i], pairs[i]);
    }
    elements[0] = make_uint4(pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]);
    elements[1] = make_uint4(pairs[2][0], pairs[2][1], pairs[3][0], pairs[3][1]);
}
