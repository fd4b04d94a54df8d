// Short causal convolutions for one instruction set: this file is compiled once for each. Tokens go by one after the
// other, a block of channels at a time; the last few of them are kept in a ring of rows.
#include "convolution.h"

#include "chunks.h"
#include "elementary.h"
#include "parallel.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Letters: K taps, C channels of the block.
template <class T>
struct ConvolutionBlock {
    static constexpr int W = Simd<T>::W;
    // Between rows of [.., C] matrices: no power of two, which would crowd a few lines of the cache.
    static constexpr ptrdiff_t kRow = row_of<T>(kConvolutionChannels);

    const GsaConvolution& call;
    const ConvolutionPlan& plan;
    int K, first, C, padded;  // `first`: the block's first channel
    T *weight, *bias;         // [K, C], [C]
    T *ring, *out;            // [K, C]: inputs, those of token t at row t mod K; [C]
    const T** inputs;         // [K]: rows of the ring, the oldest first
    // backward
    T *dring, *grad;      // [K, C]: gradients of those inputs, so far; [C]
    T** input_gradients;  // [K]
    T* sums;              // [K + 1, C]: gradients of weight and bias

    ConvolutionBlock(Arena& arena, const GsaConvolution& call, bool backward, const ConvolutionPlan& plan)
        : call(call), plan(plan), K(call.taps), first(0), C(0), padded(0) {
        const size_t matrix = static_cast<size_t>(K) * kRow;
        weight = arena.take<T>(matrix);
        bias = arena.take<T>(kRow);
        ring = arena.take<T>(matrix);
        out = arena.take<T>(kRow);
        inputs = arena.take<const T*>(K);
        if (!backward) return;
        dring = arena.take<T>(matrix);
        grad = arena.take<T>(kRow);
        input_gradients = arena.take<T*>(K);
        sums = arena.take<T>(matrix + kRow);
    }

    // to [padded] = this block's part of from [channels], or zero if that is null.
    void take(const T* from, T* to) {
        for (int i = 0; i < padded; i++) to[i] = from != nullptr && i < C ? from[first + i] : T(0);
    }

    void choose(int64_t block) {
        first = static_cast<int>(block) * kConvolutionChannels;
        const int channels = call.x.width, left = channels - first;
        C = left < kConvolutionChannels ? left : kConvolutionChannels;
        padded = whole_vectors<T>(C);
        for (int k = 0; k < K; k++)
            take(static_cast<const T*>(call.weight) + static_cast<ptrdiff_t>(k) * channels, weight + k * kRow);
        take(static_cast<const T*>(call.bias), bias);
    }

    int64_t length(int64_t n) const { return call.shape.stops[n] - call.shape.starts[n]; }

    // The block's part of a tensor [B, T, 1, channels], for rows of it.
    GsaTensor mine(const GsaTensor& x) const {
        GsaTensor part = x;
        part.width = C;
        return part;
    }

    int64_t offset(const GsaTensor& x, int64_t n, int64_t t) const {
        return call.shape.rows[n] * x.batch + (call.shape.starts[n] + t) * x.time + first;
    }

    // Row of the ring for token t, from -(K - 1) on.
    ptrdiff_t slot(int64_t t) const { return static_cast<ptrdiff_t>((t + K) % K) * kRow; }

    // Where token t < 0 of sequence n lies in [N, K - 1, channels].
    int64_t past(int64_t n, int64_t t) const { return (n * (K - 1) + K - 1 + t) * call.x.width; }

    // Token t of sequence n into the ring; those before the first come from the past.
    void fetch(int64_t n, int64_t t) {
        if (t >= 0) return read(mine(call.x), offset(call.x, n, t), T(1), ring + slot(t), padded);
        take(call.past == nullptr ? nullptr : static_cast<const T*>(call.past) + past(n, t), ring + slot(t));
    }

    // The next token of sequence n is t: what its output is made of.
    void arrive(int64_t n, int64_t t) {
        fetch(n, t);
        for (int k = 0; k < K; k++) inputs[k] = ring + slot(t - K + 1 + k);
    }

