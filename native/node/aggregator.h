// Aggregator: the sums of one server. It adds each packet when it arrives and hands the sum to the
// Outbox when the last contribution has come. Packets come in, sums go out; there is no socket,
// thread or clock here.
//
// A worker in the same process contributes in place. The aggregator does not copy its packet on
// hand-over; it reads the packet once, when all other contributions have come, and writes the sum
// into the worker's memory in the same pass.
//
// Memory is bounded by what is in flight: a packet has a buffer from its first contribution until
// its sum has left, and a worker sends the packet of the next iteration only after it has received
// the sum of this one. NeededBytes has that bound.
//
// Tensors that are updated rather than summed are passed on to `Updates`.
//
// An Aggregator is owned by one node and called under the node's lock.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "node/buffer.h"
#include "node/layout.h"
#include "node/outbox.h"
#include "node/spec.h"
#include "node/updates.h"
#include "reduce/reduce.h"
#include "wire/frame.h"

namespace gradlane {

class Aggregator {
  public:
    // local: the rank of the worker in this process, or -1.
    Aggregator(uint32_t server, uint32_t world, int32_t local, Order order, uint32_t packet_bytes, Outbox* outbox);

    // Who contributes to tensors with Spec::rail, this server's own rank among them.
    void SetRail(std::vector<uint32_t> rail) { rail_ = std::move(rail); }

    void Define(uint32_t tensor, const Spec& spec, std::shared_ptr<const Layout> layout);
    void Forget(uint32_t tensor) {
        if (sums_.erase(tensor) == 0) updates_.Forget(tensor);
    }
    // Bytes of memory that such a tensor may take here: what Updates keeps of it, and the buffers of
    // its packets in flight.
    uint64_t NeededBytes(const Spec& spec, const Layout& layout) const;
    bool Has(uint32_t tensor) const { return sums_.count(tensor) != 0 || updates_.Has(tensor); }
    uint16_t LaneOf(uint32_t tensor) const {
        const auto found = sums_.find(tensor);
        return found == sums_.end() ? kUpdateLane : found->second.spec.lane;
    }

    // Sets the rule for the pushes of `rank` to tensors of `group`, from its next push on.
    void SetRule(uint32_t group, uint32_t rank, const Rule& rule) { updates_.SetRule(group, rank, rule); }

    // Checks a push from `sender`. Returns its place if this server waits for it. Otherwise returns
    // kDisagrees if the sender has defined the tensor differently, or else -1, with the reason in
    // `why`.
    static constexpr int64_t kDisagrees = -2;
    static constexpr const char* kAnotherMeaning =
        "the same operation with another size, type or meaning: do all processes issue the same ones in one order?";
    int64_t Admit(const Header& header, uint32_t sender, const char** why) const;

    // A buffer to receive an admitted push into.
    BufferRef Take() { return packets_.Take(); }

    // An admitted push has been received and its checksum holds. flags: those of its header, for a
    // tensor that is updated.
    void Arrive(uint32_t tensor, uint32_t place, uint32_t sender, BufferRef payload, uint16_t flags = 0);

    // The worker in this process hands over its part of `iteration`. from: its contribution, of the
    // whole tensor. into: where the sum goes; it may be `from`. Both must stay until everything is
    // Delivered.
    void ArriveLocally(uint32_t tensor, uint32_t iteration, const uint8_t* from, uint8_t* into, uint16_t flags = 0);

    // Whether some packet has contributions from some workers and lacks those of others, or a push
    // to Updates is unanswered: of any tensor, or of one.
    bool IsWaiting() const;
    bool IsWaiting(uint32_t tensor) const;

    // Works off about `bytes` of what was handed over locally, sums before updates, each in the
    // order of a connection (node/packet_queue.h). Returns false when nothing is left.
    bool Work(uint64_t bytes);

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
        const std::vector<uint32_t>* workers = nullptr;  // all that take part
        uint32_t remote = 0;     // contributions that come over the wire
        bool local = false;      // one comes from this process
        bool returns = false;    // a worker in another process gets the result
        bool delivers = false;   // the worker in this process gets it
        bool wide = false;       // halves from more than two workers are summed in f32
        int64_t local_iteration = -1;
        const uint8_t* from = nullptr;
        uint8_t* into = nullptr;
        std::vector<Slot> slots;
        std::vector<uint64_t> seen;         // a bit a slot and sender, of this iteration
        std::vector<BufferRef> in_order;    // for rank order: a buffer a slot and sender
        std::vector<BufferRef> finished;    // if `spec.whole`: sums that wait for the other sums
        uint32_t finished_slots = 0;
        uint32_t iteration = 0;  // if `spec.whole`: of the sums that wait in `finished`
        uint32_t unsummed = 0;  // slots without a sum yet, if the tensor is defined once
    };
    struct LocalRun {
        uint32_t tensor, iteration, next;
    };

    const std::vector<uint32_t>& WorkersOf(const Spec& spec) const { return spec.rail ? rail_ : everybody_; }
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
    std::vector<uint32_t> everybody_, rail_;
    BufferPool packets_, wide_;
    std::unordered_map<uint32_t, Sum> sums_;
    std::map<uint32_t, std::deque<LocalRun>> work_;  // by QueuePriority, then in order of hand-over
    Updates updates_;  // declared after the pool, so that its buffers are freed before the pool is
};

}  // namespace gradlane
