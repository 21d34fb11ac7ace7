// The Heartbeat for Python: frames as bytes.

#include "net/heartbeat.h"

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>

#include "bind/bind.h"

namespace nb = nanobind;

namespace gradlane {

void BindHeartbeat(nb::module_& module) {
    nb::class_<Heartbeat>(module, "Heartbeat")
        .def("__init__", [](Heartbeat* self, nb::bytes beat, uint32_t interval_ms) {
            new (self) Heartbeat(std::string(beat.c_str(), beat.size()), std::chrono::milliseconds(interval_ms));
        })
        .def("add", &Heartbeat::Add, nb::call_guard<nb::gil_scoped_release>())
        .def("send", [](Heartbeat& heartbeat, int fd, nb::bytes frame) {
            const std::string_view bytes(frame.c_str(), frame.size());
            nb::gil_scoped_release released;
            heartbeat.Send(fd, bytes);
        })
        .def("remove", &Heartbeat::Remove, nb::call_guard<nb::gil_scoped_release>())
        .def("lives", &Heartbeat::Lives, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &Heartbeat::Close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace gradlane
