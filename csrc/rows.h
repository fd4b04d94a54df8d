// What rows.cpp provides per instruction set.
#pragma once

#include <cstddef>

#include "native.h"

namespace gsa {

// Rows in blocks that one thread takes at a time. Sums over rows are made block by block and then added up, so that
// they depend on the shape and never on the number of threads.
struct RowPlan {
    int64_t blocks;
    size_t sums, per_thread;  // bytes of working memory: sums of all blocks, then one piece for each thread
};

struct RowKernels {
    RowPlan (*plan)(const GsaRows&, bool backward);
    void (*rows)(const GsaRows&, bool backward, const RowPlan&, int threads, char* memory);
    RowPlan (*cross_entropy_plan)(const GsaCrossEntropy&);
    void (*cross_entropy)(const GsaCrossEntropy&, const RowPlan&, int threads, char* memory);
};

}  // namespace gsa
