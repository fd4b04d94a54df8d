// What both operators share: parts of working memory, rows of tensors, states, and the way through sequences.
//
// Letters and distances between rows as in pass.h; `padded` is a width of whole vectors.
#pragma once

#include "arena.h"
#include "pass.h"

namespace gsa {
namespace GSA_ISA {
namespace {

template <class T>
constexpr int whole_vectors(int n) {
    return (n + Simd<T>::W - 1) / Simd<T>::W * Simd<T>::W;
}

// The distance between rows of so many numbers; not a power of two, which would crowd a few lines of the cache.
template <class T>
constexpr ptrdiff_t row_of(int padded) {
    return padded * sizeof(T) % 512 == 0 ? padded + 64 / static_cast<int>(sizeof(T)) : padded;
}

// Gates [C, width] whose rows are as far apart as those of what they gate.
template <class T>
Gates<T> take_gates(Arena& arena, int width, ptrdiff_t row) {
    Gates<T> g{};
    g.width = width;
    g.row = row;
    T** const parts[] = {&g.a, &g.prefix, &g.suffix, &g.up, &g.down};
    for (T** x : parts) *x = arena.take<T>(kChunk * row);
    g.half = arena.take<T>(width);
    g.total = arena.take<T>(width);
    return g;
}

// Room for the gradient of these gates, with their distance between rows.
template <class T>
GateGradient<T> take_gate_gradient(Arena& arena, const Gates<T>& g) {
    const size_t size = kChunk * g.row;
    T *reads = arena.take<T>(size), *writes = arena.take<T>(size), *inside = arena.take<T>(size);
    return {reads, writes, inside, arena.take<T>(g.width)};
}

// A matrix [rows, width], with room for its decayed forms if it is gated.
template <class T>
Operand<T> take_operand(Arena& arena, int rows, int width, bool gated) {
    const ptrdiff_t row = row_of<T>(width);
    T* raw = arena.take<T>(rows * row);
    T* in = gated ? arena.take<T>(rows * row) : raw;
    return {raw, in, gated ? arena.take<T>(rows * row) : raw, width, row};
}

// A chunk of one head of one sequence.
struct HeadChunk {
    int64_t row;    // of the batch
    int64_t first;  // token
    int count;      // of tokens
    int tokens;     // C: count, padded to whole vectors
    int head;       // of keys and values
    int64_t sequence = 0;
};

inline int chunk_count(const GsaShape& shape, int64_t n) {
    return static_cast<int>((shape.stops[n] - shape.starts[n] + kChunk - 1) / kChunk);
}

// Chunk number `index` of sequence n.
template <class T>
HeadChunk chunk_of(const GsaShape& shape, int64_t n, int index, int head) {
    const int64_t first = shape.starts[n] + static_cast<int64_t>(index) * kChunk;
    const int64_t left = shape.stops[n] - first;
    const int count = left < kChunk ? static_cast<int>(left) : kChunk;
    return {shape.rows[n], first, count, whole_vectors<T>(count), head, n};
}

// out [per_head * C, padded] = the chunk's rows of a tensor with `per_head` heads for each of ours, times `scale`; zero
// where there is no token or feature. Rows of out are `row` apart.
template <class T>
void read_rows(const Team& team, const GsaTensor& x, const HeadChunk& chunk, int per_head, T scale, T* out,
               ptrdiff_t row, int padded) {
    for (int i = team.begin(per_head * chunk.tokens); i < team.end(per_head * chunk.tokens); i++) {
        const int r = i / chunk.tokens, t = i % chunk.tokens;
        if (t < chunk.count) {
            const int64_t from =
                chunk.row * x.batch + (chunk.first + t) * x.time + (chunk.head * per_head + r) * x.head;
            read(x, from, scale, out + i * row, padded);
        } else {
            for (int f = 0; f < padded; f++) out[i * row + f] = 0;
        }
    }
}

// Says that this chunk's rows of x will be read next, by the members who will read them.
inline void prefetch_rows(const Team& team, const GsaTensor& x, const HeadChunk& chunk, int per_head) {
    if (x.data == nullptr) return;
    const int size = x.type == GSA_FLOAT64 ? 8 : x.type == GSA_FLOAT32 ? 4 : 2;
    const int begin = team.begin(per_head * chunk.tokens), end = team.end(per_head * chunk.tokens);
    for (int r = begin / chunk.tokens; r * chunk.tokens < end; r++) {
        const int first = r * chunk.tokens < begin ? begin - r * chunk.tokens : 0;
        const int last = end - r * chunk.tokens < chunk.count ? end - r * chunk.tokens : chunk.count;
        const int64_t from =
            chunk.row * x.batch + (chunk.first + first) * x.time + (chunk.head * per_head + r) * x.head;
        team.prefetcher->add(static_cast<const char*>(x.data) + from * size, x.time * size, last - first,
                             x.width * size);
    }
}

// The reverse: the chunk's rows of the tensor `out` = in [per_head * C, out.width], times `scale`, without the padding.
template <class T>
void write_rows(const Team& team, const T* in, ptrdiff_t row, T scale, const HeadChunk& chunk, int per_head,
                const GsaTensor& out) {
    for (int i = team.begin(per_head * chunk.tokens); i < team.end(per_head * chunk.tokens); i++) {
        const int r = i / chunk.tokens, t = i % chunk.tokens;
        if (t >= chunk.count) continue;
        const int64_t to =
            chunk.row * out.batch + (chunk.first + t) * out.time + (chunk.head * per_head + r) * out.head;
        write(in + i * row, scale, out, to);
    }
}

// Working memory [R * C, ..] with rows `row` apart, as a place for results.
template <class T>
Rows<T> whole_rows(const HeadChunk& chunk, T* rows, ptrdiff_t row) {
    return {rows, row, chunk.tokens * row};
}

// Where results [per_head * C, padded] for `out` may be computed: in its own memory, if they are exactly what belongs
// there, else in `scratch` with rows `row` apart, from where `finish_rows` takes them.
template <class T>
Rows<T> rows_for(const GsaTensor& out, const HeadChunk& chunk, T scale, int padded, T* scratch, ptrdiff_t row,
                 int per_head) {
    const int type = sizeof(T) == 8 ? GSA_FLOAT64 : GSA_FLOAT32;
    if (out.type != type || out.width != padded || chunk.count != chunk.tokens || scale != 1)
        return whole_rows(chunk, scratch, row);
    T* first =
        static_cast<T*>(out.data) + chunk.row * out.batch + chunk.first * out.time + chunk.head * per_head * out.head;
    return {first, out.time, out.head};
}

// Copies results from `scratch` to `out`, times `scale`, unless they are there already.
template <class T>
void finish_rows(const Team& team, const Rows<T>& rows, const T* scratch, T scale, const HeadChunk& chunk, int per_head,
                 const GsaTensor& out) {
    if (rows.data == scratch) write_rows(team, scratch, rows.row, scale, chunk, per_head, out);
}

// The chunk's rows of a log gate as to.a [C, width] = exp(g) and, if wanted, write_strength [C, width] = 1 - exp(g),
// rows to.row apart. A gate of width 1 serves all features. Returns whether this member's were good: at most 0, not
// NaN.
template <class T>
bool read_gate(const Team& team, const GsaTensor& g, const HeadChunk& chunk, const Gates<T>& to, T* write_strength) {
    constexpr int W = Simd<T>::W;
    read_rows(team, g, chunk, 1, T(1), to.a, to.row, g.width == 1 ? W : to.width);
    typename Simd<T>::Int bad{};
    for (int i = team.begin(chunk.tokens); i < team.end(chunk.tokens); i++) {
        T* a = to.a + i * to.row;
        for (int f = 0; f < (g.width == 1 ? W : to.width); f += W) {
            const Vec<T> x = load(a + f);
            bad |= ~(x <= T(0));
            Vec<T> e, less_one;
            exp_and_less_one<T>(x, e, less_one);
            store(a + f, e);
            if (write_strength != nullptr) store(write_strength + i * to.row + f, -less_one);
        }
        if (g.width == 1) {
            const T first = a[0];
            for (int f = 0; f < to.width; f++) a[f] = first;
        }
    }
    return none<T>(bad);
}

// One memory of the operator: a padded matrix [rows, cols] in the state of a head, and where the caller has it, dense
// and not padded.
struct Memory {
    int rows, cols;              // padded
    ptrdiff_t row;               // distance between rows
    size_t offset;               // of the matrix in the state of a head, in numbers
    int outer_rows, outer_cols;  // not padded
    const void* initial;         // [N, H, outer_rows, outer_cols], or null
    void* final;                 // [N, H, outer_rows, outer_cols]
    void* kept;                  // [marks, H, outer_rows, outer_cols], or null
    const void* dfinal;          // [N, H, outer_rows, outer_cols], or null
    void* dinitial;              // [N, H, outer_rows, outer_cols]
};

constexpr int kMostMemories = 4;

// The memory's part of `state` = from[index, head], of from [.., H, outer_rows, outer_cols]; all zero if that is null.
template <class T>
void read_state(const Team& team, const Memory& m, const void* from, int64_t index, int heads, int head, T* state) {
    const int64_t size = static_cast<int64_t>(m.outer_rows) * m.outer_cols;
    const T* x = from == nullptr ? nullptr : static_cast<const T*>(from) + (index * heads + head) * size;
    for (int i = team.begin(m.rows); i < team.end(m.rows); i++) {
        T* out = state + m.offset + i * m.row;
        const int there = x != nullptr && i < m.outer_rows ? m.outer_cols : 0;
        for (int j = 0; j < there; j++) out[j] = x[static_cast<int64_t>(i) * m.outer_cols + j];
        for (int j = there; j < m.cols; j++) out[j] = 0;
    }
}

// The reverse: to[index, head] = the memory's part of `state`.
template <class T>
void write_state(const Team& team, const Memory& m, const T* state, void* to, int64_t index, int heads, int head) {
    const int64_t size = static_cast<int64_t>(m.outer_rows) * m.outer_cols;
    T* x = static_cast<T*>(to) + (index * heads + head) * size;
    for (int i = team.begin(m.outer_rows); i < team.end(m.outer_rows); i++)
        for (int j = 0; j < m.outer_cols; j++)
            x[static_cast<int64_t>(i) * m.outer_cols + j] = state[m.offset + i * m.row + j];
}

// The way of a team through the heads [from, to) of sequence n. Op computes chunks:
//     memories, memory_count; state_size, border_size: in numbers, of a head
//     bad_gates: whether a gate was above 0 or NaN, of those that this member has read
//     forward(team, chunk, state), replay(team, chunk, before, after), backward(team, chunk, before, dstate, border)
//     gates_at_border(team, chunk, state, dstate, border)
//     prefetch(team, chunk, next), prefetch_backward(team, chunk, next): memory that will be wanted soon
// Each ends with the team together.
template <class T, class Op>
struct Walk {
    typedef typename Op::Call Call;
    Op op;
    const GsaShape& shape;
    const Plan& plan;
    T* states;    // [group, state_size], of the heads of a group; backward: their gradients
    T* borders;   // [group, border_size], backward: the state times its gradient, summed as the gates need it
    T* replayed;  // [mark_chunks + 1, state_size], backward: before each chunk from one mark to the next, and after the
                  // last

