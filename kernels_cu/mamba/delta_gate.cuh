// delta_gate.cuh: the gates of Kimi Delta Attention: the logarithm of a decay, and the strength of an update.
//
// Constants
//     HAS_GATE        g and beta are logits: the decay is exp(lower_bound * sigmoid(exp(A_log) * (g + dt_bias))), and
//                     without BOUNDED exp(-exp(A_log) * softplus(g + dt_bias)). Otherwise g is the logarithm itself.
//     BOUNDED         as above
//     BETA_SIGMOID    beta is the sigmoid of what is given
#pragma once
#include "math.cuh"
#include "selective.cuh"

// The gate of a head. `rate` is exp(A_log).
struct DeltaGate {
    float rate, lower_bound;

    DEVICE float log_decay(float g, float bias) const {
        if constexpr (!HAS_GATE) return g;
        const float x = g + bias;
        if constexpr (BOUNDED) return logistic_share(lower_bound, rate * x);
        return -rate * softplus(x);
    }
};

DEVICE float update_strength(float beta) { return BETA_SIGMOID ? logistic_share(1.0f, beta) : beta; }
