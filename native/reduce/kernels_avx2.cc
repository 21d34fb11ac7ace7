#if defined(__x86_64__)

#define GRADLANE_F16C
#include "reduce/kernels_body.h"

namespace gradlane {

const Kernels kAvx2Kernels = KernelsFor("avx2");

}  // namespace gradlane

#endif
