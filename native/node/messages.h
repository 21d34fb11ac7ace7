// Messages: what workers send one another, matched by source, tag and order. It takes the owner's
// sends and receives and the frames of native/wire/wire.md ("Messages"), and gives frames; no socket,
// thread or clock.
//
// A small message leaves at once and is kept by the receiver until it is received. A larger one is
// offered, and leaves when the receiver has accepted it, straight into the receive's memory. What
// nobody has received yet is bounded: each sender has kCreditBytes at each receiver, and what does
// not fit waits at the sender, where it holds up nothing but later messages to the same receiver.
//
// Used under the node's lock.

#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "node/connection.h"
#include "node/packet_queue.h"
#include "node/spec.h"

namespace gradlane {

inline constexpr int32_t kAnyone = -1;  // of Receipt::from: the first message with the tag, whoever sent it

// Tags from here on are of exchanges (Node::Exchange): the dtype of a part and the low bits of the exchange's id.
inline constexpr uint32_t kExchangeTags = uint32_t{3} << 30, kExchangeIds = uint32_t{1} << 27;
constexpr uint32_t ExchangeTag(uint32_t id, DType dtype) {
    return kExchangeTags | static_cast<uint32_t>(dtype) << 27 | id % kExchangeIds;
}

// One send or one receive. Guarded by Node's done_mutex_ once it was handed over.
struct Transfer {
    bool over = false;
    int32_t rank = -1;  // the other worker; of a receive from anyone, known when it is over
    int64_t exchange = -1;  // that it is a part of; -1: of none. Set before it is handed over
};

class Messages {
  public:
    // A message of at most this many bytes leaves without being asked for. Half a round trip is
    // saved by it, and a copy is the price where no receive is waiting.
    static constexpr uint64_t kEagerBytes = 256 << 10;
    // What a sender may have at a receiver that was not received yet: bytes of small messages, and
    // kEnvelopeBytes for each message.
    static constexpr uint64_t kCreditBytes = 2 << 20;
    static constexpr uint64_t kEnvelopeBytes = 64;

    // Where frames go and who hears of ends.
    class Post {
      public:
        virtual ~Post() = default;
        // Queue a run of kMessage or kPart for the process of worker `rank`.
        virtual void PostRun(uint32_t rank, uint32_t priority, Run run) = 0;
        // Queue a kAccept or kTaken for worker `rank`.
        virtual void PostAnswer(uint32_t rank, FrameType type, uint32_t number) = 0;
        // The send's memory is not read any more, or the receive's memory holds the message.
        virtual void Ended(Transfer& transfer, int32_t rank) = 0;
        // What worker `rank` sent is not what is received. The job cannot go on.
        virtual void Mismatch(uint32_t rank, const std::string& text) = 0;
    };

    // credit_bytes: less only in tests, whose messages are small.
    Messages(uint32_t world, uint32_t packet_bytes, Post* post, uint64_t credit_bytes = kCreditBytes);

    // The owner's calls. Memory stays until the transfer is over. priority: 0 is the most urgent.
    void Send(std::shared_ptr<Transfer> transfer, uint32_t rank, uint32_t tag, uint32_t priority, const uint8_t* from, uint64_t bytes);
    void Receive(std::shared_ptr<Transfer> transfer, int32_t from, uint32_t tag, uint8_t* into, uint64_t bytes);

    // Frames from worker `rank`: where the payload of a kMessage or kPart goes, and that it has come.
    Connection::Sink OnHeader(uint32_t rank, const Header& header);
    void OnFrame(uint32_t rank, const Header& header);
    // Answers from the process of worker `rank`. Return null, or why they cannot be.
    const char* OnAccept(uint32_t rank, uint32_t number);
    const char* OnTaken(uint32_t rank, uint32_t bytes);
    // A frame that PostRun queued is in the kernel.
    void OnSent(uint32_t rank, const Header& header);

    // Whether a transfer can end only with something from a worker that has left. left: by rank; self: this worker.
    bool WaitsFor(const std::vector<bool>& left, uint32_t self) const;
    // Whether messages with the tag have come, or were offered, that nobody has received.
    bool Keeps(uint32_t tag) const { return arrivals_.count(tag) != 0; }
    bool keeps_any() const { return !arrivals_.empty(); }
    uint64_t held_bytes() const { return held_bytes_; }  // of payloads that nobody has received yet

  private:
    struct Outgoing {
        std::shared_ptr<Transfer> transfer;
        uint32_t tag = 0, priority = 0;
        const uint8_t* from = nullptr;
        uint64_t bytes = 0;
        bool accepted = false;
    };
    struct Receipt {
        std::shared_ptr<Transfer> transfer;
        int32_t from = kAnyone;
        uint8_t* into = nullptr;
        uint64_t bytes = 0;
    };
    // A message that has come before its receive, or while it comes.
    struct Arrival {
        uint32_t rank = 0, number = 0;
        uint64_t bytes = 0;
        bool is_offer = false, is_whole = false;
        std::unique_ptr<uint8_t[]> kept;
        Receipt receipt;  // with a transfer once it is received
    };
    // Messages on their way to one worker that have equal tags: a later one is never more urgent.
    struct Unsent {
        uint32_t frames = 0, priority = 0;
    };
    struct Peer {
        // to it
        uint64_t spent = 0;  // of the credit there
        uint32_t next_number = 0;
        std::deque<Outgoing> backlog;                    // no credit for them yet
        std::unordered_map<uint32_t, Outgoing> sending;  // by number
        std::unordered_map<uint32_t, Unsent> unsent;     // by tag
        // from it
        uint64_t owed = 0, taken = 0;                    // of its credit here: used, and of that not returned yet
        std::unordered_set<uint32_t> offered;            // numbers of offers that have not come whole
        std::unordered_map<uint32_t, std::pair<Receipt, uint64_t>> coming;  // accepted, with the bytes that have come
        std::list<Arrival>* arriving_in = nullptr;       // the small message whose payload comes now
        std::list<Arrival>::iterator arriving;
        Receipt direct;                                  // or its receive, where that was there first
    };

    void Launch(uint32_t rank, Outgoing message);
    void Drain(uint32_t rank);
    void Accept(uint32_t rank, uint32_t number, Receipt receipt);
    void GiveBack(uint32_t rank, uint64_t bytes);
    bool Fits(uint32_t rank, uint32_t tag, uint64_t bytes, const Receipt& receipt);
    bool Match(uint32_t rank, uint32_t tag, Receipt* receipt);

    const uint64_t eager_bytes_;
    const uint32_t packet_bytes_;
    const uint64_t credit_bytes_;
    Post* const post_;
    std::vector<Peer> peers_;  // by rank
    std::unordered_map<uint32_t, std::list<Receipt>> receipts_;  // that wait, by tag, in order
    std::unordered_map<uint32_t, std::list<Arrival>> arrivals_;  // by tag, in order
    uint64_t held_bytes_ = 0;
};

}  // namespace gradlane
