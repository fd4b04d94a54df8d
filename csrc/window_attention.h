// Softmax attention in a sliding window on one chunk of queries of one head, forward and backward: every token sees the
// last W tokens, itself among them, and S sinks, which are the first tokens of its sequence, once they have left its
// window. Sinks have keys and values of their own, and are asked by a query of their own.
//
// Letters as in pass.h. The keys that a chunk can see are its columns: W - 1 from before the chunk, then its own, so
// that token i of the chunk sees the columns i to i + W - 1. Behind them, from `sink_column` on, lie those of sinks.
// Rows of the chunk are taken a few at a time, as many as a tile of registers has, against the columns that any of them
// sees.
#pragma once

#include "chunks.h"
#include "elementary.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Rows or columns from..to.
struct Stretch {
    int from, to;
    int count() const { return to > from ? to - from : 0; }
};

template <class T>
struct WindowAttention {
    typedef GsaWindowAttention Call;
    static constexpr int W = Simd<T>::W;  // numbers of a vector; the window is `window`
    const Call& call;
    int queries, K, V, S;  // R, and widths padded; sinks, padded
    int window;            // no longer than any sequence
    int columns;           // of all keys that a chunk sees, padded
    int sink_column;       // the first of the sinks
    ptrdiff_t P_row;       // distance between rows of P and dS

    Operand<T> q, k, v, d_o;                   // [R * C, K], [columns, K], [columns, V], [R * C, V]
    Operand<T> sink_q, sink_k, sink_v;         // [R * C, K], [S, K], [S, V]
    T *k_transposed, *v_transposed;            // [K, columns], [V, columns]
    T *sink_k_transposed, *sink_v_transposed;  // [K, S], [V, S]
    ptrdiff_t transposed_row;
    T *P, *dS;        // [C, columns and sinks] of one query: weights, and the gradient of scores
    T* o;             // [R * C, V], rows v.row apart
    T *dq, *dsink_q;  // [R * C, K], rows q.row apart
    // Gradients of a head's keys and values, in one piece: [columns, K], [columns, V], [S, K], [S, V].
    ptrdiff_t carry_row;
    size_t carry_size;

    WindowAttention(Arena& arena, const Call& call, bool backward) : call(call) {
        queries = call.shape.queries;
        K = whole_vectors<T>(call.q.width);
        V = whole_vectors<T>(call.v.width);
        S = whole_vectors<T>(call.sinks);
        window = effective_window(call);
        columns = sink_column = whole_vectors<T>(window - 1 + kChunk);
        P_row = row_of<T>(columns + S);
        transposed_row = row_of<T>(columns);
        carry_row = row_of<T>(K > V ? K : V);
        carry_size = static_cast<size_t>(2 * (columns + S)) * carry_row;

        const int rows = queries * kChunk;
        q = take_operand<T>(arena, rows, K, false);
        k = take_operand<T>(arena, columns, K, false);
        v = take_operand<T>(arena, columns, V, false);
        k_transposed = arena.take<T>(K * transposed_row);
        P = arena.take<T>(kChunk * P_row);
        if (S > 0) {
            sink_q = take_operand<T>(arena, rows, K, false);
            sink_k = take_operand<T>(arena, S, K, false);
            sink_v = take_operand<T>(arena, S, V, false);
            sink_k_transposed = arena.take<T>(K * row_of<T>(S));
        }
        o = arena.take<T>(rows * v.row);
        if (!backward) return;
        d_o = take_operand<T>(arena, rows, V, false);
        v_transposed = arena.take<T>(V * transposed_row);
        dS = arena.take<T>(kChunk * P_row);
        dq = arena.take<T>(rows * q.row);
        if (S > 0) {
            sink_v_transposed = arena.take<T>(V * row_of<T>(S));
            dsink_q = arena.take<T>(rows * q.row);
        }
    }

