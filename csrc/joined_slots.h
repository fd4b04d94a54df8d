// Slots that stand for many tokens, in one softmax with what else a token sees, on one chunk. Letters as in
// slot_attention.h; n is how many tokens a slot stands for:
//
//     n_t = a_t n_{t-1} + s_t
//     x_i = e^t score_i / n_i + c ln n_i + b,  -inf while n_i = 0    o = near w + sum_i e^(x_i - total) V~_i / n_i
//
// with t, c, b of a query head, total = log(e^near_lse + sum_i e^x_i) and w = e^(near_lse - total).
#pragma once

#include "slot_passes.h"

namespace gsa {
namespace GSA_ISA {
namespace {

template <class T>
struct JoinedSlots : SlotPasses<T, JoinedSlots<T>, GsaJoinedSlots> {
    typedef SlotPasses<T, JoinedSlots<T>, GsaJoinedSlots> Passes;
    using Passes::call, Passes::queries, Passes::M, Passes::V, Passes::memories, Passes::gates, Passes::s, Passes::p,
        Passes::scores, Passes::dscores, Passes::dp, Passes::d_o, Passes::gate, Passes::ds_keys;
    static constexpr int W = Simd<T>::W;

    // Matrices [C, M], rows s.row apart.
    T* mass;              // n, after each token
    T *per_n, *log_mass;  // 1 / n and ln n; both zero while a slot is empty
    T* mass_gradient;     // of ln n
    T* near;              // [R * C, V], rows near_row apart
    T* near_weight;       // [R * C]: w
    T* head_gradient;     // [R * C, 3]: what each row adds to the gradients of t, c and b
    ptrdiff_t near_row;

    JoinedSlots(Arena& arena, const GsaJoinedSlots& call, bool backward) : Passes(arena, call, backward) {
        memories[this->memory_count++] = {1,
                                          M,
                                          M,
                                          this->state_size,
                                          1,
                                          call.g.width,
                                          call.initial_mass,
                                          call.final_mass,
                                          call.kept_mass,
                                          call.dfinal_mass,
                                          call.dinitial_mass};
        this->state_size += M;
        T** const matrices[] = {&mass, &per_n, &log_mass};
        for (T** x : matrices) *x = arena.take<T>(kChunk * s.row);
        const int rows = queries * kChunk;
        near_row = row_of<T>(V);
        near = arena.take<T>(rows * near_row);
        near_weight = arena.take<T>(rows);
        if (!backward) return;
        mass_gradient = arena.take<T>(kChunk * s.row);
        head_gradient = arena.take<T>(rows * 3);
    }

    size_t mass_at() const { return memories[2].offset; }

    // n after each of the chunk's tokens, from the state `before` the chunk, and the state `after` it, which may be the
    // same memory or null. The team has read gates and writes, and is together at the end.
    void scan(const Team& team, const HeadChunk& chunk, const T* before, T* after) {
        for (int block = team.begin(M / W); block < team.end(M / W); block++) {
            const int f = block * W;
            Vec<T> n = load(before + mass_at() + f);
            for (int i = 0; i < chunk.tokens; i++) {
                const ptrdiff_t at = i * s.row + f;
                n = n * load(gates.a + at) + load(s.raw + at);
                store(mass + at, n);
            }
            if (after != nullptr) store(after + mass_at() + f, n);
        }
        team.wait();
    }

    void replay_more(const Team& team, const HeadChunk& chunk, const T* before, T* after) {
        scan(team, chunk, before, after);
    }

    // Of the query head r: t as e^t, c and b.
    struct Head {
        T sharpness, by_mass, bias;
    };

    Head head_of(const HeadChunk& chunk, int r) const {
        const int h = chunk.head * queries + r;
        const T *t = static_cast<const T*>(call.slot_scale), *c = static_cast<const T*>(call.slot_mass);
        return {static_cast<T>(__builtin_exp(t[h])), c[h], static_cast<const T*>(call.slot_bias)[h]};
    }

