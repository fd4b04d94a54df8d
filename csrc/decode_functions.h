// What is done to numbers one by one: activation functions and gates.
#pragma once

#include "elementary.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Widths are padded to so many numbers, which are whole vectors on every machine.
constexpr int kPadding = 16;

GSA_INLINE int64_t padded_width(int64_t n) { return (n + kPadding - 1) / kPadding * kPadding; }

template <class T>
struct SeriesTerms;

template <>
struct SeriesTerms<float> {
    static constexpr int last = 15;
};

template <>
struct SeriesTerms<double> {
    static constexpr int last = 35;
};

// log(1 + e) for e from 0 to 1. It is 2 artanh(e / (2 + e)), whose argument is at most 1/3, so that its series has come
// to full precision at the last of these terms.
template <class T>
GSA_INLINE Vec<T> log_of_one_more(Vec<T> e) {
    const Vec<T> s = e / (T(2) + e), square = s * s;
    Vec<T> series = splat(T(2) / SeriesTerms<T>::last);
#pragma GCC unroll 20
    for (int i = SeriesTerms<T>::last - 2; i >= 1; i -= 2) series = series * square + T(2) / static_cast<T>(i);
    return s * series;
}

GSA_INLINE Vec<float> log_sigmoid(Vec<float> x) {
    return (x < 0.0f ? x : Vec<float>{}) - log_of_one_more<float>(exp<float>(x < 0.0f ? x : -x));
}

// log(x) for x > 0; a denormal number counts as the smallest that is not, and NaN stays NaN. With x = 2^n m, 1 <= m <
// 2, it is n ln 2 + log(m).
GSA_INLINE Vec<float> log_of_positive(Vec<float> x) {
    const float least = 0x1p-126f;
    x = x < least ? splat(least) : x;
    Simd<float>::Int word;
    __builtin_memcpy(&word, &x, sizeof(word));
    const Vec<float> n = __builtin_convertvector((word >> 23) - 127, Vec<float>);
    word = (word & 0x007fffff) | 0x3f800000;
    Vec<float> m;
    __builtin_memcpy(&m, &word, sizeof(m));
    return x == x ? n * 0.69314718056f + log_of_one_more<float>(m - 1.0f) : x;
}

// log(exp(a) + exp(b)), where at most one of them is -inf.
template <class T>
GSA_INLINE Vec<T> log_of_sum(Vec<T> a, Vec<T> b) {
    const Vec<T> high = a > b ? a : b, low = a > b ? b : a;  // a NaN in either stays one
    return high + log_of_one_more<T>(exp<T>(low - high));
}

GSA_INLINE Vec<float> apply(int function, Vec<float> x) {
    typedef Vec<float> V;
    switch (function) {
        case GSA_FUNCTION_SWISH: return x * sigmoid<float>(x);
        case GSA_FUNCTION_RELU: return x <= 0.0f ? V{} : x;
        case GSA_FUNCTION_RELU2: return x <= 0.0f ? V{} : x * x;
        case GSA_FUNCTION_GELU: {
            V y;
            for (int i = 0; i < Simd<float>::W; i++)
                y[i] = 0.5f * x[i] * (1.0f + __builtin_erff(x[i] * 0.70710678118654752f));
            return y;
        }
        case GSA_FUNCTION_SIGMOID: return sigmoid<float>(x);
        case GSA_FUNCTION_ELU1: {
            V e, less_one;
            exp_and_less_one<float>(x > 0.0f ? V{} : x, e, less_one);
            return x > 0.0f ? x + 1.0f : less_one + 1.0f;
        }
        case GSA_FUNCTION_SOFTPLUS: return -log_sigmoid(-x);
        default: return x;
    }
}

// A function of x [n], in place; as n is padded, so must x be.
void activate(int function, float* x, int64_t n) {
    if (function == GSA_FUNCTION_NONE) return;
    for (int64_t i = 0; i < n; i += Simd<float>::W) store(x + i, apply(function, load(x + i)));
}

// x [n] = a, and write [n] = 1 - a unless it is null; see GsaGate. The bounds begin with those of x[0], or are null.
void forget(const GsaGate& gate, const float* log_bound, const float* log_rest, float* x, float* write, int64_t n) {
    const float slower = static_cast<float>(1 / gate.temperature);
    for (int64_t i = 0; i < n; i += Simd<float>::W) {
        Vec<float> g = log_sigmoid(load(x + i)) * slower, a, less_one;
        if (log_bound != nullptr) g = log_of_sum<float>(load(log_bound + i), load(log_rest + i) + g);
        exp_and_less_one<float>(g, a, less_one);
        store(x + i, a);
        if (write != nullptr) store(write + i, -less_one);
    }
}

// x [n] = z before over z, write [n] = exp(x) / z, with z moved on; see GsaGate. In fp64: z is a sum over the whole
// past, and the gates are small differences of its logarithm.
void write_share(const GsaGate& gate, double* log_z, float* x, float* write, int64_t n) {
    constexpr int W = Simd<double>::W;
    typedef Vec<double> V;
    const double infinity = __builtin_inf(), clamp = gate.clamp == 0 ? infinity : gate.clamp;
    for (int64_t i = 0; i < n; i += W) {
        V w;
        for (int l = 0; l < W; l++) w[l] = x[i + l];
        w = w < -clamp ? splat(-clamp) : w;
        w = w > clamp ? splat(clamp) : w;
        const V before = load(log_z + i);
        const V after = w == -infinity ? before : log_of_sum<double>(before, w);
        // -inf less -inf is NaN, where nothing has been written yet, and nothing is now.
        const V share = w == -infinity ? V{} : exp<double>(w - after);
        const V kept = w == -infinity ? splat(1.0) : exp<double>(before - after);
        store(log_z + i, after);
        for (int l = 0; l < W; l++) {
            x[i + l] = gate.normalise ? static_cast<float>(kept[l]) : 1.0f;
            write[i + l] = static_cast<float>(share[l]);
        }
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
