// Instruction sets: which of the compiled kernels runs. Everything compiled per instruction set lives in a namespace of
// its name (baseline, avx2, avx512) and has no symbol that another set could share.
#pragma once

#if defined(__x86_64__)
#define GSA_X86 1
#else
#define GSA_X86 0
#endif

namespace gsa {

struct OperatorKernels;
struct LinearKernels;
struct MatmulKernels;
struct ScanKernels;
struct DecodeKernels;
struct RowKernels;
struct ConvolutionKernels;
struct HybridKernels;
struct DrawKernels;

struct Isa {
    const char* name;
    bool (*supported)();
    const OperatorKernels* operators;
    const LinearKernels* linear;
    const MatmulKernels* matmul;
    const ScanKernels* scan;
    const DecodeKernels* decode;
    const RowKernels* rows;
    const ConvolutionKernels* convolution;
    const HybridKernels* hybrid;
    const DrawKernels* draws;
};

const Isa& isa();  // the one in use

}  // namespace gsa