    Walk(Arena& arena, const typename Op::Call& call, bool backward, const Plan& plan, int group)
        : op(arena, call, backward), shape(call.shape), plan(plan) {
        states = arena.take<T>(op.state_size * group);
        borders = backward ? arena.take<T>(static_cast<size_t>(op.border_size) * group) : nullptr;
        replayed = backward ? arena.take<T>(op.state_size * (shape.mark_chunks + 1)) : nullptr;
    }

    static size_t state_bytes(const Call& call) {
        Arena nothing;
        return Op(nothing, call, false).state_size * sizeof(T);
    }

    bool bad_gates() const { return op.bad_gates; }

    int chunks(int64_t n) const { return chunk_count(shape, n); }
    HeadChunk chunk_at(int64_t n, int index, int head) const { return chunk_of<T>(shape, n, index, head); }

    void read_states(const Team& team, const void* const* from, int64_t index, int head, T* state) const {
        for (int m = 0; m < op.memory_count; m++)
            read_state(team, op.memories[m], from[m], index, shape.heads, head, state);
    }

    void write_states(const Team& team, const T* state, void* const* to, int64_t index, int head) const {
        for (int m = 0; m < op.memory_count; m++)
            write_state(team, op.memories[m], state, to[m], index, shape.heads, head);
    }

