// SharedSums: tensors of which all ranks of a host give or get the whole, summed and moved through the
// memory that the ranks share (host/meeting.h), without a socket.
//
// A tensor goes in chunks. Each rank has kSlots of them in the segment, and a chunk passes three steps
// on every rank:
//
//     in    copy the shares that other ranks own into this rank's slot
//     sum   add all ranks' parts of the own share, in rank order, from their slots
//     out   copy the sums of the other shares from their owners' slots
//
// A chunk is cut into as many shares as there are ranks, and each rank owns one; of a tensor with
// Spec::at that rank owns all. What only one rank contributes has no sum: the others copy it from that
// rank's slot. Numbers that only rise say how many chunks each rank has brought through each step.
// Nobody waits here: Progress does what is possible, and a rank that has nothing to do is woken by its
// eventfd.
//
// Rank 0 decides chunk by chunk which tensor is next: the most urgent of those that all ranks have
// handed over (equal ones in order of the calls), once it has seen that all mean the same.
//
// Rank order makes the bits of a sum those of Order::kRank, and the same on all ranks. Halves of three
// ranks or more are added in float32 and rounded once, as Aggregator does.
//
// Not thread-safe: the node uses it under its lock. Between processes, the segment holds all that is
// shared.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "host/meeting.h"
#include "node/spec.h"

namespace gradlane {

class SharedSums {
  public:
    // Of the segment for so many ranks.
    static size_t BytesFor(uint32_t ranks);
    // Whether a tensor goes this way: one that all ranks know, and whose packets are not returned later.
    static bool Takes(const Spec& spec) { return spec.once && !spec.whole && (spec.from == kAll || spec.to == kAll); }

    // What rank 0 and another rank have handed over is not the same. Rank 0 alone finds it.
    struct Difference {
        uint32_t rank;
        std::string text;
    };

    explicit SharedSums(std::shared_ptr<const HostRoom> room);

    // Hands over a tensor; all ranks hand over the same ones in the same order. from: what this rank
    // contributes, into: where the result goes; either is null if the spec makes no use of it. The
    // memory must stay until Progress has told of the tensor's end.
    void Start(uint32_t tensor, const Spec& spec, const uint8_t* from, uint8_t* into);
    // Goes on with what is possible, about `bytes` of it. Adds the tensors that have ended to `ended`.
    // Returns whether more is possible at once.
    bool Progress(uint64_t bytes, std::vector<uint32_t>* ended);
    // Asks to be woken. Returns false if something is possible already.
    bool Rest();
    // Whether a tensor is under way.
    bool IsUnderWay() const { return !calls_.empty(); }
    // As Progress would find it.
    bool CanProgress() const;
    // Once ranks disagree, nothing more is summed.
    const std::optional<Difference>& difference() const { return difference_; }
    // Readable when another rank has woken this one; Woken() makes it unreadable again.
    int wake_fd() const { return room_->wakes[room_->rank].get(); }
    void Woken();

  private:
    static constexpr uint32_t kSlots = 4;
    static constexpr uint64_t kChunkBytes = 256 << 10;
    static constexpr uint64_t kBlockBytes = 16 << 10;  // summed at a time: it stays in the first cache
    static constexpr uint32_t kCalls = 256;            // that a rank may be ahead of another

    // What one rank writes, and the others read.
    struct Board {
        alignas(64) std::atomic<uint64_t> handed_over{0};  // calls
        std::atomic<uint64_t> in{0}, sum{0}, out{0};       // chunks
        alignas(64) std::atomic<uint32_t> asleep{0};                    // the others write it as well
        alignas(64) std::array<std::atomic<uint64_t>, kCalls> calls{};  // a tensor's id and a digest of its spec
    };
    // What rank 0 writes for all: how many calls it has compared, and which call each chunk is of.
    struct Decisions {
        alignas(64) std::atomic<uint64_t> compared{0};
        std::atomic<uint64_t> decided{0};
        std::array<std::atomic<uint64_t>, kSlots> calls{};
    };
    struct Call {
        uint32_t tensor;
        Spec spec;
        const uint8_t* from;
        uint8_t* into;
        uint64_t chunks;
        uint64_t decided = 0, begun = 0, ended = 0;  // chunks; the first is rank 0's
    };
    struct Chunk {
        uint64_t call = 0, offset = 0, length = 0;
    };
    struct Range {
        uint64_t begin, end;
    };

    Call& CallOf(uint64_t number) { return calls_[number - first_call_]; }
    const Call& CallOf(uint64_t number) const { return calls_[number - first_call_]; }
    uint8_t* Slot(uint32_t rank, uint64_t chunk) const;
    Range Share(const Spec& spec, uint64_t length, uint32_t rank) const;
    uint64_t Least(std::atomic<uint64_t> Board::*counter) const;  // of the other ranks
    bool Receives(const Spec& spec) const;

    uint64_t LastToHandOver() const;
    bool CanHandOver() const { return handed_over_ < LastToHandOver(); }
    bool CanDecide() const;
    bool CanBringIn() const { return in_ < known_; }
    bool CanSum() const;
    bool CanTakeOut() const;
    void HandOver();
    void Compare(uint64_t end);
    void Decide();
    void Learn();
    void BringIn();
    void Sum();
    void TakeOut(std::vector<uint32_t>* ended);
    void AddShare(const Call& call, const Chunk& chunk, uint64_t number);
    void WakeOthers();
    void Wake(uint32_t rank);
    void DropEnded();

    const std::shared_ptr<const HostRoom> room_;
    Decisions* decisions_;
    std::vector<Board*> boards_;  // by rank
    uint8_t* slots_;
    std::vector<float> wide_;

    std::deque<Call> calls_;   // that have not ended, and those between them
    uint64_t first_call_ = 0;  // number of the first of them
    uint64_t handed_over_ = 0;              // calls; of rank 0: compared
    uint64_t decided_ = 0;                  // chunks; of rank 0
    uint64_t known_ = 0, in_ = 0, sum_ = 0, out_ = 0;
    std::array<Chunk, kSlots> chunks_{};
    std::set<std::pair<uint32_t, uint64_t>> undecided_;  // of rank 0: priority and number of calls
    std::optional<Difference> difference_;
};

}  // namespace gradlane
