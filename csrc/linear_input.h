// From activations as they come to columns as the kernels read them.
#pragma once

#include "elementary.h"
#include "linear.h"
#include "linear_load.h"
#include "native.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// The largest lane; a NaN may be passed over.
template <int D = W / 2>
GSA_INLINE float largest(Floats v) {
    if constexpr (D == 0)
        return v[0];
    else {
        const Floats other = shuffle<float, Rotate<W, D>>(v, v);
        return largest<D / 2>(v > other ? v : other);
    }
}

// Columns at a time: as many as leave the sums in registers.
#if GSA_VECTOR_BYTES == 64
constexpr int kColumns = 4;
#else
constexpr int kColumns = 2;
#endif

// The share that some of the columns have in fetching bytes that come next, so that they arrive while these columns are
// computed. One column alone is all reading, and reads straight ahead anyway.
struct Share {
    int64_t begin, end;
};

GSA_INLINE Share share_of(int64_t bytes, const Columns& columns, int first, int some) {
    if (columns.count == 1) return {0, 0};
    return {(bytes * first / columns.count + 63) / 64 * 64, bytes * (first + some) / columns.count};
}

GSA_INLINE void prefetch(const void* weights, const Share& share) {
    const char* p = static_cast<const char*>(weights);
    for (int64_t offset = share.begin; offset < share.end; offset += 64) __builtin_prefetch(p + offset, 0, 2);
}

// out [K] = x / sqrt(mean(x^2) + epsilon) * weight, all [K].
void rms_norm(const float* x, const float* weight, float epsilon, int64_t K, float* out) {
    Floats squares{};
    int64_t k = 0;
    for (; k + W <= K; k += W) squares += load(x + k) * load(x + k);
    float total = sum<float>(squares);
    for (; k < K; k++) total += x[k] * x[k];
    const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(K) + epsilon);
    for (k = 0; k < K; k++) out[k] = x[k] * factor * weight[k];
}

// out [K] = silu(gate) * up, of x [2 K] = gate [K], up [K].
void swiglu(const float* x, int64_t K, float* out) {
    int64_t k = 0;
    for (; k + W <= K; k += W) {
        const Floats gate = load(x + k);
        store(out + k, gate * sigmoid<float>(gate) * load(x + K + k));
    }
    if (k == K) return;
    float gate[W] = {}, up[W] = {}, product[W];
    __builtin_memcpy(gate, x + k, sizeof(float) * (K - k));
    __builtin_memcpy(up, x + K + k, sizeof(float) * (K - k));
    store(product, load(gate) * sigmoid<float>(load(gate)) * load(up));
    __builtin_memcpy(out + k, product, sizeof(float) * (K - k));
}

// x [count, stride]; see linear.h.
void read_input(const Input& input, int64_t K, int64_t stride, int count, float* x) {
    for (int c = 0; c < count; c++) {
        float* out = x + c * stride;
        switch (input.kind) {
            case GSA_INPUT_RMS_NORM: rms_norm(input.x + c * K, input.norm, input.epsilon, K, out); break;
            case GSA_INPUT_SWIGLU: swiglu(input.x + c * 2 * K, K, out); break;
            default: __builtin_memcpy(out, input.x + c * K, sizeof(float) * K);
        }
        for (int64_t k = K; k < stride; k++) out[k] = 0;
    }
}

// group_sum [count, groups]: the sums of each group's activations.
void sum_groups(const Matrix& m, const Columns& columns) {
    for (int c = 0; c < columns.count; c++) {
        for (int64_t g = 0; g < m.groups; g++) {
            const int64_t from = g * m.group_blocks;
            const int64_t to = g + 1 < m.groups ? from + m.group_blocks : m.blocks;
            Floats total{};
            for (int64_t k = from * kBlockColumns; k < to * kBlockColumns; k += W)
                total += load(columns.x + c * columns.stride + k);
            columns.group_sum[c * m.groups + g] = sum<float>(total);
        }
    }
}

// Even columns before odd ones in each two vectors that are whole; see `load_two`.
void part_even_from_odd(int64_t K, const Columns& columns) {
    for (int c = 0; c < columns.count; c++) {
        for (int64_t k = 0; k + 2 * W <= K; k += 2 * W) {
            float* x = columns.x + c * columns.stride + k;
            float parted[2 * W];
            for (int i = 0; i < W; i++) {
                parted[i] = x[2 * i];
                parted[W + i] = x[2 * i + 1];
            }
            __builtin_memcpy(x, parted, sizeof(parted));
        }
    }
}

