// Softmax attention over a cache. The positions that a token sees are cut at multiples of kBlock. Each block has sums
// of its own, which are then added up in their order: so the bits of a token depend neither on threads nor on company.
#pragma once

#include "decode_heads.h"
#include "decode_memory.h"
#include "linear_load.h"

namespace gsa {
namespace GSA_ISA {
namespace {

constexpr int kBlock = GSA_CACHE_BLOCK;

// The positions [from, to) that a token sees, and the blocks [first, last) in which they lie.
struct Seen {
    int64_t from, to;
    int64_t first() const { return from / kBlock; }
    int64_t last() const { return (to - 1) / kBlock + 1; }
    int64_t blocks() const { return last() - first(); }
};

inline Seen seen_by(const GsaBlock& block, const Tokens& tokens, int c) {
    const int64_t position = tokens.position(block.heads, c), window = block.cache.window;
    const int64_t begin = block.cache.begins[tokens.state_of[c]];
    return {window > 0 && position - window + 1 > begin ? position - window + 1 : begin, position + 1};
}

// Sums of a block, for each of R query heads: outputs [V16] that are not yet divided by the total of the weights, which
// are exp(score - highest).
struct Sums {
    float* data;
    int64_t row;  // V16 and a vector
    float* outputs(int r) const { return data + r * row; }
    float& highest(int r) const { return data[(r + 1) * row - 2]; }
    float& total(int r) const { return data[(r + 1) * row - 1]; }
};

struct CacheAttention {
    const GsaBlock& block;
    const Tokens& tokens;
    float* sums;   // [sum of blocks over the tokens and heads, R, V16 + 16], shared by the team
    float* space;  // [R, kBlock], of this thread
    int H, R, K, V;

    CacheAttention(const GsaBlock& block, const Tokens& tokens, float* sums, float* space)
        : block(block), tokens(tokens), sums(sums), space(space) {
        H = block.heads.heads;
        R = block.heads.queries;
        K = block.heads.key_width;
        V = block.heads.value_width;
    }

    // Numbers that a thread needs, and of sums for all tokens.
    static int64_t space_of(const GsaBlock& block) { return block.heads.queries * kBlock; }
    static int64_t sums_of(const GsaBlock& block, const Tokens& tokens) {
        int64_t blocks = 0;
        for (int c = 0; c < tokens.count; c++) blocks += seen_by(block, tokens, c).blocks();
        return blocks * block.heads.heads * block.heads.queries * sums_row(block);
    }
    static int64_t sums_row(const GsaBlock& block) { return padded_width(block.heads.value_width) + kPadding; }

    // Where head h of the cache of token c begins: keys [capacity / 16, K, 16], values [capacity, V16].
    float* keys(int c, int h) const {
        const int64_t state = tokens.state_of[c];
        return block.cache.caches[state] + h * block.cache.capacities[state] * K;
    }
    float* values(int c, int h) const {
        const int64_t state = tokens.state_of[c], capacity = block.cache.capacities[state];
        return block.cache.caches[state] + capacity * (H * K + h * padded_width(V));
    }

    // Key and value of head h of token c to their slot.
    void append(int c, int h) const {
        const int64_t slot = tokens.position(block.heads, c) % block.cache.capacities[tokens.state_of[c]];
        put_row(keys(c, h), values(c, h), slot, tokens.at(c, block.heads.k) + h * K,
                tokens.at(c, block.heads.v) + h * V);
    }

    // A key [K] and a value [V] to a slot of keys [.., K, 16] and values [.., V16].
    void put_row(float* keys, float* values, int64_t slot, const float* k, const float* v) const {
        float* to = keys + slot / kPadding * K * kPadding + slot % kPadding;
        for (int i = 0; i < K; i++) to[i * kPadding] = k[i];
        __builtin_memcpy(values + slot * padded_width(V), v, sizeof(float) * V);
    }

