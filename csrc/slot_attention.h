// Gated slot attention on one chunk: two passes of gated linear attention, with the slots as the values of the first
// and the keys of the second, and the readout between them.
#pragma once

#include "chunks.h"

namespace gsa {
namespace GSA_ISA {
namespace {

template <class T>
struct SlotAttention {
    typedef GsaSlotAttention Call;
    const Call& call;
    int queries, K, V, M;  // widths padded
    Memory memories[2];
    static constexpr int memory_count = 2;
    size_t state_size;
    int border_size;

    Gates<T> gates;
    Operand<T> q, k, v, s, p, d_o, dscores;
    T *scores, *k_turned, *s_turned, *v_turned, *A, *dA, *o, *dq, *dk, *dv, *dp, *ds_keys, *ds_values, *across;
    T *S_turned, *dS_turned;
    GateGradient<T> gate;

    SlotAttention(Arena& arena, const Call& call, bool backward) : call(call) {
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
        T* places[4];
        const ptrdiff_t row = row_of<T>(K) > row_of<T>(V) ? row_of<T>(K) : row_of<T>(V);
        const int turned_rows = K > V ? K : V;
        places[0] = arena.take<T>(rows * row);
        places[1] = arena.take<T>(rows * row);
        places[2] = arena.take<T>(turned_rows * kChunkRow);
        places[3] = backward ? arena.take<T>(rows * row) : nullptr;
        q = whole(places[0], K);
        k = whole(places[1], K);
        k_turned = places[2];
        dq = places[3];
        v = whole(places[0], V);
        o = places[1];
        d_o = whole(places[1], V);
        v_turned = places[2];
        dv = places[3];

        s = take_operand<T>(arena, kChunk, M, true);
        p = take_operand<T>(arena, rows, M, true);
        gates = take_gates<T>(arena, M, s.row);
        scores = arena.take<T>(rows * p.row);
        s_turned = arena.take<T>(M * kChunkRow);
        A = arena.take<T>(rows * kChunkRow);
        if (!backward) return;
        dscores = take_operand<T>(arena, rows, M, true);
        dA = arena.take<T>(rows * kChunkRow);
        dk = arena.take<T>(kChunk * k.row);
        dp = arena.take<T>(rows * p.row);
        ds_keys = arena.take<T>(kChunk * s.row);
        ds_values = arena.take<T>(kChunk * s.row);
        across = arena.take<T>(rows * p.row);
        const size_t keys = M * row_of<T>(K), values = V * row_of<T>(M), turned = keys > values ? keys : values;
        S_turned = arena.take<T>(turned);
        dS_turned = arena.take<T>(turned);
        gate = take_gate_gradient<T>(arena, gates);
    }

    static Operand<T> whole(T* place, int width) { return {place, place, place, width, row_of<T>(width)}; }

    // The first pass: queries find their slots. The gate is on the side of the values.
    Pass<T> key_pass(const Place& at) const {
        return {at.tokens, queries, q, k, s, nullptr, &gates, k_turned, A, memories[0].row};
    }

    // The second pass: slot weights read the values. The gate is on the side of the keys.
    Pass<T> value_pass(const Place& at) const {
        return {at.tokens, queries, p, s, v, &gates, nullptr, s_turned, A, memories[1].row};
    }

    // Gates, and what is written to the slots. The team has waited before, and waits at the end.
    void read_writes(const Team& team, const Place& at) {
        gates.tokens = at.tokens;
        read_gate(team, call.g, at, gates, call.s.data == nullptr ? s.raw : nullptr);
        if (call.s.data != nullptr) read_rows(team, call.s, at, 1, T(1), s.raw, s.row, M);
        team.wait();
        gates.prepare(team);
        team.wait();
        gates.decide(at.count);
        decay_early(team, gates, s);
        team.wait();
    }

    // What this chunk writes at its end, then what the next one reads.
    void fetch(const Team& team, const Place& at, const Place& next) const {
        team.ahead->clear();
        fetch_rows(team, call.o, at, queries);
        fetch_rows(team, call.g, next, 1);
        fetch_rows(team, call.s, next, 1);
        fetch_rows(team, call.q, next, queries);
        fetch_rows(team, call.k, next, 1);
        fetch_rows(team, call.v, next, 1);
    }

    void fetch_backward(const Team& team, const Place& at, const Place& next) const {
        fetch(team, at, next);
        fetch_rows(team, call.d_o, next, queries);
        fetch_rows(team, call.slots, next, queries);
        fetch_rows(team, call.dv, at, 1);
        fetch_rows(team, call.dk, at, 1);
        fetch_rows(team, call.dq, at, queries);
    }

    void forward(const Team& team, const Place& at, T* state) {
        T *keys = state, *values = state + memories[1].offset;
        read_rows(team, call.q, at, queries, static_cast<T>(call.shape.scale), q.raw, q.row, K);
        read_rows(team, call.k, at, 1, T(1), k.raw, k.row, K);
        read_writes(team, at);
        turn(team, static_cast<const T*>(k.raw), k.row, at.tokens, K, k_turned, kChunkRow);
        turn(team, static_cast<const T*>(s.in), s.row, at.tokens, M, s_turned, kChunkRow);
        team.wait();

        const Pass<T> first = key_pass(at);
        first.scores(team);
        team.wait();
        first.outputs(team, keys, whole_rows(at, scores, p.row));
        if (gates.strong) team.wait();  // else by rows, as below
        if (call.slots.data != nullptr)
            write_rows(team, static_cast<const T*>(scores), p.row, T(1), at, queries, call.slots);
        weigh(team, at);
        team.wait();
        first.update(team, keys, keys);
        team.wait();

        const Pass<T> second = value_pass(at);
        read_rows(team, call.v, at, 1, T(1), v.raw, v.row, V);
        second.scores(team);
        team.wait();
        const Rows<T> to = rows_for(call.o, at, T(1), V, o, v.row, queries);
        second.outputs(team, values, to);
        team.wait();
        second.update(team, values, values);
        finish_rows<T>(team, to, o, T(1), at, queries, call.o);
        team.wait();
    }

