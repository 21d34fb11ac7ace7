#include "reduce/kernels_body.h"

namespace gradlane {

#if defined(__SSE2__)
const Kernels kPortableKernels = KernelsFor("sse2");
#elif defined(__ARM_NEON)
const Kernels kPortableKernels = KernelsFor("neon");
#else
const Kernels kPortableKernels = KernelsFor("scalar");
#endif

}  // namespace gradlane
