// The library as a whole: its version, and which instruction set it uses.
#include <atomic>
#include <cstring>

#include "isa.h"
#include "native.h"

namespace gsa {

#define GSA_DECLARE(set)                                 \
    namespace set {                                      \
    extern const OperatorKernels operator_kernels;       \
    extern const LinearKernels linear_kernels;           \
    extern const MatmulKernels matmul_kernels;           \
    extern const ScanKernels scan_kernels;               \
    extern const DecodeKernels decode_kernels;           \
    extern const RowKernels row_kernels;                 \
    extern const ConvolutionKernels convolution_kernels; \
    extern const HybridKernels hybrid_kernels;           \
    extern const DrawKernels draw_kernels;               \
    }
GSA_DECLARE(baseline)
#if GSA_X86
GSA_DECLARE(avx2)
GSA_DECLARE(avx512)
#endif

namespace {

// Best first; the last runs everywhere.
const Isa kIsas[] = {
#if GSA_X86
    {"avx512",
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
     },
     &avx512::operator_kernels, &avx512::linear_kernels, &avx512::matmul_kernels, &avx512::scan_kernels,
     &avx512::decode_kernels, &avx512::row_kernels, &avx512::convolution_kernels, &avx512::hybrid_kernels,
     &avx512::draw_kernels},
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, &avx2::operator_kernels,
     &avx2::linear_kernels, &avx2::matmul_kernels, &avx2::scan_kernels, &avx2::decode_kernels, &avx2::row_kernels,
     &avx2::convolution_kernels, &avx2::hybrid_kernels, &avx2::draw_kernels},
#endif
    {"baseline", [] { return true; }, &baseline::operator_kernels, &baseline::linear_kernels, &baseline::matmul_kernels,
     &baseline::scan_kernels, &baseline::decode_kernels, &baseline::row_kernels, &baseline::convolution_kernels,
     &baseline::hybrid_kernels, &baseline::draw_kernels},
};

std::atomic<const Isa*> chosen{nullptr};

}  // namespace

const Isa& isa() {
    const Isa* set = chosen.load(std::memory_order_relaxed);
    if (set == nullptr) {
        for (set = kIsas; !set->supported(); set++) {
        }
        chosen.store(set, std::memory_order_relaxed);
    }
    return *set;
}

}  // namespace gsa

extern "C" int gsa_abi(void) { return GSA_ABI; }

extern "C" const char* gsa_isas(void) { return GSA_X86 ? "avx512 avx2 baseline" : "baseline"; }

extern "C" const char* gsa_isa(void) { return gsa::isa().name; }

extern "C" int gsa_use_isa(const char* name) {
    for (const gsa::Isa& set : gsa::kIsas) {
        if (std::strcmp(set.name, name) == 0 && set.supported()) {
            gsa::chosen.store(&set, std::memory_order_relaxed);
            return 0;
        }
    }
    return 1;
}
