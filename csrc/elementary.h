// Exponentials, and the readouts made of them.
#pragma once

#include "native.h"
#include "simd.h"

namespace gsa {
namespace GSA_ISA {
namespace {

template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
    static constexpr float lowest = -87.33f, highest = 88.3f;  // beyond: zero, and the largest power
    static constexpr float round = 0x1.8p23f;
    static constexpr int32_t round_bits = 0x4b400000, bias = 127;
    static constexpr int shift = 23;
    static constexpr float log2e = 1.442695040888963f, ln2_high = 0.693145751953125f, ln2_low = 1.428606765330187e-6f;
    static constexpr int terms = 7;
};

template <>
struct ExpConstants<double> {
    static constexpr double lowest = -708.0, highest = 709.0;
    static constexpr double round = 0x1.8p52;
    static constexpr int64_t round_bits = 0x4338000000000000, bias = 1023;
    static constexpr int shift = 52;
    static constexpr double log2e = 1.442695040888963407, ln2_high = 0.693147180369123816490,
                            ln2_low = 1.90821492927058770002e-10;
    static constexpr int terms = 13;
};

constexpr double kInverseFactorial[] = {
    1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
    1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};

// exp(x) and exp(x) - 1, both to full precision: with x = n ln 2 + r, exp(x) = 2^n (1 + (exp(r) - 1)).
template <class T>
GSA_INLINE void exp_and_less_one(Vec<T> x, Vec<T>& exp, Vec<T>& less_one) {
    typedef ExpConstants<T> C;
    typedef typename Simd<T>::Int Int;
    const Int under = x < C::lowest;
    Vec<T> y = under ? splat(C::lowest) : x;  // a NaN stays one
    y = y > C::highest ? splat(C::highest) : y;
    const Vec<T> rounded = y * C::log2e + C::round;
    const Vec<T> n = rounded - C::round;
    const Vec<T> r = (y - n * C::ln2_high) - n * C::ln2_low;
    Vec<T> tail = splat(static_cast<T>(kInverseFactorial[C::terms]));
#pragma GCC unroll 16
    for (int i = C::terms - 1; i >= 1; i--) tail = tail * r + static_cast<T>(kInverseFactorial[i]);
    tail *= r;
    Int word;
    __builtin_memcpy(&word, &rounded, sizeof(word));
    word = (word - C::round_bits + C::bias) << C::shift;
    Vec<T> power;
    __builtin_memcpy(&power, &word, sizeof(power));
    exp = under ? Vec<T>{} : power * tail + power;
    less_one = under ? splat(T(-1)) : power * tail + (power - T(1));
}

template <class T>
GSA_INLINE Vec<T> exp(Vec<T> x) {
    Vec<T> e, unused;
    exp_and_less_one<T>(x, e, unused);
    return e;
}

template <class T>
GSA_INLINE Vec<T> sigmoid(Vec<T> x) {
    const Vec<T> small = exp<T>(x < T(0) ? x : -x);  // never overflows
    return (x < T(0) ? small : splat(T(1))) / (T(1) + small);
}

// log(1 + e) for 0 <= e <= 1, to full precision: twice the series of artanh(e / (2 + e)), whose argument is at most
// 1/3.
template <class T>
GSA_INLINE Vec<T> log1p_of_unit(Vec<T> e) {
    constexpr int terms = sizeof(T) == 8 ? 17 : 8;
    const Vec<T> s = e / (T(2) + e), square = s * s;
    Vec<T> tail = splat(T(1) / T(2 * terms + 1));
#pragma GCC unroll 17
    for (int i = terms - 1; i >= 0; i--) tail = tail * square + T(1) / T(2 * i + 1);
    return T(2) * s * tail;
}

// log(x) for x > 0 that is not infinite, to full precision: with x = 2^n m and m about 1, n ln 2 and twice the series
// of artanh((m - 1) / (m + 1)), whose argument is at most 0.172.
template <class T>
GSA_INLINE Vec<T> log(Vec<T> x) {
    typedef ExpConstants<T> C;
    typedef typename Simd<T>::Int Int;
    constexpr int terms = sizeof(T) == 8 ? 10 : 4;
    constexpr T tiny = sizeof(T) == 8 ? T(0x1p-1022) : T(0x1p-126), up = sizeof(T) == 8 ? T(0x1p54) : T(0x1p25);
    const Int small = x < tiny;  // such numbers have no exponent of their own
    const Vec<T> y = small ? x * up : x;
    Int word;
    __builtin_memcpy(&word, &y, sizeof(word));
    Vec<T> root_half = splat(static_cast<T>(0.70710678118654752));
    Int offset;
    __builtin_memcpy(&offset, &root_half, sizeof(offset));
    // The exponent of y over sqrt(1/2), so that m lies between that and its double.
    const Int exponent = (word - offset) >> C::shift;
    word -= exponent << C::shift;
    Vec<T> m;
    __builtin_memcpy(&m, &word, sizeof(m));
    Vec<T> n = __builtin_convertvector(exponent, Vec<T>);
    n = small ? n - (sizeof(T) == 8 ? T(54) : T(25)) : n;
    const Vec<T> s = (m - T(1)) / (m + T(1)), square = s * s;
    Vec<T> tail = splat(T(1) / T(2 * terms + 1));
#pragma GCC unroll 16
    for (int i = terms - 1; i >= 1; i--) tail = tail * square + T(1) / T(2 * i + 1);
    const Vec<T> more = T(2) * s * (square * tail);
    return n * C::ln2_high + (T(2) * s + (more + n * C::ln2_low));
}

// log(1 + exp(x)), without overflow.
template <class T>
GSA_INLINE Vec<T> softplus(Vec<T> x) {
    return (x > T(0) ? x : Vec<T>{}) + log1p_of_unit<T>(exp<T>(x < T(0) ? x : -x));
}

template <class T>
GSA_INLINE Vec<T> larger(Vec<T> a, Vec<T> b) {
    return a > b ? a : b;
}

// Slot weights p [padded] of slot scores x [padded]; those from M on become zero.
template <class T>
void read_out(int readout, const T* x, int M, int padded, T* p) {
    constexpr int W = Simd<T>::W;
    if (readout == GSA_READOUT_SOFTMAX) {
        const int whole = M / W * W;
        const typename Simd<T>::Int beyond = lane_numbers<T>() >= M - whole;
        const T lowest = -static_cast<T>(__builtin_inff());
        Vec<T> most = splat(lowest);
        for (int i = 0; i < whole; i += W) most = larger<T>(most, load(x + i));
        if (whole < padded) most = larger<T>(most, beyond ? splat(lowest) : load(x + whole));
        T highest = most[0];
        for (int i = 1; i < W; i++) highest = most[i] > highest ? most[i] : highest;
        // A NaN compares as not larger, so it may not be found here; it is found again below.
        Vec<T> total{};
        for (int i = 0; i < whole; i += W) {
            const Vec<T> e = exp<T>(load(x + i) - highest);
            total += e;
            store(p + i, e);
        }
        if (whole < padded) {
            const Vec<T> e = beyond ? Vec<T>{} : exp<T>(load(x + whole) - highest);
            total += e;
            store(p + whole, e);
        }
        for (int i = whole + W; i < padded; i += W) store(p + i, Vec<T>{});  // where `padded` is more than one vector's
        const T inverse = T(1) / sum<T>(total);
        for (int i = 0; i < padded; i += W) store(p + i, load(p + i) * inverse);
        return;
    }
    for (int i = 0; i < padded; i += W) {
        const Vec<T> y = load(x + i), positive = y <= T(0) ? Vec<T>{} : y;  // a NaN stays one
        switch (readout) {
            case GSA_READOUT_IDENTITY: store(p + i, y); break;
            case GSA_READOUT_SWISH: store(p + i, y * sigmoid<T>(y)); break;
            case GSA_READOUT_RELU: store(p + i, positive); break;
            default: store(p + i, positive * positive);
        }
    }
    for (int i = M; i < padded; i++) p[i] = 0;
}

// The gradient dx of the scores x from the gradient dp of the weights p, all [padded]; dx may be dp.
template <class T>
void read_out_backward(int readout, const T* x, const T* p, const T* dp, int padded, T* dx) {
    constexpr int W = Simd<T>::W;
    T along = 0;
    if (readout == GSA_READOUT_SOFTMAX) {
        Vec<T> dot{};
        for (int i = 0; i < padded; i += W) dot += load(p + i) * load(dp + i);
        along = sum<T>(dot);
    }
    for (int i = 0; i < padded; i += W) {
        const Vec<T> y = load(x + i), w = load(p + i), dw = load(dp + i);
        switch (readout) {
            case GSA_READOUT_SOFTMAX: store(dx + i, w * (dw - along)); break;
            case GSA_READOUT_IDENTITY: store(dx + i, dw); break;
            case GSA_READOUT_SWISH: {
                const Vec<T> s = sigmoid<T>(y);
                store(dx + i, dw * (s + w * (T(1) - s)));
                break;
            }
            case GSA_READOUT_RELU: store(dx + i, y <= T(0) ? Vec<T>{} : dw); break;
            default: store(dx + i, y <= T(0) ? Vec<T>{} : T(2) * y * dw);
        }
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
