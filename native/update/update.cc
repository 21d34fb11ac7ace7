#include "update/update.h"

#include <array>

namespace gradlane {

extern const UpdateLoop kPortableUpdate;
#if defined(__x86_64__)
extern const UpdateLoop kAvx2Update;
#endif

std::span<const UpdateLoop> RunnableUpdates() {
#if defined(__x86_64__)
    static const std::array<UpdateLoop, 2> loops = {kPortableUpdate, kAvx2Update};
    static const bool has_all = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return std::span(loops).first(has_all ? 2 : 1);
#else
    static const std::array<UpdateLoop, 1> loops = {kPortableUpdate};
    return loops;
#endif
}

void Update(const Rule& rule, uint64_t step, float* parameters, const float* gradient, float* first, float* second, size_t n) {
    static const UpdateLoop best = RunnableUpdates().back();
    best(rule, step, parameters, gradient, first, second, n);
}

}  // namespace gradlane
