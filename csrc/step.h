// One token of gated slot attention for each row of a batch: every state is read and written once.
#pragma once

#include "chunks.h"
#include "parallel.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// f(i, kind) for every i below `count` at which something begins: whole vectors, with kind a vector, then the rest one
// by one, with kind a number. `get` and `put` with that kind read and write as much.
template <class T, class F>
GSA_INLINE void each(int count, F f) {
    constexpr int W = Simd<T>::W;
    int i = 0;
    for (; i + W <= count; i += W) f(i, Vec<T>{});
    for (; i < count; i++) f(i, T(0));
}

template <class T>
GSA_INLINE Vec<T> get(const T* p, Vec<T>) {
    return load(p);
}

template <class T>
GSA_INLINE T get(const T* p, T) {
    return *p;
}

template <class T>
GSA_INLINE void put(T* p, Vec<T> x) {
    store(p, x);
}

template <class T>
GSA_INLINE void put(T* p, T x) {
    *p = x;
}

// y [n] += x * row [n]
template <class T>
GSA_INLINE void add_scaled(T* y, T x, const T* row, int n) {
    each<T>(n, [=](int i, auto kind) { put<T>(y + i, get<T>(y + i, kind) + x * get<T>(row + i, kind)); });
}

// Whether all log gates are at most 0, and none is NaN.
inline bool good_gates(const GsaStep& call) {
    bool good = true;
    for (int64_t b = 0; b < call.batch; b++)
        for (int h = 0; h < call.heads; h++) good &= at_most_zero(call.g, b * call.g.batch + h * call.g.head);
    return good;
}

template <class T>
struct Step {
    const GsaStep& call;
    char* memory;  // space() bytes for each thread
    int64_t next;  // head that nobody works on yet

    // Head h of row b, in `space` of space() bytes: its outputs [R, V], and its states [K, M] and [M, V] after the
    // token. There, widths are padded to whole vectors: a, s [M]; k [K]; v [V]; q [R, K]; scores, p [R, M]. Outputs o
    // [R, V] and states are not padded.
    void head(int64_t b, int h, T* space) const {
        const int K = call.q.width, V = call.v.width, M = call.g.width, R = call.queries;
        constexpr int W = Simd<T>::W;
        const int padded = whole_vectors<T>(M);
        T *a = space, *s = a + padded, *k = s + padded, *v = k + whole_vectors<T>(K);
        T *q = v + whole_vectors<T>(V), *scores = q + R * whole_vectors<T>(K), *p = scores + R * padded,
          *o = p + R * padded;
        auto offset = [&](const GsaTensor& x, int64_t head) { return b * x.batch + head * x.head; };
        read(call.g, offset(call.g, h), T(1), a, padded);
        for (int f = 0; f < padded; f += W) {
            Vec<T> e, less_one;
            exp_and_less_one<T>(load(a + f), e, less_one);
            store(a + f, e);
            store(s + f, -less_one);
        }
        if (call.s.data != nullptr) read(call.s, offset(call.s, h), T(1), s, padded);
        read(call.k, offset(call.k, h), T(1), k, whole_vectors<T>(K));
        read(call.v, offset(call.v, h), T(1), v, whole_vectors<T>(V));
        for (int r = 0; r < R; r++)
            read(call.q, offset(call.q, h * R + r), static_cast<T>(call.scale), q + r * whole_vectors<T>(K), K);

        const int64_t unit = (call.state_of == nullptr ? b : call.state_of[b]) * call.heads + h;
        const T* keys = static_cast<const T*>(call.before_k) + unit * K * M;  // [K, M]
        T* new_keys = static_cast<T*>(call.after_k) + unit * K * M;
        for (int i = 0; i < R * padded; i++) scores[i] = 0;
        for (int i = 0; i < K; i++) {
            const T* row = keys + static_cast<int64_t>(i) * M;
            T* out = new_keys + static_cast<int64_t>(i) * M;
            const T written = k[i];
            each<T>(M, [=](int m, auto kind) {
                put<T>(out + m, get<T>(row + m, kind) * get<T>(a + m, kind) + written * get<T>(s + m, kind));
            });
            for (int r = 0; r < R; r++) add_scaled(scores + r * padded, q[r * whole_vectors<T>(K) + i], out, M);
        }
        for (int r = 0; r < R; r++) read_out(call.readout, scores + r * padded, M, padded, p + r * padded);

        const T* values = static_cast<const T*>(call.before_v) + unit * M * V;  // [M, V]
        T* new_values = static_cast<T*>(call.after_v) + unit * M * V;
        for (int i = 0; i < R * V; i++) o[i] = 0;
        for (int m = 0; m < M; m++) {
            const T* row = values + static_cast<int64_t>(m) * V;
            T* out = new_values + static_cast<int64_t>(m) * V;
            const T kept = a[m], written = s[m];
            each<T>(V, [=](int f, auto kind) {
                put<T>(out + f, get<T>(row + f, kind) * kept + written * get<T>(v + f, kind));
            });
            for (int r = 0; r < R; r++) add_scaled(o + r * V, p[r * padded + m], out, V);
        }
        for (int r = 0; r < R; r++) write(o + r * V, T(1), call.o, offset(call.o, h * R + r));
    }

    // Bytes that a thread needs.
    size_t space() const {
        const size_t K = whole_vectors<T>(call.q.width), V = whole_vectors<T>(call.v.width),
                     M = whole_vectors<T>(call.g.width), R = call.queries;
        return ((2 * M + K + V + R * (K + 2 * M + V)) * sizeof(T) + 127) / 64 * 64;
    }

    static void thread(void* context, int rank, int) {
        Step& step = *static_cast<Step*>(context);
        for (;;) {
            const int64_t unit = __atomic_fetch_add(&step.next, 1, __ATOMIC_RELAXED);
            if (unit >= step.call.batch * step.call.heads) return;
            step.head(unit / step.call.heads, static_cast<int>(unit % step.call.heads),
                      reinterpret_cast<T*>(step.memory + static_cast<size_t>(rank) * step.space()));
        }
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
