// Functions of rows for one instruction set: this file is compiled once for each. A row is read into numbers of the
// type that is computed in, worked on in the cache, and written.
#include "rows.h"

#include "chunks.h"
#include "elementary.h"
#include "parallel.h"

namespace gsa {
namespace GSA_ISA {
namespace {

constexpr int64_t kMostBlocks = 64;
constexpr int64_t kBlockRows = 16;  // at least

// Blocks of about equal size.
struct Blocks {
    int64_t rows, count;

    explicit Blocks(int64_t rows) : rows(rows), count((rows + kBlockRows - 1) / kBlockRows) {
        if (count > kMostBlocks) count = kMostBlocks;
    }
    int64_t begin(int64_t block) const { return rows * block / count; }
};

// Calls work(rank, block) for every block, on several threads.
template <class F>
struct EachBlock {
    const F& work;
    int64_t count, next;

    static void thread(void* context, int rank, int) {
        EachBlock& each = *static_cast<EachBlock*>(context);
        for (;;) {
            const int64_t block = __atomic_fetch_add(&each.next, 1, __ATOMIC_RELAXED);
            if (block >= each.count) return;
            each.work(rank, block);
        }
    }
};

template <class F>
void each_block(int threads, int64_t count, const F& work) {
    EachBlock<F> each{work, count, 0};
    as_they_come(threads, EachBlock<F>::thread, &each);
}

// The rows that a thread works on.
template <class T>
struct RowBuffers {
    T *x, *y, *z, *grad, *out;  // [padded]; backward: x, y, z become their gradients

    RowBuffers(Arena& arena, int padded) {
        T** const all[] = {&x, &y, &z, &grad, &out};
        for (T** p : all) *p = arena.take<T>(row_of<T>(padded));
    }
};

template <class T>
struct RowWork {
    static constexpr int W = Simd<T>::W;
    const GsaRows& call;
    int padded;
    RowBuffers<T> row;
    T* dweight;  // [padded], of the block

    bool present(const GsaTensor& x) const { return x.data != nullptr; }
    void load_row(const GsaTensor& x, int64_t i, T* to) { read(x, i * x.time, T(1), to, padded); }
    void store_row(const T* from, const GsaTensor& to, int64_t i) { write(from, T(1), to, i * to.time); }
    const T* weight() const { return static_cast<const T*>(call.weight); }

    // Weights lie in the caller's memory, which may end with the last one.
    Vec<T> weight_at(int i) const {
        if (i + W <= call.width) return load(weight() + i);
        Vec<T> part{};
        for (int j = i; j < call.width; j++) part[j - i] = weight()[j];
        return part;
    }

    template <class F>
    void each_vector(F f) {
        for (int i = 0; i < padded; i += W) f(i);
    }

    T norm_scale() {
        Vec<T> squares{};
        each_vector([&](int i) { squares += load(row.x + i) * load(row.x + i); });
        return T(1) / static_cast<T>(__builtin_sqrt(sum<T>(squares) / call.width + call.epsilon));
    }

    void forward(int64_t i) {
        load_row(call.x, i, row.x);
        if (present(call.y)) load_row(call.y, i, row.y);
        if (present(call.z)) load_row(call.z, i, row.z);
        switch (call.function) {
            case GSA_ROWS_RMS_NORM: {
                const T scale = norm_scale();
                each_vector([&](int j) { store(row.out + j, load(row.x + j) * scale * weight_at(j)); });
                break;
            }
            case GSA_ROWS_SWIGLU:
                each_vector([&](int j) { store(row.out + j, swish(load(row.x + j)) * load(row.y + j)); });
                break;
            case GSA_ROWS_SKIP_GATE:
                each_vector([&](int j) {
                    const Vec<T> through = load(row.x + j) + weight_at(j) * load(row.y + j);
                    store(row.out + j, through * swish(load(row.z + j)));
                });
                break;
            default: each_vector([&](int j) { store(row.out + j, softplus<T>(load(row.x + j))); });
        }
        store_row(row.out, call.out, i);
    }

    void backward(int64_t i) {
        load_row(call.x, i, row.x);
        load_row(call.d_out, i, row.grad);
        if (present(call.y)) load_row(call.y, i, row.y);
        if (present(call.z)) load_row(call.z, i, row.z);
        switch (call.function) {
            case GSA_ROWS_RMS_NORM: norm_backward(); break;
            case GSA_ROWS_SWIGLU:
                each_vector([&](int j) {
                    const Vec<T> x = load(row.x + j), grad = load(row.grad + j), s = sigmoid<T>(x);
                    const Vec<T> slope = s + x * s * (T(1) - s);
                    store(row.x + j, grad * load(row.y + j) * slope);
                    store(row.y + j, grad * x * s);
                });
                break;
            case GSA_ROWS_SKIP_GATE:
                each_vector([&](int j) {
                    const Vec<T> skipped = load(row.y + j), gate = load(row.z + j), grad = load(row.grad + j);
                    const Vec<T> s = sigmoid<T>(gate), through = load(row.x + j) + weight_at(j) * skipped;
                    const Vec<T> d = grad * gate * s;
                    store(row.z + j, grad * through * (s + gate * s * (T(1) - s)));
                    store(row.x + j, d);
                    store(row.y + j, d * weight_at(j));
                    store(dweight + j, load(dweight + j) + d * skipped);
                });
                break;
            default: each_vector([&](int j) { store(row.x + j, load(row.grad + j) * sigmoid<T>(load(row.x + j))); });
        }
        store_row(row.x, call.dx, i);
        if (present(call.dy)) store_row(row.y, call.dy, i);
        if (present(call.dz)) store_row(row.z, call.dz, i);
    }

