// The operator for one instruction set: this file is compiled once for each.
#include "operator.h"

#include "linear_attention.h"
#include "schedule.h"
#include "slot_attention.h"
#include "step.h"

namespace gsa {
namespace GSA_ISA {
namespace {

template <class T>
using LinearWalk = Walk<T, LinearAttention<T>>;
template <class T>
using SlotWalk = Walk<T, SlotAttention<T>>;

size_t linear_attention_size(const GsaLinearAttention& call, bool backward, const Plan& plan) {
    return call.shape.wide ? working_memory<LinearWalk<double>>(call, backward, plan)
                           : working_memory<LinearWalk<float>>(call, backward, plan);
}

bool linear_attention(const GsaLinearAttention& call, bool backward, const Plan& plan, char* memory,
                      size_t per_thread) {
    return call.shape.wide ? run_all<LinearWalk<double>>(call, backward, plan, memory, per_thread)
                           : run_all<LinearWalk<float>>(call, backward, plan, memory, per_thread);
}

size_t slot_attention_size(const GsaSlotAttention& call, bool backward, const Plan& plan) {
    return call.shape.wide ? working_memory<SlotWalk<double>>(call, backward, plan)
                           : working_memory<SlotWalk<float>>(call, backward, plan);
}

bool slot_attention(const GsaSlotAttention& call, bool backward, const Plan& plan, char* memory, size_t per_thread) {
    return call.shape.wide ? run_all<SlotWalk<double>>(call, backward, plan, memory, per_thread)
                           : run_all<SlotWalk<float>>(call, backward, plan, memory, per_thread);
}

template <class T>
void run_step(const GsaStep& call, int threads, char* memory) {
    Step<T> step{call, memory, 0};
    as_they_come(threads, Step<T>::thread, &step);
}

size_t step_size(const GsaStep& call) {
    return call.wide ? Step<double>{call, nullptr, 0}.space() : Step<float>{call, nullptr, 0}.space();
}

void step(const GsaStep& call, int threads, char* memory) {
    if (call.wide)
        run_step<double>(call, threads, memory);
    else
        run_step<float>(call, threads, memory);
}

}  // namespace

extern const OperatorKernels operator_kernels;
const OperatorKernels operator_kernels = {
    linear_attention_size, linear_attention, slot_attention_size, slot_attention, step_size, good_gates, step};

}  // namespace GSA_ISA
}  // namespace gsa
