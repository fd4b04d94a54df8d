// Between tensors of any type, as Python holds them, and matrices of the type that is computed in.
#pragma once

#include "native.h"
#include "simd.h"

namespace gsa {
namespace GSA_ISA {
namespace {

template <class To, class From>
GSA_INLINE To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits");
    To y;
    __builtin_memcpy(&y, &x, sizeof(y));
    return y;
}

struct BFloat16 {
    uint16_t word;
};

struct Float16 {
    uint16_t word;
};

GSA_INLINE float widen(float x) { return x; }
GSA_INLINE double widen(double x) { return x; }
GSA_INLINE float widen(BFloat16 x) { return bits<float>(static_cast<uint32_t>(x.word) << 16); }

GSA_INLINE float widen(Float16 x) {
    const uint32_t word = x.word, magnitude = word & 0x7fff;
    // The exponent's bias differs by 112; a product puts that right for subnormal numbers too.
    const float finite = bits<float>(magnitude << 13) * 0x1p112f;
    const uint32_t special = 0x7f800000u | magnitude << 13;  // infinity, NaN
    return bits<float>((magnitude >= 0x7c00 ? special : bits<uint32_t>(finite)) | (word & 0x8000) << 16);
}

// To nearest, ties to even.
GSA_INLINE void narrow(float x, float& y) { y = x; }
GSA_INLINE void narrow(float x, double& y) { y = x; }
GSA_INLINE void narrow(double x, float& y) { y = static_cast<float>(x); }
GSA_INLINE void narrow(double x, double& y) { y = x; }

GSA_INLINE void narrow(float x, BFloat16& y) {
    const uint32_t word = bits<uint32_t>(x);
    const uint32_t rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
    y.word = static_cast<uint16_t>(x != x ? word >> 16 | 0x40 : rounded);
}

GSA_INLINE void narrow(float x, Float16& y) {
    const uint32_t word = bits<uint32_t>(x), magnitude = word & 0x7fffffff;
    // Normal: move the exponent and round. Subnormal: adding 0.5 leaves the digits in place. Large: infinity or NaN.
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t small = bits<uint32_t>(bits<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t half = magnitude < 0x38800000 ? small : magnitude >= 0x477ff000 ? large : normal;
    y.word = static_cast<uint16_t>(half | (word >> 16 & 0x8000));
}

// out [width] = x [width] * scale
template <class T, class From>
void read_row(const From* x, int width, T scale, T* out) {
    for (int i = 0; i < width; i++) out[i] = static_cast<T>(widen(x[i])) * scale;
}

// out [width] = x [width] * scale, rounded
template <class T, class To>
void write_row(const T* x, int width, T scale, To* out) {
    for (int i = 0; i < width; i++) narrow(x[i] * scale, out[i]);
}

// out [padded] = the row of a tensor that begins at number `offset`, times `scale`, padded with zeros.
template <class T>
void read(const GsaTensor& x, int64_t offset, T scale, T* out, int padded) {
    switch (x.type) {
        case GSA_FLOAT32: read_row(static_cast<const float*>(x.data) + offset, x.width, scale, out); break;
        case GSA_FLOAT64: read_row(static_cast<const double*>(x.data) + offset, x.width, scale, out); break;
        case GSA_BFLOAT16: read_row(static_cast<const BFloat16*>(x.data) + offset, x.width, scale, out); break;
        default: read_row(static_cast<const Float16*>(x.data) + offset, x.width, scale, out);
    }
    for (int i = x.width; i < padded; i++) out[i] = 0;
}

template <class From>
bool at_most_zero(const From* x, int width) {
    bool all = true;
    for (int i = 0; i < width; i++) all &= widen(x[i]) <= 0;
    return all;
}

// Whether the numbers of the row of a tensor that begins at number `offset` are at most 0; a NaN is not.
inline bool at_most_zero(const GsaTensor& x, int64_t offset) {
    switch (x.type) {
        case GSA_FLOAT32: return at_most_zero(static_cast<const float*>(x.data) + offset, x.width);
        case GSA_FLOAT64: return at_most_zero(static_cast<const double*>(x.data) + offset, x.width);
        case GSA_BFLOAT16: return at_most_zero(static_cast<const BFloat16*>(x.data) + offset, x.width);
        default: return at_most_zero(static_cast<const Float16*>(x.data) + offset, x.width);
    }
}

// The row of the tensor `out` that begins at number `offset` = x [out.width], times `scale`.
template <class T>
void write(const T* x, T scale, const GsaTensor& out, int64_t offset) {
    switch (out.type) {
        case GSA_FLOAT32: write_row(x, out.width, scale, static_cast<float*>(out.data) + offset); break;
        case GSA_FLOAT64: write_row(x, out.width, scale, static_cast<double*>(out.data) + offset); break;
        case GSA_BFLOAT16: write_row(x, out.width, scale, static_cast<BFloat16*>(out.data) + offset); break;
        default: write_row(x, out.width, scale, static_cast<Float16*>(out.data) + offset);
    }
}

// A square of W x W numbers, transposed in registers: in step d, rows d apart exchange halves of their 2d-blocks.

template <int W, int D>
struct First {
    static constexpr int lane(int l) { return (l & D) == 0 ? l : W + l - D; }
};

template <int W, int D>
struct Second {
    static constexpr int lane(int l) { return (l & D) == 0 ? l + D : W + l; }
};

template <class T, int D>
GSA_INLINE void exchange(Vec<T>& a, Vec<T>& b) {
    constexpr int W = Simd<T>::W;
    const Vec<T> x = a, y = b;
    a = shuffle<T, First<W, D>>(x, y);
    b = shuffle<T, Second<W, D>>(x, y);
}

template <class T, int D>
GSA_INLINE void exchange_all(Vec<T> (&rows)[Simd<T>::W]) {
    if constexpr (D > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < Simd<T>::W; i++)
            if ((i & D) == 0) exchange<T, D>(rows[i], rows[i + D]);
        exchange_all<T, D / 2>(rows);
    }
}

// out [cols, rows] = in [rows, cols] transposed; both are whole vectors wide and high. `from` and `to` count blocks of
// rows of `in`.
template <class T>
void transpose(const T* in, ptrdiff_t in_row, int cols, T* out, ptrdiff_t out_row, int from, int to) {
    constexpr int W = Simd<T>::W;
    for (int r = from * W; r < to * W; r += W)
        for (int c = 0; c < cols; c += W) {
            Vec<T> rows[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) rows[i] = load(in + (r + i) * in_row + c);
            exchange_all<T, W / 2>(rows);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store(out + (c + i) * out_row + r, rows[i]);
        }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
