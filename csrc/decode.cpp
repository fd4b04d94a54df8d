// One token of a few sequences through all blocks of a model of gated slot attention, by one team of threads that stays
// together from the embedding to the head.
#include "decode.h"

#include "decode_columns.h"
#include "elementary.h"
#include "parallel.h"
#include "step.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// f of every number of x [n], in place; numbers beyond the last whole vector go through one of their own.
template <class F>
GSA_INLINE void map(float* x, int64_t n, F f) {
    constexpr int W = Simd<float>::W;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(x + i, f(load(x + i)));
    if (i == n) return;
    float rest[W] = {};
    __builtin_memcpy(rest, x + i, sizeof(float) * (n - i));
    store(rest, f(load(rest)));
    __builtin_memcpy(x + i, rest, sizeof(float) * (n - i));
}

void activate(int activation, float* x, int64_t n) {
    typedef Vec<float> V;
    switch (activation) {
        case GSA_FUNCTION_SWISH: map(x, n, [](V v) { return v * sigmoid<float>(v); }); break;
        case GSA_FUNCTION_RELU: map(x, n, [](V v) { return v <= 0.0f ? V{} : v; }); break;
        case GSA_FUNCTION_RELU2: map(x, n, [](V v) { return v <= 0.0f ? V{} : v * v; }); break;
        case GSA_FUNCTION_SIGMOID: map(x, n, [](V v) { return sigmoid<float>(v); }); break;
        default: break;
    }
}

// log(sigmoid(x)) = min(x, 0) - log(1 + e) with e = exp(-|x|), and log(1 + e) = 2 artanh(e / (2 + e)), whose series
// has come to full precision at the 8th term, since its argument is at most 1/3.
GSA_INLINE Vec<float> log_sigmoid(Vec<float> x) {
    const Vec<float> e = exp<float>(x < 0.0f ? x : -x);
    const Vec<float> s = e / (2.0f + e), square = s * s;
    Vec<float> series = splat(2.0f / 15);
#pragma GCC unroll 8
    for (int i = 13; i >= 1; i -= 2) series = series * square + 2.0f / static_cast<float>(i);
    return (x < 0.0f ? x : Vec<float>{}) - s * series;
}

// Activations of all columns (tokens), for the widest block: H key/value heads, HQ query heads, M slots, D the width of
// the model, I that of its MLP.
struct Buffers {
    float* x;      // [count, D], the residual stream
    float* q;      // [count, HQ * K]
    float* k;      // [count, H * K]
    float* v;      // [count, H * V]
    float* f;      // [count, H * M], what the forget gate is made of
    float* g;      // [count, HQ * V], gate of the output
    float* o;      // [count, HQ * V]
    float* inner;  // [count, 2 * I], gate and up of the MLP
};

struct Decode {
    const DecodeCall& call;
    Buffers buffers{};
    Columns shared{};         // room for all columns
    Columns* own = nullptr;   // [threads], room for one column each
    float** space = nullptr;  // [threads], working memory of Step
    int* starts = nullptr;    // [sequences + 1], the first column of each sequence, and the end
    int sequences = 0;
    Barrier barrier;

    Decode(const DecodeCall& call, int threads, Arena& arena) : call(call) {
        const GsaDecoder& decoder = call.decoder;
        ColumnRoom room;
        if (decoder.activations != GSA_ACTIVATIONS_FP32) room.words_per_quad = call.linear.words_per_quad(false);
        room.include(decoder.head);
        int64_t q = 0, k = 0, v = 0, f = 0, o = 0, inner = 0;
        size_t step = 0;
        for (int64_t i = 0; i < decoder.block_count; i++) {
            const GsaBlock& block = decoder.blocks[i];
            const GsaMatrix* const inputs[] = {&block.q, &block.o, &block.gate, &block.down};
            for (const GsaMatrix* matrix : inputs) room.include(*matrix);
            q = larger_of(q, block.q.N);
            k = larger_of(k, block.k.N);
            v = larger_of(v, block.v.N);
            f = larger_of(f, block.f.N);
            o = larger_of(o, block.o.K);
            inner = larger_of(inner, block.gate.N);
            const GsaStep one = described_step(block);
            const size_t bytes = Step<float>{one, nullptr, 0}.space();
            step = step < bytes ? bytes : step;
        }
        const int n = call.count;
        buffers = {arena.take<float>(n * decoder.width),
                   arena.take<float>(n * q),
                   arena.take<float>(n * k),
                   arena.take<float>(n * v),
                   arena.take<float>(n * f),
                   arena.take<float>(n * o),
                   arena.take<float>(n * o),
                   arena.take<float>(n * 2 * inner)};
        starts = arena.take<int>(n + 1);
        for (int c = 0; starts != nullptr && c < n; c++)
            if (c == 0 || call.state_of[c] != call.state_of[c - 1]) starts[sequences++] = c;
        if (starts != nullptr) starts[sequences] = n;
        shared = room.take(arena, n);
        own = arena.take<Columns>(threads);
        space = arena.take<float*>(threads);
        for (int t = 0; t < threads; t++) {
            const Columns columns = room.take(arena, 1);
            float* floats = arena.take<float>(static_cast<int64_t>(step / sizeof(float)));
            if (own == nullptr) continue;
            own[t] = columns;
            space[t] = floats;
        }
    }

