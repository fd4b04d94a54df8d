// The two passes of gated linear attention over one chunk that slots are made of: these are the values of the first,
// which gives scores, and the keys of the second, which slot weights ask. What lies between is the operator's:
//     weigh(team, chunk, state): weights p.raw from `scores`, by rows
//     finish_outputs(team, chunk, to): the outputs are there, and the team is together
//     weigh_backward(team, chunk): the gradient dscores.raw of scores from dp, that of weights, by rows
//     finish_gates(team, chunk, before, dstate): may add to the gradients of gates, gate.reads, and of writes, ds_keys
//     replay_more(team, chunk, before, after): other memories than the two of the passes
#pragma once

#include "chunks.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Letters as in pass.h, and M slots, padded too.
template <class T, class Operator, class CallType>
struct SlotPasses {
    typedef CallType Call;
    const Call& call;
    int queries, K, V, M;                 // R, and widths padded
    Memory memories[kMostMemories] = {};  // [K, M] of the first pass, [M, V] of the second
    int memory_count = 2;
    size_t state_size;  // of all
    int border_size;    // M
    bool bad_gates = false;

    Gates<T> gates;          // [C, M]
    Operand<T> q, k, v;      // [R * C, K], [C, K], [C, V]
    Operand<T> s;            // [C, M]: what is written to the slots
    Operand<T> p;            // [R * C, M]: slot weights
    Operand<T> d_o;          // [R * C, V]
    Operand<T> dscores;      // [R * C, M]
    T* scores;               // [R * C, M]: slot scores, rows p.row apart
    T* A;                    // [R * C, C], rows kChunkRow apart; of either pass
    T* dA;                   // [R * C, C], rows kChunkRow apart
    T* k_transposed;         // [K, C], rows kChunkRow apart
    T* s_transposed;         // [M, C], rows kChunkRow apart
    T* v_transposed;         // [V, C], rows kChunkRow apart
    T* o;                    // [R * C, V], rows v.row apart
    T *dq, *dk, *dv;         // [R * C, K], [C, K], [C, V]; rows as those of q, k and v
    T* dp;                   // [R * C, M], rows p.row apart
    T *ds_keys, *ds_values;  // [C, M]: gradient of s as the keys of the second pass and the values of the first
    T* across;               // [R * C, M], see PassGradients
    T *S_transposed, *dS_transposed;  // [M, K] or [V, M]: state and gradient, of either pass
    GateGradient<T> gate;             // matrices [C, M]

    SlotPasses(Arena& arena, const Call& call, bool backward) : call(call) {
        queries = call.shape.queries;
        K = whole_vectors<T>(call.q.width);
        V = whole_vectors<T>(call.v.width);
        M = whole_vectors<T>(call.g.width);
        const ptrdiff_t key_row = row_of<T>(M), value_row = row_of<T>(V);
        memories[0] = {K,
                       M,
                       key_row,
                       0,
                       call.q.width,
                       call.g.width,
                       call.initial_k,
                       call.final_k,
                       call.kept_k,
                       call.dfinal_k,
                       call.dinitial_k};
        memories[1] = {M,
                       V,
                       value_row,
                       static_cast<size_t>(K * key_row),
                       call.g.width,
                       call.v.width,
                       call.initial_v,
                       call.final_v,
                       call.kept_v,
                       call.dfinal_v,
                       call.dinitial_v};
        state_size = memories[1].offset + M * value_row;
        border_size = M;

        // The wide matrices of the two passes take turns in the same memory, which so stays in the cache.
        const int rows = queries * kChunk;
        T* buffers[4];
        const ptrdiff_t row = row_of<T>(K) > row_of<T>(V) ? row_of<T>(K) : row_of<T>(V);
        const int transposed_rows = K > V ? K : V;
        buffers[0] = arena.take<T>(rows * row);
        buffers[1] = arena.take<T>(rows * row);
        buffers[2] = arena.take<T>(transposed_rows * kChunkRow);
        buffers[3] = backward ? arena.take<T>(rows * row) : nullptr;
        q = ungated(buffers[0], K);
        k = ungated(buffers[1], K);
        k_transposed = buffers[2];
        dq = buffers[3];
        v = ungated(buffers[0], V);
        o = buffers[1];
        d_o = ungated(buffers[1], V);
        v_transposed = buffers[2];
        dv = buffers[3];

        s = take_operand<T>(arena, kChunk, M, true);
        p = take_operand<T>(arena, rows, M, true);
        gates = take_gates<T>(arena, M, s.row);
        scores = arena.take<T>(rows * p.row);
        s_transposed = arena.take<T>(M * kChunkRow);
        A = arena.take<T>(rows * kChunkRow);
        if (!backward) return;
        dscores = take_operand<T>(arena, rows, M, true);
        dA = arena.take<T>(rows * kChunkRow);
        dk = arena.take<T>(kChunk * k.row);
        dp = arena.take<T>(rows * p.row);
        ds_keys = arena.take<T>(kChunk * s.row);
        ds_values = arena.take<T>(kChunk * s.row);
        across = arena.take<T>(rows * p.row);
        const size_t keys = M * row_of<T>(K), values = V * row_of<T>(M), size = keys > values ? keys : values;
        S_transposed = arena.take<T>(size);
        dS_transposed = arena.take<T>(size);
        gate = take_gate_gradient<T>(arena, gates);
    }

