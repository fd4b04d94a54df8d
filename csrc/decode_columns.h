// Activations on their way into products that a team of threads shares.
#pragma once

#include "chunks.h"
#include "linear.h"
#include "team.h"

namespace gsa {
namespace GSA_ISA {
namespace {

GSA_INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

// How activations are laid out; see Columns.
inline int words_per_quad(const LinearKernels& linear, int activations) {
    if (activations == GSA_ACTIVATIONS_FP32) return 0;
    return linear.words_per_quad(activations == GSA_ACTIVATIONS_INT8_PORTABLE);
}

// Room for columns that suit any of some matrices.
struct ColumnRoom {
    int64_t blocks = 0, groups = 0;  // along the longest row
    int words_per_quad = 0;          // as in Columns

    void include(const GsaMatrix& matrix) {
        if (matrix.weight == nullptr) return;
        const Matrix m = described(matrix);
        blocks = larger_of(blocks, m.blocks);
        groups = larger_of(groups, m.groups);
    }

    // Room for `count` columns; the shapes are those of Columns.
    Columns take(Arena& arena, int count) const {
        Columns columns{};
        columns.count = count;
        columns.words_per_quad = words_per_quad;
        columns.x = arena.take<float>(count * blocks * kBlockColumns);
        columns.group_sum = arena.take<float>(count * groups);
        columns.words = arena.take<int32_t>(words_per_quad == 0 ? 0 : count * blocks * block_words(words_per_quad));
        return columns;
    }
};

// The columns from `from` to `to` alone, of columns made for matrix m.
GSA_INLINE Columns column_range(const Matrix& m, const Columns& all, int from, int to) {
    Columns part = all;
    part.count = to - from;
    part.x += from * all.stride;
    part.group_sum += from * m.groups;
    part.words += from * m.blocks * block_words(all.words_per_quad);
    return part;
}

// A product that is to be done: y = W x + residual, or + bias.
struct PendingProduct {
    const GsaMatrix* matrix;  // W [N, K]
    float* y;                 // [count, N], columns `stride` apart
    int64_t stride;
    const float* residual;        // lies as y does, or null
    const float* bias = nullptr;  // [N] or null; there is no residual then
};

// One thread of a team, with what it needs for products.
struct Worker {
    const LinearKernels& linear;
    Team team;
    Columns own;     // room for one column, of this thread
    Columns shared;  // room for all columns, of the team

    // Columns for a matrix [N, K], from what fill(column, out [K]) writes. One column each thread makes for itself,
    // which takes less than waiting for another to make it; more are shared out.
    template <class Fill>
    Columns columns(const GsaMatrix& matrix, int count, Fill fill) {
        const Matrix m = described(matrix);
        const bool alone = count == 1;
        Columns all = alone ? own : shared;
        all.count = count;
        all.stride = m.blocks * kBlockColumns;
        const int from = alone ? 0 : team.begin(all.count), to = alone ? 1 : team.end(all.count);
        for (int c = from; c < to; c++) {
            float* out = all.x + c * all.stride;
            fill(c, out);
            for (int64_t k = m.K; k < all.stride; k++) out[k] = 0;
        }
        const Columns mine = column_range(m, all, from, to);
        if (all.words_per_quad != 0)
            linear.quantise(m, mine);
        else
            linear.arrange(m, mine);
        if (!alone) team.wait();
        return all;
    }

    // This thread's share of all rows of some products with the same columns. `behind(number, from, to)` is called for
    // the rows that it has made of a product.
    template <class Behind>
    void multiply_share(const Columns& columns, const PendingProduct* products, int64_t number, Behind behind) {
        int64_t total = 0;
        for (int64_t i = 0; i < number; i++) total += row_blocks(*products[i].matrix);
        const int64_t from = total * team.rank / team.size, to = total * (team.rank + 1) / team.size;
        int64_t first = 0;
        for (int64_t i = 0; i < number; i++) {
            const PendingProduct& product = products[i];
            const int64_t blocks = row_blocks(*product.matrix);
            const int64_t begin = larger_of(from - first, 0), end = to - first < blocks ? to - first : blocks;
            first += blocks;
            if (begin >= end) continue;
            const Matrix matrix = described(*product.matrix);
            const int64_t row = begin * kBlockRows, stop = end * kBlockRows < matrix.N ? end * kBlockRows : matrix.N;
            const float* residual = product.residual;
            if (product.bias != nullptr) {
                for (int c = 0; c < columns.count; c++)
                    __builtin_memcpy(product.y + c * product.stride + row, product.bias + row,
                                     sizeof(float) * (stop - row));
                residual = product.y;
            }
            linear.multiply(matrix, columns, residual, product.y, product.stride, begin, end);
            behind(i, row, stop);
        }
    }

    // The same with nothing behind, until all threads are done.
    template <int Number>
    void multiply(const Columns& columns, const PendingProduct (&products)[Number]) {
        multiply_share(columns, products, Number, [](int64_t, int64_t, int64_t) {});
        team.wait();
    }

   private:
    static int64_t row_blocks(const GsaMatrix& matrix) { return (matrix.N + kBlockRows - 1) / kBlockRows; }
};

}  // namespace
}  // namespace GSA_ISA
}  // namespace gsa
