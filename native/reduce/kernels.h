// The reduction compiled for one instruction set each; reduce.cc chooses among them, tests compare them all.
// Not for callers: they include reduce.h. Immutable after start-up; any thread.

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
