// Blocks of int8 and int4 weights: what is in them, and products of integers.
#pragma once

#include "linear.h"
#include "linear_load.h"

namespace gsa {
namespace GSA_ISA {
namespace {

constexpr int L = kBlockRows / W;  // vectors per row of a block

// Products of pairs of int16 in each lane of a with those in b, added up.
GSA_INLINE Ints add_pairs_of(Ints a, int32_t b) {
    const Ints other = b - Ints{};
#if defined(__AVX512F__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)other);
#elif defined(__AVX2__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)other);
#elif GSA_X86
    return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)other);
#else
    return ((a << 16) >> 16) * ((other << 16) >> 16) + (a >> 16) * (other >> 16);
#endif
}

#if defined(__AVX512F__)
// Adds four products of bytes (unsigned times signed) to each lane. Not every machine with AVX-512 has the instruction,
// so the compiler may not be told of it; see dot_is_native.
struct NativeDot {
    static constexpr int words = 1;
    GSA_INLINE Ints add(Ints sums, Ints bytes, const int32_t* x) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(bytes), "m"(*x));
        return sums;
    }
};
#endif

// The same integers from what every machine has: products of 16 bits.
struct PortableDot {
    static constexpr int words = 2;
    GSA_INLINE Ints add(Ints sums, Ints bytes, const int32_t* x) {
        const Ints even = bytes & 0x00ff00ff, odd = (bytes >> 8) & 0x00ff00ff;
        return sums + add_pairs_of(even, x[0]) + add_pairs_of(odd, x[1]);
    }
};

bool dot_is_native() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

template <int Bits>
struct Format {
    static constexpr int per_chunk = 32 / Bits;               // weights of a row in 64 bytes
    static constexpr int chunks = kBlockColumns / per_chunk;  // of 64 bytes in a block
    static constexpr int bytes = chunks * 64;                 // of a block

    // Weight i of each lane, times 2 to the power of its shift; see `arrange`.
    GSA_INLINE Floats weight(Ints chunk, int i) {
        const int shift = Bits == 8 ? 8 * i : i < 4 ? 8 * i : 8 * i - 28;
        constexpr int32_t mask = Bits == 8 ? 0xff : 0x0f;
        if (shift == 32 - Bits) return __builtin_convertvector((chunk >> shift) & mask, Floats);
        return __builtin_convertvector(chunk & static_cast<int32_t>(static_cast<uint32_t>(mask) << shift), Floats);
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