// A weight is taken from its word of 32 bits without being shifted down, that is, multiplied by a power of two.
// Division of x by the same power is exact, and done once instead of once per row. The topmost is shifted, to have no
// sign.
void divide_by_shift(int format, const Columns& columns) {
    const float int8[] = {1, 0x1p-8f, 0x1p-16f, 1, 1, 0x1p-8f, 0x1p-16f, 1};
    const float int4[] = {1, 0x1p-8f, 0x1p-16f, 0x1p-24f, 0x1p-4f, 0x1p-12f, 0x1p-20f, 1};
    const float* factor = format == GSA_WEIGHT_INT8 ? int8 : int4;
    for (int64_t k = 0; k < columns.count * columns.stride; k += 8)
        for (int i = 0; i < 8; i++) columns.x[k + i] *= factor[i];
}

void arrange(const Matrix& m, const Columns& columns) {
    if (m.format == GSA_WEIGHT_BF16) {
        part_even_from_odd(m.K, columns);
    } else if (m.format != GSA_WEIGHT_FP32) {
        sum_groups(m, columns);
        divide_by_shift(m.format, columns);
    }
}

// The scale of integers for x [count], and what x is multiplied with for them. What is not finite makes the scale NaN,
// and so every result.
struct IntegerScale {
    float scale, inverse;
};

GSA_INLINE IntegerScale integer_scale(const float* x, int64_t count) {
    Floats most{}, poison{};
    for (int64_t k = 0; k < count; k += W) {
        const Floats v = load(x + k), magnitude = v < 0.0f ? -v : v;
        most = magnitude > most ? magnitude : most;
        poison += v * 0.0f;
    }
    const float highest = largest(most), not_finite = sum<float>(poison);
    return {highest / 127.0f + not_finite, highest > 1e-30f ? 127.0f / highest : 0.0f};
}

// The integers q of one block x [32]; their sum.
GSA_INLINE int32_t quantise_block(const float* x, float inverse, int32_t (&q)[kBlockColumns]) {
    constexpr float round = 0x1.8p23f;  // added and taken away again, it rounds to nearest, ties to even
    constexpr int32_t round_bits = 0x4b400000;
    for (int k = 0; k < kBlockColumns; k += W) {
        const Ints word = bits<Ints>(load(x + k) * inverse + round) - round_bits;
        __builtin_memcpy(q + k, &word, sizeof(word));
    }
    int32_t total = 0;
    for (int k = 0; k < kBlockColumns; k++) {
        q[k] = static_cast<int8_t>(q[k]);  // of what is not finite, any
        total += q[k];
    }
    return total;
}

// Fours of integers from a block's q [32]; see Columns.
GSA_INLINE void pack_words(const int32_t (&q)[kBlockColumns], int words_per_quad, int32_t* words) {
    if (words_per_quad == 1) {
        int8_t bytes[kBlockColumns];
        for (int k = 0; k < kBlockColumns; k++) bytes[k] = static_cast<int8_t>(q[k]);
        __builtin_memcpy(words, bytes, sizeof(bytes));
        return;
    }
    for (int quad = 0; quad < kBlockColumns / 4; quad++) {
        const int32_t* four = q + 4 * quad;
        for (int odd = 0; odd < 2; odd++)
            words[2 * quad + odd] = static_cast<int32_t>((static_cast<uint32_t>(four[odd]) & 0xffffu) |
                                                         static_cast<uint32_t>(four[odd + 2]) << 16);
    }
}

// The words of all columns.
void quantise(const Matrix& m, const Columns& columns) {
    const int size = block_words(columns.words_per_quad);
    int32_t q[kBlockColumns];
    for (int c = 0; c < columns.count; c++) {
        const float* x = columns.x + c * columns.stride;
        int32_t* words = columns.words + c * m.blocks * size;
        for (int64_t begin = 0; begin < m.blocks; begin += m.shared_blocks) {
            const int64_t end = begin + m.shared_blocks < m.blocks ? begin + m.shared_blocks : m.blocks;
            const IntegerScale found = integer_scale(x + begin * kBlockColumns, (end - begin) * kBlockColumns);
            int32_t total = 0;
            for (int64_t b = begin; b < end; b++) {
                total += quantise_block(x + b * kBlockColumns, found.inverse, q);
                pack_words(q, columns.words_per_quad, words + b * size);
                words[b * size + size - 2] = bits<int32_t>(found.scale);
            }
            words[begin * size + size - 1] = -total & 0xffff;
        }
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
