// What convolution.cpp provides per instruction set.
#pragma once

#include <cstddef>

#include "native.h"

namespace gsa {

constexpr int kConvolutionChannels = 256;  // in a block: what one thread works on at a time, in its innermost cache

// A unit of work is a block of channels of a run of tokens, which may go over several sequences. Runs follow from the
// shape alone, so that no sum depends on the number of threads.
struct ConvolutionPlan {
    const int64_t* first_token;  // of each sequence, among those of all; and the number of all
    int64_t runs, blocks;
    size_t sums, per_thread;  // bytes of working memory: sums of all runs, then one piece for each thread
};

struct ConvolutionKernels {
    void (*size)(const GsaConvolution&, bool backward, ConvolutionPlan&);
    void (*compute)(const GsaConvolution&, bool backward, const ConvolutionPlan&, int threads, char* memory);
};

}  // namespace gsa
