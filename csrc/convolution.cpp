// Short causal convolutions for one instruction set: this file is compiled once for each. Tokens go by one after the
// other, all channels of a token at once; the last few of them are kept in a ring of rows.
#include "convolution.h"

#include "chunks.h"
#include "elementary.h"
#include "parallel.h"

namespace gsa {
namespace GSA_ISA {
namespace {

// Letters: K taps, C channels. Rows of [.., C] matrices are `padded` apart.
template <class T>
struct ConvolutionUnit {
    static constexpr int W = Simd<T>::W;
    const GsaConvolution& call;
    const ConvolutionPlan& plan;
    int K, C, padded;
    T *weight, *bias;  // [K, C], [C]
    T *ring, *out;     // [K, C]: inputs, those of token t at row t mod K; [C]
    // backward
    T *dring, *grad;      // [K, C]: gradients of those inputs, so far; [C]
    T *dweight, *dbias;   // [K, C], [C]: sums of the unit
    const T** inputs;     // [K]: rows of the ring, the oldest first
    T** input_gradients;  // [K]

    ConvolutionUnit(Arena& arena, const GsaConvolution& call, bool backward, const ConvolutionPlan& plan)
        : call(call), plan(plan), K(call.taps), C(call.x.width), padded(whole_vectors<T>(C)) {
        const size_t matrix = static_cast<size_t>(K) * padded;
        weight = arena.take<T>(matrix);
        bias = arena.take<T>(padded);
        ring = arena.take<T>(matrix);
        out = arena.take<T>(padded);
        inputs = arena.take<const T*>(K);
        if (!backward) return;
        dring = arena.take<T>(matrix);
        grad = arena.take<T>(padded);
        input_gradients = arena.take<T*>(K);
    }

    static size_t sums_of(const GsaConvolution& call) {
        return static_cast<size_t>(call.taps + 1) * whole_vectors<T>(call.x.width);
    }

    // to [padded] = from [C], or zero if that is null.
    void take(const T* from, T* to) {
        for (int i = 0; i < padded; i++) to[i] = from != nullptr && i < C ? from[i] : T(0);
    }

    void read_parameters() {
        for (int k = 0; k < K; k++)
            take(static_cast<const T*>(call.weight) + static_cast<size_t>(k) * C, weight + k * padded);
        take(static_cast<const T*>(call.bias), bias);
    }

    int64_t length(int64_t n) const { return call.shape.stops[n] - call.shape.starts[n]; }

    int64_t offset(const GsaTensor& x, int64_t n, int64_t t) const {
        return call.shape.rows[n] * x.batch + (call.shape.starts[n] + t) * x.time;
    }

    // Row of the ring for token t, from -(K - 1) on.
    ptrdiff_t slot(int64_t t) const { return static_cast<ptrdiff_t>((t + K) % K) * padded; }

    // Token t of sequence n into the ring; those before the first come from the past.
    void fetch(int64_t n, int64_t t) {
        if (t >= 0) return read(call.x, offset(call.x, n, t), T(1), ring + slot(t), padded);
        const T* past = static_cast<const T*>(call.past);
        take(past == nullptr ? nullptr : past + (n * (K - 1) + K - 1 + t) * C, ring + slot(t));
    }

    void order(int64_t t) {
        for (int k = 0; k < K; k++) inputs[k] = ring + slot(t - K + 1 + k);
    }

    Vec<T> sum_at(int i) const {
        Vec<T> z = load(bias + i);
        for (int k = 0; k < K; k++) z += load(weight + k * padded + i) * load(inputs[k] + i);
        return z;
    }

    // Tokens from `begin` to `end` of sequence n.
    void forward(int64_t n, int64_t begin, int64_t end) {
        for (int64_t t = begin - K + 1; t < begin; t++) fetch(n, t);
        for (int64_t t = begin; t < end; t++) {
            fetch(n, t);
            order(t);
            for (int i = 0; i < padded; i += W) {
                const Vec<T> z = sum_at(i);
                store(out + i, call.function == GSA_FUNCTION_SWISH ? z * sigmoid<T>(z) : z);
            }
            write(out, T(1), call.y, offset(call.y, n, t));
        }
    }

    // The gradient of token t of sequence n is complete.
    void finish(int64_t n, int64_t t) {
        if (t >= 0) return write(dring + slot(t), T(1), call.dx, offset(call.dx, n, t));
        T* dpast = static_cast<T*>(call.dpast) + (n * (K - 1) + K - 1 + t) * C;
        __builtin_memcpy(dpast, dring + slot(t), sizeof(T) * C);
    }