    T& number(const GsaTensor& x, const HeadChunk& chunk, int row) const {
        const int r = row / chunk.tokens, i = row % chunk.tokens;
        return static_cast<T*>(
            x.data)[chunk.row * x.batch + (chunk.first + i) * x.time + (chunk.head * queries + r) * x.head];
    }

    void weigh(const Team& team, const HeadChunk& chunk, const T* before, T* after) {
        scan(team, chunk, before, after);
        for (int i = team.begin(chunk.tokens); i < team.end(chunk.tokens); i++)
            for (int f = 0; f < M; f += W) {
                const ptrdiff_t at = i * s.row + f;
                const Vec<T> n = load(mass + at);
                const typename Simd<T>::Int there = n > T(GSA_EMPTY);
                const Vec<T> some = there ? n : splat(T(1));
                store(per_n + at, there ? T(1) / some : Vec<T>{});
                store(log_mass + at, log<T>(some));
            }
        team.wait();
        const int rows = queries * chunk.tokens;
        for (int row = team.begin(rows); row < team.end(rows); row++) {
            if (row % chunk.tokens < chunk.count)
                weigh_row(chunk, row);
            else
                for (int f = 0; f < M; f += W) store(p.raw + row * p.row + f, Vec<T>{});
        }
    }

    // p / n of one row, and the weight of what is near.
    void weigh_row(const HeadChunk& chunk, int row) {
        const Head head = head_of(chunk, row / chunk.tokens);
        const ptrdiff_t token = row % chunk.tokens * s.row;
        const T *score = scores + row * p.row, near_lse = number(call.near_lse, chunk, row);
        T* x = p.raw + row * p.row;
        const T lowest = -static_cast<T>(__builtin_inff());
        Vec<T> most = splat(near_lse);
        for (int f = 0; f < M; f += W) {
            const Vec<T> w = load(per_n + token + f);
            const Vec<T> logit =
                head.sharpness * load(score + f) * w + (head.by_mass * load(log_mass + token + f) + head.bias);
            store(x + f, w > T(0) ? logit : splat(lowest));
            most = larger<T>(load(x + f), most);
        }
        T highest = most[0];
        for (int l = 1; l < W; l++) highest = most[l] > highest ? most[l] : highest;
        if (highest == lowest) {  // nothing at all is seen
            for (int f = 0; f < M; f += W) store(x + f, Vec<T>{});
            near_weight[row] = 0;
            return;
        }
        Vec<T> total{};
        for (int f = 0; f < M; f += W) {
            const Vec<T> e = exp<T>(load(x + f) - highest);
            total += e;
            store(x + f, e);
        }
        const T beside = static_cast<T>(__builtin_exp(near_lse - highest));
        const T inverse = T(1) / (sum<T>(total) + beside);
        near_weight[row] = beside * inverse;
        for (int f = 0; f < M; f += W) store(x + f, load(x + f) * inverse * load(per_n + token + f));
    }

    // Adds what is near to the outputs.
    void finish_outputs(const Team& team, const HeadChunk& chunk, const Rows<T>& to) {
        const int rows = queries * chunk.tokens;
        read_rows(team, call.near, chunk, queries, T(1), near, near_row, V);
        for (int row = team.begin(rows); row < team.end(rows); row++) {
            const int r = row / chunk.tokens, i = row % chunk.tokens;
            if (i >= chunk.count) continue;
            T* o = to.data + r * to.query + i * to.row;
            for (int f = 0; f < V; f += W)
                store(o + f, load(o + f) + near_weight[row] * load(near + row * near_row + f));
        }
    }

