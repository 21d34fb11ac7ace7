// The Dispatcher for Python, which drives it with the GIL held. A fact that no history allows raises
// AssertionError, as the specification does.

#include "schedule/dispatcher.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bind/bind.h"

namespace nb = nanobind;

namespace gradlane {
namespace {

using MessageTuple = std::tuple<uint64_t, uint32_t, uint32_t, bool, std::vector<uint32_t>>;  // as Schedule::Message

[[noreturn]] void Refuse(const std::string& text) {
    PyErr_SetString(PyExc_AssertionError, text.c_str());
    throw nb::python_error();
}

uint32_t Message(const Dispatcher& dispatcher, uint32_t message) {
    if (message >= dispatcher.schedule().messages.size()) throw nb::index_error("no such message");
    return message;
}

uint32_t Tensor(const Dispatcher& dispatcher, uint32_t tensor) {
    if (tensor >= dispatcher.schedule().tensors) throw nb::index_error("no such tensor");
    return tensor;
}

void MakeSchedule(Schedule* at, uint32_t tensors, const std::vector<MessageTuple>& messages,
                  std::vector<std::optional<uint64_t>> windows, std::optional<std::vector<uint32_t>> sequence,
                  std::vector<uint32_t> second_phases, bool follow) {
    Schedule schedule;
    schedule.tensors = tensors;
    for (const auto& [bytes, priority, lane, two_phase, needs] : messages) {
        schedule.messages.push_back({bytes, priority, lane, two_phase, needs});
    }
    schedule.windows = std::move(windows);
    schedule.sequence = std::move(sequence);
    schedule.second_phases = std::move(second_phases);
    schedule.follow = follow;
    if (!schedule.IsValid()) throw std::invalid_argument("a tensor, message or lane that is out of range");
    new (at) Schedule(std::move(schedule));
}

}  // namespace

void BindDispatcher(nb::module_& module) {
    nb::class_<Schedule>(module, "Schedule")
        .def("__init__", &MakeSchedule, nb::arg("tensors"), nb::arg("messages"), nb::arg("windows"), nb::arg("sequence").none(),
             nb::arg("second_phases"), nb::arg("follow"));
    nb::class_<Dispatcher>(module, "Dispatcher")
        .def(nb::init<Schedule>())
        .def("begin", [](Dispatcher& dispatcher) {
            if (!dispatcher.done() && dispatcher.AnyIsReady()) return false;  // an iteration is still under way
            dispatcher.Begin();
            return true;
        })
        .def("ready", [](Dispatcher& dispatcher, uint32_t tensor) {
            if (dispatcher.IsReady(Tensor(dispatcher, tensor))) {
                Refuse("tensor " + std::to_string(tensor) + " became ready twice in one iteration");
            }
            Dispatcher::Starts starts;
            dispatcher.Ready(tensor, &starts);
            return starts;
        })
        .def("finished", [](Dispatcher& dispatcher, uint32_t message) {
            if (!dispatcher.IsInFlight(Message(dispatcher, message))) {
                Refuse("message " + std::to_string(message) + " finished and is not under way");
            }
            Dispatcher::Starts starts;
            dispatcher.Finished(message, &starts);
            return starts;
        })
        .def("allow", [](Dispatcher& dispatcher, uint32_t message) {
            if (!dispatcher.schedule().follow) Refuse("a coordinator's order was not asked for (follow)");
            Dispatcher::Starts starts;
            dispatcher.Allow(Message(dispatcher, message), &starts);
            return starts;
        })
        .def("done", &Dispatcher::done)
        .def("blocking", &Dispatcher::Blocking)
        .def("state", [](Dispatcher& dispatcher) { return AsTuple(dispatcher.Describe()); })
        .def("is_in_second_phase", [](Dispatcher& dispatcher, uint32_t message) {
            return dispatcher.IsInSecondPhase(Message(dispatcher, message));
        });
}

}  // namespace gradlane
