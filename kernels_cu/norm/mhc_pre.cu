// mhc_pre: from logits to the coefficients of manifold-constrained hyper-connections (mHC), and the input of a layer.
//
//     mixes = (sum of partials over splits) / sqrt(mean(residual[t]^2) + rms_eps)
//     pre = sigmoid(mixes[0 ...] * hc_scale[0] + hc_base[0 ...]) + hc_pre_eps
//     post_mix[t] = sigmoid(mixes[HC ...] * hc_scale[1] + hc_base[HC ...]) * hc_post_mult_value
//     comb_mix[t] = sinkhorn(mixes[2 HC ...] * hc_scale[2] + hc_base[2 HC ...]), an HC x HC matrix
//     layer_input[t] = T(y), or T(y / sqrt(mean(y^2) + norm_eps) * norm_weight), with y = sum_i pre[i] * residual[t, i]
//
// The Sinkhorn iterations begin with the softmax of each row plus hc_sinkhorn_eps. Then columns are divided by their
// sum plus hc_sinkhorn_eps, and sinkhorn_repeat - 1 times rows and columns. All in float32; T rounds once.
//
// A CTA has a token. Its last threads have no part of the row: one warp of them iterates while the others write.
//
// hc_head: layer_input alone, of a projection that has no other columns than pre.
//
// Constants
//     HC            streams of a token: 1, 2 or 4
//     COLUMNS       logits of a token: HC * (HC + 2), or HC for hc_head
//     HIDDEN_SIZE   elements of a stream; a multiple of VEC_SIZE
//     ROW_THREADS   threads that have a part of the row
//     HOLDS         a thread loads its part of all streams before the logits are known
//     HAS_NORM      the layer's input is normed

#include "reduce.cuh"
#include "vec.cuh"

using vec_t = Vec<scalar_t, VEC_SIZE>;
constexpr int LANES = 32, GROUPS = NUM_THREADS / LANES, WIDTH = COLUMNS + 1;
constexpr int VECS = ceil_div(HIDDEN_SIZE, ROW_THREADS* VEC_SIZE);
constexpr bool KEEPS = VECS * VEC_SIZE <= 32;  // the elements of the layer's input stay in registers before its norm

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The streams of a token, and their weighted sum.
struct Streams {
    // Words, not elements: a thread would wait for its loads here, to unpack them.
    using word_t = typename vec_t::template word_t<VEC_SIZE>;
    word_t held[HOLDS ? VECS : 1][HC];
    const scalar_t* of_token;
    int64_t stride;

    static DEVICE int column_of(int i) { return (i * ROW_THREADS + int(threadIdx.x)) * VEC_SIZE; }
    static DEVICE bool exists(int i) { return threadIdx.x < ROW_THREADS && column_of(i) < HIDDEN_SIZE; }
    DEVICE const word_t* address(int i, int h) const {
        return reinterpret_cast<const word_t*>(of_token + h * stride + column_of(i));
    }

    DEVICE Streams(const scalar_t* residual, int64_t token_stride, int64_t stream_stride)
        : of_token(residual + blockIdx.x * token_stride), stride(stream_stride) {
        if constexpr (HOLDS) {
#pragma unroll
            for (int i = 0; i < VECS; ++i) {
#pragma unroll
                for (int h = 0; h < HC; ++h) {
                    if (exists(i)) held[i][h] = *address(i, h);
                }
            }
        }
    }
    DEVICE void mix(float (&y)[VEC_SIZE], int i, const float (&pre)[HC]) const {
#pragma unroll
        for (int h = 0; h < HC; ++h) {
            vec_t given;
            given.template word<VEC_SIZE>(0) = HOLDS ? held[HOLDS ? i : 0][h] : *address(i, h);
            float x[VEC_SIZE];
            given.to_floats(x);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) y[j] = h == 0 ? pre[h] * x[j] : fmaf(pre[h], x[j], y[j]);
        }
    }
};

// Logit `lane` of the token, in each group of 32 lanes.
DEVICE float logit(const float* partials, const float* hc_scale, const float* hc_base, int splits, float rms_eps) {
    constexpr int AT_A_TIME = 8;  // splits that a thread loads at a time
    __shared__ float of_groups[GROUPS][LANES];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, column = min(lane, COLUMNS - 1);
    const float scale = hc_scale[min(column / HC, 2)], base = hc_base[column];
    const int64_t split_stride = int64_t(gridDim.x) * WIDTH;
    const float* of_split = partials + group * split_stride + int64_t(blockIdx.x) * WIDTH + lane;
    float sum = 0.0f;
#pragma unroll 1
    for (int first = group; first < splits; first += AT_A_TIME * GROUPS) {
        float x[AT_A_TIME];
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i) {
            x[i] = 0.0f;
            if (first + i * GROUPS < splits && lane < WIDTH) x[i] = *of_split;
            of_split += GROUPS * split_stride;
        }
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i) sum += x[i];
    }
    of_groups[group][lane] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) sum += of_groups[i][lane];
    const float square = shfl<LANES>(sum, COLUMNS);
    return sum * rsqrtf(square * (1.0f / (HC * HIDDEN_SIZE)) + rms_eps) * scale + base;
}

