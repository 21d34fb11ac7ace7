// Updates: the parameters that one server keeps. Gradients come in, parameters go out; there is no
// socket, thread or clock here.
//
// Each packet is handled by itself:
// - A worker's first push has the parameters' first values. The server takes rank 0's, and answers
//   nobody before they have come.
// - A later push has a gradient; or it is quiet and has none; or it places or fetches a part of
//   what the server keeps.
// - The server answers each push with the part that the push names, which is the parameters unless
//   it says otherwise. A worker pushes a packet again only after it has been answered.
// - A fetch is answered at once, and nobody waits for it, so that a worker may fetch when it likes.
//   All others are pushes of an iteration.
//
// With staleness k the server answers a worker's push of iteration i when every worker has pushed
// iteration i - k. No worker ever computes with parameters that lack another worker's gradient of
// more than k iterations before. With k = 0 the server sums an iteration's gradients and makes one
// update; otherwise each gradient makes an update when it comes.
//
// Memory: the parameters and the optimizer's states from Define() on, and packets in flight.
//
// An Updates is owned by one Aggregator and called under the node's lock.

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
#include "update/rule.h"
#include "wire/frame.h"

namespace gradlane {

class Updates {
  public:
    // local: the rank of the worker in this process, or -1.
    Updates(uint32_t server, uint32_t world, int32_t local, Order order, BufferPool* packets, Outbox* outbox)
        : server_(server), world_(world), local_(local), order_(order), words_((world + 63) / 64), packets_(*packets), outbox_(outbox) {}

    // Throws std::bad_alloc if there is not enough memory.
    void Define(uint32_t tensor, const Spec& spec, std::shared_ptr<const Layout> layout);
    void Forget(uint32_t tensor) { kept_.erase(tensor); }
    bool Has(uint32_t tensor) const { return kept_.count(tensor) != 0; }

    // Bytes that Define() of such a tensor takes, and most bytes of packets in flight.
    uint64_t NeededBytes(const Spec& spec, const Layout& layout) const;

    // Sets the rule for the pushes of `rank` to tensors of `group`, from its next push on. None of
    // the tensors may be in flight there.
    void SetRule(uint32_t group, uint32_t rank, const Rule& rule) { rules_[Key(group, rank)] = rule; }

    // Checks a push from `sender`. Returns its place if it may come now, or else -1, with the
    // reason in `why`.
    int64_t Admit(const Header& header, uint32_t sender, const char** why) const;
    // An admitted push has been received, with the flags of its header.
    void Arrive(uint32_t tensor, uint32_t place, uint32_t sender, BufferRef payload, uint16_t flags);

    // The worker in this process hands over its part of the whole tensor. into: where parameters
    // go; it may be `from`. Both must stay until everything is Delivered.
    void ArriveLocally(uint32_t tensor, const uint8_t* from, uint8_t* into, uint16_t flags);
    // Works off about `bytes` of what was handed over locally, in the order of a connection
    // (node/packet_queue.h). Returns false when nothing is left.
    bool Work(uint64_t bytes);
    bool has_work() const { return !work_.empty(); }

    // Whether a push is unanswered: of any tensor, or of one.
    bool IsWaiting() const;
    bool IsWaiting(uint32_t tensor) const;

  private:
    struct Slot {
        uint64_t least = 0;  // iterations that every worker has pushed
        uint64_t steps = 0;  // updates that were made
        BufferRef sum;       // staleness 0: of this iteration's gradients
        uint32_t arrived = 0;               // staleness 0: pushes of this iteration
        uint32_t gradients = 0, leader = 0;  // of those: with a gradient, and sender of the first
    };
    struct Kept {
        Spec spec;
        std::shared_ptr<const Layout> layout;
        const uint8_t* from = nullptr;
        uint8_t* into = nullptr;
        uint16_t flags = 0;
        size_t values = 0;             // of this server's packets together
        std::vector<size_t> first;     // by place: its first value
        std::vector<float> memory;     // parameters, then each state
        std::vector<Slot> slots;
        std::vector<uint64_t> pushes;      // by place and worker, with fetches
        std::vector<uint64_t> iterations;  // by place and worker: pushes without fetches
        std::vector<uint64_t> unanswered;  // a bit a place and worker
        std::vector<Part> asked;           // by place and worker: the part to answer with
        std::vector<BufferRef> in_order;   // staleness 0 in rank order: a gradient a place and worker
    };
    struct LocalRun {
        uint32_t tensor, next;
    };

    static uint64_t Key(uint32_t group, uint32_t rank) { return uint64_t{group} << 32 | rank; }
    const Rule& RuleOf(const Kept& kept, uint32_t rank) const { return rules_.at(Key(kept.spec.group, rank)); }
    const std::vector<Piece>& Pieces(const Kept& kept) const { return kept.layout->by_server[server_]; }
    static float* State(Kept& kept, uint32_t place, uint32_t which) { return kept.memory.data() + kept.values * which + kept.first[place]; }

    // gradient: where the payload lies. payload: the buffer that it lies in, if there is one.
    void Take(uint32_t tensor, Kept& kept, uint32_t place, uint32_t sender, const uint8_t* gradient, BufferRef payload, uint16_t flags);
    bool Gather(Kept& kept, uint32_t place, uint32_t sender, const uint8_t* gradient, BufferRef payload, bool quiet);
    void Step(Kept& kept, uint32_t place, const Rule& rule, const uint8_t* gradient);
    void StepBySum(Kept& kept, uint32_t place);
    void Place(Kept& kept, uint32_t place, Part part, const uint8_t* values);
    void Read(Kept& kept, uint32_t place, Part part, uint8_t* into);
    void Answer(uint32_t tensor, Kept& kept, uint32_t place);

    const uint32_t server_, world_;
    const int32_t local_;
    const Order order_;
    const size_t words_;  // of 64 workers each
    BufferPool& packets_;
    Outbox* const outbox_;
    std::unordered_map<uint32_t, Kept> kept_;
    std::unordered_map<uint64_t, Rule> rules_;
    std::map<uint32_t, std::deque<LocalRun>> work_;  // by QueuePriority, then in order of hand-over
    bool broken_ = false;  // workers disagree: nothing is updated any more
};

}  // namespace gradlane
