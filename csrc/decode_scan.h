// Mamba's selective scan, one token at a time: lanes are channels, each with its states in the rows of a matrix.
#pragma once

#include "decode_tokens.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Channels `from` to `to`, of all tokens in their order.
inline void scan_channels(const GsaScan& scan, const Tokens& tokens, int64_t from, int64_t to) {
    constexpr int W = Simd<float>::W;
    const int64_t row = padded_width(scan.channels);
    for (int c = 0; c < tokens.count; c++) {
        float* memory = scan.memory + tokens.state_of[c] * scan.states * row;
        const float *B = tokens.at(c, scan.B), *C = tokens.at(c, scan.C);
        for (int64_t e = from; e < to; e += W) {
            const Vec<float> dt = load(tokens.at(c, scan.dt) + e), u = load(tokens.at(c, scan.u) + e), input = dt * u;
            Vec<float> y{};
            for (int s = 0; s < scan.states; s++) {
                float* h = memory + s * row + e;
                const Vec<float> state = exp<float>(dt * load(scan.A + s * row + e)) * load(h) + input * B[s];
                store(h, state);
                y += state * C[s];
            }
            store(tokens.at(c, scan.y) + e, (y + u * load(scan.skip + e)) * load(tokens.at(c, scan.gate) + e));
        }
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