    static int effective_window(const Call& call) {
        int64_t longest = 1;
        for (int64_t n = 0; n < call.shape.sequences; n++) {
            const int64_t seen = call.shape.stops[n] + call.shifts[n] - call.firsts[n];
            longest = seen > longest ? seen : longest;
        }
        return static_cast<int>(longest < call.window ? longest : call.window);
    }

    // The key of the chunk's column 0, as a token of the row that keys lie in; it may be before the first one.
    int64_t first_key(const HeadChunk& chunk) const { return chunk.first + call.shifts[chunk.sequence] - (window - 1); }

    // The columns that hold a key.
    Stretch filled(const HeadChunk& chunk) const {
        const int64_t missing = call.firsts[chunk.sequence] - first_key(chunk);
        return {missing > 0 ? static_cast<int>(missing) : 0, window - 1 + chunk.count};
    }

    // What of them token i sees.
    Stretch seen(const Stretch& filled, int i) const { return {filled.from > i ? filled.from : i, i + window}; }

    // How many sinks token i of the chunk sees.
    int sinks_seen(const HeadChunk& chunk, int i) const {
        if (call.sinks == 0) return 0;
        const int64_t n = chunk.sequence, position = call.befores[n] + chunk.first + i - call.shape.starts[n];
        const int64_t left = position - call.window + 1;  // tokens that have left its window
        return left <= 0 ? 0 : left < call.sinks ? static_cast<int>(left) : call.sinks;
    }

    // Whether any token of the chunk sees a sink.
    bool sees_sinks(const HeadChunk& chunk) const { return sinks_seen(chunk, chunk.count - 1) > 0; }

    static Stretch whole(Stretch x) { return {x.from / W * W, (x.to + W - 1) / W * W}; }

    // The columns of x, [columns, width]; zero where there is no key.
    void read_columns(const Team& team, const GsaTensor& x, const HeadChunk& chunk, const Operand<T>& to) const {
        const Stretch there = filled(chunk);
        const int64_t from = chunk.row * x.batch + chunk.head * x.head;
        for (int i = team.begin(columns); i < team.end(columns); i++) {
            if (i >= there.from && i < there.to)
                read(x, from + (first_key(chunk) + i) * x.time, T(1), to.raw + i * to.row, to.width);
            else
                for (int f = 0; f < to.width; f++) to.raw[i * to.row + f] = 0;
        }
    }

    void read_sinks(const Team& team, const GsaTensor& x, const HeadChunk& chunk, const Operand<T>& to) const {
        for (int i = team.begin(S); i < team.end(S); i++) {
            if (i < call.sinks)
                read(x, chunk.sequence * x.batch + i * x.time + chunk.head * x.head, T(1), to.raw + i * to.row,
                     to.width);
            else
                for (int f = 0; f < to.width; f++) to.raw[i * to.row + f] = 0;
        }
    }

    // What the chunk's weights are made of. The team waits at the end.
    void read_chunk(const Team& team, const HeadChunk& chunk) const {
        const T scale = static_cast<T>(call.shape.scale);
        read_rows(team, call.q, chunk, queries, scale, q.raw, q.row, K);
        read_columns(team, call.k, chunk, k);
        read_columns(team, call.v, chunk, v);
        if (sees_sinks(chunk)) {
            read_rows(team, call.sink_q, chunk, queries, scale, sink_q.raw, sink_q.row, K);
            read_sinks(team, call.sink_k, chunk, sink_k);
            read_sinks(team, call.sink_v, chunk, sink_v);
        }
        team.wait();
        transpose_together(team, static_cast<const T*>(k.raw), k.row, columns, K, k_transposed, transposed_row);
        if (sees_sinks(chunk))
            transpose_together(team, static_cast<const T*>(sink_k.raw), sink_k.row, S, K, sink_k_transposed,
                               row_of<T>(S));
        team.wait();
    }

