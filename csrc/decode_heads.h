// Heads of queries and keys on their way from the projections to the memory.
#pragma once

#include "decode_tokens.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Cosine and sine of every token's angles. Layers that turn by the same frequencies share them: they are computed again
// only where a token's position or the frequencies have changed.
struct Angles {
    struct Known {
        const double* frequencies;
        int64_t position;
    };
    Known* known = nullptr;  // [count]
    float* turns = nullptr;  // [count, 2, most]
    int64_t most = 0;        // frequencies

    Angles(Arena& arena, int count, int64_t most)
        : known(arena.take<Known>(count)), turns(arena.take<float>(count * 2 * most)), most(most) {
        for (int c = 0; known != nullptr && c < count; c++) known[c] = {nullptr, 0};
    }

    float* of(int c) const { return turns + c * 2 * most; }

    // For token c of a layer, at a position. Angles are fp64: in fp32 they would be off by up to 0.06 at position a
    // million.
    void compute(const GsaHeads& heads, int c, int64_t position) const {
        if (known[c].frequencies == heads.frequencies && known[c].position == position) return;
        known[c] = {heads.frequencies, position};
        float *cosine = of(c), *sine = cosine + most;
        for (int i = 0; i < heads.key_width / 2; i++) {
            const double angle = static_cast<double>(position) * heads.frequencies[i];
            cosine[i] = static_cast<float>(__builtin_cos(angle));
            sine[i] = static_cast<float>(__builtin_sin(angle));
        }
    }
};

// x [K] = relu(W x), with `space` of K16 numbers.
inline void map_head(const GsaHeads& heads, float* x, float* space) {
    constexpr int W = Simd<float>::W;
    const int64_t K = heads.key_width, row = padded_width(K);
    for (int64_t j = 0; j < row; j += W) {
        Vec<float> sum{};
        for (int64_t i = 0; i < K; i++) sum += x[i] * load(heads.map + i * row + j);
        store(space + j, apply(GSA_FUNCTION_RELU, sum));
    }
    __builtin_memcpy(x, space, sizeof(float) * K);
}

// x [K] turned as token c, or back with a direction of -1: its first half against the second.
inline void turn_head(const GsaHeads& heads, const Angles& angles, int c, float* x, float direction = 1) {
    if (heads.frequencies == nullptr) return;
    const int half = heads.key_width / 2;
    const float *cosine = angles.of(c), *sine = cosine + angles.most;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i], s = direction * sine[i];
        x[i] = a * cosine[i] - b * s;
        x[half + i] = b * cosine[i] + a * s;
    }
}

// x [K] in place.
inline void norm_head(const GsaHeads& heads, const LinearKernels& linear, const float* norm, float* x) {
    if (norm != nullptr)
        linear.read_input({GSA_INPUT_RMS_NORM, x, norm, heads.epsilon}, heads.key_width, heads.key_width, 1, x);
}

// A head x [K] of token c, in place.
inline void prepare_head(const GsaHeads& heads, const LinearKernels& linear, const Angles& angles, int c,
                         const float* norm, float* x, float* space) {
    if (heads.map != nullptr) map_head(heads, x, space);
    norm_head(heads, linear, norm, x);
    turn_head(heads, angles, c, x);
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
