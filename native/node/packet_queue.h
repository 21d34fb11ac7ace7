// PacketQueue: what one connection still has to send, most urgent first. A run of packets is queued as one item and
// cut packet by packet when the socket can take one, so that what becomes urgent later can still go first.
//
// It orders and hands out; it never touches a socket. Owned by one connection, touched under the node's lock.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "node/buffer.h"
#include "node/layout.h"
#include "wire/frame.h"

namespace gradlane {

// Packets of one tensor still to be sent. A push reads from the tensor's own memory at the moment of sending; a
// result from the packet's buffer.
struct Run {
    FrameType type = FrameType::kPush;
    uint16_t flags = 0;
    uint32_t tensor = 0, iteration = 0, priority = 0;
    const uint8_t* memory = nullptr;  // of the whole tensor (push)
    std::shared_ptr<const Layout> layout;
    uint32_t server = 0;
    uint32_t next = 0, end = 0;  // places in layout->by_server[server]
    BufferRef buffer;            // of the one packet (result)
};

struct Packet {
    Header header;
    const uint8_t* payload;
    BufferRef buffer;  // keeps a result's payload alive until it has been sent
};

class PacketQueue {
  public:
    // rank: what orders the queue; the smallest goes first, equal ones in order of arrival.
    void Put(uint32_t rank, Run run) { by_rank_[rank].push_back(std::move(run)); }

    bool empty() const { return by_rank_.empty(); }

    // The packet to send now. Not for an empty queue.
    Packet Next() {
        const auto first = by_rank_.begin();
        Run& run = first->second.front();
        const Piece& piece = run.layout->by_server[run.server][run.next];
        Packet packet;
        packet.header.type = run.type;
        packet.header.flags = run.flags;
        packet.header.tensor = run.tensor;
        packet.header.offset = piece.offset;
        packet.header.length = piece.length;
        packet.header.iteration = run.iteration;
        packet.header.priority = run.priority;
        packet.payload = run.type == FrameType::kPush ? run.memory + piece.offset : run.buffer.data();
        if (++run.next == run.end) {
            packet.buffer = std::move(run.buffer);
            first->second.pop_front();
            if (first->second.empty()) by_rank_.erase(first);
        }
        return packet;
    }

    void Clear() { by_rank_.clear(); }

  private:
    std::map<uint32_t, std::deque<Run>> by_rank_;
};

}  // namespace gradlane