    void prefetch(const Team& team, const HeadChunk& next) const {
        team.prefetcher->clear();
        HeadChunk keys = next;
        keys.first += call.shifts[next.sequence];
        prefetch_rows(team, call.q, next, queries);
        prefetch_rows(team, call.k, keys, 1);
        prefetch_rows(team, call.v, keys, 1);
        prefetch_rows(team, call.sink_q, next, queries);
        prefetch_rows(team, call.d_o, next, queries);
    }

    // The rows of a chunk that are taken together: `rows` of them from `first` on, against `band` columns.
    struct Group {
        int query, first, rows;
        Stretch band;
        bool sinks;
    };

    // Calls work(group) for the groups of one query that are this member's, whatever the query.
    template <class F>
    void each_group(const Team& team, const HeadChunk& chunk, int query, const F& work) const {
        const int groups = (chunk.count + kTileRows - 1) / kTileRows;
        for (int g = team.begin(groups); g < team.end(groups); g++) {
            const int first = g * kTileRows, left = chunk.count - first;
            const int rows = left < kTileRows ? left : kTileRows;
            const Stretch band = whole({seen(filled(chunk), first).from, first + rows - 1 + window});
            work(Group{query, first, rows, band, sinks_seen(chunk, first + rows - 1) > 0});
        }
    }

    // out [rows of the group, its columns, and those of sinks] = late early, and late_sinks early_sinks.
    void over_columns(const Team& alone, const HeadChunk& chunk, const Group& g, const Operand<T>& late, const T* early,
                      const Operand<T>& late_sinks, const T* early_sinks, T* out) const {
        const ptrdiff_t row = static_cast<ptrdiff_t>(g.query) * chunk.tokens + g.first;
        T* to = out + g.first * P_row;
        gemm<T>(alone, {g.rows,
                        g.band.count(),
                        to + g.band.from,
                        P_row,
                        {late.raw + row * late.row, late.row, 1, early + g.band.from, transposed_row, late.width}});
        if (g.sinks)
            gemm<T>(alone, {g.rows,
                            S,
                            to + sink_column,
                            P_row,
                            {late_sinks.raw + row * late_sinks.row, late_sinks.row, 1, early_sinks, row_of<T>(S),
                             late_sinks.width}});
    }

    // out [rows of the group, width] = weights times the columns' x, and those of sinks times sink_x.
    void of_columns(const Team& alone, const Group& g, const T* weights, const Operand<T>& x, const Operand<T>* sink_x,
                    T* out, ptrdiff_t out_row) const {
        const T* from = weights + g.first * P_row;
        Gemm<T> sum{g.rows,
                    x.width,
                    out,
                    out_row,
                    {from + g.band.from, P_row, 1, x.raw + g.band.from * x.row, x.row, g.band.count()}};
        Product<T> sinks{};
        if (g.sinks && sink_x != nullptr) {
            sinks = {from + sink_column, P_row, 1, sink_x->raw, sink_x->row, S};
            sum.second = &sinks;
        }
        gemm(alone, sum);
    }

    // Calls work(from, lowest, highest) for every vector of the columns that token i may see: from column `from` on,
    // lanes `lowest` to `highest` - 1 of which it does.
    template <class F>
    void each_vector(const HeadChunk& chunk, const Group& g, const Stretch& filled, int i, const F& work) const {
        const Stretch mine = seen(filled, i);
        for (int c = g.band.from; c < g.band.to; c += W) work(c, mine.from - c, mine.to - c);
        if (!g.sinks) return;
        const int sinks = sinks_seen(chunk, i);
        for (int c = 0; c < S; c += W) work(sink_column + c, 0, sinks - c);
    }

    static typename Simd<T>::Int hidden(int lowest, int highest) {
        const typename Simd<T>::Int lane = lane_numbers<T>();
        return (lane < lowest) | (lane >= highest);
    }

    T& number(const GsaTensor& x, const HeadChunk& chunk, int query, int i) const {
        return static_cast<T*>(
            x.data)[chunk.row * x.batch + (chunk.first + i) * x.time + (chunk.head * queries + query) * x.head];
    }