    Operator& self() { return static_cast<Operator&>(*this); }

    // A matrix [.., width] that has no decay.
    static Operand<T> ungated(T* data, int width) { return {data, data, data, width, row_of<T>(width)}; }

    // The first pass: queries find their slots. The gate is on the side of the values.
    Pass<T> key_pass(const HeadChunk& chunk) const {
        return {chunk.tokens, queries, q, k, s, nullptr, &gates, k_transposed, A, memories[0].row};
    }

    // The second pass: slot weights read the values. The gate is on the side of the keys.
    Pass<T> value_pass(const HeadChunk& chunk) const {
        return {chunk.tokens, queries, p, s, v, &gates, nullptr, s_transposed, A, memories[1].row};
    }

    // The chunk's gates and s. The team has waited before, and waits at the end.
    void read_writes(const Team& team, const HeadChunk& chunk) {
        gates.tokens = chunk.tokens;
        bad_gates |= !read_gate(team, call.g, chunk, gates, call.s.data == nullptr ? s.raw : nullptr);
        if (call.s.data != nullptr) read_rows(team, call.s, chunk, 1, T(1), s.raw, s.row, M);
        team.wait();
        gates.prepare(team);
        team.wait();
        gates.decide(chunk.count);
        decay_early(team, gates, s);
        team.wait();
    }

    // What this chunk writes at its end, then what the next one reads.
    void prefetch(const Team& team, const HeadChunk& chunk, const HeadChunk& next) const {
        team.prefetcher->clear();
        prefetch_rows(team, call.o, chunk, queries);
        prefetch_rows(team, call.g, next, 1);
        prefetch_rows(team, call.s, next, 1);
        prefetch_rows(team, call.q, next, queries);
        prefetch_rows(team, call.k, next, 1);
        prefetch_rows(team, call.v, next, 1);
    }

    void prefetch_backward(const Team& team, const HeadChunk& chunk, const HeadChunk& next) const {
        prefetch(team, chunk, next);
        prefetch_rows(team, call.d_o, next, queries);
        prefetch_rows(team, call.slots, next, queries);
        prefetch_rows(team, call.dv, chunk, 1);
        prefetch_rows(team, call.dk, chunk, 1);
        prefetch_rows(team, call.dq, chunk, queries);
    }

    // The chunk's outputs, and `state` (both memories) from before the chunk to after it.
    void forward(const Team& team, const HeadChunk& chunk, T* state) {
        T *keys = state, *values = state + memories[1].offset;
        read_rows(team, call.q, chunk, queries, static_cast<T>(call.shape.scale), q.raw, q.row, K);
        read_rows(team, call.k, chunk, 1, T(1), k.raw, k.row, K);
        read_writes(team, chunk);
        transpose_together(team, static_cast<const T*>(k.raw), k.row, chunk.tokens, K, k_transposed, kChunkRow);
        transpose_together(team, static_cast<const T*>(s.in), s.row, chunk.tokens, M, s_transposed, kChunkRow);
        team.wait();

        const Pass<T> first = key_pass(chunk);
        first.scores(team);
        team.wait();
        first.outputs(team, keys, whole_rows(chunk, scores, p.row));
        if (gates.strong) team.wait();  // else by rows, as below
        if (call.slots.data != nullptr)
            write_rows(team, static_cast<const T*>(scores), p.row, T(1), chunk, queries, call.slots);
        self().weigh(team, chunk, state, state);
        decay_late(team, gates, queries, p);
        team.wait();
        first.update(team, keys, keys);
        team.wait();

        const Pass<T> second = value_pass(chunk);
        read_rows(team, call.v, chunk, 1, T(1), v.raw, v.row, V);
        second.scores(team);
        team.wait();
        const Rows<T> to = rows_for(call.o, chunk, T(1), V, o, v.row, queries);
        second.outputs(team, values, to);
        team.wait();
        second.update(team, values, values);
        self().finish_outputs(team, chunk, to);
        finish_rows<T>(team, to, o, T(1), chunk, queries, call.o);
        team.wait();
    }

    // The state after the chunk from that before it.
    void replay(const Team& team, const HeadChunk& chunk, const T* before, T* after) {
        read_rows(team, call.k, chunk, 1, T(1), k.raw, k.row, K);
        read_rows(team, call.v, chunk, 1, T(1), v.raw, v.row, V);  // not where the keys are
        read_writes(team, chunk);
        key_pass(chunk).update(team, before, after);
        value_pass(chunk).update(team, before + memories[1].offset, after + memories[1].offset);
        self().replay_more(team, chunk, before, after);
        team.wait();
    }

