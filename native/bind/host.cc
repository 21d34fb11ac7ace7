// The ranks of one host for Python: how they meet, and the node that sums through their memory.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind/bind.h"
#include "bind/wait.h"
#include "host/meeting.h"

namespace nb = nanobind;

namespace gradlane {

namespace {

std::vector<uint8_t> AsSecret(nb::bytes secret) {
    const auto* key = static_cast<const uint8_t*>(secret.data());
    return {key, key + secret.size()};
}

}  // namespace

void BindHost(nb::module_& module, nb::class_<Node>& node) {
    module.attr("MAX_HOST_RANKS") = kMaxHostRanks;
    nb::class_<Meeting>(module, "Meeting")
        .def_static("lead", [](std::vector<uint32_t> numbers, nb::bytes secret) {
            const size_t bytes = Node::HostBytesFor(static_cast<uint32_t>(numbers.size()));
            return Meeting::Lead(std::move(numbers), bytes, AsSecret(secret));
        })
        .def_static("join", [](const std::string& name, uint32_t rank, std::vector<uint32_t> numbers, nb::bytes secret) {
            const size_t bytes = Node::HostBytesFor(static_cast<uint32_t>(numbers.size()));
            return Meeting::Join(name, rank, std::move(numbers), bytes, AsSecret(secret));
        })
        .def("name", &Meeting::name)
        .def("wait", [](Meeting& meeting, int64_t timeout_ms) {
            return WaitInTurns(timeout_ms, [&](int64_t turn_ms) {
                const Meeting::State state = meeting.Wait(turn_ms);
                return std::make_pair(state != Meeting::State::kGoingOn, state == Meeting::State::kMet);
            });
        })
        .def("missing", &Meeting::missing)
        .def("fault", [](const Meeting& meeting) {
            return std::make_tuple(static_cast<int>(meeting.fault()), meeting.blamed(), meeting.why());
        });
    node.def("share", [](Node& self, Meeting& meeting, const std::vector<uint32_t>& host_of) { self.Share(meeting.Take(), host_of); });
}

}  // namespace gradlane