    // Weights from the scores of token i, in place, and the logarithm of the sum of their exponentials.
    void weigh(const HeadChunk& chunk, const Group& g, const Stretch& filled, int i) const {
        T* x = P + i * P_row;
        const T lowest = -static_cast<T>(__builtin_inff());
        Vec<T> most = splat(lowest);
        each_vector(chunk, g, filled, i, [&](int c, int from, int to) {
            const Vec<T> score = hidden(from, to) ? splat(lowest) : load(x + c);
            store(x + c, score);
            most = larger<T>(most, score);
        });
        T highest = most[0];
        for (int l = 1; l < W; l++) highest = most[l] > highest ? most[l] : highest;
        Vec<T> total{};
        each_vector(chunk, g, filled, i, [&](int c, int, int) {
            const Vec<T> e = exp<T>(load(x + c) - highest);
            total += e;
            store(x + c, e);
        });
        const T mass = sum<T>(total), inverse = T(1) / mass;
        each_vector(chunk, g, filled, i, [&](int c, int, int) { store(x + c, load(x + c) * inverse); });
        number(call.lse, chunk, g.query, i) = highest + static_cast<T>(__builtin_log(mass));
    }

    // The chunk's outputs and their log-sum-exps. The team waits at the end.
    void forward(const Team& team, const HeadChunk& chunk) const {
        const Team alone{0, 1, nullptr, team.prefetcher};
        const Stretch there = filled(chunk);
        read_chunk(team, chunk);
        const Rows<T> to = rows_for(call.o, chunk, T(1), V, o, v.row, queries);
        for (int r = 0; r < queries; r++)
            each_group(team, chunk, r, [&](const Group& g) {
                over_columns(alone, chunk, g, q, k_transposed, sink_q, sink_k_transposed, P);
                for (int i = g.first; i < g.first + g.rows; i++) weigh(chunk, g, there, i);
                of_columns(alone, g, P, v, &sink_v, to.data + r * to.query + g.first * to.row, to.row);
            });
        team.wait();
        finish_rows<T>(team, to, o, T(1), chunk, queries, call.o);
        team.wait();
    }

    // From scores in P and gradients of weights in dS to weights and gradients of scores, for token i; the columns that
    // its group does not touch become zero in both.
    void weigh_backward(const HeadChunk& chunk, const Group& g, const Stretch& filled, int i) const {
        T *p = P + i * P_row, *d = dS + i * P_row;
        const T lse = number(call.lse, chunk, g.query, i);
        const T dlse = call.d_lse.data == nullptr ? T(0) : number(call.d_lse, chunk, g.query, i);
        Vec<T> dot{};
        each_vector(chunk, g, filled, i, [&](int c, int from, int to) {
            const Vec<T> weight = hidden(from, to) ? Vec<T>{} : exp<T>(load(p + c) - lse);
            store(p + c, weight);
            dot += weight * load(d + c);
        });
        const T along = sum<T>(dot) - dlse;
        each_vector(chunk, g, filled, i, [&](int c, int, int) { store(d + c, load(p + c) * (load(d + c) - along)); });
        const auto clear = [&](int from, int to) {
            for (int c = from; c < to; c += W) {
                store(p + c, Vec<T>{});
                store(d + c, Vec<T>{});
            }
        };
        clear(0, g.band.from);
        clear(g.band.to, columns);
        if (!g.sinks) clear(sink_column, sink_column + S);
    }

    // dx [columns, width] += weights^T [columns, C] late [C, width], of one query; likewise for sinks.
    void add_columns(const Team& team, const HeadChunk& chunk, const T* weights, const Operand<T>& late, int query,
                     T* dx) const {
        const Team alone{0, 1, nullptr, team.prefetcher};
        const Stretch there = filled(chunk);
        const int tiles = (there.to + kTileRows - 1) / kTileRows;
        for (int t = team.begin(tiles); t < team.end(tiles); t++) {
            const int first = t * kTileRows, last = first + kTileRows < there.to ? first + kTileRows : there.to;
            const Stretch readers{first - window + 1 > 0 ? first - window + 1 : 0,
                                  last < chunk.count ? last : chunk.count};
            if (last > there.from) add_rows(alone, chunk, weights + first, {first, last}, readers, late, query, dx);
        }
    }

