// One pass of gated linear attention over one chunk of one head, forward and backward:
//
//     o_i = sum_{j<=i} (q_i . k_j) v_j, decayed on the side of the keys, of the values, of both or of neither.
//
// Every function is called by all members of a team, each does its part, and what follows waits for the team where it
// says so.
//
// Letters: C tokens of the chunk (`tokens`, at most kChunk), R queries of a key/value head (`queries`), K and V
// features of a key and of a value (`k.width`, `v.width`). C, K and V are padded to whole vectors, and the padding is
// zero. A matrix [rows, columns] lies row by row; its rows begin a fixed distance apart, in numbers, which is called
// `row` or ends in `_row` and may be more than the number of columns. [R * C, ..] has the C tokens of the first query,
// then those of the second.
#pragma once

#include "convert.h"
#include "decay.h"
#include "gemm.h"

namespace gsa {
namespace GSA_ISA {
namespace {

constexpr ptrdiff_t kChunkRow = kChunk + 16;  // distance between rows of [.., C] matrices, for the sake of the cache

// One factor of the products in a chunk: queries or gradients of outputs [R * C, width], keys or values [C, width]. The
// same matrix three times; where it has no decay, all three are the same memory.
template <class T>
struct Operand {
    T* raw;         // [.., width] without decay
    T* in;          // [.., width] with the decay between a token and the chunk's anchor
    T* border;      // [.., width] with the decay between a token and the chunk's border
    int width;      // K, V, or M for slots
    ptrdiff_t row;  // distance between rows, of all three
};

// Where results [R * C, width] or [C, width] go. The tokens of a query are `row` apart, and the first tokens of two
// queries `query` apart, so that it may lie in a tensor of the caller.
template <class T>
struct Rows {
    T* data;
    ptrdiff_t row, query;
};

// Keys or values x [C, width]: they decay towards the reader, and their border is the end of the chunk. From x.raw to
// x.in and x.border, with gates g [C, width].
template <class T>
void decay_early(const Team& team, const Gates<T>& g, const Operand<T>& x) {
    constexpr int W = Simd<T>::W;
    for (int i = team.begin(g.tokens); i < team.end(g.tokens); i++)
        for (int f = 0; f < g.width; f += W) {
            const Vec<T> raw = load(x.raw + i * x.row + f);
            store(x.in + i * x.row + f, raw * load(g.down + i * g.row + f));
            store(x.border + i * x.row + f, raw * load(g.suffix + i * g.row + f));
        }
}

// Queries or gradients of outputs x [R * C, width]: they read what has decayed, and their border is the start of the
// chunk. From x.raw to x.in and x.border, with gates g [C, width] that all queries share.
template <class T>
void decay_late(const Team& team, const Gates<T>& g, int queries, const Operand<T>& x) {
    constexpr int W = Simd<T>::W;
    for (int i = team.begin(queries * g.tokens); i < team.end(queries * g.tokens); i++) {
        const int t = i % g.tokens;
        for (int f = 0; f < g.width; f += W) {
            const Vec<T> raw = load(x.raw + i * x.row + f);
            store(x.in + i * x.row + f, raw * load(g.up + t * g.row + f));
            store(x.border + i * x.row + f, raw * load(g.prefix + t * g.row + f));
        }
    }
}

// The gradient of a gate, gathered from the passes that used it. A gate g_t touches what was written at j < t, or
// before the chunk, and is read at i >= t, or after it. If the chunk was split, that is the sum from t on of all pairs
// by reader minus all pairs by writer, plus all that is read after the chunk. Strong gates cut off most pairs, and the
// rest would drown in the rounding of such a difference; there, what g_t touches is summed by itself.
template <class T>
struct GateGradient {
    // Matrices [C, width] with the distance between rows of the gates.
    T* reads;   // split: reads - writes. Direct: reads of what came from before the chunk. In the end the gradient
    T* writes;  // direct: writes that are read after the chunk
    T* inside;  // direct: pairs with both ends inside, at each gate between them
    T* left;    // [width]. Split: all that is read after the chunk. Direct: what came from before and is read after it

