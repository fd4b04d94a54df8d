// Memories of constant size: slots, and linear attention. Both are passes over a matrix whose rows decay, are written
// to and are read, all at once.
#pragma once

#include "decode_tokens.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// How often blocks of a width begin.
GSA_INLINE int blocks_of(int width) { return (width + kMemoryBlock - 1) / kMemoryBlock; }

// A visit to some columns of a memory [n, ..]: row i becomes row i * decay + written[i] * input, and result r is the
// sum of read[r][i] * row i.
struct Visit {
    MemoryRows rows;
    int n;
    const float* decay;    // [n], or of the columns
    const float* written;  // [n]
    const float* input;    // of the columns
    const float* read;     // [R, n], `read_row` apart
    int64_t read_row;
    float* out;  // [R, columns], `out_row` apart
    int64_t out_row;
};

// Of N vectors of columns. `ByRow`: decay is [n]. Without `Update` the memory is only read.
template <int R, int N, bool ByRow, bool Update>
GSA_INLINE void visit_columns(const Visit& p, int column) {
    constexpr int W = Simd<float>::W;
    Vec<float> sums[R][N] = {}, input[N], decay[N];
#pragma GCC unroll 2
    for (int j = 0; j < N; j++) {
        input[j] = load(p.input + column + j * W);
        decay[j] = ByRow ? Vec<float>{} : load(p.decay + column + j * W);
    }
    for (int i = 0; i < p.n; i++) {
        float* row = p.rows.data + i * p.rows.row + column;
#pragma GCC unroll 2
        for (int j = 0; j < N; j++) {
            Vec<float> x = load(row + j * W);
            if constexpr (Update) {
                __builtin_prefetch(row + p.rows.next + j * W);  // as a rule, this thread goes on there
                if constexpr (ByRow)
                    x = x * p.decay[i] + p.written[i] * input[j];
                else
                    x = x * decay[j] + p.written[i] * input[j];
                store(row + j * W, x);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][j] += p.read[r * p.read_row + i] * x;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int j = 0; j < N; j++) store(p.out + r * p.out_row + column + j * W, sums[r][j]);
}

// Of all columns of a block, which are whole vectors.
template <int R, bool ByRow, bool Update>
void visit_block(const Visit& p, int columns) {
    constexpr int W = Simd<float>::W;
    int column = 0;
    for (; column + 2 * W <= columns; column += 2 * W) visit_columns<R, 2, ByRow, Update>(p, column);
    for (; column < columns; column += W) visit_columns<R, 1, ByRow, Update>(p, column);
}

template <bool ByRow, bool Update>
void visit_some(const Visit& p, int R, int columns) {
    switch (R) {
        case 1: visit_block<1, ByRow, Update>(p, columns); break;
        case 2: visit_block<2, ByRow, Update>(p, columns); break;
        case 3: visit_block<3, ByRow, Update>(p, columns); break;
        default: visit_block<4, ByRow, Update>(p, columns);
    }
}

// The visit with R results. Four of them fit in registers; the others read the memory again.
template <bool ByRow>
void visit(Visit p, int R, int columns) {
    visit_some<ByRow, true>(p, R, columns);
    for (int r = 4; r < R; r += 4) {
        p.read += 4 * p.read_row;
        p.out += 4 * p.out_row;
        visit_some<ByRow, false>(p, R - r, columns);
    }
}

// A gate of a memory: of a token, or the same for all.
GSA_INLINE const float* gate_of(const Tokens& tokens, int c, int64_t place, const float* constant) {
    return constant != nullptr ? constant : tokens.at(c, place);
}

// Where results of a block go that may be narrower than its vectors: out [R, width] `row` apart, times `scale`.
inline void write_results(const float* results, int R, int width, float scale, float* out, int64_t row) {
    for (int r = 0; r < R; r++)
        for (int i = 0; i < width; i++) out[r * row + i] = results[r * kMemoryBlock + i] * scale;
}

GSA_INLINE int smaller_of(int a, int b) { return a < b ? a : b; }

// One layer's memories of constant size, for one thread. Letters as in native.h; R query heads read a memory.
struct Memories {
    const GsaBlock& block;
    const Tokens& tokens;
    float* scores;   // [count, HQ, M16], of slots; shared by the team
    float* results;  // [R, kMemoryBlock], of this thread
    float* weights;  // [R, M16], of this thread
    int H, R, K, V, M;

    Memories(const GsaBlock& block, const Tokens& tokens, float* scores, float* space)
        : block(block), tokens(tokens), scores(scores) {
        const GsaHeads& heads = block.heads;
        H = heads.heads * (block.memory.own ? heads.queries : 1);
        R = block.memory.own ? 1 : heads.queries;
        K = heads.key_width;
        V = heads.value_width;
        M = block.memory.slots;
        results = space;
        weights = space + R * kMemoryBlock;
    }

    // Numbers that a thread needs, and of `scores` for a token.
    static int64_t space_of(const GsaBlock& block) {
        return block.heads.queries * (kMemoryBlock + padded_width(block.memory.slots));
    }
    static int64_t scores_of(const GsaBlock& block) {
        if (block.kind != GSA_MEMORY_SLOTS) return 0;
        return block.heads.heads * block.heads.queries * padded_width(block.memory.slots);
    }

    float* scores_at(int c, int h) const { return scores + (static_cast<int64_t>(c) * H + h) * R * padded_width(M); }
    int key_head(int h) const { return block.memory.own ? h / block.heads.queries : h; }

    // This thread's share of f(sequence, head, block) for blocks of features of that width.
    template <class F>
    void share(const Team& team, int width, F f) const {
        const int blocks = blocks_of(width), units = tokens.sequences * H * blocks;
        for (int unit = team.begin(units); unit < team.end(units); unit++)
            f(unit / (H * blocks), unit / blocks % H, unit % blocks * kMemoryBlock);
    }

    // First pass of slots: the memory of keys, and scores.
    void write_keys(int sequence, int h, int first) const {
        const GsaHeads& heads = block.heads;
        const GsaMemory& memory = block.memory;
        const int64_t row = padded_width(M);
        for (int c = tokens.starts[sequence]; c < tokens.starts[sequence + 1]; c++) {
            float* keys = memory.keys + (tokens.state_of[c] * H + h) * K * row;
            const float* a = gate_of(tokens, c, memory.decay, memory.constant_decay) + h * M + first;
            const float* s = gate_of(tokens, c, memory.write, memory.constant_write) + h * M + first;
            const float *k = tokens.at(c, heads.k) + h * K, *q = tokens.at(c, heads.q) + h * R * K;
            const int columns = smaller_of(kMemoryBlock, static_cast<int>(row) - first);
            visit<false>({rows_at(keys, K, M, first), K, a, k, s, q, K, results, kMemoryBlock}, R, columns);
            write_results(results, R, columns, static_cast<float>(heads.scale), scores_at(c, h) + first, row);
        }
    }

    // Second pass: weights of the scores, the memory of values, and outputs.
    void write_values(int sequence, int h, int first) const {
        const GsaMemory& memory = block.memory;
        const int slots = static_cast<int>(padded_width(M));
        for (int c = tokens.starts[sequence]; c < tokens.starts[sequence + 1]; c++) {
            for (int r = 0; r < R; r++)
                read_out(memory.readout, scores_at(c, h) + r * slots, M, slots, weights + r * slots);
            const float* a = gate_of(tokens, c, memory.decay, memory.constant_decay) + h * M;
            const float* s = gate_of(tokens, c, memory.write, memory.constant_write) + h * M;
            visit_values(c, h, h, first, M, a, s, weights, slots, 1.0f);
        }
    }

    // The one pass of linear attention.
    void write_linear(int sequence, int h, int first) const {
        const GsaHeads& heads = block.heads;
        const GsaMemory& memory = block.memory;
        for (int c = tokens.starts[sequence]; c < tokens.starts[sequence + 1]; c++) {
            const float* a = gate_of(tokens, c, memory.decay, memory.constant_decay) + h * K;
            const float *k = tokens.at(c, heads.k) + key_head(h) * K, *q = tokens.at(c, heads.q) + h * R * K;
            visit_values(c, h, key_head(h), first, K, a, k, q, K, static_cast<float>(heads.scale));
        }
    }

    // Values of key head `from` into n rows of memory h, and outputs.
    void visit_values(int c, int h, int from, int first, int n, const float* decay, const float* written,
                      const float* read, int64_t read_row, float scale) const {
        const GsaHeads& heads = block.heads;
        const int64_t row = padded_width(V);
        float* rows = block.memory.values + (tokens.state_of[c] * H + h) * n * row;
        const float* v = tokens.at(c, heads.v) + from * V + first;
        const int columns = smaller_of(kMemoryBlock, static_cast<int>(row) - first);
        visit<true>({rows_at(rows, n, V, first), n, decay, written, v, read, read_row, results, kMemoryBlock}, R,
                    columns);
        write_results(results, R, smaller_of(columns, V - first), scale, tokens.at(c, heads.o) + h * R * V + first, V);
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
