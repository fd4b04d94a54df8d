// What linear.cpp provides per instruction set: matrices times a few columns, y = W x.
#pragma once

#include <cstdint>

#include "native.h"

namespace gsa {

// Quantised weights lie in blocks of 16 rows by 32 columns, so that the rows are the lanes of a vector: 64 bytes hold
// 16 rows of four bytes each, which are four weights of 8 bits or eight of 4 (the low halves are the first four). A
// weight is scale * (q - zero), with q as stored and a scale and a zero per row and group.
constexpr int kBlockRows = 16;
constexpr int kBlockColumns = 32;
// Activations of so many blocks at most share a scale: sums of products stay integers that floats hold exactly.
constexpr int64_t kMostShared = 4;

struct Matrix {
    int format;  // GSA_WEIGHT_...
    int64_t N, K;
    int64_t blocks;         // along a row, of 32 columns
    int64_t groups;         // along a row
    int64_t group_blocks;   // in a group; the last may have fewer
    int64_t shared_blocks;  // whose activations share a scale as integers; they divide a group
    const void* weight;     // [N, K] in fp32 or bf16; or [blocks of rows, blocks, bytes of a block]
    const uint16_t* scale;  // bf16 [blocks of rows, groups, 16]
    const uint8_t* zero;    // [blocks of rows, groups, 16]
};

// The most blocks that may share a scale of activations, so that none of a group's is shared with another group.
static inline int64_t shared_of(int64_t group_blocks) {
    int64_t shared = group_blocks < kMostShared ? group_blocks : kMostShared;
    while (group_blocks % shared != 0) shared--;
    return shared;
}

static inline Matrix described(const GsaMatrix& matrix) {
    Matrix m;
    m.format = static_cast<int>(matrix.format);
    m.N = matrix.N;
    m.K = matrix.K;
    m.blocks = (m.K + kBlockColumns - 1) / kBlockColumns;
    m.group_blocks = matrix.group == 0 ? m.blocks : matrix.group / kBlockColumns;
    m.groups = (m.blocks + m.group_blocks - 1) / m.group_blocks;
    m.shared_blocks = shared_of(m.group_blocks);
    m.weight = matrix.weight;
    m.scale = static_cast<const uint16_t*>(matrix.scale);
    m.zero = static_cast<const uint8_t*>(matrix.zero);
    return m;
}

static inline int64_t bytes_of(const Matrix& m) {
    const int bits[] = {32, 16, 8, 4};
    return m.N * m.K * bits[m.format] / 8;
}

struct Input {
    int kind;           // GSA_INPUT_...
    const float* x;     // [count, K], or [count, 2 K] for SwiGLU
    const float* norm;  // [K], for RMSNorm
    float epsilon;
};

// Activations as the kernels read them, all in memory of the caller.
struct Columns {
    int count;
    int64_t stride;    // between columns of x: at least K
    float* x;          // [count, stride]
    float* group_sum;  // [count, groups] of the activations in fp32
    // [count, blocks, block_words]: each 32 activations of a block as eight fours of integers, then the scale of these
    // integers (the bits of a float); the first of the blocks that share a scale has minus the sum of all their
    // integers then (as int16, with zeros above it).
    int32_t* words;
    int words_per_quad;  // 0: fp32 is used; 1: four int8; 2: (0, 2) and (1, 3) as int16
};

static constexpr int block_words(int words_per_quad) { return kBlockColumns / 4 * words_per_quad + 2; }

struct LinearKernels {
    // x [count, stride] from the input: copied, normalised or gated, and filled up with zeros from K on.
    void (*read_input)(const Input& input, int64_t K, int64_t stride, int count, float* x);
    // Changes columns.x in place to what the kernel for this format of weights reads, and fills group_sum; or fills
    // words.
    void (*arrange)(const Matrix& matrix, const Columns& columns);
    void (*quantise)(const Matrix& matrix, const Columns& columns);
    int (*words_per_quad)(bool portable);
    // Rows from 16 * from to 16 * to (or N) of W x + residual (or null), to y. Both are [count, N], columns `stride`
    // apart. A column's result does not depend on how many others there are.
    void (*multiply)(const Matrix& matrix, const Columns& columns, const float* residual, float* y, int64_t stride,
                     int64_t from, int64_t to);
    // out [K] = row `row` of W as floats.
    void (*unpack)(const Matrix& matrix, int64_t row, float* out);
    // The exclusive or of so many bytes as words of eight.
    uint64_t (*read)(const void* bytes, int64_t count);
};

}  // namespace gsa
