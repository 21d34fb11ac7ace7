// The rooms of all ranks of a host, met in this process. Each has a mapping of its own, as ranks have; with
// GRADLANE_ONE_MAPPING all have the same one, since a thread sanitizer knows memory by its address and sees no race between
// two mappings.

#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "node/node.h"

namespace gradlane {

inline std::vector<uint32_t> NumbersUpTo(uint32_t ranks) {
    std::vector<uint32_t> numbers(ranks);
    std::iota(numbers.begin(), numbers.end(), 0u);
    return numbers;
}

// numbers: as in HostRoom.
inline std::vector<HostRoom> RoomsOf(const std::vector<uint32_t>& numbers) {
    const std::vector<uint8_t> secret(32, 7);
    const auto world = static_cast<uint32_t>(numbers.size());
    const size_t bytes = Node::HostBytesFor(world);
    std::vector<std::unique_ptr<Meeting>> meetings;
    meetings.push_back(Meeting::Lead(numbers, bytes, secret));
    for (uint32_t rank = 1; rank < world; ++rank) meetings.push_back(Meeting::Join(meetings[0]->name(), rank, numbers, bytes, secret));
    for (size_t met = 0; met != world;) {
        met = 0;
        for (const auto& meeting : meetings) met += meeting->Wait(1) == Meeting::State::kMet;
    }
    std::vector<HostRoom> rooms;
    for (const auto& meeting : meetings) rooms.push_back(meeting->Take());
#ifdef GRADLANE_ONE_MAPPING
    for (uint32_t rank = 1; rank < world; ++rank) rooms[rank].segment = rooms[0].segment.Again();
#endif
    return rooms;
}

}  // namespace gradlane