    // Gradients of the tokens from `begin` to `end`, and of the past if they are the first. Outputs up to K - 1 tokens
    // later depend on them: those are looked at once more by the unit to which they belong, whose sums have them.
    void backward(int64_t n, int64_t begin, int64_t end) {
        const int64_t last = end + K - 1 < length(n) ? end + K - 1 : length(n), first = begin == 0 ? 1 - K : begin;
        for (int64_t t = begin - K + 1; t < begin; t++) fetch(n, t);
        for (ptrdiff_t i = 0; i < static_cast<ptrdiff_t>(K) * padded; i++) dring[i] = 0;
        for (int64_t t = begin; t < last; t++) {
            fetch(n, t);
            order(t);
            for (int k = 0; k < K; k++) input_gradients[k] = dring + slot(t - K + 1 + k);
            for (int i = 0; i < padded; i++) input_gradients[K - 1][i] = 0;
            read(call.d_y, offset(call.d_y, n, t), T(1), grad, padded);
            const bool own = t < end;
            for (int i = 0; i < padded; i += W) {
                Vec<T> d = load(grad + i);
                if (call.function == GSA_FUNCTION_SWISH) {
                    const Vec<T> z = sum_at(i), s = sigmoid<T>(z);
                    d *= s + z * s * (T(1) - s);
                }
                if (own) store(dbias + i, load(dbias + i) + d);
                for (int k = 0; k < K; k++) {
                    T *dx = input_gradients[k] + i, *dw = dweight + k * padded + i;
                    store(dx, load(dx) + d * load(weight + k * padded + i));
                    if (own) store(dw, load(dw) + d * load(inputs[k] + i));
                }
            }
            if (t - K + 1 >= first && t - K + 1 < end) finish(n, t - K + 1);
        }
        for (int64_t t = last - K + 1 > first ? last - K + 1 : first; t < end; t++) finish(n, t);
    }

    // The tokens of a unit, in all sequences that it touches.
    void walk(int64_t unit, bool backward_too, T* sums) {
        const int64_t N = call.shape.sequences, tokens = plan.first_token[N];
        const int64_t begin = tokens * unit / plan.units, end = tokens * (unit + 1) / plan.units;
        if (backward_too) {
            dweight = sums + unit * sums_of(call);
            dbias = dweight + static_cast<size_t>(K) * padded;
            for (size_t i = 0; i < sums_of(call); i++) dweight[i] = 0;
        }
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
                backward(n, from, to);
            else
                forward(n, from, to);
        }
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
        ConvolutionUnit<T> unit(arena, all.call, all.backward, all.plan);
        unit.read_parameters();
        for (;;) {
            const int64_t number = __atomic_fetch_add(&all.next, 1, __ATOMIC_RELAXED);
            if (number >= all.plan.units) return;
            unit.walk(number, all.backward, reinterpret_cast<T*>(all.memory));
        }
    }
};

template <class T>
void size_for(const GsaConvolution& call, bool backward, ConvolutionPlan& plan) {
    Arena own;
    ConvolutionUnit<T>(own, call, backward, plan);
    plan.per_thread = own.used + 64;
    plan.sums = backward ? (sizeof(T) * plan.units * ConvolutionUnit<T>::sums_of(call) + 63) / 64 * 64 : 0;
}

template <class T>
void run(const GsaConvolution& call, bool backward, const ConvolutionPlan& plan, int threads, char* memory) {
    Convolution<T> all{call, backward, plan, memory, 0};
    as_they_come(threads, Convolution<T>::thread, &all);
    if (!backward) return;
    const int C = call.x.width, padded = whole_vectors<T>(C);
    const T* sums = reinterpret_cast<const T*>(memory);
    for (int k = 0; k <= call.taps; k++) {
        T* total =
            k < call.taps ? static_cast<T*>(call.dweight) + static_cast<size_t>(k) * C : static_cast<T*>(call.dbias);
        for (int i = 0; i < C; i++) total[i] = 0;
        for (int64_t unit = 0; unit < plan.units; unit++) {
            const T* part = sums + unit * ConvolutionUnit<T>::sums_of(call) + static_cast<size_t>(k) * padded;
            for (int i = 0; i < C; i++) total[i] += part[i];
        }
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
