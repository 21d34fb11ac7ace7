// The Engine for Python: what a driver calls, and waits for without the GIL.

#include "node/engine.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/wait.h"
#include "node/node.h"

namespace nb = nanobind;

namespace gradlane {
namespace {

// As MessageMemory; of each range its address, its bytes, and the DType of its halves or -1.
using MemoryTuple = std::tuple<uintptr_t, std::vector<std::tuple<uintptr_t, uint64_t, int>>>;

std::shared_ptr<Engine> CarryOut(Node& node, const Schedule& schedule, std::vector<std::vector<uint32_t>> carried,
                                 const std::vector<MemoryTuple>& memory, std::vector<uint32_t> firsts, bool forwards, bool keeps_log) {
    if (carried.size() != schedule.messages.size() || memory.size() != schedule.messages.size()) {
        throw std::invalid_argument("carried and memory: expected an entry for each message");
    }
    if (firsts.size() != carried.size() + 1 || !std::is_sorted(firsts.begin(), firsts.end())) {
        throw std::invalid_argument("firsts: expected a rising one for each message, and one behind all");
    }
    for (const auto& tensors : carried) {
        for (const uint32_t tensor : tensors) {
            if (tensor >= schedule.tensors) throw std::invalid_argument("carried: a tensor that is out of range");
        }
    }
    std::vector<MessageMemory> places;
    for (const auto& [message, ranges] : memory) {
        MessageMemory place{reinterpret_cast<uint8_t*>(message), {}};
        for (const auto& [at, bytes, half] : ranges) {
            MessageMemory::Range range{reinterpret_cast<uint8_t*>(at), bytes};
            if (half >= 0) {
                range.half = static_cast<DType>(half);
                if (!IsHalf(*range.half)) throw std::invalid_argument("memory: halves are of float16 or bfloat16");
            }
            place.ranges.push_back(range);
        }
        places.push_back(std::move(place));
    }
    auto engine = std::make_shared<Engine>(schedule, std::move(carried), std::move(places), std::move(firsts), forwards, keeps_log);
    node.CarryOut(engine);
    return engine;
}

uint32_t Tensor(const Engine& engine, uint32_t tensor) {
    if (tensor >= engine.tensors()) throw nb::index_error("no such tensor");
    return tensor;
}

const char* NameOf(Engine::Kind kind) {
    switch (kind) {
        case Engine::Kind::kReady: return "ready";
        case Engine::Kind::kSend: return "send";
        default: return "receive";
    }
}

const char* NameOf(Engine::What what) {
    switch (what) {
        case Engine::What::kBegin: return "begin";
        case Engine::What::kReady: return "ready";
        default: return "finished";
    }
}

}  // namespace

void BindEngine(nb::module_& module, nb::class_<Node>& node) {
    nb::class_<Engine>(module, "Engine")
        .def("late", [](Engine& engine, const std::vector<uint32_t>& tensors) {
            std::vector<uint32_t> late;
            if (engine.AllArrived()) return late;
            for (const uint32_t tensor : tensors) {
                if (!engine.HasArrived(Tensor(engine, tensor))) late.push_back(tensor);
            }
            return late;
        })
        .def("all_arrived", &Engine::AllArrived)
        .def("communicated_ns", &Engine::communicated_ns)
        .def("interruptions", &Engine::interruptions)
        .def("interrupt", &Engine::Interrupt)
        .def("wait", [](Engine& engine, Node& node, int64_t tensor, uint64_t interruptions, int64_t timeout_ms) {
            if (tensor != Engine::kAll) Tensor(engine, static_cast<uint32_t>(tensor));
            return WaitInTurns(timeout_ms, [&](int64_t turn_ms) {
                const bool is_there = node.WaitArrived(tensor, interruptions, turn_ms);
                return std::make_pair(is_there || engine.interruptions() != interruptions, is_there);
            });
        });
    node.def("carry_out", &CarryOut, nb::arg("schedule"), nb::arg("carried"), nb::arg("memory"), nb::arg("firsts"),
             nb::arg("forwards"), nb::arg("keeps_log"))
        .def("begin", &Node::Begin)
        .def("flush", &Node::Flush)
        .def("ready", [](Node& self, const std::vector<uint32_t>& tensors) {
            int64_t at_ns = 0;
            for (const uint32_t tensor : tensors) at_ns = self.Ready(tensor);
            return at_ns;
        })
        .def("lacks", [](Node& self, uint32_t tensor) { self.Ready(tensor, true); })
        .def("spans", [](Node& self, bool last) {
            nb::list rows;
            for (const auto& span : self.Spans(last)) {
                rows.append(nb::make_tuple(NameOf(span.kind), span.iteration, span.subject, span.start_ns, span.end_ns));
            }
            return rows;
        })
        .def("plan_state", [](Node& self) { return AsTuple(self.EngineState()); })
        .def("facts", [](Node& self) {
            nb::list rows;
            for (const auto& fact : self.Facts()) {
                const int64_t subject = fact.what == Engine::What::kBegin ? -1 : fact.subject;
                rows.append(nb::make_tuple(NameOf(fact.what), subject, fact.starts));
            }
            return rows;
        });
}

}  // namespace gradlane