    // Key and value of head h at an earlier position of token c's sequence.
    void fetch_row(int c, int h, int64_t position, float* k, float* v) const {
        const int64_t slot = position % block.cache.capacities[tokens.state_of[c]];
        const float* from = keys(c, h) + slot / kPadding * K * kPadding + slot % kPadding;
        for (int i = 0; i < K; i++) k[i] = from[i * kPadding];
        __builtin_memcpy(v, values(c, h) + slot * padded_width(V), sizeof(float) * V);
    }

    // The sums of this thread's share of all blocks.
    void attend_all(const Team& team) const {
        int64_t total = 0, first = 0;
        for (int c = 0; c < tokens.count; c++) total += seen_by(block, tokens, c).blocks() * H;
        const int64_t from = total * team.rank / team.size, to = total * (team.rank + 1) / team.size;
        for (int c = 0; c < tokens.count; c++) {
            const Seen seen = seen_by(block, tokens, c);
            const int64_t blocks = seen.blocks(), end = to - first < blocks * H ? to - first : blocks * H;
            for (int64_t unit = larger_of(from - first, 0); unit < end; unit++)
                attend(c, static_cast<int>(unit / blocks), seen, seen.first() + unit % blocks, sums_at(first + unit));
            first += blocks * H;
        }
    }

    Sums sums_at(int64_t unit) const { return {sums + unit * R * sums_row(block), sums_row(block)}; }

    // The sums of one block.
    void attend(int c, int h, const Seen& seen, int64_t number, const Sums& out) const {
        const int64_t begin = number * kBlock, slot = begin % block.cache.capacities[tokens.state_of[c]];
        const int from = static_cast<int>(larger_of(seen.from - begin, 0));
        const int to = static_cast<int>(seen.to - begin < kBlock ? seen.to - begin : kBlock);
        attend_rows(tokens.at(c, block.heads.q) + h * R * K, keys(c, h) + slot * K,
                    values(c, h) + slot * padded_width(V), from, to, out);
    }

    // The sums of queries [R, K] over slots `from` to `to` of a block of keys and values.
    void attend_rows(const float* queries, const float* k, const float* v, int from, int to, const Sums& out) const {
        for (int r = 0; r < R; r += 4) {
            const float* q = queries + r * K;
            const Sums part{out.outputs(r), out.row};
            switch (R - r) {
                case 1: attend_heads<1>(q, k, v, from, to, space + r * kBlock, part); break;
                case 2: attend_heads<2>(q, k, v, from, to, space + r * kBlock, part); break;
                case 3: attend_heads<3>(q, k, v, from, to, space + r * kBlock, part); break;
                default: attend_heads<4>(q, k, v, from, to, space + r * kBlock, part);
            }
        }
    }

    // For N query heads q [N, K], with scores [N, kBlock].
    template <int N>
    void attend_heads(const float* q, const float* k, const float* v, int from, int to, float* scores,
                      const Sums& out) const {
        const int row = static_cast<int>(padded_width(V));
        for (int t = from / kTile * kTile; t < to; t += kTile) score_tile<N>(q, k + t * K, v + t * row, scores + t);
        for (int r = 0; r < N; r++) weigh(scores + r * kBlock, from, to, out.highest(r), out.total(r));
        int column = 0;
        for (; column + kWide * W <= row; column += kWide * W)
            add_values<N, kWide>(v + column, row, from, to, scores, k + kBlock * K, out, column);
        for (; column < row; column += W)
            add_values<N, 1>(v + column, row, from, to, scores, k + kBlock * K, out, column);
    }

    // Fetches `count` numbers that are wanted next: values while keys are read, keys of the next block while values
    // are. What is not straight ahead, the processor does not fetch by itself.
    static void fetch(const float* ahead, int count) {
        for (int i = 0; i < count; i += 16) __builtin_prefetch(ahead + i, 0, 2);
    }

    static constexpr int W = Simd<float>::W;
    static constexpr int kTile = kPadding;         // positions at a time
    static constexpr int kWide = W == 16 ? 4 : 2;  // vectors of values at a time

