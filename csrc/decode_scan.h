// Mamba's selective scan, one token at a time: lanes are channels, whose states are the rows of a memory.
#pragma once

#include "decode_tokens.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Channels `from` to `to`, of all tokens in their order.
inline void scan_channels(const GsaScan& scan, const Tokens& tokens, int64_t from, int64_t to) {
    constexpr int W = Simd<float>::W;
    const int64_t S = scan.states, E = scan.channels;
    for (int c = 0; c < tokens.count; c++) {
        float* memory = scan.memory + tokens.state_of[c] * S * padded_width(E);
        const float *B = tokens.at(c, scan.B), *C = tokens.at(c, scan.C);
        for (int64_t e = from; e < to; e += W) {
            const MemoryRows h = rows_at(memory, S, E, e);
            const float* A = scan.A + (h.data - memory);
            const Vec<float> dt = load(tokens.at(c, scan.dt) + e), u = load(tokens.at(c, scan.u) + e), input = dt * u;
            Vec<float> y{};
            for (int64_t s = 0; s < S; s++) {
                const Vec<float> decay = exp<float>(dt * load(A + s * h.row));
                const Vec<float> state = decay * load(h.data + s * h.row) + input * B[s];
                __builtin_prefetch(A + s * h.row + h.next);
                __builtin_prefetch(h.data + s * h.row + h.next);
                store(h.data + s * h.row, state);
                y += state * C[s];
            }
            store(tokens.at(c, scan.y) + e, (y + u * load(scan.skip + e)) * load(tokens.at(c, scan.gate) + e));
        }
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