    // All to zero, but `left`. `border` [width] holds all that passes the border after this chunk; it is used up here
    // and set to zero, to be gathered for the border before the chunk.
    void begin(const Team& team, const Gates<T>& g, T* border) const {
        constexpr int W = Simd<T>::W;
        for (int block = team.begin(g.width / W); block < team.end(g.width / W); block++) {
            for (int i = 0; i < g.tokens; i++) {
                store(reads + i * g.row + block * W, Vec<T>{});
                store(writes + i * g.row + block * W, Vec<T>{});
                store(inside + i * g.row + block * W, Vec<T>{});
            }
            store(left + block * W, g.strong ? Vec<T>{} : load(border + block * W));
            store(border + block * W, Vec<T>{});
        }
    }

    // The gradient of the log gate [C, width], in place of `reads`.
    void finish(const Team& team, const Gates<T>& g) const {
        constexpr int W = Simd<T>::W;
        for (int block = team.begin(g.width / W); block < team.end(g.width / W); block++) {
            const int f = block * W;
            Vec<T> after = load(left + f), before{};
            if (g.strong) after *= load(g.total + f);
            for (int i = g.tokens - 1; i >= 0; i--) {
                after += load(reads + i * g.row + f);
                store(reads + i * g.row + f, after + load(inside + i * g.row + f));
            }
            if (!g.strong) continue;
            for (int i = 0; i < g.tokens; i++) {
                store(reads + i * g.row + f, load(reads + i * g.row + f) + before);
                before += load(writes + i * g.row + f);
            }
        }
    }
};

template <class T>
struct Pass {
    int tokens, queries;       // C, R
    Operand<T> q, k, v;        // [R * C, K], [C, K], [C, V]
    const Gates<T>* by_key;    // [C, K], decay on the side of the keys; or null
    const Gates<T>* by_value;  // [C, V], decay on the side of the values; or null
    T* k_transposed;           // [K, C], k.in transposed; rows kChunkRow apart
    T* A;                      // [R * C, C], scores; rows kChunkRow apart
    ptrdiff_t state_row;       // distance between rows of states [K, V]

    bool strong_key() const { return by_key != nullptr && by_key->strong; }
    bool strong_value() const { return by_value != nullptr && by_value->strong; }
    // [K] and [V]: what takes sums seen from the border to the anchor, for chunks that are split; else null.
    const T* half_key() const { return by_key != nullptr && !by_key->strong ? by_key->half : nullptr; }
    const T* half_value() const { return by_value != nullptr && !by_value->strong ? by_value->half : nullptr; }

    // A [R * C, C] = tril(q k^T), decayed on the side of the keys. Needs k_transposed, unless gates are strong.
    void scores(const Team& team) const {
        if (strong_key()) {
            direct_scores(team, *by_key, queries, q.raw, q.row, k.raw, k.row, A, kChunkRow);
            return;
        }
        causal_product(team, q, k_transposed, k.width, A);
    }

    // out [R * C, C] = tril(late.in early) for late [R * C, inner] and early [inner, C]; rows of out and early
    // kChunkRow apart.
    void causal_product(const Team& team, const Operand<T>& late, const T* early, int inner, T* out) const {
        for (int r = 0; r < queries; r++) {
            const T* a = late.in + r * tokens * late.row;
            const Product<T> pairs{a, late.row, 1, early, kChunkRow, inner};
            Gemm<T> g{tokens, tokens, out + r * tokens * kChunkRow, kChunkRow, pairs};
            g.causal = true;
            gemm(team, g);
        }
    }