    // Where the caller has this part of all memories.
    template <class Pointer>
    struct Places {
        Pointer at[kMostMemories] = {};
        bool any = false;

        Places(const Op& op, Pointer Memory::* part) {
            for (int m = 0; m < op.memory_count; m++) any |= (at[m] = op.memories[m].*part) != nullptr;
        }
    };

    void forward(const Team& team, int64_t n, int from, int to) {
        const Places initial(op, &Memory::initial);
        const Places final(op, &Memory::final), kept(op, &Memory::kept);
        const int64_t first_mark = plan.first_mark[n];
        for (int h = from; h < to; h++) read_states(team, initial.at, n, h, states + (h - from) * op.state_size);
        team.wait();
        for (int c = 0; c < chunks(n); c++)
            for (int h = from; h < to; h++) {
                T* state = states + (h - from) * op.state_size;
                if (kept.any && c % shape.mark_chunks == 0) {
                    write_states(team, state, kept.at, first_mark + c / shape.mark_chunks, h);
                    team.wait();
                }
                const bool last_head = h + 1 == to;
                if (last_head && c + 1 == chunks(n))
                    team.prefetcher->clear();
                else
                    op.prefetch(team, chunk_at(n, c, h), chunk_at(n, c + last_head, last_head ? from : h + 1));
                op.forward(team, chunk_at(n, c, h), state);
            }
        for (int h = from; h < to; h++) write_states(team, states + (h - from) * op.state_size, final.at, n, h);
        team.wait();
    }

