// The C functions of decode.h's kernels: working memory, and the number of threads.
#include "decode.h"
#include "isa.h"
#include "memory.h"
#include "native.h"
#include "parallel.h"

namespace gsa {
namespace {

thread_local WorkingMemory memory;

// Bytes of weights, read for one token, that are worth a thread. Threads meet after every product.
constexpr Worth kBytes{2 << 20, 12 << 20};

int useful(int threads, int64_t bytes, int count) {
    const double columns = (7 + count) / 8.0;  // what is read once serves all of them
    return useful_threads(threads, static_cast<double>(bytes) * columns, kBytes);
}

}  // namespace
}  // namespace gsa

using namespace gsa;

extern "C" int gsa_decode(const GsaDecoder* decoder, const int64_t* ids, const int64_t* state_of, int count, int first,
                          float* logits, int threads) {
    const DecodeKernels& kernels = *isa().decode;
    const DecodeCall call{*decoder, *isa().linear, ids, state_of, count, first, logits};
    int64_t bytes = bytes_of(described(decoder->head));
    for (int64_t i = 0; i < decoder->block_count; i++) {
        const GsaBlock& block = decoder->blocks[i];
        for (int64_t j = 0; j < block.product_count; j++) bytes += bytes_of(described(block.products[j].matrix));
        const GsaMatrix* const others[] = {&block.output.matrix, &block.mlp.gate, &block.mlp.up, &block.mlp.down};
        for (const GsaMatrix* matrix : others)
            if (matrix->weight != nullptr) bytes += bytes_of(described(*matrix));
    }
    threads = useful(threads, bytes, count);
    char* space = memory.get(kernels.decode_size(call, threads));
    if (space == nullptr) return 1;
    kernels.decode(call, threads, space);
    memory.trim();
    return 0;
}

extern "C" int gsa_products(const GsaMatrix* const* matrices, int64_t count, const float* x, int activations, float* y,
                            int threads) {
    const DecodeKernels& kernels = *isa().decode;
    const ProductsCall call{matrices, count, *isa().linear, x, activations, y};
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) bytes += bytes_of(described(*matrices[i]));
    threads = useful(threads, bytes, 1);
    char* space = memory.get(kernels.products_size(call, threads));
    if (space == nullptr) return 1;
    kernels.products(call, threads, space);
    return 0;
}
