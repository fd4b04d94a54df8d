// Which slots take a token, and what that makes of their gates.
#pragma once

#include "decode_tokens.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// The n-th largest of x [M], counted with multiplicity. `space` has room for M numbers. A NaN is passed over.
inline float nth_largest(const float* x, int M, int n, float* space) {
    const float nothing = -__builtin_inff();
    if (n >= M) return nothing;
    __builtin_memcpy(space, x, sizeof(float) * M);
    float found = nothing;
    for (int taken = 0; taken < n; taken++) {
        int best = 0;
        for (int i = 1; i < M; i++) best = space[i] > space[best] || space[best] != space[best] ? i : best;
        found = space[best];
        space[best] = nothing;
    }
    return found;
}

// Decay and write gates [M] of head h of token c; see GsaRouter.
struct Routing {
    const GsaBlock& block;
    const Tokens& tokens;
    float *scores, *weights;  // [M16] each, of this thread

    Routing(const GsaBlock& block, const Tokens& tokens, float* space)
        : block(block), tokens(tokens), scores(space), weights(space + padded_width(block.memory.slots)) {}

    static int64_t space_of(const GsaBlock& block) { return 2 * padded_width(block.memory.slots); }

    void route(int c, int h) const {
        constexpr int W = Simd<float>::W;
        const GsaMemory& memory = block.memory;
        const GsaRouter& router = memory.router;
        const int M = memory.slots, M16 = static_cast<int>(padded_width(M));
        const float* logits = tokens.at(c, router.logits) + h * M;
        choose(router, logits, M, M16);
        const float* gates = tokens.at(c, router.gates) + (router.rates == nullptr ? h * M : h);
        for (int i = 0; i < M; i++) scores[i] = router.rates == nullptr ? gates[i] : -router.rates[h] * gates[0];
        float *decay = tokens.at(c, memory.decay) + h * M, *write = tokens.at(c, memory.write) + h * M;
        const float slower = static_cast<float>(1 / router.temperature);
        for (int i = 0; i < M16; i += W) {
            Vec<float> g = load(scores + i), a, less_one;
            if (router.rates == nullptr) g = log_sigmoid(g) * slower;
            exp_and_less_one<float>(g * load(weights + i), a, less_one);
            store(scores + i, a);
            store(weights + i, -less_one);
        }
        __builtin_memcpy(decay, scores, sizeof(float) * M);
        __builtin_memcpy(write, weights, sizeof(float) * M);
    }

   private:
    // weights [M16] of logits [M]. What is NaN is never left out, and makes all of them NaN.
    void choose(const GsaRouter& router, const float* logits, int M, int M16) const {
        constexpr int W = Simd<float>::W;
        const float nothing = -__builtin_inff();
        const float least = nth_largest(logits, M, router.chosen, weights);
        __builtin_memcpy(scores, logits, sizeof(float) * M);
        for (int i = M; i < M16; i++) scores[i] = nothing;
        if (router.kind == GSA_ROUTER_SIGMOID) {
            for (int i = 0; i < M16; i += W) {
                const Vec<float> x = load(scores + i);
                store(scores + i, x < least ? splat(nothing) : log_sigmoid(x));
            }
            read_out(GSA_READOUT_SOFTMAX, scores, M, M16, weights);
        } else {
            read_out(GSA_READOUT_SOFTMAX, scores, M, M16, weights);
            for (int i = 0; i < M; i++) weights[i] = scores[i] < least ? 0.0f : weights[i];
        }
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
