// selective_scan_stage.cuh: the staging threads of selective_scan_fwd: they load tiles to shared memory for the
// scanning threads, and write the results of a tile. It uses the constants of selective_scan_fwd.cu.
#pragma once
#include "selective_scan.cuh"

constexpr int NUM_THREADS = SCAN_THREADS + STAGE_THREADS;
static_assert(UNIT % VEC_SIZE == 0);
constexpr int GROUPS = SCAN_THREADS / LANES;  // lanes that share channels form a group
constexpr int BLOCK_CHANNELS = GROUPS * CHANNELS;
constexpr int PADDED_STATES = LANES * STATES;
constexpr int ROW_UNITS = TILE_TOKENS / UNIT;
constexpr int ROW = TILE_TOKENS + 4;  // floats of a row in shared memory: vectors of eight rows lie in different banks
constexpr int CHANNEL_UNITS = ceil_div(BLOCK_CHANNELS * ROW_UNITS, STAGE_THREADS);  // units of channel rows per thread
constexpr int STATE_UNITS = ceil_div(PADDED_STATES * ROW_UNITS, STAGE_THREADS);     // units per thread for B, and for C

// A tile in shared memory. Channel c of the block is channel c / GROUPS of the group c % GROUPS.
struct Buffer {
    float rate[BLOCK_CHANNELS * ROW];      // delta * log2(e)
    float scaled_u[BLOCK_CHANNELS * ROW];  // delta * u
    float y[BLOCK_CHANNELS * ROW];         // the result of column c is at index c + 4 of its row
    float B[TILE_TOKENS * PADDED_STATES];
    float C[TILE_TOKENS * PADDED_STATES];
    unit_t u[BLOCK_CHANNELS * ROW_UNITS];  // for D
};

DEVICE void store_floats(float* shared, const float (&x)[UNIT]) {
#pragma unroll
    for (int j = 0; j < UNIT; j += 4)
        *reinterpret_cast<float4*>(shared + j) = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
}

// A staging thread's part of a tile in flight from global to shared memory. It is loaded early and stored late to hide
// memory latency.
struct Stage {
    LoadedUnit delta[CHANNEL_UNITS], u[CHANNEL_UNITS], B[STATE_UNITS], C[STATE_UNITS];

    DEVICE void load(const Rows& rows, const Tile& tile, int thread) {
#pragma unroll
        for (int i = 0; i < CHANNEL_UNITS; ++i) {
            const int unit = thread + i * STAGE_THREADS, channel = unit / ROW_UNITS, column = unit % ROW_UNITS * UNIT;
            if (tile.has_none(column, UNIT) || channel >= rows.channels) continue;
            delta[i] = tile.load(rows.delta + channel * rows.delta_stride, column);
            u[i] = tile.load(rows.u + channel * rows.u_stride, column);
        }
#pragma unroll
        for (int i = 0; i < STATE_UNITS; ++i) {
            const int unit = thread + i * STAGE_THREADS, state = unit % PADDED_STATES;
            const int column = unit / PADDED_STATES * UNIT;
            if (tile.has_none(column, UNIT) || state >= STATE_SIZE) continue;
            B[i] = tile.load(rows.B + state * rows.B_stride, column);
            C[i] = tile.load(rows.C + state * rows.C_stride, column);
        }
    }

    DEVICE void store(const Rows& rows, const Tile& tile, int thread, Buffer& to) {
#pragma unroll
        for (int i = 0; i < CHANNEL_UNITS; ++i) {
            const int unit = thread + i * STAGE_THREADS, channel = unit / ROW_UNITS, column = unit % ROW_UNITS * UNIT;
            if (tile.has_none(column, UNIT) || channel >= BLOCK_CHANNELS) continue;
            float step[UNIT] = {}, scaled_u[UNIT] = {};
            if (channel < rows.channels) {
                const float bias = rows.bias ? rows.bias[channel] : 0.0f;
                const unit_t own_u = u[i].unit();
                to.u[unit] = own_u;
                delta[i].unit().to_floats(step);
                own_u.to_floats(scaled_u);
#pragma unroll
                for (int j = 0; j < UNIT; ++j) {
                    step[j] = rows.softplus ? softplus(step[j] + bias) : step[j] + bias;
                    scaled_u[j] *= step[j];
                    step[j] *= LOG2_E;
                }
            }
            store_floats(to.rate + channel * ROW + column, step);
            store_floats(to.scaled_u + channel * ROW + column, scaled_u);
        }
#pragma unroll
        for (int i = 0; i < STATE_UNITS; ++i) {
            const int unit = thread + i * STAGE_THREADS, state = unit % PADDED_STATES;
            const int column = unit / PADDED_STATES * UNIT;
            if (tile.has_none(column, UNIT)) continue;
            const unit_t own_B = B[i].unit(), own_C = C[i].unit();
#pragma unroll
            for (int j = 0; j < UNIT; ++j) {
                to.B[(column + j) * PADDED_STATES + state] = state < STATE_SIZE ? own_B[j] : 0.0f;
                to.C[(column + j) * PADDED_STATES + state] = state < STATE_SIZE ? own_C[j] : 0.0f;
            }
        }
    }
};

// A staging thread's part of the results of a tile. Gates are loaded early, too.
struct Results {
    LoadedUnit z[CHANNEL_UNITS];

    DEVICE void load(const Rows& rows, const Tile& tile, int thread) {
        if (!rows.z) return;
#pragma unroll
        for (int i = 0; i < CHANNEL_UNITS; ++i) {
            const int unit = thread + i * STAGE_THREADS, channel = unit / ROW_UNITS, column = unit % ROW_UNITS * UNIT;
            if (tile.has_none(column, UNIT) || channel >= rows.channels) continue;
            z[i] = tile.load(rows.z + channel * rows.z_stride, column);
        }
    }

    DEVICE void write(const Rows& rows, const Tile& tile, int thread, const Buffer& from) const {
#pragma unroll
        for (int i = 0; i < CHANNEL_UNITS; ++i) {
            const int unit = thread + i * STAGE_THREADS, channel = unit / ROW_UNITS, column = unit % ROW_UNITS * UNIT;
            if (tile.has_none(column, UNIT) || channel >= rows.channels) continue;
            float y[UNIT];
#pragma unroll
            for (int j = 0; j < UNIT; j += 4) {
                const bool scanned = !tile.has_none(column + j, 4);
                const float4 four =
                    scanned ? *reinterpret_cast<const float4*>(from.y + channel * ROW + column + j + 4) : float4();
                y[j] = four.x;
                y[j + 1] = four.y;
                y[j + 2] = four.z;
                y[j + 3] = four.w;
            }
            if (rows.D) {
                const float D = rows.D[channel];
                const unit_t u = from.u[unit];
#pragma unroll
                for (int j = 0; j < UNIT; ++j) y[j] = fmaf(D, u[j], y[j]);
            }
            tile.store(rows.delta + channel * rows.delta_stride, column, y);
            if (rows.z) {
                const unit_t own_z = z[i].unit();
#pragma unroll
                for (int j = 0; j < UNIT; ++j) y[j] = gated_by_silu<scalar_t>(y[j], own_z[j]);
                tile.store(rows.z + channel * rows.z_stride, column, y);
            }
        }
    }
};
