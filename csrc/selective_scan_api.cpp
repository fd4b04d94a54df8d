// The C interface of the selective scan: the plan, working memory and the number of threads, then the kernels.
#include "isa.h"
#include "memory.h"
#include "parallel.h"
#include "selective_scan.h"

namespace gsa {
namespace {

thread_local WorkingMemory scan_memory;

// Runs of sequences, so that there is work for several threads where channels are few.
constexpr int64_t kRuns = 16;

}  // namespace
}  // namespace gsa

extern "C" int gsa_selective_scan(const GsaSelectiveScan* call, int backward) {
    using namespace gsa;
    const GsaShape& shape = call->shape;
    const int64_t N = shape.sequences;
    const int64_t runs = N < 1 ? 1 : N < kRuns ? N : kRuns;
    Numbers first_mark(N + 1), first_token(N + 1), first_sequence(runs + 1);
    if (first_mark.missing() || first_token.missing() || first_sequence.missing()) return GSA_STATUS_NO_MEMORY;
    for (int64_t n = 0; n < N; n++) {
        const int64_t length = shape.stops[n] - shape.starts[n];
        first_mark[n + 1] = first_mark[n] + (length + kScanChunk - 1) / kScanChunk;
        first_token[n + 1] = first_token[n] + length;
    }
    const int64_t tokens = first_token[N];
    first_sequence[runs] = N;
    for (int64_t run = 1, n = 0; run < runs; run++) {  // about as many tokens in each
        while (n < N && first_token[n] * runs < tokens * run) n++;
        first_sequence[run] = n;
    }
    const int blocks = (call->u.width + kScanChannels - 1) / kScanChannels;
    const ScanPlan plan{first_mark.data(), first_token.data(), first_sequence.data(), static_cast<int>(runs), blocks};
    const double operations = static_cast<double>(tokens) * call->u.width * call->B.width * (backward ? 50 : 25);
    const int threads = useful_threads(shape.threads, operations, kOperations);
    const ScanKernels& kernels = *isa().scan;
    const ScanMemory size = kernels.size(*call, backward != 0, plan);
    char* space = scan_memory.get(size.shared + size.per_thread * static_cast<size_t>(threads));
    if (space == nullptr) return GSA_STATUS_NO_MEMORY;
    const bool good = kernels.compute(*call, backward != 0, plan, threads, space, size);
    scan_memory.trim();
    return good || backward ? GSA_STATUS_DONE : GSA_STATUS_BAD_GATES;
}
