// What hybrid.cpp provides per instruction set: windows of attention, and slots that join them in one softmax.
#pragma once

#include "operator.h"

namespace gsa {

struct HybridKernels {
    size_t (*window_attention_size)(const GsaWindowAttention&, bool backward, const Plan&);
    bool (*window_attention)(const GsaWindowAttention&, bool backward, const Plan&, char* memory, size_t per_thread);
    size_t (*joined_slots_size)(const GsaJoinedSlots&, bool backward, const Plan&);
    bool (*joined_slots)(const GsaJoinedSlots&, bool backward, const Plan&, char* memory, size_t per_thread);
};

}  // namespace gsa
