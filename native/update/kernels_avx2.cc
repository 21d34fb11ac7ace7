#if defined(__x86_64__)

#include "update/kernels_body.h"

namespace gradlane {
extern const UpdateLoop kAvx2Update;
const UpdateLoop kAvx2Update = UpdateAny;
}  // namespace gradlane

#endif