    // Slot weights from slot scores, by rows.
    void weigh(const Team& team, const Place& at) {
        for (int i = team.begin(queries * at.tokens); i < team.end(queries * at.tokens); i++)
            read_out(call.readout, scores + i * p.row, call.g.width, M, p.raw + i * p.row);
        decay_late(team, gates, queries, p);
    }

    void replay(const Team& team, const Place& at, const T* before, T* after) {
        read_rows(team, call.k, at, 1, T(1), k.raw, k.row, K);
        read_rows(team, call.v, at, 1, T(1), v.raw, v.row, V);  // not where the keys are
        read_writes(team, at);
        key_pass(at).update(team, before, after);
        value_pass(at).update(team, before + memories[1].offset, after + memories[1].offset);
        team.wait();
    }

    void gates_at_border(const Team& team, const Place& at, const T* state, const T* dstate, T* border) const {
        const size_t values = memories[1].offset;
        GSA_ISA::gates_at_border<T>(team, value_pass(at), state + values, dstate + values, border, nullptr);
        team.wait();
        GSA_ISA::gates_at_border<T>(team, key_pass(at), state, dstate, nullptr, border);
        team.wait();
    }

    void backward(const Team& team, const Place& at, const T* before, T* dstate, T* border) {
        const size_t values = memories[1].offset;
        const T scale = static_cast<T>(call.shape.scale);
        read_rows(team, call.v, at, 1, T(1), v.raw, v.row, V);
        read_rows(team, call.d_o, at, queries, T(1), d_o.raw, d_o.row, V);
        read_rows(team, call.slots, at, queries, T(1), scores, p.row, M);
        read_writes(team, at);
        weigh(team, at);
        turn(team, static_cast<const T*>(v.raw), v.row, at.tokens, V, v_turned, kChunkRow);
        turn(team, static_cast<const T*>(s.in), s.row, at.tokens, M, s_turned, kChunkRow);
        gate.begin(team, gates, border);
        team.wait();

        const Pass<T> second = value_pass(at);
        PassGradients<T> d{};
        d.o = d_o;
        d.dq = whole_rows(at, dp, p.row);
        d.dk = whole_rows(at, ds_keys, s.row);
        d.dv = rows_for(call.dv, at, T(1), V, dv, v.row, 1);
        d.dA = dA;
        d.v_turned = v_turned;
        d.S_turned = S_turned;
        d.dS_turned = dS_turned;
        d.turned_row = row_of<T>(M);
        d.key_gate = &gate;
        d.key_border = border;
        GSA_ISA::backward(team, second, d, before + values, dstate + values);

        for (int i = team.begin(queries * at.tokens); i < team.end(queries * at.tokens); i++) {
            const ptrdiff_t row = i * p.row;
            read_out_backward(call.readout, scores + row, p.raw + row, dp + row, M, dscores.raw + row);
        }
        decay_late(team, gates, queries, dscores);
        finish_rows<T>(team, d.dv, dv, T(1), at, 1, call.dv);
        read_rows(team, call.q, at, queries, scale, q.raw, q.row, K);
        read_rows(team, call.k, at, 1, T(1), k.raw, k.row, K);
        team.wait();
        turn(team, static_cast<const T*>(k.raw), k.row, at.tokens, K, k_turned, kChunkRow);
        team.wait();

        const Pass<T> first = key_pass(at);
        d.o = dscores;
        d.outputs = scores;
        d.dq = rows_for(call.dq, at, scale, K, dq, q.row, queries);
        d.dk = rows_for(call.dk, at, T(1), K, dk, k.row, 1);
        d.dv = whole_rows(at, ds_values, s.row);
        d.v_turned = s_turned;
        d.turned_row = row_of<T>(K);
        d.across = across;
        d.key_gate = nullptr;
        d.value_gate = &gate;
        d.value_border = border;
        GSA_ISA::backward(team, first, d, before, dstate);

        finish_rows<T>(team, d.dq, dq, scale, at, queries, call.dq);
        finish_rows<T>(team, d.dk, dk, T(1), at, 1, call.dk);
        gate.finish(team, gates);
        team.wait();
        finish_writes(team, at);
        team.wait();
    }

    // The gradients of g and s, by rows: through s, or through s = 1 - exp(g).
    void finish_writes(const Team& team, const Place& at) {
        constexpr int W = Simd<T>::W;
        for (int i = team.begin(at.tokens); i < team.end(at.tokens); i++)
            for (int f = 0; f < M; f += W) {
                const ptrdiff_t to = i * s.row + f;
                const Vec<T> ds = load(ds_keys + to) + load(ds_values + to);
                store(ds_keys + to, ds);
                if (call.s.data == nullptr) store(gate.reads + to, load(gate.reads + to) - ds * load(gates.a + to));
            }
        write_rows(team, static_cast<const T*>(gate.reads), s.row, T(1), at, 1, call.dg);
        if (call.s.data != nullptr) write_rows(team, static_cast<const T*>(ds_keys), s.row, T(1), at, 1, call.ds);
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
