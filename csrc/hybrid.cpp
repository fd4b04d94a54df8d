// The parts of the mixer `hybrid` for one instruction set: this file is compiled once for each.
#include "hybrid.h"

#include "joined_slots.h"
#include "schedule.h"
#include "window_attention.h"

namespace gsa {
namespace GSA_ISA {
namespace {

template <class T>
using JoinedWalk = Walk<T, JoinedSlots<T>>;

size_t window_attention_size(const GsaWindowAttention& call, bool backward, const Plan& plan) {
    return call.shape.wide ? working_memory<WindowWalk<double>>(call, backward, plan)
                           : working_memory<WindowWalk<float>>(call, backward, plan);
}

bool window_attention(const GsaWindowAttention& call, bool backward, const Plan& plan, char* memory,
                      size_t per_thread) {
    return call.shape.wide ? run_all<WindowWalk<double>>(call, backward, plan, memory, per_thread)
                           : run_all<WindowWalk<float>>(call, backward, plan, memory, per_thread);
}

size_t joined_slots_size(const GsaJoinedSlots& call, bool backward, const Plan& plan) {
    return call.shape.wide ? working_memory<JoinedWalk<double>>(call, backward, plan)
                           : working_memory<JoinedWalk<float>>(call, backward, plan);
}

bool joined_slots(const GsaJoinedSlots& call, bool backward, const Plan& plan, char* memory, size_t per_thread) {
    return call.shape.wide ? run_all<JoinedWalk<double>>(call, backward, plan, memory, per_thread)
                           : run_all<JoinedWalk<float>>(call, backward, plan, memory, per_thread);
}

}  // namespace

extern const HybridKernels hybrid_kernels;
const HybridKernels hybrid_kernels = {window_attention_size, window_attention, joined_slots_size, joined_slots};

}  // namespace GSA_ISA
}  // namespace gsa
