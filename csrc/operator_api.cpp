// The operator's C interface: working memory and the number of threads, then the kernels of the instruction set in use.
#include <algorithm>

#include "hybrid.h"
#include "isa.h"
#include "memory.h"
#include "operator.h"
#include "parallel.h"

namespace gsa {
namespace {

thread_local WorkingMemory memory;

double tokens(const GsaShape& shape) {
    double sum = 0;
    for (int64_t n = 0; n < shape.sequences; n++) sum += static_cast<double>(shape.stops[n] - shape.starts[n]);
    return sum * shape.heads * (1 + shape.queries);
}

template <class Call>
int run(const Call& call, bool backward, double operations, size_t (*size)(const Call&, bool, const Plan&),
        bool (*compute)(const Call&, bool, const Plan&, char*, size_t)) {
    const GsaShape& shape = call.shape;
    Numbers order(shape.sequences), first_mark(shape.sequences);
    if (order.missing() || first_mark.missing()) return GSA_STATUS_NO_MEMORY;
    int64_t marks = 0;
    for (int64_t n = 0; n < shape.sequences; n++) {
        const int64_t span = static_cast<int64_t>(kChunk) * shape.mark_chunks;
        order[n] = n;
        first_mark[n] = marks;
        marks += (shape.stops[n] - shape.starts[n] + span - 1) / span;
    }
    std::stable_sort(order.data(), order.data() + shape.sequences, [&](int64_t a, int64_t b) {
        return shape.stops[a] - shape.starts[a] > shape.stops[b] - shape.starts[b];
    });
    const Plan plan{order.data(), first_mark.data(), useful_threads(shape.threads, operations, kOperations)};
    const size_t per_thread = size(call, backward, plan);
    char* space = memory.get(per_thread * static_cast<size_t>(plan.threads));
    if (space == nullptr) return GSA_STATUS_NO_MEMORY;
    const bool good = compute(call, backward, plan, space, per_thread);
    memory.trim();
    return good || backward ? GSA_STATUS_DONE : GSA_STATUS_BAD_GATES;
}

}  // namespace
}  // namespace gsa

using namespace gsa;

extern "C" int gsa_linear_attention(const GsaLinearAttention* call, int backward) {
    const OperatorKernels& kernels = *isa().operators;
    const double operations = tokens(call->shape) * call->q.width * call->v.width * (backward ? 4 : 2);
    return run(*call, backward != 0, operations, kernels.linear_attention_size, kernels.linear_attention);
}

extern "C" int gsa_slot_attention(const GsaSlotAttention* call, int backward) {
    const OperatorKernels& kernels = *isa().operators;
    const double operations =
        tokens(call->shape) * (call->q.width + call->v.width) * call->g.width * (backward ? 4 : 2);
    return run(*call, backward != 0, operations, kernels.slot_attention_size, kernels.slot_attention);
}

extern "C" int gsa_window_attention(const GsaWindowAttention* call, int backward) {
    const HybridKernels& kernels = *isa().hybrid;
    const double seen = static_cast<double>(std::min<int64_t>(call->window, INT16_MAX) + call->sinks);
    const double operations = tokens(call->shape) * seen * (call->q.width + call->v.width) * (backward ? 5 : 2);
    return run(*call, backward != 0, operations, kernels.window_attention_size, kernels.window_attention);
}

extern "C" int gsa_joined_slots(const GsaJoinedSlots* call, int backward) {
    const HybridKernels& kernels = *isa().hybrid;
    const double operations =
        tokens(call->shape) * (call->q.width + call->v.width) * call->g.width * (backward ? 4 : 2);
    return run(*call, backward != 0, operations, kernels.joined_slots_size, kernels.joined_slots);
}

extern "C" int gsa_slot_attention_step(const GsaStep* call) {
    const double operations =
        static_cast<double>(call->batch) * call->heads * (call->q.width + call->v.width) * call->g.width * 10;
    const int threads = useful_threads(call->threads, operations, kOperations);
    const OperatorKernels& kernels = *isa().operators;
    if (call->check && !kernels.good_gates(*call)) return GSA_STATUS_BAD_GATES;
    char* space = memory.get(kernels.step_size(*call) * static_cast<size_t>(threads));
    if (space == nullptr) return GSA_STATUS_NO_MEMORY;
    kernels.step(*call, threads, space);
    return GSA_STATUS_DONE;
}
