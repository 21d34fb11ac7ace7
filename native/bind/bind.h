#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "node/node.h"

namespace gradlane {

// unfinished, in flight, missing; as Dispatcher::State
using StateTuple = std::tuple<uint32_t, std::vector<uint32_t>, std::vector<uint32_t>>;

inline StateTuple AsTuple(Dispatcher::State state) {
    return {state.unfinished, std::move(state.in_flight), std::move(state.missing)};
}

// Adds the classes Schedule and Dispatcher to the module.
void BindDispatcher(nanobind::module_& module);

// Adds the class Engine, and to Node what a plan needs that the node carries out.
void BindEngine(nanobind::module_& module, nanobind::class_<Node>& node);

// Adds the class Meeting, and to Node what it shares with the ranks of its host.
void BindHost(nanobind::module_& module, nanobind::class_<Node>& node);

// Adds the class Heartbeat to the module.
void BindHeartbeat(nanobind::module_& module);

}  // namespace gradlane