    void add_rows(const Team& alone, const HeadChunk& chunk, const T* weights, Stretch rows, Stretch readers,
                  const Operand<T>& late, int query, T* dx) const {
        const T* from = late.raw + (static_cast<ptrdiff_t>(query) * chunk.tokens + readers.from) * late.row;
        Gemm<T> sum{rows.count(),
                    late.width,
                    dx + rows.from * carry_row,
                    carry_row,
                    {weights + readers.from * P_row, 1, P_row, from, late.row, readers.count()}};
        sum.old = sum.out;
        gemm(alone, sum);
    }

    // The chunk's gradients. `carry` holds the gradients of keys and values by the columns of the chunk behind this
    // one, and then by those of this one; the first chunk that is asked gets zeros. The team waits at the end.
    void backward(const Team& team, const HeadChunk& chunk, T* carry) const {
        const Team alone{0, 1, nullptr, team.prefetcher};
        const T scale = static_cast<T>(call.shape.scale);
        const Stretch there = filled(chunk);
        const bool sinks = sees_sinks(chunk);
        T *dk = carry, *dv = dk + columns * carry_row, *dsink_k = dv + columns * carry_row,
          *dsink_v = dsink_k + S * carry_row;
        read_rows(team, call.d_o, chunk, queries, T(1), d_o.raw, d_o.row, V);
        read_chunk(team, chunk);
        transpose_together(team, static_cast<const T*>(v.raw), v.row, columns, V, v_transposed, transposed_row);
        if (sinks)
            transpose_together(team, static_cast<const T*>(sink_v.raw), sink_v.row, S, V, sink_v_transposed,
                               row_of<T>(S));
        move_on(team, dk, K);
        move_on(team, dv, V);
        team.wait();
        const Rows<T> to_q = rows_for(call.dq, chunk, scale, K, dq, q.row, queries);
        for (int r = 0; r < queries; r++) {
            each_group(team, chunk, r, [&](const Group& g) {
                over_columns(alone, chunk, g, q, k_transposed, sink_q, sink_k_transposed, P);
                over_columns(alone, chunk, g, d_o, v_transposed, d_o, sink_v_transposed, dS);
                for (int i = g.first; i < g.first + g.rows; i++) weigh_backward(chunk, g, there, i);
                of_columns(alone, g, dS, k, nullptr, to_q.data + r * to_q.query + g.first * to_q.row, to_q.row);
                if (!sinks) return;
                const ptrdiff_t row = static_cast<ptrdiff_t>(r) * chunk.tokens + g.first;
                gemm<T>(alone, {g.rows,
                                K,
                                dsink_q + row * q.row,
                                q.row,
                                {dS + g.first * P_row + sink_column, P_row, 1, sink_k.raw, sink_k.row, S}});
            });
            team.wait();
            add_columns(team, chunk, dS, q, r, dk);
            add_columns(team, chunk, P, d_o, r, dv);
            if (sinks && team.rank == 0) {
                add_rows(alone, chunk, dS + sink_column, {0, S}, {0, chunk.count}, sink_q, r, dsink_k);
                add_rows(alone, chunk, P + sink_column, {0, S}, {0, chunk.count}, d_o, r, dsink_v);
            }
            team.wait();
        }
        finish_rows<T>(team, to_q, dq, scale, chunk, queries, call.dq);
        if (S > 0) finish_sink_queries(team, chunk, sinks, scale);
        const bool first = chunk.first == call.shape.starts[chunk.sequence];
        write_columns(team, chunk, first, dk, call.dk);
        write_columns(team, chunk, first, dv, call.dv);
        if (S > 0 && first) {
            write_sinks(team, chunk, dsink_k, call.dsink_k);
            write_sinks(team, chunk, dsink_v, call.dsink_v);
        }
        team.wait();
    }

