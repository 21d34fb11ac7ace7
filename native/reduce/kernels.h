// The reductions, compiled once for each instruction set. reduce.cc chooses one of them, and tests
// compare them all. Callers include reduce.h instead. What is declared here never changes; any
// thread may use it.

#pragma once

#include <cstddef>
#include <span>

#include "reduce/reduce.h"

namespace gradlane {

// The functions of reduce.h.
struct Kernels {
    const char* isa;
    void (*reduce)(DType, Op, void* into, const void* from, size_t n);
    void (*reduce_both)(DType, Op, void* a, void* b, size_t n);
    void (*widen)(DType, float* into, const void* from, size_t n);
    void (*widen_reduce)(DType, Op, float* into, const void* from, size_t n);
    void (*narrow)(DType, void* into, const float* from, size_t n);
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
#endif

// Those that this CPU can run, the best last.
std::span<const Kernels* const> RunnableKernels();

}  // namespace gradlane
