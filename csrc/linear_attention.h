// Gated linear attention on one chunk: a single pass, gated on either side, on both or on neither.
#pragma once

#include "chunks.h"

namespace gsa {
namespace GSA_ISA {
namespace {

template <class T>
struct LinearAttention {
    typedef GsaLinearAttention Call;
    const Call& call;
    int queries, K, V;   // R, and widths padded
    Memory memories[2];  // [K, V]; there is no second
    static constexpr int memory_count = 1;
    size_t state_size;
    int border_size;  // K + V: the sums for the gate of the keys, then for that of the values
    bool by_key, by_value;
    bool bad_gates = false;

    Gates<T> key_gates, value_gates;               // [C, K], [C, V]
    Operand<T> q, k, v, d_o;                       // [R * C, K], [C, K], [C, V], [R * C, V]
    T* k_transposed;                               // [K, C], rows kChunkRow apart
    T* v_transposed;                               // [V, C], rows kChunkRow apart
    T *A, *dA;                                     // [R * C, C], rows kChunkRow apart
    T* o;                                          // [R * C, V], rows v.row apart
    T *dq, *dk, *dv;                               // [R * C, K], [C, K], [C, V]; rows as those of q, k and v
    T* across;                                     // [R * C, V], see PassGradients
    T *S_transposed, *dS_transposed;               // [V, K]
    GateGradient<T> key_gradient, value_gradient;  // matrices [C, K], [C, V]

    LinearAttention(Arena& arena, const Call& call, bool backward) : call(call) {
        queries = call.shape.queries;
        K = whole_vectors<T>(call.q.width);
        V = whole_vectors<T>(call.v.width);
        by_key = call.gk.data != nullptr;
        by_value = call.gv.data != nullptr;
        const ptrdiff_t row = row_of<T>(V);
        memories[0] = {K,         V,           row,          0, call.q.width, call.v.width, call.initial, call.final,
                       call.kept, call.dfinal, call.dinitial};
        memories[1] = {};
        state_size = K * row;
        border_size = K + V;

        const int rows = queries * kChunk;
        q = take_operand<T>(arena, rows, K, by_key);
        k = take_operand<T>(arena, kChunk, K, by_key);
        v = take_operand<T>(arena, kChunk, V, by_value);
        if (by_key) key_gates = take_gates<T>(arena, K, k.row);
        if (by_value) value_gates = take_gates<T>(arena, V, v.row);
        k_transposed = arena.take<T>(K * kChunkRow);
        A = arena.take<T>(rows * kChunkRow);
        o = arena.take<T>(rows * v.row);
        if (!backward) return;
        d_o = take_operand<T>(arena, rows, V, by_value);
        v_transposed = arena.take<T>(V * kChunkRow);
        dA = arena.take<T>(rows * kChunkRow);
        dq = arena.take<T>(rows * q.row);
        dk = arena.take<T>(kChunk * k.row);
        dv = arena.take<T>(kChunk * v.row);
        across = arena.take<T>(rows * v.row);
        S_transposed = arena.take<T>(V * row_of<T>(K));
        dS_transposed = arena.take<T>(V * row_of<T>(K));
        if (by_key) key_gradient = take_gate_gradient<T>(arena, key_gates);
        if (by_value) value_gradient = take_gate_gradient<T>(arena, value_gates);
    }

    Pass<T> pass(const HeadChunk& chunk) const {
        const Gates<T>* on_keys = by_key ? &key_gates : nullptr;
        const Gates<T>* on_values = by_value ? &value_gates : nullptr;
        return {chunk.tokens, queries, q, k, v, on_keys, on_values, k_transposed, A, memories[0].row};
    }

    // Keys, values and gates. The team waits at the end.
    void read_writes(const Team& team, const HeadChunk& chunk) {
        key_gates.tokens = value_gates.tokens = chunk.tokens;
        read_rows(team, call.k, chunk, 1, T(1), k.raw, k.row, K);
        read_rows(team, call.v, chunk, 1, T(1), v.raw, v.row, V);
        if (by_key) bad_gates |= !read_gate<T>(team, call.gk, chunk, key_gates, nullptr);
        if (by_value) bad_gates |= !read_gate<T>(team, call.gv, chunk, value_gates, nullptr);
        team.wait();
        if (by_key) key_gates.prepare(team);
        if (by_value) value_gates.prepare(team);
        team.wait();
        if (by_key) key_gates.decide(chunk.count);
        if (by_value) value_gates.decide(chunk.count);
        if (by_key) decay_early(team, key_gates, k);
        if (by_value) decay_early(team, value_gates, v);
        team.wait();
    }

    // Queries, and what else the outputs need. The team waits at the end.
    void read_queries(const Team& team, const HeadChunk& chunk) {
        read_rows(team, call.q, chunk, queries, static_cast<T>(call.shape.scale), q.raw, q.row, K);
        if (by_key) decay_late(team, key_gates, queries, q);
        transpose_together(team, static_cast<const T*>(k.in), k.row, chunk.tokens, K, k_transposed, kChunkRow);
        team.wait();
    }

