// Weights from memory to vectors of floats. Compilers widen small integers badly, so x86 is told how.
#pragma once

#include "convert.h"
#include "isa.h"
#include "simd.h"
#if GSA_X86
#include <immintrin.h>
#endif

namespace gsa {
namespace GSA_ISA {
namespace {

constexpr int W = Simd<float>::W;
typedef Vec<float> Floats;
typedef Simd<float>::Int Ints;

GSA_INLINE Ints load_ints(const void* p) {
    Ints v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
}

// Leaves a vector in its register: compilers would rather load it again for every use.
GSA_INLINE void keep_in_register(Floats& v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif GSA_X86
    asm("" : "+x"(v));
#else
    (void)v;
#endif
}

// Two vectors of weights. Those of bf16 are words cut in two, which puts even and odd columns apart: `arrange` does the
// same with activations.
GSA_INLINE void load_two(const float* p, Floats& a, Floats& b) {
    a = load(p);
    b = load(p + W);
}

GSA_INLINE void load_two(const BFloat16* p, Floats& even, Floats& odd) {
    const Ints words = load_ints(p);
    even = bits<Floats>(words << 16);
    odd = bits<Floats>(words & static_cast<int32_t>(0xffff0000));
}

GSA_INLINE Floats load_floats(const float* p) { return load(p); }

GSA_INLINE Floats load_floats(const BFloat16* p) {
#if defined(__AVX512F__)
    const Ints words =
        (Ints)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    const Ints words = (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    typedef uint16_t Halves __attribute__((vector_size(2 * W)));
    Halves halves;
    __builtin_memcpy(&halves, p, sizeof(halves));
    const Ints words = __builtin_convertvector(halves, Ints);
#endif
    return bits<Floats>(words << 16);
}

GSA_INLINE Ints load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif GSA_X86
    int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    const __m128i none = _mm_setzero_si128();
    return (Ints)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), none), none);
#else
    typedef uint8_t Bytes __attribute__((vector_size(W)));
    Bytes bytes;
    __builtin_memcpy(&bytes, p, sizeof(bytes));
    return __builtin_convertvector(bytes, Ints);
#endif
}

GSA_INLINE Floats load_floats(const uint8_t* p) { return __builtin_convertvector(load_bytes(p), Floats); }

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