    // out [R * C, V] from A and the state S [K, V] before the chunk, with decay on the side of the values.
    void outputs(const Team& team, const T* S, const Rows<T>& out) const {
        constexpr int W = Simd<T>::W;
        T* const o = out.data;
        const ptrdiff_t o_row = out.row;
        if (strong_value()) {
            gemm(team, border_reads(S, o, o_row));
            team.wait();
            // By features, as direct_mix goes on.
            for (int block = team.begin(v.width / W); block < team.end(v.width / W); block++)
                for (int i = 0; i < queries * tokens; i++) {
                    T* x = o + i * o_row + block * W;
                    store(x, load(x) * load(by_value->prefix + i % tokens * by_value->row + block * W));
                }
            direct_mix(team, *by_value, queries, A, kChunkRow, v.raw, v.row, o, o_row);
            return;
        }
        for (int r = 0; r < queries; r++) {
            const Product<T> inside{A + r * tokens * kChunkRow, kChunkRow, 1, v.in, v.row, tokens, Band::kLower};
            Gemm<T> g = border_reads(S, o, o_row);
            g.rows = tokens;
            g.out += r * out.query;
            g.first.a += r * tokens * q.row;
            g.between = half_value();
            g.second = &inside;
            gemm(team, g);
        }
        if (by_value == nullptr) return;
        team.wait();
        for (int i = team.begin(queries * tokens); i < team.end(queries * tokens); i++)
            for (int f = 0; f < v.width; f += W) {
                T* x = o + i * o_row + f;
                store(x, load(x) * load(by_value->up + i % tokens * by_value->row + f));
            }
    }

    // o [R * C, V] = q.border S, for the state S [K, V] before the chunk; without decay on the side of the values.
    Gemm<T> border_reads(const T* S, T* o, ptrdiff_t o_row) const {
        return {queries * tokens, v.width, o, o_row, {q.border, q.row, 1, S, state_row, k.width}};
    }

