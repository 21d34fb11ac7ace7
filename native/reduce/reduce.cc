#include "reduce/reduce.h"

#include "reduce/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace gradlane {

namespace {

#if defined(__x86_64__)
bool HasAvx2() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    // Asked of the CPU itself: not every compiler's __builtin_cpu_supports knows f16c.
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    return f16c && __builtin_cpu_supports("avx2");
}
#endif

const Kernels& Best() {
    static const Kernels& best = *RunnableKernels().back();
    return best;
}

}  // namespace

std::span<const Kernels* const> RunnableKernels() {
#if defined(__x86_64__)
    static const Kernels* const kernels[] = {&kPortableKernels, &kAvx2Kernels};
    return std::span(kernels).first(HasAvx2() ? 2 : 1);
#else
    static const Kernels* const kernels[] = {&kPortableKernels};
    return kernels;
#endif
}

void Reduce(DType dtype, Op op, void* into, const void* from, size_t n) {
    Best().reduce(dtype, op, into, from, n);
}

void ReduceBoth(DType dtype, Op op, void* a, void* b, size_t n) { Best().reduce_both(dtype, op, a, b, n); }

void Widen(DType half, float* into, const void* from, size_t n) { Best().widen(half, into, from, n); }

void WidenReduce(DType half, Op op, float* into, const void* from, size_t n) {
    Best().widen_reduce(half, op, into, from, n);
}

void Narrow(DType half, void* into, const float* from, size_t n) { Best().narrow(half, into, from, n); }

const char* ReduceIsa() { return Best().isa; }

}  // namespace gradlane
