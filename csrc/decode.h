// What decode.cpp provides per instruction set: one token of a few sequences through a whole model.
#pragma once

#include <cstddef>

#include "linear.h"

namespace gsa {

// The arguments of gsa_decode.
struct DecodeCall {
    const GsaDecoder& decoder;
    const LinearKernels& linear;
    const int64_t* ids;       // [count]
    const int64_t* state_of;  // [count]
    int count, first;
    float* logits;  // [count - first, vocabulary]
};

// The arguments of gsa_products.
struct ProductsCall {
    const GsaMatrix* const* matrices;  // [count], each [N, K] of its own
    int64_t count;
    const LinearKernels& linear;
    const float* x;  // [largest K]
    int activations;
    float* y;  // [largest N]
};

// Working memory comes from the caller, who asks for its size first.
struct DecodeKernels {
    size_t (*decode_size)(const DecodeCall& call, int threads);
    void (*decode)(const DecodeCall& call, int threads, char* memory);
    size_t (*products_size)(const ProductsCall& call, int threads);
    void (*products)(const ProductsCall& call, int threads, char* memory);
};

}  // namespace gsa
