// The C interface of short convolutions: the plan, working memory and the number of threads, then the kernels.
#include <algorithm>

#include "convolution.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace gsa {
namespace {

thread_local WorkingMemory convolution_memory;

constexpr int64_t kMostRuns = 64;
constexpr int64_t kRunTokens = 64;  // at least, and several times the taps: at its ends, so many are read twice

}  // namespace
}  // namespace gsa

extern "C" int gsa_convolution(const GsaConvolution* call, int backward) {
    using namespace gsa;
    const GsaShape& shape = call->shape;
    const int64_t N = shape.sequences;
    Numbers first_token(N + 1);
    if (first_token.missing()) return GSA_STATUS_NO_MEMORY;
    for (int64_t n = 0; n < N; n++) first_token[n + 1] = first_token[n] + shape.stops[n] - shape.starts[n];
    const int64_t tokens = first_token[N], least = std::max<int64_t>(kRunTokens, 8 * static_cast<int64_t>(call->taps));
    const int64_t blocks = (call->x.width + kConvolutionChannels - 1) / kConvolutionChannels;
    ConvolutionPlan plan{first_token.data(), std::min(kMostRuns, (tokens + least - 1) / least), blocks, 0, 0};
    const double operations = static_cast<double>(tokens) * call->x.width * (call->taps * 2 + 20) * (backward ? 3 : 1);
    const int threads = useful_threads(shape.threads, operations, kOperations);
    const ConvolutionKernels& kernels = *isa().convolution;
    kernels.size(*call, backward != 0, plan);
    char* space = convolution_memory.get(plan.sums + plan.per_thread * static_cast<size_t>(threads));
    if (space == nullptr) return GSA_STATUS_NO_MEMORY;
    kernels.compute(*call, backward != 0, plan, threads, space);
    convolution_memory.trim();
    return GSA_STATUS_DONE;
}
