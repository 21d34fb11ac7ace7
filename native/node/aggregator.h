// Aggregator: the sums of one server. It adds each packet when it arrives and hands the sum on when the last
// contribution has come. It knows no socket, thread or clock: packets in, sums out.
//
// A worker in the same process contributes in place: its packet is not copied on hand-over but read once, when
// everybody else's has come, and the sum is written into its memory in the same pass.
//
// Memory is bounded by what is in flight: a packet has a buffer from its first contribution until its sum has
// left, and a worker sends the next iteration's only after it has received this one's sum.
//
// Owned by one node, called under its lock.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "node/buffer.h"
#include "node/layout.h"
#include "reduce/reduce.h"
#include "wire/frame.h"

namespace gradlane {

// What a tensor is to everybody: the same on all workers and servers.
struct Spec {
    uint64_t bytes = 0;
    DType dtype = DType::kF32;
    Op op = Op::kSum;
    int32_t from = kAll;        // kAll: every worker contributes; else this one alone (broadcast, all-gather)
    int32_t to = kAll;          // kAll: every worker gets the result; else this one alone (reduce, reduce-scatter)
    int32_t at = kDealt;        // kDealt: packets are dealt to all servers; else this one has them all
    bool whole = false;         // a server returns what it has of the tensor at once, not packet by packet
    bool urgent_first = false;  // packets are ordered by priority, not by arrival
    bool once = false;          // one iteration and no more
    uint32_t priority = 0;
    uint16_t lane = 0;
    bool operator==(const Spec&) const = default;
};

Definition AsDefinition(const Spec& spec);

// The iteration of a tensor that is defined once: a digest of its definition, so that processes which mean different
// things by one id find out with the first packet.
uint32_t OnlyIteration(const Spec& spec);

enum class Order : uint8_t { kArrival, kRank };  // of additions; rank order gives the same bits whatever the schedule

class Aggregator {
  public:
    // Where sums go. Called from within the aggregator's methods.
    class Outbox {
      public:
        virtual ~Outbox() = default;
        // The sum of one packet, for every receiving worker in another process.
        virtual void Return(uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place,
                            uint32_t iteration, BufferRef sum) = 0;
        // `packets` more sums are in the memory of the worker in this process.
        virtual void Delivered(uint32_t tensor, uint32_t packets) = 0;
        // `packets` more were read from the memory of the worker in this process, which gets no sum of them.
        virtual void Consumed(uint32_t tensor, uint32_t packets) = 0;
        // Every packet of a tensor that was defined `once` has been summed; Forget() it, though not from in here.
        virtual void Over(uint32_t tensor) = 0;
    };

    // local: the rank of the worker in this process, or -1.
    Aggregator(uint32_t server, uint32_t world, int32_t local, Order order, uint32_t packet_bytes, Outbox* outbox);

    void Define(uint32_t tensor, const Spec& spec, std::shared_ptr<const Layout> layout);
    void Forget(uint32_t tensor) { sums_.erase(tensor); }
    bool Has(uint32_t tensor) const { return sums_.count(tensor) != 0; }
    uint16_t LaneOf(uint32_t tensor) const { return sums_.at(tensor).spec.lane; }

    // Whether a push from `sender` is one that this server waits for: its place, or why not: kDisagrees where the
    // sender has another idea of the tensor, else -1.
    static constexpr int64_t kDisagrees = -2;
    static constexpr const char* kAnotherMeaning =
        "the same operation with another size, type or meaning: do all processes issue the same ones in one order?";
    int64_t Admit(const Header& header, uint32_t sender, const char** why) const;

    // A buffer to receive an admitted push into.
    BufferRef Take() { return packets_.Take(); }

    // An admitted push has been received and its checksum holds. No fault is possible any more.
    void Arrive(uint32_t tensor, uint32_t place, uint32_t sender, BufferRef payload);

    // The worker in this process hands over its part of `iteration`. from: its contribution, the whole tensor.
    // into: where the sum shall go (may be `from`). Both must stay until everything is Delivered.
    void ArriveLocally(uint32_t tensor, uint32_t iteration, const uint8_t* from, uint8_t* into);

    // Whether a sum that somebody has contributed to lacks somebody else's part.
    bool IsWaiting() const;

    // Works off what was handed over locally, about `bytes` of it, most urgent first. False when nothing is left.
    bool Work(uint64_t bytes);
    bool has_work() const { return !work_.empty(); }

    // Bytes of packet buffers in use now, and the most there ever were.
    size_t held_bytes() const { return packets_.taken_bytes() + wide_.taken_bytes(); }
    size_t most_held_bytes() const { return packets_.most_taken_bytes() + wide_.most_taken_bytes(); }

  private:
    struct Slot {
        BufferRef sum;         // of what has arrived; f32 when wide
        uint32_t arrived = 0;  // remote contributions
        uint32_t iteration = 0;
    };
    struct Sum {
        Spec spec;
        std::shared_ptr<const Layout> layout;
        uint32_t remote = 0;     // contributions that come over the wire
        bool local = false;      // one comes from this process
        bool returns = false;    // somebody in another process gets the result
        bool delivers = false;   // the worker in this process does
        bool wide = false;       // halves from more than two workers are summed in f32
        int64_t local_iteration = -1;
        const uint8_t* from = nullptr;
        uint8_t* into = nullptr;
        std::vector<Slot> slots;
        std::vector<uint64_t> seen;         // a bit a slot and sender, of this iteration
        std::vector<BufferRef> in_order;    // rank order: a buffer a slot and sender
        std::vector<BufferRef> finished;    // whole: sums that wait for the rest
        uint32_t finished_slots = 0;
        uint32_t unsummed = 0;  // slots, of a tensor that is defined once
    };
    struct LocalRun {
        uint32_t tensor, iteration, next;
    };

    const std::vector<Piece>& Pieces(const Sum& sum) const { return sum.layout->by_server[server_]; }
    bool IsComplete(const Sum& sum, const Slot& slot) const;
    void Add(Sum& sum, uint32_t place, BufferRef payload);
    BufferRef AddInRankOrder(Sum& sum, uint32_t place);
    void Finish(uint32_t tensor, Sum& sum, uint32_t place);
    void Emit(uint32_t tensor, Sum& sum, uint32_t place, uint32_t iteration, BufferRef result);

    const uint32_t server_, world_;
    const int32_t local_;
    const Order order_;
    Outbox* const outbox_;
    const size_t words_;  // of 64 senders each
    BufferPool packets_, wide_;
    std::unordered_map<uint32_t, Sum> sums_;
    std::map<uint32_t, std::deque<LocalRun>> work_;
};

}  // namespace gradlane
