#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace gradlane {

// A wait without the GIL in turns short enough for Python's signal handlers to run, as they must for Ctrl-C and for
// SIGTERM. wait(ms): one turn; true (or not empty) when what was waited for is there, and early when it never will be.
template <typename Wait>
auto WaitInTurns(int64_t timeout_ms, Wait wait) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds kTurn{200};
    const auto end = Clock::now() + std::chrono::milliseconds(std::clamp<int64_t>(timeout_ms, 0, int64_t{1} << 40));
    while (true) {
        const auto turn_end = std::min(end, Clock::now() + kTurn);
        auto [over, result] = [&] {
            nanobind::gil_scoped_release released;
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(turn_end - Clock::now());
            return wait(std::max<int64_t>(left.count(), 0));
        }();
        if (over || turn_end == end || Clock::now() < turn_end) return result;
        if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    }
}

}  // namespace gradlane
