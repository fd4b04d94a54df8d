// int8 and int4 weights: the lanes of a vector are rows, so that nothing is summed across lanes.
#pragma once

#include "linear_blocks.h"
#include "linear_input.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Adds the products of a block w [16, 32] of weights, block number `block` of its rows, with C columns from `first` on
// to sums [C, L vectors of rows]; activations in fp32.
template <int Bits, int C>
struct RealBlock {
    // Products go to several sums in turn, or each would wait for the one before. As many for every number of columns:
    // a result must not depend on that.
    static constexpr int turns = L >= 4 ? 1 : 4 / L;

    GSA_INLINE void add(const uint8_t* w, const Columns& columns, int first, int64_t block, Floats (&sums)[C][L]) {
        typedef Format<Bits> F;
        const float* x = columns.x + first * columns.stride + block * kBlockColumns;
        Floats part[turns][C][L] = {};
#pragma GCC unroll 8
        for (int j = 0; j < F::chunks; j++) {
#pragma GCC unroll 4
            for (int l = 0; l < L; l++) {
                const Ints chunk = load_ints(w + 64 * j + GSA_VECTOR_BYTES * l);
#pragma GCC unroll 8
                for (int i = 0; i < F::per_chunk; i++) {
                    const Floats weight = F::weight(chunk, i);
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++)
                        part[i % turns][c][l] += weight * x[c * columns.stride + F::per_chunk * j + i];
                }
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < turns; t++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++)
#pragma GCC unroll 4
                for (int l = 0; l < L; l++) sums[c][l] += part[t][c][l];
    }
};

// Rows from `row` on of y [count, N] = sums + residual, in C columns from `first` on.
template <int C>
GSA_INLINE void finish_rows(const Matrix& m, int first, const Floats (&sums)[C][L], const float* residual, float* y,
                            int64_t stride, int64_t row) {
    const int rows = m.N - row < kBlockRows ? static_cast<int>(m.N - row) : kBlockRows;
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {  // unrolled, or the sums would have to lie in memory all along
        const int64_t offset = (first + c) * stride + row;
        if (rows == kBlockRows) {
#pragma GCC unroll 4
            for (int l = 0; l < L; l++) {
                const int64_t place = offset + W * l;
                store(y + place, residual == nullptr ? sums[c][l] : sums[c][l] + load(residual + place));
            }
            continue;
        }
        float out[kBlockRows];
#pragma GCC unroll 4
        for (int l = 0; l < L; l++) store(out + W * l, sums[c][l]);
        for (int r = 0; r < rows; r++) y[offset + r] = residual == nullptr ? out[r] : out[r] + residual[offset + r];
    }
}

// The MultiplyRows of linear.cpp for C columns in fp32.
template <int Bits, int C>
void multiply_real(const Matrix& m, const Columns& columns, int first, const float* residual, float* y, int64_t stride,
                   int64_t row) {
    const int64_t row_block = row / kBlockRows;
    const uint8_t* w = static_cast<const uint8_t*>(m.weight) + row_block * m.blocks * Format<Bits>::bytes;
    const int64_t group_row = row_block * m.groups;
    const Share share = share_of(Format<Bits>::bytes, columns, first, C);
    Floats sums[C][L] = {};
    int64_t block = 0;
    for (int64_t g = 0; g < m.groups; g++) {
        const int64_t end = block + m.group_blocks < m.blocks ? block + m.group_blocks : m.blocks;
        Floats part[C][L] = {};
        for (; block < end; block++, w += Format<Bits>::bytes) {
            prefetch(w + m.blocks * Format<Bits>::bytes, share);
            RealBlock<Bits, C>::add(w, columns, first, block, part);
        }
#pragma GCC unroll 4
        for (int l = 0; l < L; l++) {
            const int64_t offset = (group_row + g) * kBlockRows + W * l;
            const Floats scale = load_floats(reinterpret_cast<const BFloat16*>(m.scale + offset));
            const Floats zero = load_floats(m.zero + offset);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++)
                sums[c][l] += scale * (part[c][l] - zero * columns.group_sum[(first + c) * m.groups + g]);
        }
    }
    finish_rows<C>(m, first, sums, residual, y, stride, row);
}