// Writes the layer's input of the token. `gate`: sigmoid of the logit of each lane.
DEVICE void write_input(scalar_t* layer_input, const scalar_t* norm_weight, const Streams& streams, float gate,
                        float pre_eps, float norm_eps) {
    float pre[HC], scale = 1.0f;
    float y[KEEPS ? VECS : 1][VEC_SIZE];
#pragma unroll
    for (int h = 0; h < HC; ++h) pre[h] = shfl<LANES>(gate, h) + pre_eps;
    if constexpr (HAS_NORM) {
        __shared__ float partial[GROUPS];
        float squares = 0.0f;
#pragma unroll KEEPS ? VECS : 1
        for (int i = 0; i < VECS; ++i) {
            if (!Streams::exists(i)) continue;
            streams.mix(y[KEEPS ? i : 0], i, pre);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) squares += y[KEEPS ? i : 0][j] * y[KEEPS ? i : 0][j];
        }
        scale = rsqrtf(row_reduce<Sum, NUM_THREADS>(squares, partial) / HIDDEN_SIZE + norm_eps);
    }
#pragma unroll KEEPS ? VECS : 1
    for (int i = 0; i < VECS; ++i) {
        if (!Streams::exists(i)) continue;
        float (&mixed)[VEC_SIZE] = y[KEEPS ? i : 0];
        if constexpr (!KEEPS || !HAS_NORM) streams.mix(mixed, i, pre);
        const int column = Streams::column_of(i);
        if constexpr (HAS_NORM) {
            const vec_t weight = vec_t::load(norm_weight + column);
#pragma unroll
            for (int j = 0; j < VEC_SIZE; ++j) mixed[j] *= scale * weight[j];
        }
        vec_t::from_floats(mixed).store(layer_input + column);
    }
}

// Lane i of each HC lanes has row i.
DEVICE void sinkhorn(float (&row)[HC], int repeat, float eps) {
    float largest = row[0], total = 0.0f;
#pragma unroll
    for (int j = 1; j < HC; ++j) largest = fmaxf(largest, row[j]);
#pragma unroll
    for (int j = 0; j < HC; ++j) total += row[j] = expf(row[j] - largest);
    const float share = 1.0f / total;
#pragma unroll
    for (int j = 0; j < HC; ++j) row[j] = row[j] * share + eps;
    for (int i = 0; i < repeat; ++i) {
        if (i > 0) {
            float sum = eps;
#pragma unroll
            for (int j = 0; j < HC; ++j) sum += row[j];
            const float factor = estimate_reciprocal(sum);
#pragma unroll
            for (int j = 0; j < HC; ++j) row[j] *= factor;
        }
#pragma unroll
        for (int j = 0; j < HC; ++j) row[j] *= estimate_reciprocal(lane_reduce<Sum, HC>(row[j]) + eps);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
mhc_pre(float* post_mix,              // [num_tokens, HC]
        float* comb_mix,              // [num_tokens, HC, HC]
        scalar_t* layer_input,        // [num_tokens, HIDDEN_SIZE]
        const float* partials,        // [splits, num_tokens, WIDTH]
        const scalar_t* residual,     // [num_tokens, HC, HIDDEN_SIZE]
        const float* hc_scale,        // [3]
        const float* hc_base,         // [COLUMNS]
        const scalar_t* norm_weight,  // [HIDDEN_SIZE]
        int splits, float rms_eps, float hc_pre_eps, float hc_sinkhorn_eps, float hc_post_mult_value,
        int sinkhorn_repeat, float norm_eps, int64_t token_stride, int64_t stream_stride, int64_t comb_token_stride,
        int64_t comb_row_stride, int64_t out_stride) {
    await_previous_kernel();
    const Streams streams(residual, token_stride, stream_stride);
    const float mixed = logit(partials, hc_scale, hc_base, splits, rms_eps), gate = sigmoid(mixed);
    write_input(layer_input + blockIdx.x * out_stride, norm_weight, streams, gate, hc_pre_eps, norm_eps);
    if (threadIdx.x >= ROW_THREADS) {
        const int lane = threadIdx.x % LANES;
        float row[HC];
#pragma unroll
        for (int j = 0; j < HC; ++j) row[j] = shfl<LANES>(mixed, 2 * HC + lane % HC * HC + j);
        sinkhorn(row, sinkhorn_repeat, hc_sinkhorn_eps);
        if (threadIdx.x < ROW_THREADS + HC) {
#pragma unroll
            for (int j = 0; j < HC; ++j) comb_mix[blockIdx.x * comb_token_stride + lane * comb_row_stride + j] = row[j];
        } else if (threadIdx.x >= ROW_THREADS + LANES + HC && threadIdx.x < ROW_THREADS + LANES + 2 * HC) {
            post_mix[int64_t(blockIdx.x) * HC + lane - HC] = gate * hc_post_mult_value;
        }
    }
}

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, MIN_BLOCKS)
hc_head(scalar_t* out,                  // [num_tokens, HIDDEN_SIZE]
        const float* partials,          // [splits, num_tokens, WIDTH]
        const scalar_t* hidden_states,  // [num_tokens, HC, HIDDEN_SIZE]
        const float* hc_scale,          // [1]
        const float* hc_base,           // [COLUMNS]
        int splits, float rms_norm_eps, float hc_eps, int64_t token_stride, int64_t stream_stride, int64_t out_stride) {
    await_previous_kernel();
    const Streams streams(hidden_states, token_stride, stream_stride);
    const float gate = sigmoid(logit(partials, hc_scale, hc_base, splits, rms_norm_eps));
    write_input(out + blockIdx.x * out_stride, nullptr, streams, gate, hc_eps, 0.0f);
}
