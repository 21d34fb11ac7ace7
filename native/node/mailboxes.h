// Mailboxes: frames of messages (native/wire/wire.md, "Messages") between the ranks of one host, through the
// memory that they share. For each rank and each other one there is a ring of bytes, which carries what a
// connection would, in the same order: control frames first, then packets by priority.
//
// Whoever waits for a message reads the rings itself. A small message is not worth more than that: where nobody
// waits, it lies in its ring until somebody does. The I/O thread is woken for what another rank waits for: an
// answer, an offer and its parts, and a ring that is full.
//
// Nothing of what another process writes is believed: numbers are checked before they are used, and a header is copied
// before it is read.
//
// Used under the node's lock; bell(), IsReady and IsInsisted by any thread.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "host/bell.h"
#include "host/meeting.h"
#include "host/ring.h"
#include "node/connection.h"
#include "node/packet_queue.h"

namespace gradlane {

class Mailboxes {
  public:
    class Owner {
      public:
        virtual ~Owner() = default;
        // A header from `rank`: where its payload goes, or what is wrong with it.
        virtual Connection::Sink OnMailHeader(uint32_t rank, const Header& header) = 0;
        // It has come whole. Returns null, or what is wrong with it.
        virtual const char* OnMailFrame(uint32_t rank, const Header& header) = 0;
        // A packet is in the ring: its memory is not read again.
        virtual void OnMailSent(uint32_t rank, const Header& header) = 0;
        // Nothing more is taken from `rank` or sent to it.
        virtual void OnMailFault(uint32_t rank, Code code, const char* why) = 0;
    };

    // Of the segment for so many ranks.
    static size_t BytesFor(uint32_t ranks);

    // offset: of the mailboxes in the room's segment.
    Mailboxes(std::shared_ptr<const HostRoom> room, size_t offset, Owner* owner);

    void Queue(uint32_t rank, uint32_t priority, Run run) { peers_[rank]->queue.Put(priority, std::move(run)); }
    void QueueControl(uint32_t rank, const std::vector<uint8_t>& frame);
    // Writes what there is room for, about `bytes` of it for each rank. Returns whether there is more to do at once.
    bool Write(uint64_t bytes);
    // Reads what has come, and writes. Does nothing within itself.
    bool Pump(uint64_t bytes);
    bool HasOutput(uint32_t rank) const;
    // Nothing more is read or written.
    void Close() noexcept;

    Bell& bell() { return bell_; }  // this rank's
    // Whether Pump would do something.
    bool IsReady() const;
    // Whether it would do something that another rank waits for.
    bool IsInsisted() const;

  private:
    static constexpr uint64_t kPieceBytes = 32 << 10;  // copied at a time: the other rank copies one while this one copies the next

    // Frames to and from one other rank.
    struct Peer {
        Peer(RingReader in, RingMarks* marks, uint8_t* memory, uint64_t bytes, Bell bell)
            : in(in), out(marks, memory, bytes), bell(bell) {}

        bool is_closed = false;
        // from it
        RingReader in;
        std::array<uint8_t, kHeaderBytes> head;
        size_t head_bytes = 0;  // that have come
        Header header;          // once all of them have
        uint8_t* into = nullptr;
        uint64_t awaited = 0;  // bytes of the payload
        // to it
        RingWriter out;
        Bell bell;
        PacketQueue queue;
        std::vector<uint8_t> control, sending_control;  // frames without payload
        Packet packet;                                  // whose header or payload is being written
        std::array<uint8_t, kHeaderBytes> sending_head;
        const uint8_t* sending = nullptr;  // control frames, or the header
        uint64_t unsent_head = 0, unsent = 0;
        bool is_packet = false, insists = false;

        bool HasOutput() const { return unsent_head != 0 || unsent != 0 || !control.empty() || !queue.empty(); }
    };

    bool ReadFrom(uint32_t rank, uint64_t bytes);
    bool WriteTo(uint32_t rank, uint64_t bytes);
    bool TakeHeader(uint32_t rank);
    bool BeginNext(Peer& peer);
    bool Fault(uint32_t rank, Code code, const char* why);

    const std::shared_ptr<const HostRoom> room_;
    Owner* const owner_;
    Bell bell_;
    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null: this one
    bool is_pumping_ = false;
};

}  // namespace gradlane
