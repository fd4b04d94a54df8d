// What operator.cpp provides per instruction set.
#pragma once

#include <cstddef>

#include "native.h"

namespace gsa {

constexpr int kChunk = 64;  // tokens, at most

// What follows from the lengths of the sequences.
struct Plan {
    const int64_t* order;       // the sequences, longest first
    const int64_t* first_mark;  // of each sequence, among the states kept
    int threads;
};

// Working memory comes from the caller, who asks for its size first. What computes says whether all gates were good: at
// most 0, and not NaN.
struct OperatorKernels {
    size_t (*linear_attention_size)(const GsaLinearAttention&, bool backward, const Plan&);
    bool (*linear_attention)(const GsaLinearAttention&, bool backward, const Plan&, char* memory, size_t per_thread);
    size_t (*slot_attention_size)(const GsaSlotAttention&, bool backward, const Plan&);
    bool (*slot_attention)(const GsaSlotAttention&, bool backward, const Plan&, char* memory, size_t per_thread);
    size_t (*step_size)(const GsaStep&);
    bool (*good_gates)(const GsaStep&);
    void (*step)(const GsaStep&, int threads, char* memory);
};

}  // namespace gsa
