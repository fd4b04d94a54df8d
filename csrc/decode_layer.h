// A layer of a model for the tokens of a call: its products, its memory, its output and its MLP.
#pragma once

#include "decode.h"
#include "decode_hybrid.h"
#include "decode_router.h"
#include "decode_scan.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// The largest size(block) of all blocks.
template <class F>
int64_t most(const DecodeCall& call, F size) {
    int64_t found = 0;
    for (int64_t i = 0; i < call.decoder.block_count; i++) found = larger_of(found, size(call.decoder.blocks[i]));
    return found;
}

// What goes through all layers, with room for the widest; the team shares it.
struct Stream {
    Tokens tokens;
    Turns turns;
    int64_t width;   // D
    float* x;        // [count, D], what layers add to
    float* inner;    // [count, 2 I], gate and up of the MLP
    float* between;  // what the threads of a layer pass on to each other: scores of slots, or sums of a cache

    Stream(Arena& arena, const DecodeCall& call)
        : tokens(arena, call.count, call.state_of, most(call, [](const GsaBlock& b) { return b.features; })),
          turns(arena, call.count, most(call, [](const GsaBlock& b) { return b.heads.key_width / 2; })),
          width(call.decoder.width) {
        x = arena.take<float>(call.count * width);
        inner = arena.take<float>(call.count * 2 * most(call, [](const GsaBlock& b) { return b.mlp.gate.N; }));
        between = arena.take<float>(most(call, [&](const GsaBlock& b) {
            if (b.kind == GSA_MEMORY_HYBRID) return HybridAttention::between_of(b, tokens);
            return b.kind == GSA_MEMORY_CACHE ? CacheAttention::sums_of(b, tokens)
                                              : call.count * Memories::scores_of(b);
        }));
    }

    // out [D] = RMSNorm of x of token c.
    void normed(int c, const float* norm, float epsilon, const LinearKernels& linear, float* out) const {
        linear.read_input({GSA_INPUT_RMS_NORM, x + c * width, norm, epsilon}, width, width, 1, out);
    }
};

// A layer as one thread of the team goes through it.
struct Layer {
    const GsaBlock& block;
    Stream& stream;
    Worker& worker;
    float* space;   // space_of(block) numbers
    Tokens tokens;  // those of the stream, with this layer's features

    Layer(const GsaBlock& block, Stream& stream, Worker& worker, float* space)
        : block(block), stream(stream), worker(worker), space(space), tokens(stream.tokens) {
        tokens.stride = block.features;
    }

    static int64_t space_of(const GsaBlock& block) {
        int64_t numbers = 0;
        switch (block.kind) {
            case GSA_MEMORY_CACHE: numbers = CacheAttention::space_of(block); break;
            case GSA_MEMORY_HYBRID: numbers = HybridAttention::space_of(block); break;
            default: numbers = larger_of(Memories::space_of(block), Routing::space_of(block));
        }
        return larger_of(padded_width(block.heads.key_width), numbers);
    }

    // Adds what the layer makes of stream.x to it.
    void run() {
        const GsaHeads& h = block.heads;
        const Team& team = worker.team;
        if (h.frequencies != nullptr)
            for (int c = team.begin(tokens.count); c < team.end(tokens.count); c++)
                stream.turns.compute(block, tokens, c);
        if (block.kind == GSA_MEMORY_HYBRID)
            HybridAttention(block, tokens, stream.turns, stream.between, space).fetch_ahead(team);
        products();
        const bool changed = h.map != nullptr || h.query_norm != nullptr || h.frequencies != nullptr;
        if (block.kind == GSA_MEMORY_HYBRID) {
            hybrid();
        } else if (block.kind == GSA_MEMORY_CACHE) {
            heads();
            cache();
        } else {
            if (changed) heads();
            if (block.memory.router.kind != GSA_ROUTER_NONE) route();
            if (block.kind != GSA_MEMORY_SCAN) memories();
        }
        output();
        if (block.mlp.down.weight != nullptr) mlp();
    }

   private:
    // All products down to the memory, and what stands behind each.
    void products() {
        constexpr int kMost = 8;  // at a time
        for (int64_t first = 0, number = 0; first < block.product_count; first += number) {
            const GsaProduct* group = block.products + first;
            PendingProduct pending[kMost];
            for (number = 0; first + number < block.product_count && number < kMost; number++) {
                const GsaProduct& product = group[number];
                if (product.input != group->input) break;
                pending[number] = {&product.matrix, tokens.at(0, product.output), tokens.stride, nullptr, product.bias};
            }
            const auto input = [&](int c, float* out) {
                if (group->input < 0)
                    stream.normed(c, block.norm, block.epsilon, worker.linear, out);
                else
                    __builtin_memcpy(out, tokens.at(c, group->input), sizeof(float) * group->matrix.K);
            };
            const Columns columns = worker.columns(group->matrix, tokens.count, input);
            worker.multiply_share(columns, pending, number, [&](int64_t i, int64_t from, int64_t to) {
                behind(group[i], tokens, from, to);
                if (block.kind == GSA_MEMORY_SCAN && first + i + 1 == block.product_count)
                    scan_channels(block.scan, tokens, from, to);
            });
            worker.team.wait();
        }
    }

