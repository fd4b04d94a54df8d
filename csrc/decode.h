// What decode.cpp provides per instruction set: one token of a few sequences through a whole model.
#pragma once

#include <cstddef>

#include "linear.h"

namespace gsa {

struct DecodeCall {
    const GsaDecoder& decoder;
    const LinearKernels& linear;
    const int64_t *ids, *state_of;
    int count, first;
    float* logits;
};

struct ProductsCall {
    const GsaMatrix* const* matrices;
    int64_t count;
    const LinearKernels& linear;
    const float* x;
    int activations;
    float* y;
};

// Working memory comes from the caller, who asks for its size first.
struct DecodeKernels {
    size_t (*decode_size)(const DecodeCall& call, int threads);
    void (*decode)(const DecodeCall& call, int threads, char* memory);
    size_t (*products_size)(const ProductsCall& call, int threads);
    void (*products)(const ProductsCall& call, int threads, char* memory);
};

}  // namespace gsa
