// The C functions of linear.h's kernels: working memory, and rows shared out among threads.
#include <atomic>

#include "arena.h"
#include "isa.h"
#include "linear.h"
#include "memory.h"
#include "native.h"
#include "parallel.h"

namespace gsa {
namespace {

// Bytes to read that are worth a thread.
constexpr Worth kBytes{16 << 10, 512 << 10};
// What a thread takes at a time: a few microseconds of work.
constexpr int64_t kBytesPerPiece = 64 << 10;

// Rows, or blocks of them, that whoever comes first takes piece by piece.
class Pieces {
   public:
    Pieces(int64_t count, int64_t bytes) : count_(count) {
        const int64_t pieces = bytes / kBytesPerPiece;
        size_ = pieces < 1 ? count : (count + pieces - 1) / pieces;
        if (size_ < 1) size_ = 1;
    }

    // The next piece; false if there is none.
    bool take(int64_t& begin, int64_t& end) {
        begin = next_.fetch_add(size_, std::memory_order_relaxed);
        if (begin >= count_) return false;
        end = begin + size_ < count_ ? begin + size_ : count_;
        return true;
    }

   private:
    const int64_t count_;
    int64_t size_;
    std::atomic<int64_t> next_{0};
};

thread_local WorkingMemory memory;

// Room for the count and layout of columns that are given.
void place(Arena& arena, const Matrix& m, Columns& columns) {
    const size_t count = static_cast<size_t>(columns.count), words = block_words(columns.words_per_quad);
    columns.x = arena.take<float>(count * columns.stride);
    columns.group_sum = arena.take<float>(count * m.groups);
    columns.words = arena.take<int32_t>(columns.words_per_quad == 0 ? 0 : count * m.blocks * words);
}

// Columns in working memory; false if there is none.
bool prepare(const LinearKernels& kernels, const Matrix& m, const Input& input, int activations, Columns& columns) {
    if (m.format == GSA_WEIGHT_FP32 && input.kind == GSA_INPUT_PLAIN) {
        columns.x = const_cast<float*>(input.x);  // only read from here on
        columns.stride = m.K;
        return true;
    }
    const bool integers = activations != GSA_ACTIVATIONS_FP32;
    columns.stride = m.blocks * kBlockColumns;
    if (integers) columns.words_per_quad = kernels.words_per_quad(activations == GSA_ACTIVATIONS_INT8_PORTABLE);
    Arena size;
    place(size, m, columns);
    Arena arena{memory.get(size.used)};
    if (arena.base == nullptr) return false;
    place(arena, m, columns);
    kernels.read_input(input, m.K, columns.stride, columns.count, columns.x);
    if (integers) {
        kernels.quantise(m, columns);
    } else {
        kernels.arrange(m, columns);
    }
    return true;
}

struct Job {
    const LinearKernels* kernels;
    const Matrix* matrix;
    const Columns* columns;
    const float* residual;
    float* y;
    Pieces pieces;  // of blocks of rows
};

void work(void* context, int, int) {
    Job& job = *static_cast<Job*>(context);
    for (int64_t begin, end; job.pieces.take(begin, end);)
        job.kernels->multiply(*job.matrix, *job.columns, job.residual, job.y, job.matrix->N, begin, end);
}

struct Unpacking {
    const LinearKernels* kernels;
    const Matrix* matrix;
    float* out;
    Pieces pieces;  // of rows
};

void unpack_share(void* context, int, int) {
    Unpacking& unpacking = *static_cast<Unpacking*>(context);
    const Matrix& m = *unpacking.matrix;
    for (int64_t begin, end; unpacking.pieces.take(begin, end);)
        for (int64_t row = begin; row < end; row++) unpacking.kernels->unpack(m, row, unpacking.out + row * m.K);
}

struct Reading {
    const LinearKernels* kernels;
    const void* const* parts;
    const int64_t* bytes;
    int64_t count;
    std::atomic<uint64_t> total{0};
};

void read_share(void* context, int rank, int size) {
    Reading& reading = *static_cast<Reading*>(context);
    uint64_t total = 0;
    for (int64_t i = 0; i < reading.count; i++) {
        const int64_t lines = reading.bytes[i] / 64, from = 64 * (lines * rank / size);
        const int64_t to = rank + 1 == size ? reading.bytes[i] : 64 * (lines * (rank + 1) / size);
        total ^= reading.kernels->read(static_cast<const char*>(reading.parts[i]) + from, to - from);
    }
    reading.total.fetch_xor(total);
}

}  // namespace
}  // namespace gsa

extern "C" int gsa_matvec(const GsaMatrix* matrix, int input, const float* x, const float* norm, float epsilon,
                          int count, int activations, const float* residual, float* y, int threads) {
    using namespace gsa;
    const LinearKernels& kernels = *isa().linear;
    const Matrix m = described(*matrix);
    Columns columns{};
    columns.count = count;
    if (!prepare(kernels, m, {input, x, norm, epsilon}, activations, columns)) return 1;
    const int64_t blocks = (m.N + kBlockRows - 1) / kBlockRows;
    Job job{&kernels, &m, &columns, residual, y, Pieces(blocks, bytes_of(m))};
    as_they_come(useful_threads(threads, static_cast<double>(bytes_of(m)), kBytes), work, &job);
    return 0;
}

extern "C" void gsa_unpack(const GsaMatrix* matrix, float* out, int threads) {
    using namespace gsa;
    const Matrix m = described(*matrix);
    const int64_t bytes = 4 * m.N * m.K;
    Unpacking unpacking{isa().linear, &m, out, Pieces(m.N, bytes)};
    as_they_come(useful_threads(threads, static_cast<double>(bytes), kBytes), unpack_share, &unpacking);
}

extern "C" uint64_t gsa_read(const void* const* parts, const int64_t* bytes, int64_t count, int threads) {
    using namespace gsa;
    Reading reading{isa().linear, parts, bytes, count};
    as_team(threads, read_share, &reading);
    return reading.total.load();
}
