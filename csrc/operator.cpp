// The operator for one instruction set: this file is compiled once for each.
#include "operator.h"

#include "linear_attention.h"
#include "parallel.h"
#include "slot_attention.h"
#include "step.h"

namespace gsa {
namespace GSA_ISA {
namespace {

constexpr int kMaxTeams = 64;

template <class T, class Op>
bool run(const typename Op::Call& call, bool backward, const Plan& plan, char* memory, size_t per_thread) {
    Barrier barriers[kMaxTeams];
    Schedule<T, Op> schedule{call, backward, plan, memory, per_thread, heads_at_once<T, Op>(call, plan), barriers};
    schedule.units = call.shape.sequences * schedule.groups();
    schedule.share(plan.threads < kMaxTeams ? plan.threads : kMaxTeams);
    (schedule.together > 0 ? as_team : as_they_come)(plan.threads, Schedule<T, Op>::thread, &schedule);
    return !schedule.bad_gates;
}

size_t linear_attention_size(const GsaLinearAttention& call, bool backward, const Plan& plan) {
    return call.shape.wide ? working_memory<double, LinearAttention<double>>(call, backward, plan)
                           : working_memory<float, LinearAttention<float>>(call, backward, plan);
}

bool linear_attention(const GsaLinearAttention& call, bool backward, const Plan& plan, char* memory,
                      size_t per_thread) {
    return call.shape.wide ? run<double, LinearAttention<double>>(call, backward, plan, memory, per_thread)
                           : run<float, LinearAttention<float>>(call, backward, plan, memory, per_thread);
}

size_t slot_attention_size(const GsaSlotAttention& call, bool backward, const Plan& plan) {
    return call.shape.wide ? working_memory<double, SlotAttention<double>>(call, backward, plan)
                           : working_memory<float, SlotAttention<float>>(call, backward, plan);
}

bool slot_attention(const GsaSlotAttention& call, bool backward, const Plan& plan, char* memory, size_t per_thread) {
    return call.shape.wide ? run<double, SlotAttention<double>>(call, backward, plan, memory, per_thread)
                           : run<float, SlotAttention<float>>(call, backward, plan, memory, per_thread);
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