    void weigh_backward(const Team& team, const HeadChunk& chunk) {
        const int rows = queries * chunk.tokens;
        read_rows(team, call.near, chunk, queries, T(1), near, near_row, V);
        team.wait();
        // By tokens, since the queries of a head add to the same gradients.
        for (int i = team.begin(chunk.tokens); i < team.end(chunk.tokens); i++) {
            for (int f = 0; f < M; f += W) {
                store(mass_gradient + i * s.row + f, Vec<T>{});
            }
            for (int row = i; row < rows; row += chunk.tokens) {
                if (i < chunk.count) {
                    weigh_row_backward(chunk, row);
                } else {
                    for (int f = 0; f < M; f += W) store(dscores.raw + row * p.row + f, Vec<T>{});
                    for (int x = 0; x < 3; x++) head_gradient[row * 3 + x] = 0;
                }
            }
        }
        team.wait();
        write_rows(team, static_cast<const T*>(near), near_row, T(1), chunk, queries, call.d_near);
        if (team.rank == 0) add_head_gradients(chunk);
    }

    void weigh_row_backward(const HeadChunk& chunk, int row) {
        const Head head = head_of(chunk, row / chunk.tokens);
        const ptrdiff_t token = row % chunk.tokens * s.row;
        const T *score = scores + row * p.row, *y = p.raw + row * p.row, *dy = dp + row * p.row;
        const T *grad = d_o.raw + row * d_o.row, w = near_weight[row];
        T *dx = dscores.raw + row * p.row, *beside = near + row * near_row;
        Vec<T> dot{}, far{};
        for (int f = 0; f < V; f += W) {
            dot += load(grad + f) * load(beside + f);
            store(beside + f, w * load(grad + f));
        }
        for (int f = 0; f < M; f += W) far += load(y + f) * load(dy + f);
        const T along_near = sum<T>(dot), along = sum<T>(far) + w * along_near;  // the gradient times the output
        number(call.d_near_lse, chunk, row) = w * (along_near - along);
        Vec<T> by_scale{}, by_mass{}, by_bias{};
        for (int f = 0; f < M; f += W) {
            const ptrdiff_t at = token + f;
            const Vec<T> weighted = load(y + f) * load(dy + f), per = load(per_n + at);
            const Vec<T> d = weighted - load(y + f) * load(mass + at) * along;
            const Vec<T> logit = head.sharpness * load(score + f) * per;
            by_scale += d * logit;
            by_mass += d * load(log_mass + at);
            by_bias += d;
            store(dx + f, d * head.sharpness * per);
            store(mass_gradient + at, load(mass_gradient + at) + head.by_mass * d - weighted - d * logit);
        }
        T* to = head_gradient + row * 3;
        to[0] = sum<T>(by_scale);
        to[1] = sum<T>(by_mass);
        to[2] = sum<T>(by_bias);
    }

    void add_head_gradients(const HeadChunk& chunk) {
        void* const all[] = {call.dslot_scale, call.dslot_mass, call.dslot_bias};
        for (int r = 0; r < queries; r++)
            for (int x = 0; x < 3; x++) {
                T total = 0;
                for (int i = 0; i < chunk.count; i++) total += head_gradient[(r * chunk.tokens + i) * 3 + x];
                static_cast<T*>(all[x])[(chunk.sequence * call.shape.heads + chunk.head) * queries + r] += total;
            }
    }

    // Through n to gates and writes; dstate's part of it goes to before the chunk.
    void finish_gates(const Team& team, const HeadChunk& chunk, const T* before, T* dstate) {
        for (int block = team.begin(M / W); block < team.end(M / W); block++) {
            const int f = block * W;
            Vec<T> dn = load(dstate + mass_at() + f);
            for (int i = chunk.tokens - 1; i >= 0; i--) {
                const ptrdiff_t at = i * s.row + f;
                const Vec<T> n_before = i > 0 ? load(mass + at - s.row) : load(before + mass_at() + f);
                dn += load(mass_gradient + at) * load(per_n + at);
                store(ds_keys + at, load(ds_keys + at) + dn);
                dn *= load(gates.a + at);
                store(gate.reads + at, load(gate.reads + at) + dn * n_before);
            }
            store(dstate + mass_at() + f, dn);
        }
        team.wait();
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
