// What draw.cpp provides per instruction set.
#pragma once

#include <cstddef>

#include "native.h"

namespace gsa {

struct DrawKernels {
    size_t (*room)(int64_t width);  // bytes of working memory for each thread
    void (*draw)(GsaDraw* const* draws, int64_t count, int64_t width, int threads, char* memory);
};

}  // namespace gsa
