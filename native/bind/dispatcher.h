#pragma once

#include <nanobind/nanobind.h>

namespace gradlane {

// Adds the classes Schedule and Dispatcher to the module.
void BindDispatcher(nanobind::module_& module);

// Adds the class Engine, which needs Node.
void BindEngine(nanobind::module_& module);

}  // namespace gradlane
