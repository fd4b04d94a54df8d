// Sinks, a window and slots in one softmax. A token that leaves the window is written to the slots, unless it is one of
// the first, which stay as sinks. The sums of sinks and of the window are made in blocks as those of a cache, and those
// of the slots are added to them in the same order whatever the threads.
#pragma once

#include "decode_cache.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Units of work that cost differently: `units(each)` calls each(cost, work) for all of them, always in the same order.
// A unit belongs to the member of the team in whose share of the costs its middle lies.
template <class Units>
void share_out(const Team& team, Units units) {
    int64_t total = 0, before = 0;
    units([&](int64_t cost, auto) { total += cost; });
    units([&](int64_t cost, auto work) {
        const int64_t middle = 2 * before + cost;
        before += cost;
        if (middle * team.size / (2 * total) == team.rank) work();
    });
}

// Weights are fetched so many bytes ahead. The processor foresees no step to another page, and the matrix of a head is
// about as long as one; that of the next head, which comes next as a rule, begins where this one ends.
constexpr int kFetchAhead = 2048;

// y [row] += sum over i of x[i] * matrix[i], of a matrix [n, row]: N vectors at a time.
template <int N, class Weight>
GSA_INLINE void add_product_columns(const float* x, int n, const Weight* matrix, int64_t row, float* y) {
    Floats sums[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sums[j] = load(y + j * W);
    for (int i = 0; i < n; i++) {
        const Weight* weights = matrix + i * row;
        for (size_t byte = 0; byte < N * W * sizeof(Weight); byte += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(weights) + kFetchAhead + byte, 0, 2);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sums[j] += x[i] * load_floats(weights + j * W);
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) store(y + j * W, sums[j]);
}

template <class Weight>
void add_product(const float* x, int n, const Weight* matrix, int64_t row, float* y) {
    constexpr int kWide = W == 16 ? 4 : 8;
    int64_t column = 0;
    for (; column + kWide * W <= row; column += kWide * W)
        add_product_columns<kWide>(x, n, matrix + column, row, y + column);
    for (; column < row; column += W) add_product_columns<1>(x, n, matrix + column, row, y + column);
}

// Cosines and sines of the turns of a token: its own, that of the query that asks sinks, of the one that asks slots,
// and that of the token that leaves the window.
struct Turns {
    Angles own, sinks, slots, left;

    Turns(Arena& arena, int count, int64_t most)
        : own(arena, count, most), sinks(arena, count, most), slots(arena, count, most), left(arena, count, most) {}

    void compute(const GsaBlock& block, const Tokens& tokens, int c) const {
        const GsaHeads& heads = block.heads;
        const int64_t position = tokens.position(heads, c);
        own.compute(heads, c, position);
        if (block.kind != GSA_MEMORY_HYBRID) return;
        const int64_t window = block.cache.window, last = window + block.hybrid.sinks - 1;
        sinks.compute(heads, c, position < last ? position : last);
        slots.compute(heads, c, block.hybrid.own_positions ? position : window);
        if (position >= window) left.compute(heads, c, position - window);
    }
};

// Numbers between the threads of a layer: sums of parts, [parts of all tokens and heads, R, K16 + 16], then scores of
// slots, [count, HQ, M16]. A head of a token has blocks of sinks for parts, then those of the window.
struct HybridAttention {
    const GsaBlock& block;
    const GsaHybrid& hybrid;
    const GsaHeads& heads;
    const Tokens& tokens;
    const Turns& turns;
    CacheAttention cache;
    float *scores, *space;
    int64_t first[GSA_MAX_TOKENS + 1];  // parts before those of each token
    int H, R, K, M;
    int64_t M16, K16, S16;

    HybridAttention(const GsaBlock& block, const Tokens& tokens, const Turns& turns, float* between, float* space)
        : block(block),
          hybrid(block.hybrid),
          heads(block.heads),
          tokens(tokens),
          turns(turns),
          cache(block, tokens, between, space),
          space(space) {
        H = heads.heads;
        R = heads.queries;
        K = heads.key_width;
        M = block.memory.slots;
        M16 = padded_width(M);
        K16 = padded_width(K);
        S16 = padded_width(hybrid.sinks);
        first[0] = 0;
        for (int c = 0; c < tokens.count; c++) first[c + 1] = first[c] + H * parts(block, tokens, c);
        scores = between + first[tokens.count] * R * CacheAttention::sums_row(block);
    }

    // Numbers that a thread needs, and of `between` for all tokens.
    static int64_t space_of(const GsaBlock& block) {
        const int64_t slots = kMemoryBlock + padded_width(block.memory.slots) + 2;
        return larger_of(CacheAttention::space_of(block), block.heads.queries * slots);
    }
    static int64_t between_of(const GsaBlock& block, const Tokens& tokens) {
        int64_t sums = 0;
        for (int c = 0; c < tokens.count; c++) sums += parts(block, tokens, c) * CacheAttention::sums_row(block);
        return (sums + tokens.count * padded_width(block.memory.slots)) * block.heads.heads * block.heads.queries;
    }

    // How many sinks token c sees, in how many blocks, and whether it is behind a token that went to the slots.
    static int64_t sinks_seen(const GsaBlock& block, const Tokens& tokens, int c) {
        const int64_t left = tokens.position(block.heads, c) - block.cache.window + 1;
        return left < block.hybrid.sinks ? larger_of(left, 0) : block.hybrid.sinks;
    }
    static int64_t sink_blocks(const GsaBlock& block, const Tokens& tokens, int c) {
        return (sinks_seen(block, tokens, c) + kBlock - 1) / kBlock;
    }
    static int64_t parts(const GsaBlock& block, const Tokens& tokens, int c) {
        return sink_blocks(block, tokens, c) + seen_by(block, tokens, c).blocks();
    }
    bool writes(int c) const { return tokens.position(heads, c) >= block.cache.window + hybrid.sinks; }

    Sums part(int c, int h, int64_t number) const {
        return cache.sums_at(first[c] + h * parts(block, tokens, c) + number);
    }
    // A row [M16] of head h among the features, and of what is kept for the sequence of token c.
    float* row(int c, int h, int64_t place) const { return tokens.at(c, place) + h * M16; }
    float* kept(int c, int h, float* rows) const { return rows + (tokens.state_of[c] * H + h) * M16; }
    float* sink_keys(int c, int h) const { return hybrid.sink_keys + (tokens.state_of[c] * H + h) * S16 * K; }
    float* sink_values(int c, int h) const { return hybrid.sink_values + (tokens.state_of[c] * H + h) * S16 * K16; }

    // Keys and queries of all tokens as they are needed, and the gates of those that leave.
    void enter(const Team& team, const LinearKernels& linear) const {
        share_entering(
            team, [&](int s, int h) { enter_keys(s, h, linear); },
            [&](int c, int head) { enter_query(c, head, linear); });
    }

    // What a thread will do there, of_keys(sequence, head) and of_query(token, query head).
    template <class OfKeys, class OfQuery>
    void share_entering(const Team& team, OfKeys of_keys, OfQuery of_query) const {
        share_out(team, [&](auto unit) {
            for (int s = 0; s < tokens.sequences; s++)
                for (int h = 0; h < H; h++) {
                    const int begin = tokens.starts[s], end = tokens.starts[s + 1];
                    unit((end - begin) * 2 * (K16 + M16), [&] { of_keys(s, h); });
                    for (int c = begin; c < end; c++)
                        for (int r = 0; r < R; r++) unit(K16, [&] { of_query(c, h * R + r); });
                }
        });
    }

    // What the processor will not foresee there, while the layer's products are computed: the beginnings of weights,
    // and keys that will be written or leave, each of which lies in as many lines of the cache as it has numbers.
    void fetch_ahead(const Team& team) const {
        bool weights = true, queries = true;
        share_entering(
            team,
            [&](int s, int h) {
                for (int c = tokens.starts[s]; c < tokens.starts[s + 1]; c++) {
                    if (!writes(c)) continue;
                    if (weights) fetch_weight(hybrid.router_weight, h * 2 * K * M16);
                    weights = false;
                    const int64_t position = tokens.position(heads, c);
                    const int64_t capacity = block.cache.capacities[tokens.state_of[c]];
                    fetch_key(cache.keys(c, h), position % capacity);
                    fetch_key(cache.keys(c, h), (position - block.cache.window) % capacity);
                }
            },
            [&](int c, int head) {
                if (queries && writes(c)) fetch_weight(hybrid.query_weight, head * K * K16);
                queries = false;
            });
    }
    void fetch_weight(const void* weight, int64_t first) const {
        const char* begin = static_cast<const char*>(weight) + first * (hybrid.bf16 ? 2 : 4);
        for (int byte = 0; byte < kFetchAhead; byte += 64) __builtin_prefetch(begin + byte, 0, 2);
    }
    void fetch_key(const float* keys, int64_t slot) const {
        const float* tile = keys + slot / kPadding * K * kPadding;
        for (int i = 0; i < K; i++) __builtin_prefetch(tile + i * kPadding, 1, 2);
    }

    // Of one head: all tokens of a sequence come before any leaves, which may be one of them.
    void enter_keys(int sequence, int h, const LinearKernels& linear) const {
        const int begin = tokens.starts[sequence], end = tokens.starts[sequence + 1];
        for (int c = begin; c < end; c++) {
            float* k = tokens.at(c, heads.k) + h * K;
            norm_head(heads, linear, heads.key_norm, k);
            turn_head(heads, turns.own, c, k);
            cache.append(c, h);
            const int64_t position = tokens.position(heads, c);
            if (position < hybrid.sinks)
                cache.put_row(sink_keys(c, h), sink_values(c, h), position, k, tokens.at(c, heads.v) + h * K);
        }
        for (int c = begin; c < end; c++) {
            if (!writes(c)) continue;
            float *k = tokens.at(c, hybrid.left) + h * 2 * K, *v = k + K;
            cache.fetch_row(c, h, tokens.position(heads, c) - block.cache.window, k, v);
            float* plain = hybrid.own_positions ? space : k;  // the router sees keys that are not turned
            if (hybrid.own_positions) __builtin_memcpy(plain, k, sizeof(float) * K);
            turn_head(heads, turns.left, c, plain, -1);
            route(c, h, plain, v);
        }
    }

    // What slots take of the token that leaves and forget for it, what they are divided by and stand for with it.
    void route(int c, int h, const float* k, const float* v) const {
        float *decay = row(c, h, block.memory.decay), *write = row(c, h, block.memory.write);
        float *inverse = row(c, h, hybrid.inverse), *log_mass = row(c, h, hybrid.log_mass);
        float* mass = kept(c, h, hybrid.mass);
        __builtin_memcpy(write, hybrid.router_bias + h * M16, sizeof(float) * M16);
        multiply(k, hybrid.router_weight, 2 * h * K, M16, write);
        multiply(v, hybrid.router_weight, (2 * h + 1) * K, M16, write);
        if (hybrid.rates != nullptr)
            share_by_softmax(hybrid.rates + h * M16, hybrid.fades + h * M16, write, decay);
        else
            share_by_gates(write, decay);
        for (int64_t i = 0; i < M16; i += W) {
            const Vec<float> n = load(mass + i) * load(decay + i) + load(write + i);
            store(mass + i, n);
            store(inverse + i, n > GSA_EMPTY ? 1.0f / n : Vec<float>{});
            store(log_mass + i, n > GSA_EMPTY ? log_of_positive(n) : splat(-__builtin_inff()));
        }
    }

    // Logits to shares, and what is kept: exp(-rate share - fade).
    void share_by_softmax(const float* rates, const float* fades, float* shares, float* decay) const {
        float highest = shares[0];
        for (int64_t i = 1; i < M; i++) highest = shares[i] > highest ? shares[i] : highest;
        Vec<float> total{};
        for (int64_t i = 0; i < M16; i += W) {
            const Vec<float> e = exp<float>(load(shares + i) - highest);
            store(shares + i, e);
            total += e;
        }
        const float inverse = 1 / sum<float>(total);
        for (int64_t i = 0; i < M16; i += W) {
            const Vec<float> s = enough(load(shares + i) * inverse);
            store(shares + i, s);
            store(decay + i, exp<float>(-load(rates + i) * s - load(fades + i)));
        }
    }

    // Logits to gates, which are kept, and shares: 1 - a over its sum.
    void share_by_gates(float* shares, float* decay) const {
        const float slower = static_cast<float>(1 / hybrid.temperature);
        Vec<float> total{};
        for (int64_t i = 0; i < M16; i += W) {
            Vec<float> a, less_one;
            exp_and_less_one<float>(log_sigmoid(load(shares + i)) * slower, a, less_one);
            store(decay + i, a);
            store(shares + i, -less_one);
            total -= less_one;
        }
        const float forgotten = sum<float>(total), inverse = forgotten > 0 ? 1 / forgotten : 1;
        for (int64_t i = 0; i < M16; i += W) store(shares + i, enough(load(shares + i) * inverse));
    }

    // Shares that are too small are none.
    Vec<float> enough(Vec<float> share) const {
        return share > static_cast<float>(hybrid.least) ? share : Vec<float>{};
    }

    // y [row] += x [K] times the rows of a weight from `first` on.
    void multiply(const float* x, const void* weight, int64_t first, int64_t row, float* y) const {
        if (hybrid.bf16)
            add_product(x, K, static_cast<const BFloat16*>(weight) + first * row, row, y);
        else
            add_product(x, K, static_cast<const float*>(weight) + first * row, row, y);
    }

    // The queries that ask the window, the sinks and the slots.
    void enter_query(int c, int head, const LinearKernels& linear) const {
        float* q = tokens.at(c, heads.q) + head * K;
        norm_head(heads, linear, heads.query_norm, q);
        if (sinks_seen(block, tokens, c) > 0) {
            float* to = tokens.at(c, hybrid.sink_query) + head * K;
            __builtin_memcpy(to, q, sizeof(float) * K);
            turn_head(heads, turns.sinks, c, to);
        }
        if (writes(c)) {
            float* to = tokens.at(c, hybrid.slot_query) + head * K;
            for (int i = 0; i < K; i++) space[i] = q[i];
            for (int64_t i = K; i < K16; i++) space[i] = 0;
            multiply(q, hybrid.query_weight, head * K, K16, space);
            turn_head(heads, turns.slots, c, space);
            for (int i = 0; i < K; i++) to[i] = space[i] * hybrid.scale[head];
        }
        turn_head(heads, turns.own, c, q);
    }

    // The sums of all parts, the way of those that leave into the memory of keys, and scores of slots.
    void attend(const Team& team) const {
        share_out(team, [&](auto unit) {
            for (int s = 0; s < tokens.sequences; s++)
                for (int h = 0; h < H; h++) {
                    for (int c = tokens.starts[s]; c < tokens.starts[s + 1]; c++) attend_parts(c, h, unit);
                    for (int column = 0; column < M; column += kMemoryBlock)
                        unit((tokens.starts[s + 1] - tokens.starts[s]) * 2 * kMemoryBlock,
                             [&] { write_keys(s, h, column); });
                }
        });
    }

    template <class Unit>
    void attend_parts(int c, int h, Unit unit) const {
        const int64_t sinks = sinks_seen(block, tokens, c), before = sink_blocks(block, tokens, c);
        const Seen seen = seen_by(block, tokens, c);
        for (int64_t j = 0; j < before; j++)
            unit(kPadding, [&] {
                const int64_t begin = j * kBlock, count = sinks - begin < kBlock ? sinks - begin : kBlock;
                cache.attend_rows(tokens.at(c, hybrid.sink_query) + h * R * K, sink_keys(c, h) + begin * K,
                                  sink_values(c, h) + begin * K16, 0, static_cast<int>(count), part(c, h, j));
            });
        for (int64_t j = 0; j < seen.blocks(); j++) {
            const int64_t begin = (seen.first() + j) * kBlock, end = begin + kBlock;
            unit((seen.to < end ? seen.to : end) - larger_of(seen.from, begin),
                 [&] { cache.attend(c, h, seen, seen.first() + j, part(c, h, before + j)); });
        }
    }

    void write_keys(int sequence, int h, int column) const {
        const GsaMemory& memory = block.memory;
        float *results = space, *keys = memory.keys + (tokens.state_of[tokens.starts[sequence]] * H + h) * K * M16;
        const int columns = smaller_of(kMemoryBlock, static_cast<int>(M16) - column);
        for (int c = tokens.starts[sequence]; c < tokens.starts[sequence + 1]; c++) {
            if (!writes(c)) continue;
            const float *a = row(c, h, memory.decay) + column, *s = row(c, h, memory.write) + column;
            const float *k = tokens.at(c, hybrid.left) + h * 2 * K, *q = tokens.at(c, hybrid.slot_query) + h * R * K;
            visit<false>({rows_at(keys, K, M, column), K, a, k, s, q, K, results, kMemoryBlock}, R, columns);
            write_results(results, R, columns, 1.0f, scores_at(c, h) + column, M16);
        }
    }

    float* scores_at(int c, int h) const { return scores + (static_cast<int64_t>(c) * H + h) * R * M16; }

    // The way of those that leave into the memory of values, and outputs.
    void finish(const Team& team) const {
        share_out(team, [&](auto unit) {
            for (int s = 0; s < tokens.sequences; s++)
                for (int h = 0; h < H; h++)
                    for (int column = 0; column < K; column += kMemoryBlock)
                        unit(tokens.starts[s + 1] - tokens.starts[s], [&] { write_values(s, h, column); });
        });
    }

    void write_values(int sequence, int h, int column) const {
        const GsaMemory& memory = block.memory;
        float *results = space, *weights = results + R * kMemoryBlock, *highest = weights + R * M16;
        float* values = memory.values + (tokens.state_of[tokens.starts[sequence]] * H + h) * M * K16;
        for (int c = tokens.starts[sequence]; c < tokens.starts[sequence + 1]; c++) {
            if (writes(c)) {
                for (int r = 0; r < R; r++) weigh(c, h, r, weights + r * M16, highest[2 * r], highest[2 * r + 1]);
                const float* v = tokens.at(c, hybrid.left) + h * 2 * K + K + column;
                visit<true>({rows_at(values, M, K, column), M, row(c, h, memory.decay), row(c, h, memory.write), v,
                             weights, M16, results, kMemoryBlock},
                            R, smaller_of(kMemoryBlock, static_cast<int>(K16) - column));
            }
            for (int r = 0; r < R; r++)
                combine(c, h, r, column, results + r * kMemoryBlock, highest[2 * r], highest[2 * r + 1]);
        }
    }

    // What the values of slots are summed with, [M16]: exp(score - highest) divided as they are.
    void weigh(int c, int h, int r, float* weights, float& highest, float& total) const {
        const float *scores = scores_at(c, h) + r * M16, *inverse = row(c, h, hybrid.inverse);
        const float *log_mass = row(c, h, hybrid.log_mass), lowest = -__builtin_inff();
        const float power = hybrid.mass_power[h * R + r], bias = hybrid.bias[h * R + r];
        Vec<float> most = splat(lowest), sums{};
        for (int64_t i = 0; i < M16; i += W) {
            const Vec<float> mass = load(log_mass + i);
            const Vec<float> score = load(scores + i) * load(inverse + i) + (power * mass + bias);
            store(weights + i, mass == lowest ? mass : score);
            most = larger<float>(most, load(weights + i));
        }
        highest = most[0];
        for (int i = 1; i < W; i++) highest = most[i] > highest ? most[i] : highest;
        const float least = highest == lowest ? 0 : highest;  // if nothing was ever written, all weights are zero
        for (int64_t i = 0; i < M16; i += W) {
            const Vec<float> weight = exp<float>(load(weights + i) - least);
            sums += weight;
            store(weights + i, weight * load(inverse + i));
        }
        total = sum<float>(sums);
    }

    // Columns of an output from the sums of all parts and, behind one that was written, of the slots.
    void combine(int c, int h, int r, int column, const float* slots, float slots_highest, float slots_total) const {
        const int64_t number = parts(block, tokens, c);
        const bool written = writes(c);
        const int width = smaller_of(kMemoryBlock, K - column);
        float highest = written ? slots_highest : -__builtin_inff(), total = 0, sums[kMemoryBlock] = {};
        const auto add = [&](const float* outputs, float own_highest, float own_total) {
            const float weight = exp<float>(splat(own_highest - highest))[0];
            total += weight * own_total;
            for (int i = 0; i < width; i++) sums[i] += weight * outputs[i];
        };
        for (int64_t j = 0; j < number; j++) {
            const float other = part(c, h, j).highest(r);
            highest = other > highest ? other : highest;
        }
        for (int64_t j = 0; j < number; j++) {
            const Sums other = part(c, h, j);
            add(other.outputs(r) + column, other.highest(r), other.total(r));
        }
        if (written) add(slots, slots_highest, slots_total);
        float* o = tokens.at(c, heads.o) + (h * R + r) * K + column;
        for (int i = 0; i < width; i++) o[i] = sums[i] / total;
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