    // Heads of queries and keys, and the way of keys and values into a cache.
    void heads() {
        const GsaHeads& h = block.heads;
        const CacheAttention cache(block, tokens, stream.between, space);
        const Team& team = worker.team;
        const int HQ = h.heads * h.queries, all = HQ + h.heads, K = h.key_width;
        for (int unit = team.begin(tokens.count * all); unit < team.end(tokens.count * all); unit++) {
            const int c = unit / all, key = unit % all - HQ;  // queries are below 0
            float* head = key < 0 ? tokens.at(c, h.q) + (HQ + key) * K : tokens.at(c, h.k) + key * K;
            prepare_head(h, worker.linear, stream.turns.own, c, key < 0 ? h.query_norm : h.key_norm, head, space);
            if (block.kind == GSA_MEMORY_CACHE && key >= 0) cache.append(c, key);
        }
        team.wait();
    }

    void route() {
        const Routing routing(block, tokens, space);
        const Team& team = worker.team;
        const int H = block.heads.heads;
        for (int unit = team.begin(tokens.count * H); unit < team.end(tokens.count * H); unit++)
            routing.route(unit / H, unit % H);
        team.wait();
    }

    void cache() {
        const CacheAttention cache(block, tokens, stream.between, space);
        cache.attend_all(worker.team);
        worker.team.wait();
        cache.combine_all(worker.team);
        worker.team.wait();
    }

    void hybrid() {
        const HybridAttention hybrid(block, tokens, stream.turns, stream.between, space);
        hybrid.enter(worker.team, worker.linear);
        worker.team.wait();
        hybrid.attend(worker.team);
        worker.team.wait();
        hybrid.finish(worker.team);
        worker.team.wait();
    }

    void memories() {
        const Memories memories(block, tokens, stream.between, space);
        const Team& team = worker.team;
        if (block.kind == GSA_MEMORY_SLOTS) {
            memories.share(team, memories.M, [&](int s, int h, int first) { memories.write_keys(s, h, first); });
            team.wait();
            memories.share(team, memories.V, [&](int s, int h, int first) { memories.write_values(s, h, first); });
        } else {
            memories.share(team, memories.V, [&](int s, int h, int first) { memories.write_linear(s, h, first); });
        }
        team.wait();
    }

    void output() {
        const GsaOutput& o = block.output;
        const auto input = [&](int c, float* out) { finish(c, out); };
        worker.multiply(worker.columns(o.matrix, tokens.count, input), {{&o.matrix, stream.x, stream.width, stream.x}});
    }

    // out [width]: what enters the output matrix in column c, with room for whole vectors.
    void finish(int c, float* out) const {
        const GsaOutput& o = block.output;
        const int64_t width = o.matrix.K, normed = o.norm_kind == GSA_NORM_HEADS ? block.heads.value_width : width;
        __builtin_memcpy(out, tokens.at(c, o.o), sizeof(float) * width);
        activate(o.function, out, width);
        for (int64_t i = 0; o.norm_kind != GSA_NORM_NONE && i < width; i += normed)
            worker.linear.read_input({GSA_INPUT_RMS_NORM, out + i, o.norm, o.epsilon}, normed, normed, 1, out + i);
        if (o.gate < 0) return;
        const float* gate = tokens.at(c, o.gate);
        for (int64_t i = 0; i < width; i++) out[i] *= gate[i];
    }

    void mlp() {
        const GsaMlp& m = block.mlp;
        const int64_t I = m.gate.N;
        const auto input = [&](int c, float* out) { stream.normed(c, m.norm, m.epsilon, worker.linear, out); };
        worker.multiply(worker.columns(m.gate, tokens.count, input),
                        {{&m.gate, stream.inner, 2 * I, nullptr}, {&m.up, stream.inner + I, 2 * I, nullptr}});
        const auto gated = [&](int c, float* out) {
            worker.linear.read_input({GSA_INPUT_SWIGLU, stream.inner + c * 2 * I, nullptr, 0}, I, I, 1, out);
        };
        worker.multiply(worker.columns(m.down, tokens.count, gated), {{&m.down, stream.x, stream.width, stream.x}});
    }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