    void backward(const Team& team, int64_t n, int from, int to) {
        const Places kept(op, &Memory::kept), dinitial(op, &Memory::dinitial);
        const Places dfinal(op, &Memory::dfinal);
        const int64_t first_mark = plan.first_mark[n];
        const int every = shape.mark_chunks, total = chunks(n);
        for (int h = from; h < to; h++) {
            read_states(team, dfinal.at, n, h, states + (h - from) * op.state_size);
            if (team.rank == 0)
                for (int i = 0; i < op.border_size; i++) borders[(h - from) * op.border_size + i] = 0;
        }
        for (int mark = (total + every - 1) / every - 1; mark >= 0; mark--)
            for (int h = from; h < to; h++) {
                const int first = mark * every, stop = first + every < total ? first + every : total;
                T* dstate = states + (h - from) * op.state_size;
                T* border = borders + (h - from) * op.border_size;
                // The state after the last chunk matters only if it has a gradient.
                const bool final_too = stop == total && dfinal.any;
                read_states(team, kept.at, first_mark + mark, h, replayed);
                team.wait();
                for (int c = first; c < stop - !final_too; c++) {
                    T* before = replayed + (c - first) * op.state_size;
                    if (c + 1 < stop)
                        op.prefetch(team, chunk_at(n, c, h), chunk_at(n, c + 1, h));
                    else
                        op.prefetch_backward(team, chunk_at(n, c, h), chunk_at(n, c, h));
                    op.replay(team, chunk_at(n, c, h), before, before + op.state_size);
                }
                if (final_too)
                    op.gates_at_border(team, chunk_at(n, total - 1, h), replayed + (total - first) * op.state_size,
                                       dstate, border);
                for (int c = stop - 1; c >= first; c--) {
                    if (c > first)
                        op.prefetch_backward(team, chunk_at(n, c, h), chunk_at(n, c - 1, h));
                    else if (h + 1 < to)
                        op.prefetch(team, chunk_at(n, c, h), chunk_at(n, first, h + 1));
                    else if (mark > 0)
                        op.prefetch(team, chunk_at(n, c, h), chunk_at(n, first - every, from));
                    op.backward(team, chunk_at(n, c, h), replayed + (c - first) * op.state_size, dstate, border);
                }
            }
        team.wait();
        for (int h = from; h < to; h++) write_states(team, states + (h - from) * op.state_size, dinitial.at, n, h);
        team.wait();
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
