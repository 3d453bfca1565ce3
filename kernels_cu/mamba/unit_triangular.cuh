// unit_triangular.cuh: the inverse of I + L, where L has elements below the diagonal only.
#pragma once
#include "vec.cuh"

// Column `column` of (I + L)^-1 by forward substitution, for the calling thread. L is column-major with stride PITCH;
// elements on and above its diagonal are read, but not used.
template <int PITCH, int SIZE>
DEVICE void invert_column(float (&x)[SIZE], const float* columns, int column) {
#pragma unroll
    for (int l = 0; l < SIZE; ++l) x[l] = l == column ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < SIZE - 1; ++m) {
#pragma unroll
        for (int l = (m + 1) / 4 * 4; l < SIZE; l += 4) {
            const auto four = Vec<float, 4>::load(columns + m * PITCH + l);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (l + i > m) x[l + i] = fmaf(-four[i], x[m], x[l + i]);
            }
        }
    }
}
