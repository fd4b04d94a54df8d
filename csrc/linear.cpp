// y = W x for a few columns: which kernel, over which rows.
#include "linear.h"

#include "linear_dense.h"
#include "linear_quantised.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// A block of 16 rows from `row` on of y [count, N] = W x + residual, in a few columns from `first` on; those of y and
// the residual are `stride` apart.
typedef void (*MultiplyRows)(const Matrix&, const Columns&, int first, const float* residual, float* y, int64_t stride,
                             int64_t row);

template <int Bits, int C>
MultiplyRows choose_quantised(int words_per_quad) {
#if defined(__AVX512F__)
    if (words_per_quad == NativeDot::words) return multiply_integers<Bits, C, NativeDot>;
#endif
    if (words_per_quad == PortableDot::words) return multiply_integers<Bits, C, PortableDot>;
    return multiply_real<Bits, C>;
}

template <int C>
MultiplyRows choose(int format, int words_per_quad) {
    constexpr int kRows = C == 1 ? 4 : 2;
    switch (format) {
        case GSA_WEIGHT_FP32: return multiply_dense<float, C, kRows>;
        case GSA_WEIGHT_BF16: return multiply_dense<BFloat16, C, kRows>;
        case GSA_WEIGHT_INT8: return choose_quantised<8, C>(words_per_quad);
        default: return choose_quantised<4, C>(words_per_quad);
    }
}

// For twice as many columns at a time, whose sums of integers still find room in registers; null: there are none.
constexpr int kManyColumns = 2 * kColumns;

MultiplyRows choose_many(int format, int words_per_quad) {
#if defined(__AVX512F__)
    if (words_per_quad == NativeDot::words)
        return format == GSA_WEIGHT_INT8 ? multiply_integers<8, kManyColumns, NativeDot>
                                         : multiply_integers<4, kManyColumns, NativeDot>;
#else
    (void)format, (void)words_per_quad;
#endif
    return nullptr;
}

// For the last one to four of all columns.
MultiplyRows choose(int format, int words_per_quad, int columns, bool alone) {
    if (alone && format == GSA_WEIGHT_FP32) return multiply_dense<float, 1, 1>;
    if (alone && format == GSA_WEIGHT_BF16) return multiply_dense<BFloat16, 1, 1>;
    switch (columns) {
        case 1: return choose<1>(format, words_per_quad);
        case 2: return choose<2>(format, words_per_quad);
#if GSA_VECTOR_BYTES == 64
        case 3: return choose<3>(format, words_per_quad);
#endif
        default: return choose<kColumns>(format, words_per_quad);
    }
}

void multiply(const Matrix& m, const Columns& columns, const float* residual, float* y, int64_t stride, int64_t from,
              int64_t to) {
    const int rest = columns.count % kColumns;
    const MultiplyRows many = choose_many(m.format, columns.words_per_quad);
    const MultiplyRows whole = choose(m.format, columns.words_per_quad, kColumns, false);
    const MultiplyRows last = choose(m.format, columns.words_per_quad, rest, columns.count == 1);
    for (int64_t block = from; block < to; block++) {
        // Columns innermost: the weights of a block of rows stay in the cache from one to the next.
        const int64_t row = block * kBlockRows;
        int c = 0;
        if (many != nullptr)
            for (; c + kManyColumns <= columns.count; c += kManyColumns) many(m, columns, c, residual, y, stride, row);
        for (; c + kColumns <= columns.count; c += kColumns) whole(m, columns, c, residual, y, stride, row);
        if (rest != 0) last(m, columns, c, residual, y, stride, row);
    }
}

void unpack(const Matrix& m, int64_t row, float* out) {
    switch (m.format) {
        case GSA_WEIGHT_FP32: unpack_dense<float>(m, row, out); break;
        case GSA_WEIGHT_BF16: unpack_dense<BFloat16>(m, row, out); break;
        case GSA_WEIGHT_INT8: unpack_quantised<8>(m, row, out); break;
        default: unpack_quantised<4>(m, row, out);
    }
}

int words_per_quad(bool portable) { return dot_is_native() && !portable ? 1 : 2; }

// A sum of all bytes as words: what cannot be done without reading them.
uint64_t read(const void* bytes, int64_t count) {
    constexpr int kVectors = 8;
    typedef Simd<double>::Int Words;
    const uint8_t* p = static_cast<const uint8_t*>(bytes);
    Words sums[kVectors] = {};
    int64_t i = 0;
    for (; i + kVectors * GSA_VECTOR_BYTES <= count; i += kVectors * GSA_VECTOR_BYTES) {
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; j++) {
            Words words;
            __builtin_memcpy(&words, p + i + GSA_VECTOR_BYTES * j, sizeof(words));
            sums[j] ^= words;
        }
    }
    for (int j = 1; j < kVectors; j++) sums[0] ^= sums[j];
    uint64_t total = 0;
    for (int l = 0; l < Simd<double>::W; l++) total ^= static_cast<uint64_t>(sums[0][l]);
    for (; i < count; i++) total ^= static_cast<uint64_t>(p[i]) << 8 * (i % 8);
    return total;
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {read_input, arrange, quantise, words_per_quad, multiply, unpack, read};

}  // namespace GSA_ISA
}  // namespace gsa