    // Adds to border [M] what a state and its gradient at the end of the chunk say of the gates there.
    void gates_at_border(const Team& team, const HeadChunk& chunk, const T* state, const T* dstate, T* border) const {
        const size_t values = memories[1].offset;
        GSA_ISA::gates_at_border<T>(team, value_pass(chunk), state + values, dstate + values, border, nullptr);
        team.wait();
        GSA_ISA::gates_at_border<T>(team, key_pass(chunk), state, dstate, nullptr, border);
        team.wait();
    }

    // The chunk's gradients, from the state before it; `dstate` goes from the gradient of the state after the chunk to
    // that of the state before it, and `border` [M] along with it.
    void backward(const Team& team, const HeadChunk& chunk, const T* before, T* dstate, T* border) {
        const size_t values = memories[1].offset;
        const T scale = static_cast<T>(call.shape.scale);
        read_rows(team, call.v, chunk, 1, T(1), v.raw, v.row, V);
        read_rows(team, call.d_o, chunk, queries, T(1), d_o.raw, d_o.row, V);
        read_rows(team, call.slots, chunk, queries, T(1), scores, p.row, M);
        read_writes(team, chunk);
        self().weigh(team, chunk, before, nullptr);
        decay_late(team, gates, queries, p);
        transpose_together(team, static_cast<const T*>(v.raw), v.row, chunk.tokens, V, v_transposed, kChunkRow);
        transpose_together(team, static_cast<const T*>(s.in), s.row, chunk.tokens, M, s_transposed, kChunkRow);
        gate.begin(team, gates, border);
        team.wait();

        const Pass<T> second = value_pass(chunk);
        PassGradients<T> d{};
        d.o = d_o;
        d.dq = whole_rows(chunk, dp, p.row);
        d.dk = whole_rows(chunk, ds_keys, s.row);
        d.dv = rows_for(call.dv, chunk, T(1), V, dv, v.row, 1);
        d.dA = dA;
        d.v_transposed = v_transposed;
        d.S_transposed = S_transposed;
        d.dS_transposed = dS_transposed;
        d.transposed_row = row_of<T>(M);
        d.key_gate = &gate;
        d.key_border = border;
        GSA_ISA::backward(team, second, d, before + values, dstate + values);

        self().weigh_backward(team, chunk);
        decay_late(team, gates, queries, dscores);
        finish_rows<T>(team, d.dv, dv, T(1), chunk, 1, call.dv);
        read_rows(team, call.q, chunk, queries, scale, q.raw, q.row, K);
        read_rows(team, call.k, chunk, 1, T(1), k.raw, k.row, K);
        team.wait();
        transpose_together(team, static_cast<const T*>(k.raw), k.row, chunk.tokens, K, k_transposed, kChunkRow);
        team.wait();

        const Pass<T> first = key_pass(chunk);
        d.o = dscores;
        d.outputs = scores;
        d.dq = rows_for(call.dq, chunk, scale, K, dq, q.row, queries);
        d.dk = rows_for(call.dk, chunk, T(1), K, dk, k.row, 1);
        d.dv = whole_rows(chunk, ds_values, s.row);
        d.v_transposed = s_transposed;
        d.transposed_row = row_of<T>(K);
        d.across = across;
        d.key_gate = nullptr;
        d.value_gate = &gate;
        d.value_border = border;
        GSA_ISA::backward(team, first, d, before, dstate);

        finish_rows<T>(team, d.dq, dq, scale, chunk, queries, call.dq);
        finish_rows<T>(team, d.dk, dk, T(1), chunk, 1, call.dk);
        gate.finish(team, gates);
        team.wait();
        self().finish_gates(team, chunk, before, dstate);
        finish_writes(team, chunk);
        team.wait();
    }

    // The gradients of g and s, by rows: through s, or through s = 1 - exp(g).
    void finish_writes(const Team& team, const HeadChunk& chunk) {
        constexpr int W = Simd<T>::W;
        for (int i = team.begin(chunk.tokens); i < team.end(chunk.tokens); i++)
            for (int f = 0; f < M; f += W) {
                const ptrdiff_t to = i * s.row + f;
                const Vec<T> ds = load(ds_keys + to) + load(ds_values + to);
                store(ds_keys + to, ds);
                if (call.s.data == nullptr) store(gate.reads + to, load(gate.reads + to) - ds * load(gates.a + to));
            }
        write_rows(team, static_cast<const T*>(gate.reads), s.row, T(1), chunk, 1, call.dg);
        if (call.s.data != nullptr) write_rows(team, static_cast<const T*>(ds_keys), s.row, T(1), chunk, 1, call.ds);
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
