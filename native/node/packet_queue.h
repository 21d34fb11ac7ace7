// PacketQueue: what one connection still has to send. A run of packets is queued as one item and
// cut packet by packet when the socket can take one, so that a more urgent run that is queued later
// can still go first.
//
// The order is that of src/gradlane/schedule/wire_order.py, which is its specification: the queue's
// key is (priority, order of Put). tests/packet_queue_test.cc runs the specification's vectors on
// it.
//
// A queue orders packets and hands them out; it never touches a socket. It is owned by one
// connection and used under the node's lock.

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

// Packets of one tensor or message still to be sent. A push and a message read from their own memory
// at the moment of sending; a result reads from the packet's buffer.
struct Run {
    FrameType type = FrameType::kPush;
    uint16_t flags = 0;
    bool acknowledged = false;  // its last packet asks for an answer (push)
    uint32_t tensor = 0, iteration = 0, priority = 0;
    const uint8_t* memory = nullptr;  // of the whole tensor (push) or message
    std::shared_ptr<const Layout> layout;
    uint32_t server = 0;
    uint32_t next = 0, end = 0;  // places in layout->by_server[server]
    BufferRef buffer;            // of the one packet (result)
    uint32_t payload_crc = 0;    // and its checksum, where checksums are sent
};

struct Packet {
    Header header;
    const uint8_t* payload;
    BufferRef buffer;  // keeps a result's payload alive until it has been sent
};

class PacketQueue {
  public:
    // Queues a run of at least one packet. The run with the smallest priority goes first, and equal
    // ones go in order of Put. priority: QueuePriority of the tensor's Spec, which may differ from
    // the priority in the packets' headers.
    void Put(uint32_t priority, Run run) {
        packets_ += run.end - run.next;
        by_priority_[priority].push_back(std::move(run));
    }

    // Queues a run of sums that are ordered among themselves alone (Spec::urgent_sums): it takes a place like a run
    // with priority 0 for each of its packets, and the most urgent sum that waits goes in the next such place.
    void PutSums(uint32_t priority, Run run) {
        for (uint32_t place = run.next; place < run.end; ++place) Put(0, PlaceOfSum());
        sums_[priority].push_back(std::move(run));
    }

    bool empty() const { return by_priority_.empty(); }
    size_t packets() const { return packets_; }

    // The priority of the packet to send now; the least urgent one if the queue is empty.
    uint32_t priority() const { return empty() ? UINT32_MAX : by_priority_.begin()->first; }

    // Takes the packet to send now. The queue must not be empty.
    Packet Next() {
        const auto first = by_priority_.begin();
        --packets_;
        if (!IsPlaceOfSum(first->second.front())) return Take(by_priority_, first);
        Drop(by_priority_, first);
        return Take(sums_, sums_.begin());
    }

    void Clear() {
        by_priority_.clear();
        sums_.clear();
        packets_ = 0;
    }

  private:
    using Runs = std::map<uint32_t, std::deque<Run>>;

    static Run PlaceOfSum() {
        Run run;
        run.end = 1;
        return run;
    }
    static bool IsPlaceOfSum(const Run& run) { return run.layout == nullptr; }

    static void Drop(Runs& runs, Runs::iterator first) {
        first->second.pop_front();
        if (first->second.empty()) runs.erase(first);
    }

    // Takes a packet of the first run.
    static Packet Take(Runs& runs, Runs::iterator first) {
        Run& run = first->second.front();
        const Piece& piece = run.layout->by_server[run.server][run.next];
        Packet packet;
        packet.header.type = run.type;
        packet.header.flags = run.flags;
        if (run.acknowledged && run.next + 1 == run.end) packet.header.flags |= kFlagAcknowledge;
        packet.header.tensor = run.tensor;
        packet.header.offset = piece.offset;
        packet.header.length = piece.length;
        packet.header.iteration = run.iteration;
        packet.header.priority = run.priority;
        switch (run.type) {
            case FrameType::kResult:
                packet.payload = run.buffer.data();
                packet.header.payload_crc = run.payload_crc;
                break;
            case FrameType::kMessage: packet.payload = run.memory; break;  // its offset is the size of the message
            default: packet.payload = run.memory + piece.offset; break;
        }
        if (++run.next == run.end) {
            packet.buffer = std::move(run.buffer);
            Drop(runs, first);
        }
        return packet;
    }

    Runs by_priority_;
    Runs sums_;           // those of PutSums, whose places are in by_priority_
    size_t packets_ = 0;  // of all runs
};

}  // namespace gradlane