    void prefetch(const Team& team, const HeadChunk& chunk, const HeadChunk& next) const {
        team.prefetcher->clear();
        prefetch_rows(team, call.o, chunk, queries);
        prefetch_rows(team, call.gk, next, 1);
        prefetch_rows(team, call.gv, next, 1);
        prefetch_rows(team, call.k, next, 1);
        prefetch_rows(team, call.v, next, 1);
        prefetch_rows(team, call.q, next, queries);
    }

    void prefetch_backward(const Team& team, const HeadChunk& chunk, const HeadChunk& next) const {
        prefetch(team, chunk, next);
        prefetch_rows(team, call.d_o, next, queries);
        prefetch_rows(team, call.dv, chunk, 1);
        prefetch_rows(team, call.dk, chunk, 1);
        prefetch_rows(team, call.dq, chunk, queries);
    }

    // The chunk's outputs, and `state` [K, V] from before the chunk to after it.
    void forward(const Team& team, const HeadChunk& chunk, T* state) {
        read_writes(team, chunk);
        read_queries(team, chunk);
        const Pass<T> x = pass(chunk);
        x.scores(team);
        team.wait();
        const Rows<T> to = by_value ? whole_rows(chunk, o, v.row) : rows_for(call.o, chunk, T(1), V, o, v.row, queries);
        x.outputs(team, state, to);
        team.wait();
        x.update(team, state, state);
        finish_rows<T>(team, to, o, T(1), chunk, queries, call.o);
        team.wait();
    }

    // The state after the chunk from that before it.
    void replay(const Team& team, const HeadChunk& chunk, const T* before, T* after) {
        read_writes(team, chunk);
        pass(chunk).update(team, before, after);
        team.wait();
    }

    // Adds to border [K + V] what a state and its gradient at the end of the chunk say of the gates there.
    void gates_at_border(const Team& team, const HeadChunk& chunk, const T* state, const T* dstate, T* border) const {
        GSA_ISA::gates_at_border(team, pass(chunk), state, dstate, border, border + K);
        team.wait();
    }

    // The chunk's gradients, from the state before it; `dstate` goes from the gradient of the state after the chunk to
    // that of the state before it, and `border` [K + V] along with it.
    void backward(const Team& team, const HeadChunk& chunk, const T* before, T* dstate, T* border) {
        const T scale = static_cast<T>(call.shape.scale);
        read_writes(team, chunk);
        read_rows(team, call.d_o, chunk, queries, T(1), d_o.raw, d_o.row, V);
        if (by_value) decay_late(team, value_gates, queries, d_o);
        transpose_together(team, static_cast<const T*>(v.in), v.row, chunk.tokens, V, v_transposed, kChunkRow);
        if (by_key) key_gradient.begin(team, key_gates, border);
        if (by_value) value_gradient.begin(team, value_gates, border + K);
        read_queries(team, chunk);
        const Pass<T> x = pass(chunk);
        if (by_value && !value_gates.strong) {  // the gate's gradient wants the outputs
            x.scores(team);
            team.wait();
            x.outputs(team, before, whole_rows(chunk, o, v.row));
            team.wait();
        }
        PassGradients<T> d{};
        d.o = d_o;
        d.outputs = o;
        // On a gated side they are not yet what they will be.
        d.dq = by_key ? whole_rows(chunk, dq, q.row) : rows_for(call.dq, chunk, scale, K, dq, q.row, queries);
        d.dk = by_key ? whole_rows(chunk, dk, k.row) : rows_for(call.dk, chunk, T(1), K, dk, k.row, 1);
        d.dv = by_value ? whole_rows(chunk, dv, v.row) : rows_for(call.dv, chunk, T(1), V, dv, v.row, 1);
        d.dA = dA;
        d.v_transposed = v_transposed;
        d.S_transposed = S_transposed;
        d.dS_transposed = dS_transposed;
        d.transposed_row = row_of<T>(K);
        d.across = across;
        d.key_gate = &key_gradient;
        d.value_gate = &value_gradient;
        d.key_border = border;
        d.value_border = border + K;
        GSA_ISA::backward(team, x, d, before, dstate);

        finish_rows<T>(team, d.dq, dq, scale, chunk, queries, call.dq);
        finish_rows<T>(team, d.dk, dk, T(1), chunk, 1, call.dk);
        finish_rows<T>(team, d.dv, dv, T(1), chunk, 1, call.dv);
        if (by_key) key_gradient.finish(team, key_gates);
        if (by_value) value_gradient.finish(team, value_gates);
        team.wait();
        if (by_key) write_gate(team, key_gradient.reads, key_gates, chunk, call.dgk);
        if (by_value) write_gate(team, value_gradient.reads, value_gates, chunk, call.dgv);
        team.wait();
    }

    // Writes dg [C, width] with rows g.row apart. The gradient of a gate that serves all features is the sum of theirs.
    void write_gate(const Team& team, T* dg, const Gates<T>& g, const HeadChunk& chunk, const GsaTensor& out) {
        if (out.width == 1)
            for (int i = team.begin(chunk.tokens); i < team.end(chunk.tokens); i++) {
                Vec<T> total{};
                for (int f = 0; f < g.width; f += Simd<T>::W) total += load(dg + i * g.row + f);
                dg[i * g.row] = sum<T>(total);
            }
        write_rows(team, static_cast<const T*>(dg), g.row, T(1), chunk, 1, out);
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
