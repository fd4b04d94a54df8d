// fp32 and bf16 weights, as they lie in a plain matrix: the lanes of a vector are neighbours in a row.
#pragma once

#include "convert.h"
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

GSA_INLINE Floats load_weights(const float* p) { return load(p); }

GSA_INLINE Floats load_weights(const BFloat16* p) {
    typedef uint16_t Halves __attribute__((vector_size(GSA_VECTOR_BYTES / 2)));
    Halves words;
    __builtin_memcpy(&words, p, sizeof(words));
    return bits<Floats>(__builtin_convertvector(words, Ints) << 16);
}

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

// y [C, 4] of four rows.
template <class Weight, int C>
GSA_INLINE void multiply_rows(const Weight* const (&w)[4], const float* x, int64_t stride, int64_t K, float (&y)[C][4]) {
    Floats sums[C][4] = {};
    int64_t k = 0;
    for (; k + W <= K; k += W) {
        Floats column[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) column[c] = load(x + c * stride + k);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const Floats row = load_weights(w[r] + k);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sums[c][r] += row * column[c];
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        const Floats totals = add_lanes(sums[c]);
        __builtin_memcpy(y[c], &totals, sizeof(y[c]));
    }
    for (; k < K; k++)
        for (int c = 0; c < C; c++)
            for (int r = 0; r < 4; r++) y[c][r] += widen(w[r][k]) * x[c * stride + k];
}

template <class Weight, int C>
void multiply_dense(const Matrix& m, const Columns& columns, int first, const float* residual, float* y, int64_t row) {
    const Weight* weight = static_cast<const Weight*>(m.weight);
    const int64_t end = row + kBlockRows < m.N ? row + kBlockRows : m.N;
    for (; row < end; row += 4) {
        const int rows = end - row < 4 ? static_cast<int>(end - row) : 4;
        const Weight* w[4];
        for (int r = 0; r < 4; r++) w[r] = weight + (row + (r < rows ? r : 0)) * m.K;  // beyond the end: the first again
        float sums[C][4];
        multiply_rows<Weight, C>(w, columns.x + first * columns.stride, columns.stride, m.K, sums);
        for (int c = 0; c < C; c++) {
            const int64_t at = (first + c) * m.N + row;
            for (int r = 0; r < rows; r++) y[at + r] = residual == nullptr ? sums[c][r] : sums[c][r] + residual[at + r];
        }
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
