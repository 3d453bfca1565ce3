// wq_fragment.cuh: the register fragments of wq_gemm_sm80.cu for a k-tile: quants, the rows of a they multiply, and the
// scales and zero points of the columns.
//
// In an MMA of 16 rows of K, lane 4g + t has two columns h, and in each two row pairs q, as in mma.cuh's A fragment. A
// warp has TILES such blocks of 16 columns. The layout's MmaUnit (packed_layout.cuh) says which words a lane has of
// consecutive rows, and which columns and rows these are. Where the row pairs differ from mma.cuh's, `Rows` reads a in
// the same permuted order, so that the sum over K is unchanged. Constants are the kernel's.
#pragma once
#include "async.cuh"
#include "dequant.cuh"
#include "gemm_epilogue.cuh"
#include "group_scale.cuh"
#include "mma.cuh"
#include "LAYOUT.cuh"

using quants_t = Quants<scalar_t, BITS, EXPONENT>;
using pair_t = Vec<scalar_t, 2>;
using layout_t = LAYOUT<BITS>;
using mma_unit_t = typename layout_t::template MmaUnit<TILE_N>;
// 2:4 sparsity: metadata gives the rows of the stored ones (sparse_24_metadata.cuh).
constexpr bool IS_SPARSE = mma_unit_t::SPREAD == 2;
constexpr int WORDS = mma_unit_t::WORDS;                                      // words of a lane in a unit
constexpr int TILES = TILE_N / 16;                                            // blocks of 16 columns
constexpr int UNIT_K = WORDS * 32 / BITS * 32 / TILE_N * mma_unit_t::SPREAD;  // rows of a unit
constexpr int UNITS = SHORT_STEPS ? ceil_div(64, UNIT_K) : mma_unit_t::UNITS, STEP_K = UNITS * UNIT_K;  // of a k-tile
constexpr int PRODUCTS = UNIT_K / 16;                                                    // MMAs along K of a unit
constexpr int ROW_TILES = ceil_div(TILE_M, 8);                                           // blocks of 8 rows of a
constexpr int A_CHUNKS = STEP_K / 8;                                                     // 16-byte chunks of a row
constexpr int GROUPS = GROUP_SIZE > 0 && GROUP_SIZE < STEP_K ? STEP_K / GROUP_SIZE : 1;  // groups of a k-tile
constexpr int A_BYTES = TILE_M * A_CHUNKS * 16, SCALE_BYTES = HAS_SCALES ? TILE_N * sizeof(scale_t) : 0;
constexpr int ZERO_BYTES = ZERO_CODES ? TILE_N * BITS / 8 : ADDED || ZERO_FLOATS ? TILE_N * 2 : 0;
constexpr int UNIT_BYTES = WORDS * 4 * 32;                             // bytes of a unit of a warp
constexpr int PLACE_BYTES = IS_SPARSE ? STEP_K / 32 * TILE_N * 4 : 0;  // bytes of a k-tile
// A stage in shared memory: rows of a, scales of the groups, zero points, quants (unless HELD in registers), 2:4
// metadata.
constexpr int QUANTS_AT = ceil_div(A_BYTES + GROUPS * (SCALE_BYTES + ZERO_BYTES), 16) * 16;
constexpr int TERM_BYTES = BITS == 3 ? 8 : 16;  // bytes of one cp.async of scales or zero points
constexpr int PLACES_AT = QUANTS_AT + (HELD ? 0 : UNITS * UNIT_BYTES), STAGE_BYTES = PLACES_AT + PLACE_BYTES;
// Whether the epilogue needs the sum of each row of a over K, to apply zero points or offsets.
constexpr bool HAS_SHIFTS = ADDED || ZERO_CODES || ZERO_FLOATS || ZERO_POINT > 0 || quants_t::RAW_OFFSET > 0.0f;
static_assert(TILE_N == 64 || TILE_N == mma_unit_t::MOST_COLUMNS);
static_assert(EXPONENT == 0 || (!ZERO_CODES && !ZERO_FLOATS && ZERO_POINT == 0), "floats have no zero points");
static_assert(BITS != 3 || GROUPS == 1);
static_assert(GROUP_SIZE == 0 || GROUP_SIZE % STEP_K == 0 || STEP_K % GROUP_SIZE == 0);
static_assert(GROUP_SIZE == 0 || GROUP_SIZE % (mma_unit_t::GROUPS_OF_16 ? 16 : UNIT_K) == 0);
static_assert(TILE_M < 8 ? 8 % TILE_M == 0 : TILE_M == 8 || TILE_M % 16 == 0);

