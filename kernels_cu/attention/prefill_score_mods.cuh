// prefill_score_mods.cuh: what prefill_sm90 does to the scores of a KV tile before the softmax: score modifications and
// masks, each a type. Reads the constants of the kernel that includes it.
//
// A thread's element of a tile has a `column`, counted from the lane's first key, and a row, `half` of its two. A
// modification changes a score; a mask tells whether a row does not see a key. A new one is a type here and a line in
// Softmax::modify_scores or Softmax::apply_masks.
#pragma once
#include "attention.cuh"
#include "prefill_epilogue.cuh"
#include "prefill_scheduler.cuh"

// SHORT_SERIES: for small scores, a polynomial of two terms approximates the logits soft cap.
constexpr bool SHORT_SERIES = BY_MAGNITUDE && !HAS_ALIBI && !HAS_LSE;

// The logits soft cap. A series replaces tanh if all scores of the warp are small: each approximates it up to its
// limit.
struct SoftCap {
    const float cap;
    const CapSeries<2> short_series;
    const CapSeries<3> series;
    const CapSeries<5> long_series;
    float series_limit, short_limit;
    float square = 0.0f;           // of the largest |score| of the tile
    bool by_short_series = false;  // the short series serves all scores of the warp

    // qk_scale: the softmax scale times the descale of keys.
    DEVICE SoftCap(float qk_scale, float cap)
        : cap(cap), short_series(qk_scale, cap), series(qk_scale, cap), long_series(qk_scale, cap) {
        const float unit_limit = BY_MAGNITUDE || logit_unit<HAS_SOFTCAP>(qk_scale, cap) > 0.0f
                                     ? MAX_MAGNITUDE / fabsf(qk_scale * LOG2_E)
                                     : 0.0f;
        series_limit = fminf(series.limit, unit_limit);
        short_limit = fminf(short_series.limit, unit_limit);
    }

    // Begins a tile with this largest |score| of the thread. Squares are compared, so that ptxas hoists the series of
    // an interior tile above the wait for P V: docs/performance/prefill.md, "Fast path for interior tiles".
    DEVICE void begin_tile(float magnitude) {
        square = magnitude * magnitude;
        by_short_series = SHORT_SERIES && is_below(short_limit);
    }
    // Whether the series up to this limit serves all scores of the warp.
    DEVICE bool is_below(float limit) const { return !any_lane(!(square < limit * limit)); }
};

// ALiBi: a bias that grows with the distance of the key from the row's limit.
struct Alibi {
    float slopes[2], distances[2];  // per row: units of log 2 per key; from the limit to column 0

    DEVICE float operator()(float logit, int column, int half) const {
        return fmaf(slopes[half], distances[half] + float(column), logit);
    }
};

// Keys after a row's limit: its own position if CAUSAL, else the end of the sequence.
struct LimitMask {
    int last[2];  // last column that the row sees

    DEVICE bool hides(int column, int half) const { return column > last[half]; }
};
// Keys before the sliding window.
struct WindowMask {
    int first[2];  // first column that the row sees

    DEVICE bool hides(int column, int half) const { return column < first[half]; }
};
// Keys of pages with an invalid block number.
struct PageMask {
    uint32_t invalid_boxes;  // a bit for each box

    DEVICE bool hides(int column, int) const { return invalid_boxes >> column / BOX_TOKENS & 1; }
};