    // The step of a block, without what differs from call to call.
    static GsaStep described_step(const GsaBlock& block) {
        GsaStep step{};
        step.heads = block.heads;
        step.queries = block.queries;
        step.readout = block.readout;
        step.scale = block.scale;
        step.q.width = step.k.width = block.key_width;
        step.v.width = step.o.width = block.value_width;
        step.g.width = block.slots;
        return step;
    }

    // data [count, heads, width] as a tensor of one token per row.
    static GsaTensor rows(float* data, int64_t heads, int width) {
        return {data, heads * width, 0, width, GSA_FLOAT32, width};
    }

    GsaStep step_of(const GsaBlock& block) const {
        GsaStep step = described_step(block);
        const int64_t H = block.heads, HQ = H * block.queries;
        step.batch = call.count;
        step.state_of = call.state_of;
        step.q = rows(buffers.q, HQ, block.key_width);
        step.k = rows(buffers.k, H, block.key_width);
        step.v = rows(buffers.v, H, block.value_width);
        step.g = rows(buffers.f, H, block.slots);
        step.o = rows(buffers.o, HQ, block.value_width);
        step.before_k = step.after_k = block.keys;
        step.before_v = step.after_v = block.values;
        return step;
    }

    // Head h of column c: activations, gate, and the step, which changes the head's states.
    void head(const GsaBlock& block, const Step<float>& step, int64_t c, int h, float* own_space) const {
        const int64_t K = block.key_width, V = block.value_width, M = block.slots, H = block.heads, R = block.queries;
        activate(block.feature_map, buffers.q + (c * H + h) * R * K, R * K);
        activate(block.feature_map, buffers.k + (c * H + h) * K, K);
        activate(block.value_activation, buffers.v + (c * H + h) * V, V);
        const float slower = static_cast<float>(1 / block.temperature);
        map(buffers.f + (c * H + h) * M, M, [=](Vec<float> x) { return log_sigmoid(x) * slower; });
        step.head(c, h, own_space);
    }

    // out [HQ * V]: what enters the output matrix in column c.
    void finish(const GsaBlock& block, int c, float* out) const {
        const int64_t V = block.value_width, HQ = static_cast<int64_t>(block.heads) * block.queries, all = HQ * V;
        __builtin_memcpy(out, buffers.o + c * all, sizeof(float) * all);
        activate(block.output_activation, out, all);
        if (block.output_norm_kind == GSA_NORM_FULL) normalise(out, block.output_norm, block.output_epsilon, all);
        if (block.output_norm_kind == GSA_NORM_HEADS)
            for (int64_t h = 0; h < HQ; h++) normalise(out + h * V, block.output_norm, block.output_epsilon, V);
        if (block.g.weight == nullptr) return;
        const float* g = buffers.g + c * all;
        for (int64_t i = 0; i < all; i++) out[i] *= g[i];  // swish of it
    }

    // RMSNorm of x [n] with weight [n], in place.
    void normalise(float* x, const float* weight, float epsilon, int64_t n) const {
        call.linear.read_input({GSA_INPUT_RMS_NORM, x, weight, epsilon}, n, n, 1, x);
    }