    // `Taps` is K where the compiler knows it, or 0.
    template <int Taps>
    Vec<T> sum_at(int i) const {
        Vec<T> z = load(bias + i);
#pragma GCC unroll 4
        for (int k = 0; k < (Taps ? Taps : K); k++) z += load(weight + k * kRow + i) * load(inputs[k] + i);
        return z;
    }

    // Tokens from `begin` to `end` of sequence n.
    template <int Taps>
    void forward(int64_t n, int64_t begin, int64_t end) {
        for (int64_t t = begin - K + 1; t < begin; t++) fetch(n, t);
        for (int64_t t = begin; t < end; t++) {
            arrive(n, t);
            if (call.function == GSA_FUNCTION_SWISH)
                for (int i = 0; i < padded; i += W) {
                    const Vec<T> z = sum_at<Taps>(i);
                    store(out + i, z * sigmoid<T>(z));
                }
            else
                for (int i = 0; i < padded; i += W) store(out + i, sum_at<Taps>(i));
            write(out, T(1), mine(call.y), offset(call.y, n, t));
        }
    }

    // The gradient of token t of sequence n is complete.
    void finish(int64_t n, int64_t t) {
        if (t >= 0) return write(dring + slot(t), T(1), mine(call.dx), offset(call.dx, n, t));
        T* to = static_cast<T*>(call.dpast) + past(n, t) + first;
        __builtin_memcpy(to, dring + slot(t), sizeof(T) * C);
    }

    // Adds what the gradients `grad` of an output say of its inputs, and, if it is one of this unit's own, of weight
    // and bias.
    template <int Taps, bool Own>
    void spread() {
        for (int i = 0; i < padded; i += W) {
            const Vec<T> d = load(grad + i);
            if (Own) store(sums + K * kRow + i, load(sums + K * kRow + i) + d);
#pragma GCC unroll 4
            for (int k = 0; k < (Taps ? Taps : K); k++) {
                T *dx = input_gradients[k] + i, *dw = sums + k * kRow + i;
                store(dx, load(dx) + d * load(weight + k * kRow + i));
                if (Own) store(dw, load(dw) + d * load(inputs[k] + i));
            }
        }
    }

    // Gradients of the tokens from `begin` to `end`, and of the past if they are the first. Outputs up to K - 1 tokens
    // later depend on them too; what these say of weight and bias is for the unit that they belong to.
    template <int Taps>
    void backward(int64_t n, int64_t begin, int64_t end) {
        const int64_t last = end + K - 1 < length(n) ? end + K - 1 : length(n), earliest = begin == 0 ? 1 - K : begin;
        for (int64_t t = begin - K + 1; t < begin; t++) fetch(n, t);
        for (ptrdiff_t i = 0; i < K * kRow; i++) dring[i] = 0;
        for (int64_t t = begin; t < last; t++) {
            arrive(n, t);
            for (int k = 0; k < K; k++) input_gradients[k] = dring + slot(t - K + 1 + k);
            for (int i = 0; i < padded; i++) input_gradients[K - 1][i] = 0;
            read(mine(call.d_y), offset(call.d_y, n, t), T(1), grad, padded);
            if (call.function == GSA_FUNCTION_SWISH)
                for (int i = 0; i < padded; i += W) {
                    const Vec<T> z = sum_at<Taps>(i), s = sigmoid<T>(z);
                    store(grad + i, load(grad + i) * (s + z * s * (T(1) - s)));
                }
            if (t < end)
                spread<Taps, true>();
            else
                spread<Taps, false>();
            if (t - K + 1 >= earliest && t - K + 1 < end) finish(n, t - K + 1);
        }
        for (int64_t t = last - K + 1 > earliest ? last - K + 1 : earliest; t < end; t++) finish(n, t);
    }

