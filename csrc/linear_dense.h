// fp32 and bf16 weights, as they lie in a plain matrix: the lanes of a vector are neighbours in a row.
#pragma once

#include "linear_input.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Sums of four vectors, in the first four lanes.
template <int D>
GSA_INLINE Floats add_pairs(Floats a, Floats b) {
    exchange<float, D>(a, b);
    return a + b;
}

GSA_INLINE Floats add_lanes(const Floats (&v)[4]) {
    Floats sums = add_pairs<2>(add_pairs<1>(v[0], v[1]), add_pairs<1>(v[2], v[3]));
    if constexpr (W > 4) sums = add_pairs<4>(sums, sums);
    if constexpr (W > 8) sums = add_pairs<8>(sums, sums);
    return sums;
}

// The sum of w [K] times x [K] from k on.
template <class Weight>
__attribute__((noinline)) float multiply_rest(const Weight* w, const float* x, int64_t k, int64_t K) {
    float rest = 0;
    for (; k < K; k++) rest += widen(w[k]) * x[k];
    return rest;
}

// sums [R, C] of the products of rows w [R, K] with columns x [C, K], `stride` apart; each sum is a vector whose lanes
// are still to be added up. A sum is made of the same parts in the same order whatever R and C are, so that a column's
// result does not depend on its company. A column alone is read row after row, because memory is fastest when it is
// read straight ahead; with more of them, arithmetic counts, and several rows share what is loaded.
template <class Weight, int R, int C>
GSA_INLINE void multiply_rows(const Weight* w, const float* x, int64_t stride, int64_t K, Floats (*sums)[C]) {
    Floats part[R][2][C] = {};
    int64_t k = 0;
    for (; k + 2 * W <= K; k += 2 * W) {
        Floats weights[R][2];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) load_two(w + r * K + k, weights[r][0], weights[r][1]);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                Floats activations = load(x + c * stride + k + half * W);
                if constexpr (R > 1) keep_in_register(activations);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) part[r][half][c] += weights[r][half] * activations;
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            sums[r][c] = part[r][0][c] + part[r][1][c];
            if (k < K) sums[r][c][0] += multiply_rest(w + r * K, x + c * stride, k, K);
        }
    }
}

// The MultiplyRows of linear.cpp for C columns, R rows at a time.
template <class Weight, int C, int R>
void multiply_dense(const Matrix& m, const Columns& columns, int first, const float* residual, float* y, int64_t stride,
                    int64_t row) {
    const float* x = columns.x + first * columns.stride;
    const int64_t end = row + kBlockRows < m.N ? row + kBlockRows : m.N;
    const Share share = share_of(R * m.K * static_cast<int64_t>(sizeof(Weight)), columns, first, C);
    for (; row < end; row += 4) {
        const Weight* w = static_cast<const Weight*>(m.weight) + row * m.K;
        const int rows = end - row < 4 ? static_cast<int>(end - row) : 4;
        Floats sums[4][C] = {};
        int r = 0;
        for (; r + R <= rows; r += R) {
            prefetch(w + (kBlockRows + r) * m.K, share);
            multiply_rows<Weight, R, C>(w + r * m.K, x, columns.stride, m.K, sums + r);
        }
        for (; r < rows; r++) multiply_rows<Weight, 1, C>(w + r * m.K, x, columns.stride, m.K, sums + r);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            float total[W];
            store(total, add_lanes({sums[0][c], sums[1][c], sums[2][c], sums[3][c]}));
            const int64_t offset = (first + c) * stride + row;
            for (r = 0; r < rows; r++) y[offset + r] = residual == nullptr ? total[r] : total[r] + residual[offset + r];
        }
    }
}

// out [K] = row `row` of W.
template <class Weight>
void unpack_dense(const Matrix& m, int64_t row, float* out) {
    const Weight* w = static_cast<const Weight*>(m.weight) + row * m.K;
    for (int64_t k = 0; k < m.K; k++) out[k] = widen(w[k]);
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
