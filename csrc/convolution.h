// What convolution.cpp provides per instruction set.
#pragma once

#include <cstddef>

#include "native.h"

namespace gsa {

// Tokens of all sequences, one after another, in units that one thread takes at a time. They follow from the shape
// alone, so that no sum depends on the number of threads.
struct ConvolutionPlan {
    const int64_t* first_token;  // of each sequence, among those of all; and the number of all
    int64_t units;
    size_t sums, per_thread;  // bytes of working memory: sums of all units, then one piece for each thread
};

struct ConvolutionKernels {
    void (*size)(const GsaConvolution&, bool backward, ConvolutionPlan&);
    void (*compute)(const GsaConvolution&, bool backward, const ConvolutionPlan&, int threads, char* memory);
};

}  // namespace gsa
