// fp32 and bf16 weights, as they lie in a plain matrix: the lanes of a vector are neighbours in a row.
#pragma once

#include "linear_input.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Columns at a time: as many as leave the sums in registers.
#if GSA_VECTOR_BYTES == 64
constexpr int kColumns = 4;
#else
constexpr int kColumns = 2;
#endif

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

// Sums of products of one row, still to be added up across lanes. Row after row, because memory is fastest when it is
// read straight ahead.
template <class Weight, int C>
GSA_INLINE void multiply_row(const Weight* w, const float* x, int64_t stride, int64_t K, Floats (&sums)[C]) {
    constexpr int kTurns = 3;  // sums in turn, or each product would wait for the one before
    Floats part[kTurns][2][C] = {};
    int64_t k = 0;
    const auto add = [&](Floats(&to)[2][C]) __attribute__((always_inline)) {
        Floats a, b;
        load_two(w + k, a, b);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            to[0][c] += a * load(x + c * stride + k);
            to[1][c] += b * load(x + c * stride + k + W);
        }
        k += 2 * W;
    };
    while (k + kTurns * 2 * W <= K) {
#pragma GCC unroll 4
        for (int t = 0; t < kTurns; t++) add(part[t]);
    }
    while (k + 2 * W <= K) add(part[0]);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        sums[c] = part[0][0][c] + part[0][1][c];
#pragma GCC unroll 4
        for (int t = 1; t < kTurns; t++) sums[c] += part[t][0][c] + part[t][1][c];
        float rest = 0;
        for (int64_t j = k; j < K; j++) rest += widen(w[j]) * x[c * stride + j];
        sums[c][0] += rest;
    }
}

template <class Weight, int C>
void multiply_dense(const Matrix& m, const Columns& columns, int first, const float* residual, float* y, int64_t stride,
                    int64_t row) {
    const Weight* w = static_cast<const Weight*>(m.weight);
    const int64_t end = row + kBlockRows < m.N ? row + kBlockRows : m.N;
    for (; row < end; row += 4) {
        const int rows = end - row < 4 ? static_cast<int>(end - row) : 4;
        Floats sums[4][C] = {};
        for (int r = 0; r < rows; r++)
            multiply_row<Weight, C>(w + (row + r) * m.K, columns.x + first * columns.stride, columns.stride, m.K, sums[r]);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            float total[W];
            store(total, add_lanes({sums[0][c], sums[1][c], sums[2][c], sums[3][c]}));
            const int64_t at = (first + c) * stride + row;
            for (int r = 0; r < rows; r++) y[at + r] = residual == nullptr ? total[r] : total[r] + residual[at + r];
        }
    }
}

template <class Weight>
void unpack_dense(const Matrix& m, int64_t row, float* out) {
    const Weight* w = static_cast<const Weight*>(m.weight) + row * m.K;
    for (int64_t k = 0; k < m.K; k++) out[k] = widen(w[k]);
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
