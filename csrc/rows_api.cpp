// The C interface of functions of rows: working memory and the number of threads, then the kernels.
#include "isa.h"
#include "memory.h"
#include "parallel.h"
#include "rows.h"

namespace gsa {
namespace {

thread_local WorkingMemory row_memory;

// Operations on a number, about.
constexpr double kOperationsOfRows = 20;

}  // namespace
}  // namespace gsa

using namespace gsa;

extern "C" int gsa_rows(const GsaRows* call, int backward) {
    const RowKernels& kernels = *isa().rows;
    const double operations = static_cast<double>(call->rows) * call->width * kOperationsOfRows * (backward ? 2 : 1);
    const int threads = useful_threads(call->threads, operations, kOperations);
    const RowPlan plan = kernels.plan(*call, backward != 0);
    char* space = row_memory.get(plan.sums + plan.per_thread * static_cast<size_t>(threads));
    if (space == nullptr) return GSA_STATUS_NO_MEMORY;
    kernels.rows(*call, backward != 0, plan, threads, space);
    row_memory.trim();
    return GSA_STATUS_DONE;
}

extern "C" int gsa_cross_entropy(const GsaCrossEntropy* call) {
    const RowKernels& kernels = *isa().rows;
    const double operations = static_cast<double>(call->rows) * call->logits.width * kOperationsOfRows;
    const int threads = useful_threads(call->threads, operations, kOperations);
    const RowPlan plan = kernels.cross_entropy_plan(*call);
    char* space = row_memory.get(plan.per_thread * static_cast<size_t>(threads));
    if (space == nullptr) return GSA_STATUS_NO_MEMORY;
    kernels.cross_entropy(*call, plan, threads, space);
    row_memory.trim();
    return GSA_STATUS_DONE;
}
