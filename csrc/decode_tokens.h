// The tokens of a call of decoding, and what lies between the products of a layer.
#pragma once

#include "decode_columns.h"
#include "decode_functions.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Tokens of one sequence stand together, in their order, so that whoever holds a part of its state takes them one after
// another.
struct Tokens {
    int count = 0, sequences = 0;
    const int64_t* state_of = nullptr;  // [count]
    int starts[GSA_MAX_TOKENS + 1];     // [sequences + 1], the first token of each sequence, and the end
    int earlier[GSA_MAX_TOKENS];        // [count], tokens of the same sequence before it
    float* features = nullptr;          // [count, stride]
    int64_t stride = 0;

    Tokens(Arena& arena, int count, const int64_t* state_of, int64_t most_features) : count(count), state_of(state_of) {
        // Vectors that begin inside of the last part may reach beyond it.
        features = arena.take<float>(count * most_features + 4 * kPadding);
        for (int c = 0; c < count; c++) {
            if (c == 0 || state_of[c] != state_of[c - 1]) starts[sequences++] = c;
            earlier[c] = c - starts[sequences - 1];
        }
        starts[sequences] = count;
    }

    // Tokens of its sequence before token c, of which a layer has counted those before this call.
    int64_t position(const GsaHeads& heads, int c) const { return heads.positions[state_of[c]] + earlier[c]; }
    float* at(int c, int64_t place) const { return features + c * stride + place; }
    float* at_or_null(int c, int64_t place) const { return place < 0 ? nullptr : at(c, place); }
};

// Memories are matrices [n, width] that lie in blocks of so many columns, one after another, so that whoever takes a
// block reads straight ahead. Work is cut between them whatever the threads, and no sum crosses a cut.
constexpr int kMemoryBlock = GSA_MEMORY_BLOCK;

// Part of a memory: rows of a block, from one of its columns on.
struct MemoryRows {
    float* data;
    int64_t row;   // distance between them
    int64_t next;  // to the same part of the next block
};

// From `column` on in a memory [n, width].
GSA_INLINE MemoryRows rows_at(float* memory, int64_t n, int64_t width, int64_t column) {
    const int64_t first = column / kMemoryBlock * kMemoryBlock, rest = padded_width(width) - first;
    const int64_t row = rest < kMemoryBlock ? rest : kMemoryBlock;
    return {memory + first * n + column - first, row, n * row};
}

// The results from row `from` to `to` of a product through its convolution.
inline void convolve(const GsaStepConvolution& conv, const Tokens& tokens, int64_t place, int64_t from, int64_t to) {
    constexpr int W = Simd<float>::W;
    const int64_t row = padded_width(conv.channels), before = conv.size - 1;
    to = to < conv.channels ? to : conv.channels;
    for (int c = 0; c < tokens.count; c++) {
        float *x = tokens.at(c, place), *past = conv.past + tokens.state_of[c] * before * row;
        for (int64_t i = from; i < to; i += W) {
            const Vec<float> now = load(x + i);
            Vec<float> sum = conv.bias == nullptr ? Vec<float>{} : load(conv.bias + i);
            for (int64_t back = 0; back < before; back++) {
                const Vec<float> then = load(past + back * row + i);
                sum += then * load(conv.weight + back * row + i);
                if (back > 0) store(past + (back - 1) * row + i, then);
            }
            sum += now * load(conv.weight + before * row + i);
            store(past + (before - 1) * row + i, now);
            const Vec<float> y = apply(conv.function, sum);
            if (i + W <= to)
                store(x + i, y);
            else
                __builtin_memcpy(x + i, &y, sizeof(float) * (to - i));  // what follows belongs to somebody else
        }
    }
}

// What stands behind rows `from` to `to` of a product, of all tokens in their order: whoever has made the rows does it.
inline void behind(const GsaProduct& product, const Tokens& tokens, int64_t from, int64_t to) {
    const GsaGate& gate = product.gate;
    if (product.convolution.size != 0) convolve(product.convolution, tokens, product.output, from, to);
    for (int c = 0; c < tokens.count; c++) {
        float *x = tokens.at(c, product.output + from), *write = tokens.at_or_null(c, gate.write);
        if (write != nullptr) write += from;
        activate(product.function, x, to - from);
        if (gate.kind == GSA_GATE_FORGET) {
            const bool bounded = gate.log_bound != nullptr;
            forget(gate, bounded ? gate.log_bound + from : nullptr, bounded ? gate.log_rest + from : nullptr, x, write,
                   to - from);
        } else if (gate.kind == GSA_GATE_WRITE) {
            double* log_z = gate.log_z + tokens.state_of[c] * padded_width(product.matrix.N) + from;
            write_share(gate, log_z, x, write, to - from);
        }
    }
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