// A lane's unit: its packed words.
struct Unit {
    uint32_t words[WORDS];

    // The column, within the warp's tile, of block `tile` and half h, for lane 4g + t.
    static DEVICE int column(int g, int tile, int h) { return mma_unit_t::column(g, tile, h); }

    // Quants are stored in lines along K. A unit takes LINE_PIECES pieces of 16 bytes from each of LINES lines. The
    // pitch gives the size of a line: it is n, the columns of the weight; where all rows of a column block are
    // contiguous, it is k.
    static constexpr bool BY_BLOCKS = mma_unit_t::LINE_WORDS > 0;
    static DEVICE int64_t pitch(int64_t n, int64_t k) { return BY_BLOCKS ? k : n; }
    static constexpr int LINES = mma_unit_t::LINES;
    static constexpr int COPIES = UNIT_BYTES / 512, LINE_PIECES = UNIT_BYTES / 16 / LINES;
    static DEVICE int64_t line_words(int64_t pitch) { return unit_words(pitch) / LINES; }
    static DEVICE int64_t unit_words(int64_t pitch) {
        return BY_BLOCKS ? mma_unit_t::LINE_WORDS : pitch * (UNIT_K / mma_unit_t::SPREAD * BITS / 32);
    }
    // The line of the lane's first copy in a unit, and the offset in that line. One cp.async of all lanes copies pieces
    // 0 ... 31 of the unit, the next 32 ... 63, independent of the lanes that will use them, for coalescing: eight
    // lanes together request 128 contiguous bytes, or whole lines. With GPTQ, a lane's own pieces would be 32 bytes
    // from each of four lines.
    static DEVICE int line() { return LINES == 1 ? 0 : first_piece() / LINE_PIECES; }
    template <typename MmaUnit = mma_unit_t>
    static DEVICE int64_t place(int64_t first_column, int64_t pitch) {
        return MmaUnit::first_word(first_column, pitch, first_piece() % LINE_PIECES * 4);
    }
    static DEVICE int first_piece() { return HELD ? piece(0) : threadIdx.x % 32; }
    // Offset of the lane's copy i from its first one.
    static constexpr int COPY_LINES = LINES / COPIES;  // lines per copy of all lanes; 0: several copies per line
    static DEVICE int64_t copy_at(int i, int64_t pitch) {
        if constexpr (BY_BLOCKS) return i * mma_unit_t::COPY_LINES * pitch;
        else if constexpr (HELD) return i * mma_unit_t::HELD_WORDS;
        else return COPY_LINES == 0 ? i * 128 : i * COPY_LINES * line_words(pitch);
    }
    // Byte offset of a piece in a unit in shared memory, swizzled.
    static constexpr bool NEIGHBOURS = mma_unit_t::NEIGHBOURS, SIXTEENS = mma_unit_t::SIXTEENS;
    static DEVICE int piece_at(int piece) {
        return (NEIGHBOURS ? piece ^ (piece >> 3 & 1) : SIXTEENS ? piece ^ (piece >> 4) % 4 << 1 : piece) * 16;
    }