    // The state [K, V] after the chunk from that before it; they may be the same memory.
    void update(const Team& team, const T* before, T* after) const {
        Gemm<T> g{k.width, v.width, after, state_row, {k.border, 1, k.row, v.border, v.row, tokens}};
        g.old = before;
        g.keep_row = by_key != nullptr ? by_key->total : nullptr;
        g.keep_col = by_value != nullptr ? by_value->total : nullptr;
        gemm(team, g);
    }
};

// Where the gradients of one pass go, and what they need besides.
template <class T>
struct PassGradients {
    Operand<T> o;                       // [R * C, V], gradient of the outputs, decayed late on the side of the values
    const T* outputs;                   // [R * C, V], the outputs, if the side of the values is gated; rows o.row apart
    Rows<T> dq, dk, dv;                 // [R * C, K], [C, K], [C, V]; on a gated side with the rows of q, k or v
    T* dA;                              // [R * C, C], gradient of A; rows kChunkRow apart
    T* v_transposed;                    // [V, C], v.in transposed; rows kChunkRow apart
    T *S_transposed, *dS_transposed;    // [V, K], the state and its gradient transposed
    ptrdiff_t transposed_row;           // distance between rows of these two
    T* across;                          // [R * C, V], what is read from before the chunk; rows o.row apart
    const GateGradient<T>* key_gate;    // matrices [C, K], where the side of the keys is gated
    const GateGradient<T>* value_gate;  // matrices [C, V], where the side of the values is gated
    T *key_border, *value_border;       // [K], [V]: the gates' sums for the chunk before this one are gathered here
};

// out [cols, rows] = in [rows, cols] transposed. Members share the rows of `in`, in whole vectors.
template <class T>
void transpose_together(const Team& team, const T* in, ptrdiff_t in_row, int rows, int cols, T* out,
                        ptrdiff_t out_row) {
    const int blocks = rows / Simd<T>::W;
    transpose(in, in_row, cols, out, out_row, team.begin(blocks), team.end(blocks));
}

// sums [K] += S * dS [K, V], summed over columns. `weight` [V] weighs columns, or is null.
template <class T>
void add_row_sums(const Team& team, const Pass<T>& x, const T* S, const T* dS, const T* weight, T* sums) {
    constexpr int W = Simd<T>::W;
    for (int i = team.begin(x.k.width); i < team.end(x.k.width); i++) {
        Vec<T> dot{};
        for (int f = 0; f < x.v.width; f += W) {
            const Vec<T> pair = load(S + i * x.state_row + f) * load(dS + i * x.state_row + f);
            dot += weight != nullptr ? pair * load(weight + f) : pair;
        }
        sums[i] += sum<T>(dot);
    }
}

// sums [V] += S * dS [K, V], summed over rows. `weight` [K] weighs rows, or is null.
template <class T>
void add_column_sums(const Team& team, const Pass<T>& x, const T* S, const T* dS, const T* weight, T* sums) {
    constexpr int W = Simd<T>::W;
    for (int block = team.begin(x.v.width / W); block < team.end(x.v.width / W); block++) {
        const int f = block * W;
        Vec<T> dot{};
        for (int i = 0; i < x.k.width; i++) {
            const Vec<T> pair = load(S + i * x.state_row + f) * load(dS + i * x.state_row + f);
            dot += weight != nullptr ? weight[i] * pair : pair;
        }
        store(sums + f, load(sums + f) + dot);
    }
}

// What a gate has to do with everything that passes a border between chunks: the state S [K, V] there times its
// gradient dS [K, V], added to key_border [K] and value_border [V].
template <class T>
void gates_at_border(const Team& team, const Pass<T>& x, const T* S, const T* dS, T* key_border, T* value_border) {
    const T* nothing = nullptr;
    if (x.by_key != nullptr) add_row_sums(team, x, S, dS, nothing, key_border);
    if (x.by_value != nullptr) add_column_sums(team, x, S, dS, nothing, value_border);
}

// Finishes d.dq [R * C, K] and d.dk [C, K], which hold all but their own decay, and adds to the gradient of the gate on
// the side of the keys.
template <class T>
void finish_key_side(const Team& team, const Pass<T>& x, const PassGradients<T>& d) {
    constexpr int W = Simd<T>::W;
    const Gates<T>& g = *x.by_key;
    const GateGradient<T>& gate = *d.key_gate;
    const bool strong = g.strong;
    for (int block = team.begin(g.width / W); block < team.end(g.width / W); block++) {
        const int f = block * W;
        for (int i = 0; i < x.tokens; i++) {
            const ptrdiff_t offset = i * g.row + f;
            T* dk = d.dk.data + i * x.k.row + f;
            store(dk, load(dk) * load((strong ? g.suffix : g.down) + offset));
            const Vec<T> written = load(dk) * load(x.k.raw + i * x.k.row + f);
            Vec<T> read{};
            for (int r = 0; r < x.queries; r++) {
                const ptrdiff_t to = (r * x.tokens + i) * x.q.row + f;
                store(d.dq.data + to, load(d.dq.data + to) * load((strong ? g.prefix : g.up) + offset));
                read += load(d.dq.data + to) * load(x.q.raw + to);
            }
            store(gate.reads + offset, load(gate.reads + offset) + (strong ? read : read - written));
            if (strong) store(gate.writes + offset, load(gate.writes + offset) + written);
        }
    }
    if (!strong) return;
    direct_mix(team, g, x.queries, d.dA, kChunkRow, x.k.raw, x.k.row, d.dq.data, x.q.row);
    direct_mix_back(team, g, x.queries, d.dA, kChunkRow, x.q.raw, x.q.row, x.k.raw, x.k.row, d.dk.data, x.k.row,
                    gate.inside);
}

// The same for d.dv [C, V] and the gate on the side of the values.
template <class T>
void finish_value_side(const Team& team, const Pass<T>& x, const PassGradients<T>& d) {
    constexpr int W = Simd<T>::W;
    const Gates<T>& g = *x.by_value;
    const GateGradient<T>& gate = *d.value_gate;
    const bool strong = g.strong;
    for (int block = team.begin(g.width / W); block < team.end(g.width / W); block++) {
        const int f = block * W;
        for (int i = 0; i < x.tokens; i++) {
            const ptrdiff_t offset = i * g.row + f;
            T* dv = d.dv.data + i * x.v.row + f;
            store(dv, load(dv) * load((strong ? g.suffix : g.down) + offset));
            const Vec<T> written = load(dv) * load(x.v.raw + i * x.v.row + f);
            Vec<T> read{};
            for (int r = 0; r < x.queries; r++) {
                const ptrdiff_t to = (r * x.tokens + i) * d.o.row + f;
                const Vec<T> o = strong ? load(d.across + to) * load(g.prefix + offset) : load(d.outputs + to);
                read += o * load(d.o.raw + to);
            }
            store(gate.reads + offset, load(gate.reads + offset) + (strong ? read : read - written));
            if (strong) store(gate.writes + offset, load(gate.writes + offset) + written);
        }
    }
    if (!strong) return;
    direct_mix_back(team, g, x.queries, x.A, kChunkRow, d.o.raw, d.o.row, x.v.raw, x.v.row, d.dv.data, x.v.row,
                    gate.inside);
}

// dq, dk, dv and the gates' gradients, from the state `before` [K, V] the chunk and d.o. dS [K, V] is the gradient of
// the state after the chunk, and becomes that of the state before it. The team must have waited before, and waits at
// the end. A is computed here; k_transposed and v_transposed are there already.
template <class T>
void backward(const Team& team, const Pass<T>& x, const PassGradients<T>& d, const T* before, T* dS) {
    const int n = x.tokens;
    transpose_together(team, before, x.state_row, x.k.width, x.v.width, d.S_transposed, d.transposed_row);
    transpose_together(team, static_cast<const T*>(dS), x.state_row, x.k.width, x.v.width, d.dS_transposed,
                       d.transposed_row);
    // Strong gates: what crosses the chunk from side to side, but for the gate's own decay.
    if (x.strong_key())
        add_row_sums(team, x, before, dS, x.by_value != nullptr ? x.by_value->total : nullptr, d.key_gate->left);
    if (x.strong_value())
        add_column_sums(team, x, before, dS, x.by_key != nullptr ? x.by_key->total : nullptr, d.value_gate->left);
    x.scores(team);
    if (x.strong_value())
        direct_scores(team, *x.by_value, x.queries, d.o.raw, d.o.row, x.v.raw, x.v.row, d.dA, kChunkRow);
    else
        x.causal_product(team, d.o, d.v_transposed, x.v.width, d.dA);
    if (x.strong_value()) gemm(team, x.border_reads(before, d.across, d.o.row));
    team.wait();

    for (int r = 0; r < x.queries; r++) {
        const ptrdiff_t first = r * n;
        const T *A = x.A + first * kChunkRow, *dA = d.dA + first * kChunkRow;
        {
            const Product<T> inside{dA, kChunkRow, 1, x.k.in, x.k.row, n, Band::kLower};
            const T* late = d.o.border + first * d.o.row;  // [C, V]
            const Product<T> from_state{late, d.o.row, 1, d.S_transposed, d.transposed_row, x.v.width};
            Gemm<T> g{n, x.k.width, d.dq.data + r * d.dq.query, d.dq.row, from_state};
            g.between = x.half_key();
            if (!x.strong_key()) g.second = &inside;
            gemm(team, g);
        }
        // Sums over the queries of a head: the first of them begins with what the state has, the others add.
        const Product<T> keys{dA, 1, kChunkRow, x.q.in + first * x.q.row, x.q.row, n, Band::kUpper};
        const Product<T> values{A, 1, kChunkRow, d.o.in + first * d.o.row, d.o.row, n, Band::kUpper};
        Gemm<T> dk{
            n, x.k.width, d.dk.data, d.dk.row, {x.v.border, x.v.row, 1, d.dS_transposed, d.transposed_row, x.v.width}};
        Gemm<T> dv{n, x.v.width, d.dv.data, d.dv.row, {x.k.border, x.k.row, 1, dS, x.state_row, x.k.width}};
        if (r == 0) {
            dk.between = x.half_key();
            dv.between = x.half_value();
            if (!x.strong_key()) dk.second = &keys;
            if (!x.strong_value()) dv.second = &values;
            gemm(team, dk);
            gemm(team, dv);
            continue;
        }
        dk.old = dk.out;
        dv.old = dv.out;
        dk.first = keys;
        dv.first = values;
        if (!x.strong_key()) gemm(team, dk);
        if (!x.strong_value()) gemm(team, dv);
    }
    team.wait();

    if (x.by_key != nullptr) finish_key_side(team, x, d);
    if (x.by_value != nullptr) finish_value_side(team, x, d);
    Gemm<T> g{x.k.width, x.v.width, dS, x.state_row, {x.q.border, 1, x.q.row, d.o.border, d.o.row, x.queries * n}};
    g.old = dS;
    g.keep_row = x.by_key != nullptr ? x.by_key->total : nullptr;
    g.keep_col = x.by_value != nullptr ? x.by_value->total : nullptr;
    gemm(team, g);
    team.wait();
    gates_at_border(team, x, before, dS, d.key_border, d.value_border);
    team.wait();
}

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
