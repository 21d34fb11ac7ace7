#pragma once

#include <nanobind/nanobind.h>

namespace gradlane {

// Adds the class Dispatcher to the module.
void BindDispatcher(nanobind::module_& module);

}  // namespace gradlane