    // Copies a unit to shared memory, copy i to offset `places[i]`. `from` is the source of the lane's first copy. Only
    // `lines` lines from there on exist; the last one is copied instead of those past the end, where a is zero.
    static DEVICE void copy(uint8_t* to, const int (&places)[COPIES], const uint32_t* from, int64_t pitch, int lines) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const bool exists = COPY_LINES == 0 || i == 0 || i * COPY_LINES < lines;
            cp_async<16>(to + places[i], from + (exists ? copy_at(i, pitch) : (lines - 1) * line_words(pitch)));
        }
    }
    // Copies all units of a k-tile; returns the source of the lane's first copy of the next k-tile.
    static DEVICE const uint32_t*
    copy_step(uint8_t* to, const int (&places)[COPIES], const uint32_t* from, int64_t pitch) {
        const int64_t step = COPY_LINES > 0 ? COPY_LINES * line_words(pitch) : unit_words(pitch);
#pragma unroll
        for (int i = 0; i < UNITS * COPIES; ++i) {
            const int64_t at = COPY_LINES > 0 ? 0 : copy_at(i % COPIES, pitch);
            cp_async<16>(to + i / COPIES * UNIT_BYTES + places[i % COPIES], from + at);
            if (COPY_LINES > 0 || i % COPIES == COPIES - 1) from += step;
        }
        return from;
    }
    // A lane reads READ words at a time. `piece(i)` is the piece of read i, `read_at(i)` its byte offset in shared
    // memory.
    static constexpr int READ = mma_unit_t::READ, READS = WORDS / READ;
    static DEVICE int piece(int i) { return mma_unit_t::piece(i); }
    static DEVICE int read_at(int i) {
        const int word = mma_unit_t::WORD_OF_T ? threadIdx.x % 4 : threadIdx.x % 32 / 4 % (4 / READ) * READ;
        return piece_at(piece(i)) + word * 4;
    }
    // Loads the lane's words from global memory; `from` is the first.
    DEVICE void load(const uint32_t* from, int64_t pitch) {
        static_assert(!HELD || mma_unit_t::HELD_WORDS > 0);
#pragma unroll
        for (int i = 0; i < READS; ++i) {
            const auto run = Vec<uint32_t, READ>::load_once(from + copy_at(i, pitch));
#pragma unroll
            for (int j = 0; j < READ; ++j) words[READ * i + j] = run.data[j];
        }
    }
    // Reads the lane's words of a unit in shared memory, at offsets `offsets`.
    DEVICE void read(const uint8_t* from, const int (&offsets)[READS]) {
#pragma unroll
        for (int i = 0; i < READS; ++i) {
            const auto run = Vec<uint32_t, READ>::load(reinterpret_cast<const uint32_t*>(from + offsets[i]));
#pragma unroll
            for (int j = 0; j < READ; ++j) words[READ * i + j] = run.data[j];
        }
    }

    // Row pair q of column (tile, h) in MMA `product`: quants_t::raw, times `factor` of the tile. IS_SPARSE: the pair
    // of stored quants, independent of q.
    static constexpr float factor(int tile) { return mma_unit_t::template factor<quants_t>(tile); }
    DEVICE uint32_t pair(const quants_t& decode, int product, int tile, int h, int q, int term) const {
        return mma_unit_t::template pair<RECODED>(words, decode, product, tile, h, q, term);
    }
};

// The rows of a of a k-tile in shared memory: 16-byte chunks, swizzled so that the eight chunks that lanes read
// together (one from each of eight rows, or four from each of two rows) are on different banks.
struct Rows {
    const uint8_t* data;

    static DEVICE int place(int row, int chunk) {
        return (row * A_CHUNKS + (chunk ^ ((row & 1) << 2 | (row >> 1 & 3)))) * 16;
    }

    // Whether the B fragments of one MMA are loaded separately from the others.
    static constexpr RowOrder ORDER = mma_unit_t::ROWS;
    static constexpr bool IN_FOURS = ORDER == rows_in_pairs || ORDER == rows_alternating;
    static constexpr bool BY_PRODUCT = IN_FOURS || (ORDER == rows_of_fragment && (TILE_M > 8 || PRODUCTS == 1));

