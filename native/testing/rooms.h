// The rooms of all ranks of a host, met in this process.

#pragma once

#include <memory>
#include <vector>

#include "node/node.h"

namespace gradlane {

inline std::vector<HostRoom> RoomsOf(uint32_t world) {
    const std::vector<uint8_t> secret(32, 7);
    const size_t bytes = Node::HostBytesFor(world);
    std::vector<std::unique_ptr<Meeting>> meetings;
    meetings.push_back(Meeting::Lead(world, bytes, secret));
    for (uint32_t rank = 1; rank < world; ++rank) meetings.push_back(Meeting::Join(meetings[0]->name(), rank, world, bytes, secret));
    for (size_t met = 0; met != world;) {
        met = 0;
        for (const auto& meeting : meetings) met += meeting->Wait(1) == Meeting::State::kMet;
    }
    std::vector<HostRoom> rooms;
    for (const auto& meeting : meetings) rooms.push_back(meeting->Take());
    return rooms;
}

}  // namespace gradlane