    // The tokens of a unit, in all sequences that it touches; backward leaves its sums in `total` [K + 1, C].
    void walk(int64_t unit, bool backward_too, T* total) {
        choose(unit % plan.blocks);
        const int64_t run = unit / plan.blocks, N = call.shape.sequences, tokens = plan.first_token[N];
        const int64_t begin = tokens * run / plan.runs, end = tokens * (run + 1) / plan.runs;
        if (backward_too)
            for (ptrdiff_t i = 0; i < (K + 1) * kRow; i++) sums[i] = 0;
        int64_t low = 0, high = N;  // the last sequence that begins at `begin` or before
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (plan.first_token[middle] <= begin ? low : high) = middle;
        }
        for (int64_t n = low; n < N && plan.first_token[n] < end; n++) {
            const int64_t before = plan.first_token[n], from = begin > before ? begin - before : 0;
            const int64_t to = end - before < length(n) ? end - before : length(n);
            if (from >= to) continue;
            if (backward_too)
                K == 4 ? backward<4>(n, from, to) : backward<0>(n, from, to);
            else
                K == 4 ? forward<4>(n, from, to) : forward<0>(n, from, to);
        }
        if (!backward_too) return;
        for (int k = 0; k <= K; k++)
            __builtin_memcpy(total + (run * (K + 1) + k) * call.x.width + first, sums + k * kRow, sizeof(T) * C);
    }
};

template <class T>
struct Convolution {
    const GsaConvolution& call;
    bool backward;
    const ConvolutionPlan& plan;
    char* memory;
    int64_t next;  // unit that nobody works on yet

    static void thread(void* context, int rank, int) {
        Convolution& all = *static_cast<Convolution*>(context);
        Arena arena;
        arena.base = all.memory + all.plan.sums + static_cast<size_t>(rank) * all.plan.per_thread;
        ConvolutionBlock<T> block(arena, all.call, all.backward, all.plan);
        for (;;) {
            const int64_t unit = __atomic_fetch_add(&all.next, 1, __ATOMIC_RELAXED);
            if (unit >= all.plan.runs * all.plan.blocks) return;
            block.walk(unit, all.backward, reinterpret_cast<T*>(all.memory));
        }
    }
};

template <class T>
void size_for(const GsaConvolution& call, bool backward, ConvolutionPlan& plan) {
    Arena own;
    ConvolutionBlock<T>(own, call, backward, plan);
    plan.per_thread = own.used + 64;
    const size_t numbers = static_cast<size_t>(plan.runs) * (call.taps + 1) * call.x.width;
    plan.sums = backward ? (sizeof(T) * numbers + 63) / 64 * 64 : 0;
}

template <class T>
void run(const GsaConvolution& call, bool backward, const ConvolutionPlan& plan, int threads, char* memory) {
    Convolution<T> all{call, backward, plan, memory, 0};
    as_they_come(threads, Convolution<T>::thread, &all);
    if (!backward) return;
    const ptrdiff_t channels = call.x.width, weights = call.taps * channels;
    const T* sums = reinterpret_cast<const T*>(memory);
    T *dweight = static_cast<T*>(call.dweight), *dbias = static_cast<T*>(call.dbias);
    for (ptrdiff_t i = 0; i < weights; i++) dweight[i] = 0;
    for (ptrdiff_t i = 0; i < channels; i++) dbias[i] = 0;
    for (int64_t run = 0; run < plan.runs; run++, sums += weights + channels) {
        for (ptrdiff_t i = 0; i < weights; i++) dweight[i] += sums[i];
        for (ptrdiff_t i = 0; i < channels; i++) dbias[i] += sums[weights + i];
    }
}

void size(const GsaConvolution& call, bool backward, ConvolutionPlan& plan) {
    call.shape.wide ? size_for<double>(call, backward, plan) : size_for<float>(call, backward, plan);
}

void compute(const GsaConvolution& call, bool backward, const ConvolutionPlan& plan, int threads, char* memory) {
    if (call.shape.wide)
        run<double>(call, backward, plan, threads, memory);
    else
        run<float>(call, backward, plan, threads, memory);
}

}  // namespace

extern const ConvolutionKernels convolution_kernels;
const ConvolutionKernels convolution_kernels = {size, compute};

}  // namespace GSA_ISA
}  // namespace gsa
