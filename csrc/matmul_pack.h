// Weights and activations of any type to words of two bf16 numbers, as matmul.h lays them out.
#pragma once

#include "linear_blocks.h"
#include "matmul.h"

namespace gsa {
namespace GSA_ISA {
namespace {

typedef uint32_t Words __attribute__((vector_size(GSA_VECTOR_BYTES)));
constexpr int kPairs = kBlockColumns / 2;  // of a block

struct Even {
    static constexpr int lane(int l) { return 2 * l; }
};

struct Odd {
    static constexpr int lane(int l) { return 2 * l + 1; }
};

// Rounded to bf16 (to nearest, ties to even), in the upper halves of words; the lower ones hold anything.
GSA_INLINE Words rounded(Floats x) {
    const Words word = bits<Words>(x);
    const Words quiet = word | 0x400000u, nearest = word + 0x7fffu + (word >> 16 & 1u);
    return x != x ? quiet : nearest;
}

GSA_INLINE Words pair(Floats even, Floats odd) { return rounded(even) >> 16 | (rounded(odd) & 0xffff0000u); }

GSA_INLINE void store_words(uint32_t* p, Words words) { __builtin_memcpy(p, &words, sizeof(words)); }

// words [16] from x [32].
GSA_INLINE void pack_block(const float* x, uint32_t* words) {
    for (int i = 0; i < kPairs; i += W) {
        const Floats a = load(x + 2 * i), b = load(x + 2 * i + W);
        store_words(words + i, pair(shuffle<float, Even>(a, b), shuffle<float, Odd>(a, b)));
    }
}

GSA_INLINE void pack_block(const BFloat16* x, uint32_t* words) {
    __builtin_memcpy(words, x, sizeof(uint32_t) * kPairs);
}

// out [16, 16], rows `out_row` apart, from rows [16, 16] of words, transposed.
GSA_INLINE void transpose_words(const uint32_t (&rows)[kBlockRows][kPairs], uint32_t* out, ptrdiff_t out_row) {
    transpose<float>(reinterpret_cast<const float*>(rows), kPairs, kPairs, reinterpret_cast<float*>(out), out_row, 0,
                     kBlockRows / W);
}

// 16 rows of a panel, from dense rows; `rows` of them are there.
template <class Weight>
void pack_dense(const Matrix& m, int64_t row, int rows, uint32_t* panel) {
    const Weight* w = static_cast<const Weight*>(m.weight) + row * m.K;
    uint32_t words[kBlockRows][kPairs] = {};
    for (int64_t block = 0; block < m.blocks; block++) {
        const int64_t first = block * kBlockColumns, rest = m.K - first;
        for (int r = 0; r < rows; r++) {
            if (rest >= kBlockColumns) {
                pack_block(w + r * m.K + first, words[r]);
            } else {
                Weight last[kBlockColumns] = {};
                __builtin_memcpy(last, w + r * m.K + first, sizeof(Weight) * rest);
                pack_block(last, words[r]);
            }
        }
        transpose_words(words, panel + block * kPairs * kPanelRows, kPanelRows);
    }
}

// The same from a block of quantised rows, which lie beside each other already.
template <int Bits>
void pack_quantised(const Matrix& m, int64_t row, uint32_t* panel) {
    typedef Format<Bits> F;
    const int64_t row_block = row / kBlockRows;
    const uint8_t* w = static_cast<const uint8_t*>(m.weight) + row_block * m.blocks * F::bytes;
    for (int64_t block = 0; block < m.blocks; block++, w += F::bytes, panel += kPairs * kPanelRows) {
        const int64_t group = (row_block * m.groups + block / m.group_blocks) * kBlockRows;
        for (int l = 0; l < L; l++) {
            const Floats scale = load_floats(reinterpret_cast<const BFloat16*>(m.scale + group + W * l));
            const Floats zero = load_floats(m.zero + group + W * l);
            const auto weight = [&](Ints chunk, int i) {
                const int shift = i < 4 ? 8 * i : 8 * i - 28;
                return (__builtin_convertvector(chunk >> shift & (Bits == 8 ? 0xff : 0x0f), Floats) - zero) * scale;
            };
            for (int j = 0; j < F::chunks; j++) {
                const Ints chunk = load_ints(w + 64 * j + GSA_VECTOR_BYTES * l);
#pragma GCC unroll 4
                for (int i = 0; i < F::per_chunk; i += 2)
                    store_words(panel + (F::per_chunk * j + i) / 2 * kPanelRows + W * l,
                                pair(weight(chunk, i), weight(chunk, i + 1)));
            }
        }
    }
}

void pack_rows(const Matrix& m, int64_t row, uint32_t* panel) {
    for (int half = 0; half < kPanelRows / kBlockRows; half++, row += kBlockRows, panel += kBlockRows) {
        const int64_t rest = m.N - row;
        if (rest <= 0) {
            for (int64_t p = 0; p < pairs_of(m); p++)
                __builtin_memset(panel + p * kPanelRows, 0, sizeof(uint32_t) * kBlockRows);
            continue;
        }
        const int rows = rest < kBlockRows ? static_cast<int>(rest) : kBlockRows;
        switch (m.format) {
            case GSA_WEIGHT_FP32: pack_dense<float>(m, row, rows, panel); break;
            case GSA_WEIGHT_BF16: pack_dense<BFloat16>(m, row, rows, panel); break;
            case GSA_WEIGHT_INT8: pack_quantised<8>(m, row, panel); break;
            default: pack_quantised<4>(m, row, panel);
        }
    }
}

template <int C>
void pack_tile(const float* x, int count, int64_t pairs, uint32_t* tile) {
    uint32_t words[kBlockRows][kPairs] = {}, turned[kPairs][kBlockRows];
    for (int64_t first = 0; first < pairs; first += kPairs, tile += kPairs * C) {
        for (int c = 0; c < count; c++) pack_block(x + 2 * (c * pairs + first), words[c]);
        transpose_words(words, turned[0], kBlockRows);
        for (int p = 0; p < kPairs; p++) __builtin_memcpy(tile + p * C, turned[p], sizeof(uint32_t) * C);
    }
}

void pack_columns(const float* x, int count, int64_t pairs, uint32_t* tile) {
    switch (tile_width(count)) {
        case 4: pack_tile<4>(x, count, pairs, tile); break;
        case 8: pack_tile<8>(x, count, pairs, tile); break;
        default: pack_tile<12>(x, count, pairs, tile);
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
