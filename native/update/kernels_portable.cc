#include "update/kernels_body.h"

namespace gradlane {
extern const UpdateLoop kPortableUpdate;
const UpdateLoop kPortableUpdate = UpdateAny;
}  // namespace gradlane