    // buffers.x [count, D] through one block, all members of the team together.
    void block(const GsaBlock& b, Worker& worker, float* own_space) const {
        const int64_t D = call.decoder.width;
        const auto normed = [&](const float* norm, float epsilon) {
            return [=](int c, float* out) {
                call.linear.read_input({GSA_INPUT_RMS_NORM, buffers.x + c * D, norm, epsilon}, D, D, 1, out);
            };
        };
        worker.multiply(worker.columns(b.q, call.count, normed(b.mixer_norm, b.mixer_epsilon)),
                        {{&b.q, buffers.q, b.q.N, nullptr},
                         {&b.k, buffers.k, b.k.N, nullptr},
                         {&b.v, buffers.v, b.v.N, nullptr},
                         {&b.f, buffers.f, b.f.N, nullptr},
                         {&b.g, buffers.g, b.g.N, nullptr}});
        const GsaStep step = step_of(b);
        const Step<float> steps{step, nullptr, 0};
        // A head of all tokens of a sequence belongs to one thread, which takes them in their order.
        const int units = sequences * b.heads;
        for (int unit = worker.team.begin(units); unit < worker.team.end(units); unit++)
            for (int c = starts[unit / b.heads]; c < starts[unit / b.heads + 1]; c++)
                head(b, steps, c, unit % b.heads, own_space);
        if (b.g.weight != nullptr)
            for (int c = worker.team.begin(call.count); c < worker.team.end(call.count); c++)
                activate(GSA_FUNCTION_SWISH, buffers.g + c * b.g.N, b.g.N);
        worker.team.wait();
        worker.multiply(worker.columns(b.o, call.count, [&](int c, float* out) { finish(b, c, out); }),
                        {{&b.o, buffers.x, D, buffers.x}});
        const int64_t inner = b.gate.N;
        worker.multiply(
            worker.columns(b.gate, call.count, normed(b.mlp_norm, b.mlp_epsilon)),
            {{&b.gate, buffers.inner, 2 * inner, nullptr}, {&b.up, buffers.inner + inner, 2 * inner, nullptr}});
        const auto gated = [&](int c, float* out) {
            call.linear.read_input({GSA_INPUT_SWIGLU, buffers.inner + c * 2 * inner, nullptr, 0}, inner, inner, 1, out);
        };
        worker.multiply(worker.columns(b.down, call.count, gated), {{&b.down, buffers.x, D, buffers.x}});
    }

    void run(int rank, int size) {
        const GsaDecoder& decoder = call.decoder;
        Worker worker{call.linear, {rank, size, &barrier, nullptr}, own[rank], shared};
        const Matrix embeddings = described(decoder.embeddings);
        for (int c = worker.team.begin(call.count); c < worker.team.end(call.count); c++)
            call.linear.unpack(embeddings, call.ids[c], buffers.x + c * decoder.width);
        worker.team.wait();
        for (int64_t i = 0; i < decoder.block_count; i++) block(decoder.blocks[i], worker, space[rank]);
        if (call.first == call.count) return;
        const auto normed = [&](int c, float* out) {
            const float* x = buffers.x + (call.first + c) * decoder.width;
            const Input input{GSA_INPUT_RMS_NORM, x, decoder.norm, decoder.epsilon};
            call.linear.read_input(input, decoder.width, decoder.width, 1, out);
        };
        worker.multiply(worker.columns(decoder.head, call.count - call.first, normed),
                        {{&decoder.head, call.logits, decoder.head.N, nullptr}});
    }
};

// Products alone.
struct Products {
    const ProductsCall& call;
    Columns* own = nullptr;
    Barrier barrier;

    Products(const ProductsCall& call, int threads, Arena& arena) : call(call) {
        ColumnRoom room;
        if (call.activations != GSA_ACTIVATIONS_FP32) room.words_per_quad = call.linear.words_per_quad(false);
        for (int64_t i = 0; i < call.count; i++) room.include(*call.matrices[i]);
        own = arena.take<Columns>(threads);
        for (int t = 0; t < threads; t++) {
            const Columns columns = room.take(arena, 1);
            if (own != nullptr) own[t] = columns;
        }
    }

    void run(int rank, int size) {
        Worker worker{call.linear, {rank, size, &barrier, nullptr}, own[rank], own[rank]};
        for (int64_t i = 0; i < call.count; i++) {
            const GsaMatrix& matrix = *call.matrices[i];
            const auto copy = [&](int, float* out) { __builtin_memcpy(out, call.x, sizeof(float) * matrix.K); };
            worker.multiply(worker.columns(matrix, 1, copy), {{&matrix, call.y, matrix.N, nullptr}});
        }
    }
};

template <class Task, class Call>
size_t size_of(const Call& call, int threads) {
    Arena arena;
    const Task task(call, threads, arena);
    return arena.used;
}

template <class Task, class Call>
void run(const Call& call, int threads, char* memory) {
    Arena arena{memory};
    Task task(call, threads, arena);
    as_team(threads, [](void* context, int rank, int size) { static_cast<Task*>(context)->run(rank, size); }, &task);
}

}  // namespace

extern const DecodeKernels decode_kernels;
const DecodeKernels decode_kernels = {size_of<Decode, DecodeCall>, run<Decode, DecodeCall>,
                                      size_of<Products, ProductsCall>, run<Products, ProductsCall>};

}  // namespace GSA_ISA
}  // namespace gsa
