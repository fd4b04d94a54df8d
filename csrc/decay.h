// What a forget gate does inside a chunk, exact for every gate.
//
// Token j reaches token i >= j with the weight w_ij = a_{j+1} ... a_i, a = exp(g), one per feature. While the decay of
// a chunk stays within what the type can hold, w_ij splits into up_i * down_j, anchored half way, and everything is
// plain products. A chunk with stronger decay takes the direct form: w_ij by multiplying on, from j to i. Both use
// nothing but products of a, never differences of sums of g: a full reset (a = 0) is a gate like any other.
#pragma once

#include "elementary.h"
#include "operator.h"
#include "team.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Nats of decay per token, on average over a chunk, up to which it is split (as in gsa/ops/chunk/decay.py).
template <class T>
constexpr double kSplitLimit = sizeof(T) == 4 ? 1.0 : 8.0;

// Letters as in pass.h: C tokens, R queries of a head, F features. Products of gates:
template <class T>
struct Gates {
    int width, tokens;  // F and C, both padded to whole vectors
    ptrdiff_t row;      // distance between rows of the matrices [C, F]
    T* a;               // [C, F]: of token i alone, exp(g)
    T* prefix;          // [C, F]: a_0 ... a_i, from before the chunk to token i
    T* suffix;          // [C, F]: a_{i+1} ..., from token i to the chunk's end
    T* up;              // [C, F]: from the anchor to token i
    T* down;            // [C, F]: from token i to the anchor
    T* half;            // [F]: from before the chunk to the anchor, which is as much as from there to its end
    T* total;           // [F]: of the whole chunk
    bool strong;        // whether the chunk needs the direct form

    // All the other products from a; every member of the team does its part of the features.
    void prepare(const Team& team) {
        constexpr int W = Simd<T>::W;
        for (int block = team.begin(width / W); block < team.end(width / W); block++) {
            const int f = block * W;
            Vec<T> w = splat(T(1));
            for (int i = 0; i < tokens; i++) {
                w *= load(a + i * row + f);
                store(prefix + i * row + f, w);
            }
            store(total + f, w);
            Vec<T> root;
            for (int l = 0; l < W; l++) root[l] = sizeof(T) == 4 ? __builtin_sqrtf(w[l]) : __builtin_sqrt(w[l]);
            store(half + f, root);
            w = splat(T(1));
            for (int i = tokens - 1; i >= 0; i--) {
                store(suffix + i * row + f, w);
                w *= load(a + i * row + f);
                const Vec<T> p = load(prefix + i * row + f);
                store(up + i * row + f, p / root);
                store(down + i * row + f, root / p);
            }
        }
    }

    // Sets `strong` for a chunk of so many tokens that are not padding; the team has prepared and waited.
    void decide(int count) {
        const T least = static_cast<T>(__builtin_exp(-kSplitLimit<T> * count));
        strong = false;
        for (int f = 0; f < width; f++) strong |= !(total[f] >= least);
    }
};

// The direct forms. x [R * C, F] belongs to queries, y [C, F] to keys or values, and A [R * C, C] is lower triangular
// for each query. Each matrix comes with the distance between its rows.

// A [R * C, C]: A_ij = sum_f x_i w_ij y_j, and zero for j > i.
template <class T>
void direct_scores(const Team& team, const Gates<T>& g, int queries, const T* x, ptrdiff_t x_row, const T* y,
                   ptrdiff_t y_row, T* A, ptrdiff_t A_row) {
    constexpr int W = Simd<T>::W, kBlock = 8;
    const int n = g.tokens;
    for (int j = team.rank; j < n; j += team.size) {
        for (int i = 0; i < n; i++)
            for (int r = 0; r < queries; r++) A[(r * n + i) * A_row + j] = 0;
        for (int f = 0; f < g.width; f += kBlock * W) {
            const int vecs = (g.width - f) / W < kBlock ? (g.width - f) / W : kBlock;
            Vec<T> w[kBlock];
            for (int v = 0; v < vecs; v++) w[v] = load(y + j * y_row + f + v * W);
            for (int i = j; i < n; i++) {
                if (i > j)
                    for (int v = 0; v < vecs; v++) w[v] *= load(g.a + i * g.row + f + v * W);
                for (int r = 0; r < queries; r++) {
                    Vec<T> dot{};
                    for (int v = 0; v < vecs; v++) dot += load(x + (r * n + i) * x_row + f + v * W) * w[v];
                    A[(r * n + i) * A_row + j] += sum<T>(dot);
                }
            }
        }
    }
}

// out [R * C, F]: out_i += sum_{j<=i} A_ij w_ij y_j
template <class T>
void direct_mix(const Team& team, const Gates<T>& g, int queries, const T* A, ptrdiff_t A_row, const T* y,
                ptrdiff_t y_row, T* out, ptrdiff_t out_row) {
    constexpr int W = Simd<T>::W;
    const int n = g.tokens;
    for (int block = team.begin(g.width / W); block < team.end(g.width / W); block++) {
        const int f = block * W;
        for (int j = 0; j < n; j++) {
            Vec<T> w = load(y + j * y_row + f);
            for (int i = j; i < n; i++) {
                if (i > j) w *= load(g.a + i * g.row + f);
                for (int r = 0; r < queries; r++) {
                    T* o = out + (r * n + i) * out_row + f;
                    store(o, load(o) + A[(r * n + i) * A_row + j] * w);
                }
            }
        }
    }
}

// out [C, F]: out_j += sum_{i>=j} A_ij w_ij x_i, over all queries. And the gradient of the gate itself, dg [C, F] with
// rows g.row apart: at t, the pairs with j < t <= i,
//   dg_t += sum_{j<t<=i} A_ij x_i w_ij y_j
template <class T>
void direct_mix_back(const Team& team, const Gates<T>& g, int queries, const T* A, ptrdiff_t A_row, const T* x,
                     ptrdiff_t x_row, const T* y, ptrdiff_t y_row, T* out, ptrdiff_t out_row, T* dg) {
    constexpr int W = Simd<T>::W;
    const int n = g.tokens;
    Vec<T> reach[kChunk];  // y_j, decayed to token t
    for (int block = team.begin(g.width / W); block < team.end(g.width / W); block++) {
        const int f = block * W;
        for (int j = 0; j < n; j++) {
            Vec<T> w = load(y + j * y_row + f);
            for (int t = j + 1; t < n; t++) reach[t] = w *= load(g.a + t * g.row + f);
            Vec<T> later{};  // sum over i >= t, decayed to t
            for (int t = n - 1; t >= j; t--) {
                for (int r = 0; r < queries; r++)
                    later += A[(r * n + t) * A_row + j] * load(x + (r * n + t) * x_row + f);
                if (t == j) break;
                T* d = dg + t * g.row + f;
                store(d, load(d) + later * reach[t]);
                later *= load(g.a + t * g.row + f);
            }
            T* o = out + j * out_row + f;
            store(o, load(o) + later);
        }
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
