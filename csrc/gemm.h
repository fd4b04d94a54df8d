// Small matrix products from cache: out = a b (+ a' b'), in tiles of registers.
//
// out [rows, cols], a [rows, inner], b [inner, cols]. Rows and inner dimensions may have any size; columns are whole
// vectors, so matrices are padded to those. Distances between rows are in numbers.
#pragma once

#include "simd.h"
#include "team.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Which part of a square, causal `a` is not zero: the sum over its columns stops at, or begins with, the diagonal.
enum class Band { kFull, kLower, kUpper };

template <class T>
struct Product {
    const T* a;              // [rows, inner], or a matrix [inner, rows] that is read transposed
    ptrdiff_t a_row, a_col;  // distances between rows and between columns of a; one of them is 1
    const T* b;              // [inner, cols]
    ptrdiff_t b_row;         // distance between rows of b
    int inner;
    Band band = Band::kFull;
};

template <class T>
struct Gemm {
    int rows, cols;
    T* out;             // [rows, cols]
    ptrdiff_t out_row;  // distance between rows of out
    Product<T> first;
    const Product<T>* second = nullptr;  // added to the first, or null
    const T* between = nullptr;   // [cols]: the first product's columns are scaled by it before the second is added
    const T* old = nullptr;       // [rows, cols], added to the result; rows out_row apart, and may be `out`. Of it
    const T* keep_row = nullptr;  // [rows]: this factor is kept in each row
    const T* keep_col = nullptr;  // [cols]: and this one in each column
    bool causal = false;          // only the lower triangle is wanted, and the rest zero where a band may read it
};

#if GSA_VECTOR_BYTES == 64
constexpr int kTileRows = 8, kTileVecs = 2;
#else
constexpr int kTileRows = 6, kTileVecs = 2;
#endif

// About as much of what comes next is fetched as there is time for: so many lines of memory per stretch of the sums.
constexpr int kFetchLines = 12, kFetchEvery = 64;

// acc [R, V vectors] += a [R, from..to] b [from..to, V vectors]; a and b point to their first row and column.
template <class T, int R, int V>
GSA_INLINE void accumulate(Prefetcher* prefetcher, Vec<T> (&acc)[R][V], const T* a, ptrdiff_t a_row, ptrdiff_t a_col,
                           const T* b, ptrdiff_t b_row, int from, int to) {
    a += from * a_col;
    b += from * b_row;
    for (int k = from; k < to;) {
        if (prefetcher != nullptr) prefetcher->fetch(kFetchLines);
        const int stop = k + kFetchEvery < to ? k + kFetchEvery : to;
        for (; k < stop; k++, a += a_col, b += b_row) {
            Vec<T> x[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) x[v] = load(b + v * Simd<T>::W);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const T s = a[r * a_row];
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) acc[r][v] += s * x[v];
            }
        }
    }
}

// The same for the rows from `row` and the columns from `col` on of a product, leaving out what its band says is zero.
template <class T, int R, int V>
GSA_INLINE void accumulate(Prefetcher* prefetcher, Vec<T> (&acc)[R][V], const Product<T>& p, int row, int col) {
    const int from = p.band == Band::kUpper ? row : 0;
    const int to = p.band == Band::kLower && row + R < p.inner ? row + R : p.inner;
    const T* a = p.a + row * p.a_row;
    // The two ways `a` may lie in memory, spelt out for the compiler.
    if (p.a_row == 1)
        accumulate<T, R, V>(prefetcher, acc, a, 1, p.a_col, p.b + col, p.b_row, from, to);
    else
        accumulate<T, R, V>(prefetcher, acc, a, p.a_row, 1, p.b + col, p.b_row, from, to);
}

// R rows by V vectors of g.out, from `row` and `col` on.
template <class T, int R, int V>
__attribute__((noinline)) void tile(Prefetcher* prefetcher, const Gemm<T>& g, int row, int col) {
    constexpr int W = Simd<T>::W;
    Vec<T> acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) acc[r][v] = Vec<T>{};
    accumulate<T, R, V>(prefetcher, acc, g.first, row, col);
    if (g.between != nullptr)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const Vec<T> scale = load(g.between + col + v * W);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) acc[r][v] *= scale;
        }
    if (g.second != nullptr) accumulate<T, R, V>(prefetcher, acc, *g.second, row, col);
    if (g.old != nullptr) {
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const Vec<T> kept = g.keep_col != nullptr ? load(g.keep_col + col + v * W) : splat(T(1));
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const Vec<T> old = load(g.old + (row + r) * g.out_row + col + v * W) * kept;
                acc[r][v] += g.keep_row != nullptr ? g.keep_row[row + r] * old : old;
            }
        }
    }
    if (g.causal && col + V * W > row)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) acc[r][v] = lane_numbers<T>() > row + r - col - v * W ? Vec<T>{} : acc[r][v];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(g.out + (row + r) * g.out_row + col + v * W, acc[r][v]);
}

// A tile of the last rows, which may be fewer.
template <class T, int R, int V>
void tile_of(Prefetcher* prefetcher, const Gemm<T>& g, int rows, int row, int col) {
    if constexpr (R > 0) {
        if (rows >= R)
            tile<T, R, V>(prefetcher, g, row, col);
        else
            tile_of<T, R - 1, V>(prefetcher, g, rows, row, col);
    }
}

// V vectors of columns from `col` on, of the tiles of rows from `from` to `to`.
template <class T, int V>
void panel(Prefetcher* prefetcher, const Gemm<T>& g, int col, int from, int to) {
    for (int t = from; t < to; t++) {
        const int row = t * kTileRows;
        if (g.causal && col > row + kTileRows - 1) continue;
        tile_of<T, kTileRows, V>(prefetcher, g, g.rows - row, row, col);
    }
}

// All of g.out. The team's members each take a part of the tiles; whoever reads the result waits for the team first.
template <class T>
void gemm(const Team& team, const Gemm<T>& g) {
    constexpr int W = Simd<T>::W, kWide = W * kTileVecs;
    const int tall = (g.rows + kTileRows - 1) / kTileRows, wide = (g.cols + kWide - 1) / kWide;
    const int begin = team.begin(tall * wide), end = team.end(tall * wide);
    for (int t = begin; t < end;) {
        const int p = t / tall, stop = end < (p + 1) * tall ? end : (p + 1) * tall;
        const int col = p * kWide;
        if (g.cols - col >= kWide)
            panel<T, kTileVecs>(team.prefetcher, g, col, t - p * tall, stop - p * tall);
        else
            panel<T, 1>(team.prefetcher, g, col, t - p * tall, stop - p * tall);
        t = stop;
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
