// The C interface of drawing tokens: working memory and the number of threads, then the kernel.
#include "draw.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace gsa {
namespace {

thread_local WorkingMemory draw_memory;

// Operations for a token of the vocabulary, about.
constexpr double kOperationsOfScores = 60;

}  // namespace
}  // namespace gsa

using namespace gsa;

extern "C" int gsa_draw(GsaDraw* const* draws, int64_t count, int64_t width, int threads) {
    const DrawKernels& kernels = *isa().draws;
    const double operations = static_cast<double>(count) * static_cast<double>(width) * kOperationsOfScores;
    const int useful = useful_threads(threads, operations, kOperations);
    char* space = draw_memory.get(kernels.room(width) * static_cast<size_t>(useful));
    if (space == nullptr) return GSA_STATUS_NO_MEMORY;
    kernels.draw(draws, count, width, useful, space);
    draw_memory.trim();
    return GSA_STATUS_DONE;
}
