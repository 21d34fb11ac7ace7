#pragma once

#include <nanobind/nanobind.h>

#include "node/node.h"

namespace gradlane {

// Adds the classes Schedule and Dispatcher to the module.
void BindDispatcher(nanobind::module_& module);

// Adds the class Engine, and to Node what a plan needs that the node carries out.
void BindEngine(nanobind::module_& module, nanobind::class_<Node>& node);

}  // namespace gradlane