// The same for columns of integers. The sum of q * x over blocks that share a scale begins with -zero * (sum of x), so
// that it ends as that of (q - zero) * x: integers below 2^24, which floats hold exactly.
template <int Bits, int C, class Dot>
void multiply_integers(const Matrix& m, const Columns& columns, int first, const float* residual, float* y,
                       int64_t stride, int64_t row) {
    typedef Format<Bits> F;
    constexpr int kWords = block_words(Dot::words), kScale = kWords - 2, kSum = kWords - 1;
    const int64_t row_block = row / kBlockRows;
    const uint8_t* w = static_cast<const uint8_t*>(m.weight) + row_block * m.blocks * F::bytes;
    const uint16_t* scales = m.scale + row_block * m.groups * kBlockRows;
    const uint8_t* zeros = m.zero + row_block * m.groups * kBlockRows;
    const Share share = share_of(F::bytes, columns, first, C);
    const int32_t* x[C];
    Floats sums[C][L] = {};
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) x[c] = columns.words + (first + c) * m.blocks * kWords;
    int64_t left = m.group_blocks;  // blocks of this group
    for (int64_t block = 0; block < m.blocks; block += m.shared_blocks) {
        const int64_t count = block + m.shared_blocks < m.blocks ? m.shared_blocks : m.blocks - block;
        Ints totals[C][L];
#pragma GCC unroll 4
        for (int l = 0; l < L; l++) {
            const Ints zero = load_bytes(zeros + W * l);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) totals[c][l] = add_pairs_of(zero, x[c][kSum]);
        }
        for (int64_t b = 0; b < count; b++, w += F::bytes) {
            prefetch(w + m.blocks * F::bytes, share);
#pragma GCC unroll 8
            for (int j = 0; j < F::chunks; j++) {
#pragma GCC unroll 4
                for (int l = 0; l < L; l++) {
                    const Ints chunk = load_ints(w + 64 * j + GSA_VECTOR_BYTES * l);
                    const Ints low = Bits == 8 ? chunk : chunk & 0x0f0f0f0f, high = (chunk >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) {
                        const int32_t* words = x[c] + F::per_chunk / 4 * Dot::words * j;
                        totals[c][l] = Dot::add(totals[c][l], low, words);
                        if constexpr (Bits == 4) totals[c][l] = Dot::add(totals[c][l], high, words + Dot::words);
                    }
                }
            }
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) x[c] += kWords;
        }
#pragma GCC unroll 4
        for (int l = 0; l < L; l++) {
            const Floats scale = load_floats(reinterpret_cast<const BFloat16*>(scales + W * l));
#pragma GCC unroll 8
            for (int c = 0; c < C; c++)
                sums[c][l] +=
                    __builtin_convertvector(totals[c][l], Floats) * bits<float>(x[c][kScale - kWords]) * scale;
        }
        left -= count;
        if (left == 0) {
            left = m.group_blocks;
            scales += kBlockRows;
            zeros += kBlockRows;
        }
    }
    finish_rows<C>(m, first, sums, residual, y, stride, row);
}

// out [K] = row `row` of W, whose bytes lie four by four, 64 apart.
template <int Bits>
void unpack_quantised(const Matrix& m, int64_t row, float* out) {
    typedef Format<Bits> F;
    const int64_t row_block = row / kBlockRows, lane = row % kBlockRows;
    const uint8_t* w = static_cast<const uint8_t*>(m.weight) + row_block * m.blocks * F::bytes + 4 * lane;
    for (int64_t block = 0; block < m.blocks; block++, w += F::bytes) {
        uint8_t q[kBlockColumns];
        for (int j = 0; j < F::chunks; j++) {
            uint32_t four;
            __builtin_memcpy(&four, w + 64 * j, sizeof(four));
            if constexpr (Bits == 8) {
                __builtin_memcpy(q + 4 * j, &four, sizeof(four));
            } else {
                const uint32_t low = four & 0x0f0f0f0f, high = (four >> 4) & 0x0f0f0f0f;
                __builtin_memcpy(q + 8 * j, &low, sizeof(low));
                __builtin_memcpy(q + 8 * j + 4, &high, sizeof(high));
            }
        }
        const int64_t offset = (row_block * m.groups + block / m.group_blocks) * kBlockRows + lane;
        const float scale = bits<float>(static_cast<uint32_t>(m.scale[offset]) << 16), zero = m.zero[offset];
        float weights[kBlockColumns];
        for (int k = 0; k < kBlockColumns; k += W) store(weights + k, (load_floats(q + k) - zero) * scale);
        const int64_t first = block * kBlockColumns, rest = m.K - first;
        __builtin_memcpy(out + first, weights, sizeof(float) * (rest < kBlockColumns ? rest : kBlockColumns));
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
