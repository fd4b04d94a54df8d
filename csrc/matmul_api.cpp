// The C functions of matmul.h's kernels: working memory, and columns and rows shared out among threads.
#include <atomic>

#include "arena.h"
#include "isa.h"
#include "linear.h"
#include "matmul.h"
#include "memory.h"
#include "native.h"
#include "parallel.h"

namespace gsa {
namespace {

thread_local WorkingMemory memory;

// One call. First the columns become what the kernels read, tile by tile; then they meet the rows, panel by panel.
struct Matmul {
    const MatmulKernels& kernels;
    const LinearKernels& linear;
    const GsaMatrix* const* matrices;  // [number], with the same K
    int64_t number;
    Input input;
    int64_t count;
    int compute;
    const float* residual;          // [count, width] or null
    float* y;                       // [count, width]
    Matrix first{};                 // matrices[0]
    int64_t width = 0;              // rows of all matrices
    int64_t panels = 0;             // of all matrices
    float* own_x = nullptr;         // [threads, 12, 32 * blocks], a tile of columns as floats
    uint32_t* own_panel = nullptr;  // [threads, pairs, 32]
    uint32_t* tiles = nullptr;      // [tiles, pairs, 12]; the last has room for its columns alone
    Columns columns{};              // all, in int8
    std::atomic<int64_t> next{0};

    bool integers() const { return compute == GSA_COMPUTE_INT8 || compute == GSA_COMPUTE_INT8_PORTABLE; }
    bool portable() const { return compute == GSA_COMPUTE_BF16_PORTABLE || compute == GSA_COMPUTE_INT8_PORTABLE; }
    int64_t tile_count() const { return (count + kTileColumns - 1) / kTileColumns; }
    int64_t tile_size() const { return pairs_of(first) * kTileColumns; }
    int columns_of(int64_t tile) const {
        const int64_t rest = count - tile * kTileColumns;
        return rest < kTileColumns ? static_cast<int>(rest) : kTileColumns;
    }

    void describe() {
        first = described(*matrices[0]);
        for (int64_t i = 0; i < number; i++) {
            width += matrices[i]->N;
            panels += (matrices[i]->N + kPanelRows - 1) / kPanelRows;
        }
    }

    void place(Arena& arena, int threads) {
        const size_t all = static_cast<size_t>(count), many = static_cast<size_t>(threads);
        const size_t length = static_cast<size_t>(first.blocks * kBlockColumns);
        own_x = arena.take<float>(many * kTileColumns * length);
        if (!integers()) {
            own_panel = arena.take<uint32_t>(many * pairs_of(first) * kPanelRows);
            tiles = arena.take<uint32_t>(tile_count() * tile_size());
            return;
        }
        columns.count = static_cast<int>(count);
        columns.words_per_quad = linear.words_per_quad(portable());
        columns.words = arena.take<int32_t>(all * first.blocks * block_words(columns.words_per_quad));
    }

    // One tile, by the thread of this rank.
    void convert(int64_t tile, int rank) {
        const int64_t length = first.blocks * kBlockColumns, begin = tile * kTileColumns;
        const int some = columns_of(tile);
        float* x = own_x + rank * kTileColumns * length;
        Input part = input;
        part.x += begin * first.K * (input.kind == GSA_INPUT_SWIGLU ? 2 : 1);
        linear.read_input(part, first.K, length, some, x);
        if (!integers()) return kernels.pack_columns(x, some, pairs_of(first), tiles + tile * tile_size());
        Columns mine = columns;
        mine.count = some;
        mine.stride = length;
        mine.x = x;
        mine.words += begin * first.blocks * block_words(columns.words_per_quad);
        linear.quantise(first, mine);
    }

    // One panel of the rows of all matrices.
    void multiply(int64_t panel, int rank) {
        int64_t offset = 0, i = 0;
        for (;; i++) {
            const int64_t own = (matrices[i]->N + kPanelRows - 1) / kPanelRows;
            if (panel < own) break;
            panel -= own;
            offset += matrices[i]->N;
        }
        const Matrix m = described(*matrices[i]);
        const int64_t row = panel * kPanelRows, rest = m.N - row;
        if (integers()) {
            const int64_t blocks = (m.N + kBlockRows - 1) / kBlockRows, from = row / kBlockRows;
            const int64_t to = from + kPanelRows / kBlockRows;
            linear.multiply(m, columns, residual == nullptr ? nullptr : residual + offset, y + offset, width, from,
                            to < blocks ? to : blocks);
            return;
        }
        uint32_t* words = own_panel + rank * pairs_of(m) * kPanelRows;
        kernels.pack_rows(m, row, words);
        const int rows = rest < kPanelRows ? static_cast<int>(rest) : kPanelRows;
        for (int64_t tile = 0; tile < tile_count(); tile++) {
            const int64_t place = tile * kTileColumns * width + offset + row;
            kernels.multiply(words, tiles + tile * tile_size(), pairs_of(m), columns_of(tile), rows, portable(),
                             residual == nullptr ? nullptr : residual + place, y + place, width);
        }
    }
};

template <void (Matmul::*part)(int64_t, int), int64_t (*number)(const Matmul&)>
void work(void* context, int rank, int) {
    Matmul& matmul = *static_cast<Matmul*>(context);
    const int64_t end = number(matmul);
    for (int64_t i; (i = matmul.next.fetch_add(1, std::memory_order_relaxed)) < end;) (matmul.*part)(i, rank);
}

struct Exercise {
    const MatmulKernels& kernels;
    int compute;
    int64_t rounds;
    std::atomic<int64_t> done{0};
};

void exercise(void* context, int, int) {
    Exercise& job = *static_cast<Exercise*>(context);
    job.done.fetch_add(job.kernels.exercise(job.compute, job.rounds));
}

int64_t tiles_of(const Matmul& matmul) { return matmul.tile_count(); }
int64_t panels_of(const Matmul& matmul) { return matmul.panels; }

}  // namespace
}  // namespace gsa

extern "C" int gsa_has_unit(int compute) { return gsa::isa().matmul->has_unit(compute); }

extern "C" int64_t gsa_exercise(int compute, int64_t rounds, int threads) {
    gsa::Exercise job{*gsa::isa().matmul, compute, rounds};
    gsa::as_team(threads, gsa::exercise, &job);
    return job.done.load();
}

extern "C" int gsa_matmul(const GsaMatrix* const* matrices, int64_t number, int input, const float* x,
                          const float* norm, float epsilon, int64_t count, int compute, const float* residual, float* y,
                          int threads) {
    using namespace gsa;
    Matmul matmul{*isa().matmul, *isa().linear, matrices, number, {input, x, norm, epsilon},
                  count,         compute,       residual, y};
    matmul.describe();
    const double numbers = static_cast<double>(count) * static_cast<double>(matmul.first.K);
    Arena size;
    matmul.place(size, threads);
    Arena arena{memory.get(size.used)};
    if (arena.base == nullptr) return 1;
    matmul.place(arena, threads);
    as_they_come(useful_threads(threads, 8 * numbers, kOperations), work<&Matmul::convert, tiles_of>, &matmul);
    matmul.next.store(0);
    as_they_come(useful_threads(threads, 2 * numbers * static_cast<double>(matmul.width), kOperations),
                 work<&Matmul::multiply, panels_of>, &matmul);
    memory.trim();
    return 0;
}