    void norm_backward() {
        const T scale = norm_scale();
        Vec<T> along{};
        each_vector([&](int j) {
            const Vec<T> normed = load(row.x + j) * scale, grad = load(row.grad + j);
            store(dweight + j, load(dweight + j) + grad * normed);
            const Vec<T> weighted = grad * weight_at(j);
            along += weighted * normed;
            store(row.x + j, normed);
            store(row.grad + j, weighted);
        });
        const T mean = sum<T>(along) / call.width;
        each_vector([&](int j) { store(row.x + j, (load(row.grad + j) - load(row.x + j) * mean) * scale); });
    }

    static Vec<T> swish(Vec<T> x) { return x * sigmoid<T>(x); }
};

template <class T>
RowPlan plan_for(const GsaRows& call, bool backward) {
    const int padded = whole_vectors<T>(call.width);
    Arena own;
    RowBuffers<T>(own, padded);
    const Blocks blocks(call.rows);
    const bool sums = backward && call.dweight != nullptr;
    return {blocks.count, sums ? sizeof(T) * static_cast<size_t>(blocks.count) * padded : 0, own.used + 64};
}

template <class T>
void run(const GsaRows& call, bool backward, const RowPlan& plan, int threads, char* memory) {
    const int padded = whole_vectors<T>(call.width);
    const Blocks blocks(call.rows);
    T* sums = reinterpret_cast<T*>(memory);
    each_block(threads, plan.blocks, [&](int rank, int64_t block) {
        Arena arena;
        arena.base = memory + plan.sums + static_cast<size_t>(rank) * plan.per_thread;
        RowWork<T> rows{call, padded, RowBuffers<T>(arena, padded), plan.sums ? sums + block * padded : nullptr};
        if (rows.dweight != nullptr)
            for (int i = 0; i < padded; i++) rows.dweight[i] = 0;
        for (int64_t i = blocks.begin(block); i < blocks.begin(block + 1); i++) {
            if (backward)
                rows.backward(i);
            else
                rows.forward(i);
        }
    });
    if (plan.sums == 0) return;
    T* total = static_cast<T*>(call.dweight);
    for (int i = 0; i < call.width; i++) total[i] = 0;
    for (int64_t block = 0; block < plan.blocks; block++)
        for (int i = 0; i < call.width; i++) total[i] += sums[block * padded + i];
}

template <class T>
struct CrossEntropy {
    static constexpr int W = Simd<T>::W;
    const GsaCrossEntropy& call;
    int V, padded;
    T* row;  // [padded]

    void one(int64_t i) {
        const int64_t label = call.labels[i];
        T& loss = static_cast<T*>(call.losses)[i];
        loss = 0;
        if (label < 0) {
            if (!call.gradient) return;
            for (int j = 0; j < V; j++) row[j] = 0;
        } else {
            read(call.logits, i * call.logits.time, T(1), row, padded);
            const T lowest = -static_cast<T>(__builtin_inff());
            for (int j = V; j < padded; j++) row[j] = lowest;
            Vec<T> most = splat(lowest);
            for (int j = 0; j < padded; j += W) most = larger<T>(load(row + j), most);
            T highest = most[0];
            for (int j = 1; j < W; j++) highest = most[j] > highest ? most[j] : highest;
            const T own = row[label] - highest;
            // In a few sums: one alone would wait for itself, and lose digits over a large vocabulary.
            Vec<T> mass[4] = {};
            for (int j = 0; j < padded; j += W) {
                const Vec<T> e = exp<T>(load(row + j) - highest);
                store(row + j, e);
                mass[j / W % 4] += e;
            }
            const T total = sum<T>((mass[0] + mass[1]) + (mass[2] + mass[3]));
            loss = static_cast<T>(__builtin_log(total)) - own;
            if (!call.gradient) return;
            const T inverse = T(1) / total;
            for (int j = 0; j < padded; j += W) store(row + j, load(row + j) * inverse);
            row[label] -= T(1);
        }
        write(row, T(1), call.logits, i * call.logits.time);
    }
};

template <class T>
void cross_entropy_of(const GsaCrossEntropy& call, const RowPlan& plan, int threads, char* memory) {
    const int V = call.logits.width, padded = whole_vectors<T>(V);
    const Blocks blocks(call.rows);
    each_block(threads, plan.blocks, [&](int rank, int64_t block) {
        CrossEntropy<T> of{call, V, padded, reinterpret_cast<T*>(memory + static_cast<size_t>(rank) * plan.per_thread)};
        for (int64_t i = blocks.begin(block); i < blocks.begin(block + 1); i++) of.one(i);
    });
}

RowPlan plan(const GsaRows& call, bool backward) {
    return call.wide ? plan_for<double>(call, backward) : plan_for<float>(call, backward);
}

void rows(const GsaRows& call, bool backward, const RowPlan& plan, int threads, char* memory) {
    if (call.wide)
        run<double>(call, backward, plan, threads, memory);
    else
        run<float>(call, backward, plan, threads, memory);
}

RowPlan cross_entropy_plan(const GsaCrossEntropy& call) {
    const size_t padded = whole_vectors<float>(call.logits.width);  // no fewer than those of double
    return {Blocks(call.rows).count, 0, (call.wide ? 8 : 4) * padded + 64};
}

void cross_entropy(const GsaCrossEntropy& call, const RowPlan& plan, int threads, char* memory) {
    if (call.wide)
        cross_entropy_of<double>(call, plan, threads, memory);
    else
        cross_entropy_of<float>(call, plan, threads, memory);
}

}  // namespace

extern const RowKernels row_kernels;
const RowKernels row_kernels = {plan, rows, cross_entropy_plan, cross_entropy};

}  // namespace GSA_ISA
}  // namespace gsa