    // The gradients dx [columns, width] by the columns of the chunk before: what was column c is c + kChunk now, and
    // there is nothing yet in the first ones.
    void move_on(const Team& team, T* dx, int width) const {
        for (int block = team.begin(width / W); block < team.end(width / W); block++) {
            T* x = dx + block * W;
            for (int c = columns - 1; c >= 0; c--)
                store(x + c * carry_row, c < kChunk ? Vec<T>{} : load(x + (c - kChunk) * carry_row));
        }
    }

    void finish_sink_queries(const Team& team, const HeadChunk& chunk, bool there, T scale) const {
        if (!there) {
            const int rows = queries * chunk.tokens;
            for (int i = team.begin(rows); i < team.end(rows); i++)
                for (int f = 0; f < K; f++) dsink_q[i * q.row + f] = 0;
        }
        write_rows(team, static_cast<const T*>(dsink_q), q.row, scale, chunk, queries, call.dsink_q);
    }

    // The gradients of keys or values that no earlier chunk sees: the chunk's own and, of the first one, all.
    void write_columns(const Team& team, const HeadChunk& chunk, bool first, const T* dx, const GsaTensor& out) const {
        const Stretch there = filled(chunk);
        const int from = first ? there.from : window - 1;
        const int64_t to = chunk.row * out.batch + chunk.head * out.head;
        for (int c = from + team.begin(there.to - from); c < from + team.end(there.to - from); c++)
            write(dx + c * carry_row, T(1), out, to + (first_key(chunk) + c) * out.time);
    }

    void write_sinks(const Team& team, const HeadChunk& chunk, const T* dx, const GsaTensor& out) const {
        for (int i = team.begin(call.sinks); i < team.end(call.sinks); i++)
            write(dx + i * carry_row, T(1), out, chunk.sequence * out.batch + i * out.time + chunk.head * out.head);
    }
};

// The way of a team through the heads [from, to) of a sequence; see schedule.h.
template <class T>
struct WindowWalk {
    typedef GsaWindowAttention Call;
    WindowAttention<T> op;
    const GsaShape& shape;
    T* carries;  // [group, carry_size], backward

    WindowWalk(Arena& arena, const Call& call, bool backward, const Plan&, int group)
        : op(arena, call, backward), shape(call.shape) {
        carries = backward ? arena.take<T>(op.carry_size * group) : nullptr;
    }

    static size_t state_bytes(const Call& call) {
        Arena nothing;
        return WindowAttention<T>(nothing, call, false).carry_size * sizeof(T);
    }

    bool bad_gates() const { return false; }

    void forward(const Team& team, int64_t n, int from, int to) {
        for (int c = 0; c < chunk_count(shape, n); c++)
            for (int h = from; h < to; h++) {
                const bool last = h + 1 == to;
                op.prefetch(
                    team, chunk_of<T>(shape, n, c + last < chunk_count(shape, n) ? c + last : c, last ? from : h + 1));
                op.forward(team, chunk_of<T>(shape, n, c, h));
            }
    }

    void backward(const Team& team, int64_t n, int from, int to) {
        const size_t size = op.carry_size * (to - from);
        for (size_t i = team.rank; i < size; i += team.size) carries[i] = 0;
        team.wait();
        for (int c = chunk_count(shape, n) - 1; c >= 0; c--)
            for (int h = from; h < to; h++) {
                const bool last = h + 1 == to;
                op.prefetch(team, chunk_of<T>(shape, n, c >= last ? c - last : c, last ? from : h + 1));
                op.backward(team, chunk_of<T>(shape, n, c, h), carries + (h - from) * op.carry_size);
            }
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
