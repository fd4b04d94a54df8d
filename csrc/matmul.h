// What matmul.cpp provides per instruction set: matrices times many columns, y = W x, with products in bf16. Those in
// int8 are linear.h's, which takes any number of columns.
//
// W goes through the kernel in panels of 32 rows, which are the lanes of its vectors; x in tiles of up to 12 columns.
// Both are words of two neighbours along K, the even one in the low half, with zeros behind K.
#pragma once

#include <cstdint>

#include "linear.h"
#include "native.h"

namespace gsa {

constexpr int kPanelRows = 32;
constexpr int kTileColumns = 12;

// Words along K: as many as whole blocks of 32 columns have.
static inline int64_t pairs_of(const Matrix& m) { return m.blocks * (kBlockColumns / 2); }

// Columns that a tile of `count` has room for.
static inline int tile_width(int count) { return (count + 3) / 4 * 4; }

struct MatmulKernels {
    // Whether the processor has the unit for products of this kind (GSA_COMPUTE_BF16, GSA_COMPUTE_INT8), and these
    // kernels use it.
    bool (*has_unit)(int compute);
    // Keeps that unit busy for so many rounds, with numbers that lie in registers; how many multiplications that were.
    int64_t (*exercise)(int compute, int64_t rounds);
    // tile [pairs, tile_width(count)] from columns x [count, 2 * pairs].
    void (*pack_columns)(const float* x, int count, int64_t pairs, uint32_t* tile);
    // panel [pairs, 32] from the rows of W from `row` on; those behind the last are zero.
    void (*pack_rows)(const Matrix& matrix, int64_t row, uint32_t* panel);
    // y [count, rows] = panel times tile + residual (or null), columns `stride` apart. A column's result does not
    // depend on the others. Portable: by what every processor has, with the same bits.
    void (*multiply)(const uint32_t* panel, const uint32_t* tile, int64_t pairs, int count, int rows, bool portable,
                     const float* residual, float* y, int64_t stride);
};

}  // namespace gsa