    // scores [N, kBlock] of kTile positions, whose keys are k [K, 16]. Even and odd features have sums of their own, so
    // that one does not wait for the other.
    template <int N>
    void score_tile(const float* q, const float* k, const float* ahead, float* scores) const {
        constexpr int kParts = kTile / W;
        Vec<float> total[N][kParts] = {}, odd[N][kParts] = {};
        const auto add = [&](int i, Vec<float>(&sums)[N][kParts]) {
            fetch(ahead + i * kTile, kTile);
#pragma GCC unroll 4
            for (int j = 0; j < kParts; j++) {
                Vec<float> keys = load(k + i * kPadding + j * W);
                keep_in_register(keys);
#pragma GCC unroll 4
                for (int r = 0; r < N; r++) sums[r][j] += q[r * K + i] * keys;
            }
        };
        int i = 0;
        for (; i + 2 <= K; i += 2) {
            add(i, total);
            add(i + 1, odd);
        }
        if (i < K) add(i, total);
#pragma GCC unroll 4
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int j = 0; j < kParts; j++) total[r][j] += odd[r][j];
        const float scale = static_cast<float>(block.heads.scale);
#pragma GCC unroll 4
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int j = 0; j < kParts; j++) store(scores + r * kBlock + j * W, total[r][j] * scale);
    }

    // Scores [kBlock] from `from` to `to` become weights; those beside them in a vector become zero.
    static void weigh(float* scores, int from, int to, float& highest, float& total) {
        const float lowest = -__builtin_inff();
        const int begin = from / W * W, end = (to + W - 1) / W * W;
        for (int t = begin; t < from; t++) scores[t] = lowest;
        for (int t = to; t < end; t++) scores[t] = lowest;
        Vec<float> most = splat(lowest), sums{};
        for (int t = begin; t < end; t += W) most = larger<float>(most, load(scores + t));
        highest = most[0];
        for (int i = 1; i < W; i++) highest = most[i] > highest ? most[i] : highest;
        for (int t = begin; t < end; t += W) {
            const Vec<float> weight = exp<float>(load(scores + t) - highest);
            sums += weight;
            store(scores + t, weight);
        }
        total = sum<float>(sums);
    }

    // N outputs of P vectors at `column`.
    template <int N, int P>
    void add_values(const float* v, int row, int from, int to, const float* weights, const float* ahead,
                    const Sums& out, int column) const {
        Vec<float> sums[N][P] = {};
        for (int t = from; t < to; t++) {
            if (column == 0) fetch(ahead + t * K, K);
#pragma GCC unroll 4
            for (int j = 0; j < P; j++) {
                Vec<float> value = load(v + t * row + j * W);
                keep_in_register(value);
#pragma GCC unroll 4
                for (int r = 0; r < N; r++) sums[r][j] += weights[r * kBlock + t] * value;
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int j = 0; j < P; j++) store(out.outputs(r) + column + j * W, sums[r][j]);
    }

    // The output of query head `head` of token c, from the sums of its blocks; those of earlier tokens are `before`.
    void combine(int c, int head, int64_t before) const {
        const int64_t blocks = seen_by(block, tokens, c).blocks(), unit = before + head / R * blocks;
        const int r = head % R;
        float highest = sums_at(unit).highest(r), total = 0;
        for (int64_t j = 1; j < blocks; j++) {
            const float other = sums_at(unit + j).highest(r);
            highest = other > highest ? other : highest;
        }
        float* o = tokens.at(c, block.heads.o) + head * V;
        for (int64_t j = 0; j < blocks; j++) {
            const Sums part = sums_at(unit + j);
            const float weight = exp<float>(splat(part.highest(r) - highest))[0];
            total += weight * part.total(r);
            for (int i = 0; i < V; i++) o[i] = (j == 0 ? 0.0f : o[i]) + weight * part.outputs(r)[i];
        }
        for (int i = 0; i < V; i++) o[i] /= total;
    }

    // This thread's share of all outputs.
    void combine_all(const Team& team) const {
        const int HQ = H * R, units = tokens.count * HQ, from = team.begin(units), to = team.end(units);
        int64_t before = 0;
        for (int c = 0; c < tokens.count; c++) {
            for (int head = 0; head < HQ; head++)
                if (c * HQ + head >= from && c * HQ + head < to) combine(c, head, before);
            before += seen_by(block, tokens, c).blocks() * H;
        }
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