    // Loads the B fragments of a unit, by MMA and block of 8 rows of a; with BY_PRODUCT only those of `product`; then b
    // may hold one MMA.
    template <int COUNT>
    DEVICE void load(uint32_t (&b)[COUNT][ROW_TILES][2], int unit, int product) const {
        static_assert(COUNT == PRODUCTS || (BY_PRODUCT && COUNT == 1));
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        if constexpr (IN_FOURS) {  // a lane's four adjacent elements along K
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                const int row = tile * 8 + (TILE_M < 8 ? g % TILE_M : g),
                          chunk = (unit * PRODUCTS + product) * 2 + t / 2;
                const auto four =
                    Vec<uint32_t, 2>::load(reinterpret_cast<const uint32_t*>(data + place(row, chunk) + t % 2 * 8));
                b[product % COUNT][tile][0] =
                    ORDER == rows_in_pairs ? four.data[0] : pack_halves<false>(four.data[0], four.data[1]);
                b[product % COUNT][tile][1] =
                    ORDER == rows_in_pairs ? four.data[1] : pack_halves<true>(four.data[0], four.data[1]);
            }
        } else if constexpr (BY_PRODUCT) {
            constexpr int TILES = ROW_TILES == 1 ? 1 : 2;
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile += TILES) {
                const int row = TILES == 1 ? lane % 8 % TILE_M : tile * 8 + lane / 16 * 8 + lane % 8;
                uint32_t words[2 * TILES];
                ldmatrix<2 * TILES>(words, data + place(row, (unit * PRODUCTS + product) * 2 + lane / 8 % 2));
#pragma unroll
                for (int j = 0; j < 2 * TILES; ++j) b[product % COUNT][tile + j / 2][j % 2] = words[j];
            }
        } else if constexpr (ORDER == rows_of_fragment) {
            uint32_t words[4];
            ldmatrix<4>(words, data + place(lane % 8 % TILE_M, unit * 4 + lane / 8));
#pragma unroll
            for (int j = 0; j < 4; ++j) b[j / 2 % PRODUCTS][0][j % 2] = words[j];
        } else {
            constexpr int PAIRS = UNIT_K / 8;  // words of a that a lane holds
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                uint32_t words[PAIRS];
                const int row = tile * 8 + (TILE_M < 8 ? g % TILE_M : g);
                if constexpr (PAIRS == 2) {
                    const auto two = Vec<uint32_t, 2>::load(
                        reinterpret_cast<const uint32_t*>(data + place(row, unit * 2 + t / 2) + t % 2 * 8));
                    words[0] = two.data[0];
                    words[1] = two.data[1];
                } else {
#pragma unroll
                    for (int i = 0; i < PAIRS; i += 4) {
                        const auto four = Vec<uint32_t, 4>::load(
                            reinterpret_cast<const uint32_t*>(data + place(row, (unit * 4 + t) * (PAIRS / 4) + i / 4)));
#pragma unroll
                        for (int j = 0; j < 4; ++j) words[i + j] = four.data[j];
                    }
                }
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) {
                    uint32_t& word = b[i / 2][tile][i % 2];
                    // rows_of_lane_in_halves: a pair of quants is rows i and i + PAIRS.
                    if constexpr (ORDER == rows_of_lane) word = words[i];
                    else if (i % 2 == 0) word = pack_halves<false>(words[i / 2], words[i / 2 + PAIRS / 2]);
                    else word = pack_halves<true>(words[i / 2], words[i / 2 + PAIRS / 2]);
                }
            }
        }
    }
};

