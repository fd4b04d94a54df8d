// A panel of rows times a tile of columns, both in bf16, added up in fp32.
#include "matmul.h"

#include "matmul_pack.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// sums [C, 32] of the products of panel [pairs, 32] and tile [pairs, C].
typedef float Sums[kTileColumns][kPanelRows];

#if defined(__AVX512F__)
// To each lane of `sums` adds the product of the upper halves of its words, then that of the lower ones, each rounded;
// numbers too small to be normal are taken for zero. Not every machine with AVX-512 has the instruction, so the
// compiler may not be told of it; see has_unit.
GSA_INLINE Floats add_products(Floats sums, Ints panel, Ints column) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(panel), "v"(column));
    return sums;
}

template <int C>
void multiply_by_unit(const uint32_t* panel, const uint32_t* tile, int64_t pairs, Sums& sums) {
    Floats total[C][2] = {};
    for (int64_t p = 0; p < pairs; p++, panel += kPanelRows, tile += C) {
        const Ints left = load_ints(panel), right = load_ints(panel + W);
#pragma GCC unroll 12
        for (int c = 0; c < C; c++) {
            const Ints column = static_cast<int32_t>(tile[c]) - Ints{};
            total[c][0] = add_products(total[c][0], left, column);
            total[c][1] = add_products(total[c][1], right, column);
        }
    }
#pragma GCC unroll 12
    for (int c = 0; c < C; c++) {
        store(sums[c], total[c][0]);
        store(sums[c] + W, total[c][1]);
    }
}
#endif

GSA_INLINE float without_small(float x) {
    const uint32_t word = bits<uint32_t>(x);
    return bits<float>((word & 0x7f800000u) == 0 ? word & 0x80000000u : word);
}

GSA_INLINE float lower(uint32_t word) { return without_small(bits<float>(word << 16)); }
GSA_INLINE float upper(uint32_t word) { return without_small(bits<float>(word & 0xffff0000u)); }

// The same bits from what every machine has.
template <int C>
void multiply_portably(const uint32_t* panel, const uint32_t* tile, int64_t pairs, Sums& sums) {
    for (int c = 0; c < C; c++) {
        for (int r = 0; r < kPanelRows; r++) sums[c][r] = 0;
        for (int64_t p = 0; p < pairs; p++) {
            const float first = upper(tile[p * C + c]), second = lower(tile[p * C + c]);
            const uint32_t* words = panel + p * kPanelRows;
            for (int r = 0; r < kPanelRows; r++) {
                const float sum = without_small(__builtin_fmaf(upper(words[r]), first, sums[c][r]));
                sums[c][r] = without_small(__builtin_fmaf(lower(words[r]), second, sum));
            }
        }
    }
}

template <int C>
void multiply_tile(const uint32_t* panel, const uint32_t* tile, int64_t pairs, bool portable, Sums& sums) {
#if defined(__AVX512F__)
    if (!portable) return multiply_by_unit<C>(panel, tile, pairs, sums);
#else
    (void)portable;
#endif
    multiply_portably<C>(panel, tile, pairs, sums);
}

void multiply(const uint32_t* panel, const uint32_t* tile, int64_t pairs, int count, int rows, bool portable,
              const float* residual, float* y, int64_t stride) {
    Sums sums;
    switch (tile_width(count)) {
        case 4: multiply_tile<4>(panel, tile, pairs, portable, sums); break;
        case 8: multiply_tile<8>(panel, tile, pairs, portable, sums); break;
        default: multiply_tile<12>(panel, tile, pairs, portable, sums);
    }
    for (int c = 0; c < count; c++)
        for (int r = 0; r < rows; r++)
            y[c * stride + r] = residual == nullptr ? sums[c][r] : sums[c][r] + residual[c * stride + r];
}

bool has_unit(int compute) {
#if defined(__AVX512F__)
    if (compute == GSA_COMPUTE_BF16) return __builtin_cpu_supports("avx512bf16");
#endif
    return compute == GSA_COMPUTE_INT8 && dot_is_native();
}

int64_t exercise(int compute, int64_t rounds) {
#if defined(__AVX512F__)
    constexpr int kSums = 12;
    const bool integers = compute == GSA_COMPUTE_INT8;
    Ints sums[kSums] = {}, zeros{};
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < kSums; i++) {
            if (integers)
                asm volatile("vpdpbusd %1, %1, %0" : "+v"(sums[i]) : "v"(zeros));
            else
                asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sums[i]) : "v"(zeros));
        }
    }
    return rounds * kSums * W * (integers ? 4 : 2);
#else
    (void)compute, (void)rounds;
    return 0;
#endif
}

}  // namespace

extern const MatmulKernels matmul_kernels;
const MatmulKernels matmul_kernels = {has_unit, exercise, pack_columns, pack_rows, multiply};

}  // namespace GSA_ISA
}  // namespace gsa
