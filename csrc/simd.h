// Vectors of the width of the instruction set that is being compiled, as the compiler's own vector types: arithmetic is
// written with ordinary operators. Nothing here may have a symbol of its own (see isa.h), so all is static or inlined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define GSA_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define GSA_VECTOR_BYTES 32
#else
#define GSA_VECTOR_BYTES 16  // SSE2 or NEON
#endif

#define GSA_INLINE static inline __attribute__((always_inline))

namespace gsa {
namespace GSA_ISA {
namespace {

template <class T>
struct Simd;

template <>
struct Simd<float> {
    typedef float Vec __attribute__((vector_size(GSA_VECTOR_BYTES)));
    typedef int32_t Int __attribute__((vector_size(GSA_VECTOR_BYTES)));
    static constexpr int W = GSA_VECTOR_BYTES / 4;
};

template <>
struct Simd<double> {
    typedef double Vec __attribute__((vector_size(GSA_VECTOR_BYTES)));
    typedef int64_t Int __attribute__((vector_size(GSA_VECTOR_BYTES)));
    static constexpr int W = GSA_VECTOR_BYTES / 8;
};

template <class T>
using Vec = typename Simd<T>::Vec;

// Addresses need not be aligned.
template <class T>
GSA_INLINE Vec<T> load(const T* p) {
    Vec<T> v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
}

template <class T>
GSA_INLINE void store(T* p, Vec<T> v) {
    __builtin_memcpy(p, &v, sizeof(v));
}

template <class T>
GSA_INLINE Vec<T> splat(T x) {
    return x - Vec<T>{};
}

template <class T>
GSA_INLINE typename Simd<T>::Int lane_numbers() {
    typename Simd<T>::Int lane;
    for (int i = 0; i < Simd<T>::W; i++) lane[i] = i;
    return lane;
}

// Whether no lane is set.
template <class T>
GSA_INLINE bool none(typename Simd<T>::Int mask) {
    typename Simd<T>::Int any = mask;
    for (int i = 1; i < Simd<T>::W; i++) any[0] |= mask[i];
    return any[0] == 0;
}

// Lanes of a and b in any order: lane l of the result is number pick(l) of a followed by b.
#define GSA_SHUFFLE2(a, b, pick) __builtin_shufflevector(a, b, pick(0), pick(1))
#define GSA_SHUFFLE4(a, b, pick) __builtin_shufflevector(a, b, pick(0), pick(1), pick(2), pick(3))
#define GSA_SHUFFLE8(a, b, pick) \
    __builtin_shufflevector(a, b, pick(0), pick(1), pick(2), pick(3), pick(4), pick(5), pick(6), pick(7))
#define GSA_SHUFFLE16(a, b, pick)                                                                                  \
    __builtin_shufflevector(a, b, pick(0), pick(1), pick(2), pick(3), pick(4), pick(5), pick(6), pick(7), pick(8), \
                            pick(9), pick(10), pick(11), pick(12), pick(13), pick(14), pick(15))

// Lane l of the result is Pick::lane(l).
template <class T, class Pick>
GSA_INLINE Vec<T> shuffle(Vec<T> a, Vec<T> b) {
    constexpr int W = Simd<T>::W;
    if constexpr (W == 16)
        return GSA_SHUFFLE16(a, b, Pick::lane);
    else if constexpr (W == 8)
        return GSA_SHUFFLE8(a, b, Pick::lane);
    else if constexpr (W == 4)
        return GSA_SHUFFLE4(a, b, Pick::lane);
    else
        return GSA_SHUFFLE2(a, b, Pick::lane);
}

template <int W, int D>
struct Rotate {
    static constexpr int lane(int l) { return (l + D) % W; }
};

template <class T, int D = Simd<T>::W / 2>
GSA_INLINE T sum(Vec<T> v) {
    if constexpr (D == 0)
        return v[0];
    else
        return sum<T, D / 2>(v + shuffle<T, Rotate<Simd<T>::W, D>>(v, v));
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