// The index of the stored scale of column i of lane 4g + t: half i % 2 of block i / 2.
DEVICE constexpr int entry_of(int g, int i) { return int(SCALE_ORDER(mma_unit_t::column(g, i / 2, i % 2))); }
// Whether eight columns of a lane have adjacent scales, in any order.
DEVICE constexpr bool entries_by_eight() {
    for (int i = 0; i < 2 * TILES; ++i) {
        if (entry_of(0, i) / 8 != i / 8 || entry_of(0, i) % 8 != entry_of(0, i % 8)) return false;
        if (entry_of(1, i) != entry_of(0, i) + 2 * TILES) return false;
    }
    return true;
}
// Whether the four columns of a half have adjacent scales.
DEVICE constexpr bool entries_by_four() {
    for (int i = 0; i < 2 * TILES; ++i) {
        if (entry_of(0, i) != i % 2 * 32 + i / 2 || entry_of(1, i) != entry_of(0, i) + 4) return false;
    }
    return TILES == 4;
}

// Per-column factors of a group, for a lane's columns: `scales` multiply the accumulators over the group, `shifts`
// (zero points and offsets, scaled) the sums of the rows of a over it. Both leave out quants_t::RAW_FACTOR.
struct Terms {
    float scales[TILES][2], shifts[TILES][2];

    // Reads the values of the lane's columns from the row of the tile, and decodes them.
    template <typename T, typename To, typename Decode>
    static DEVICE void spread(To (&to)[TILES][2], const uint8_t* from, const Decode& decode) {
        const T* entries = reinterpret_cast<const T*>(from);
        const int g = threadIdx.x % 32 / 4;
        if constexpr (entries_by_eight()) {
#pragma unroll
            for (int i = 0; i < 2 * TILES; i += 8) {
                const auto eight = Vec<T, 8>::load(entries + 2 * TILES * g + i);
#pragma unroll
                for (int j = 0; j < 8; ++j) to[(i + j) / 2][j % 2] = decode(eight.data[entry_of(0, j)]);
            }
        } else if constexpr (entries_by_four()) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const auto four = Vec<T, 4>::load(entries + 32 * h + 4 * g);
#pragma unroll
                for (int i = 0; i < 4; ++i) to[i][h] = decode(four.data[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                to[i / 2][i % 2] = decode(entries[SCALE_ORDER(Unit::column(g, i / 2, i % 2))]);
            }
        }
    }

    // Loads group `group` of the k-tile.
    template <typename MmaUnit = mma_unit_t>
    DEVICE void load(const uint8_t* groups, int group) {
        load<MmaUnit>(groups + group * SCALE_BYTES, groups + GROUPS * SCALE_BYTES + group * ZERO_BYTES);
    }
    // Loads the scales and zero points of one group for this warp's columns, from shared memory.
    template <typename MmaUnit = mma_unit_t>
    DEVICE void load(const uint8_t* entries, const uint8_t* points) {
        if constexpr (HAS_SCALES) {
            constexpr float FACTOR = power_of_two(GROUP_SCALE_EXPONENT);
            spread<scale_t>(scales, entries, [](scale_t x) { return SCALE<scale_t>(&x, 0) * FACTOR; });
        }
        if constexpr (ADDED || ZERO_FLOATS) spread<scalar_t>(shifts, points, to_float<scalar_t>);
        const int g = threadIdx.x % 32 / 4;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(points);
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            const int tile = i / 2, h = i % 2;
            // 2^23 has an ulp of 1: or-ing an integer into its bits adds the integer.
            constexpr uint32_t RAISE = 0x4b000000;
            uint32_t point = RAISE;
            if constexpr (ZERO_CODES) point |= MmaUnit::zero_point(words, g, tile, h);
            const float offset = 8388608.0f - ZERO_POINT - quants_t::RAW_OFFSET;
            float zero = __uint_as_float(point) - offset;
            if constexpr (ZERO_FLOATS) zero += shifts[tile][h];
            if constexpr (!HAS_SCALES) scales[tile][h] = 1.0f;
            const float shift = ADDED ? shifts[tile][h] : 0.0f;
            shifts[tile][h] = fmaf(-zero, scales[tile][h], shift);
            scales[tile][h] *= 1.0f / Unit::factor(tile);
        }
    }
};
