// SharedSums: tensors of which all ranks of a host give or get the whole, summed and moved through the
// memory that the ranks share (host/meeting.h), without a socket.
//
// A tensor passes once, or twice where the ranks of other hosts add to it in between (node_shared.cc):
// each Pass says who gives, who adds and who gets. It goes in chunks. Each rank has kSlots of them in
// the segment, and a chunk goes through three steps on every rank:
//
//     in    copy the shares that other ranks own into this rank's slot
//     sum   add all ranks' parts of the own share, in rank order, from their slots
//     out   copy the sums of the other shares from their owners' slots
//
// A tensor is cut into as many shares as there are ranks, and each rank owns one; where a pass has one
// owner, that rank owns all. A chunk has a piece of each share. What is only moved has no sum: it is
// copied from the slot of the rank that gives it. Numbers that only rise say how many chunks each rank
// has brought through each step. Nobody waits here: Progress does what is possible, and a rank that has
// nothing to do is woken by its eventfd.
//
// Rank 0 decides chunk by chunk which tensor is next: the most urgent of those that all ranks have
// handed over (equal ones in order of the calls), once it has seen that all mean the same. A pass that
// awaits what comes from other hosts has no chunk before all ranks are Ready, so that no slot is ever
// held for the network.
//
// Any rank may have written what the segment says, which is not believed: a rank uses no number of it that cannot be.
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
#include "node/greeting.h"
#include "node/spec.h"

namespace gradlane {

inline constexpr int32_t kOwn = -2;  // of Pass::from and Pass::to: each rank its own share

// Numbers of ranks are those of the room.
struct Pass {
    int32_t from = kAll;  // kAll: sums; kOwn: each rank gives its own share; else this one alone gives
    int32_t to = kAll;    // kAll, kOwn: each rank gets the sum of its own share; else this one alone gets
    int32_t at = kDealt;  // of sums. kDealt: each rank owns a share; else this one owns all
};

struct Range {
    uint64_t begin = 0, end = 0;
};

class SharedSums {
  public:
    // Of the segment for so many ranks.
    static size_t BytesFor(uint32_t ranks);
    // Whether a tensor goes this way: one that all ranks know, and whose packets are not returned later.
    static bool Takes(const Spec& spec) { return spec.once && !spec.whole && (spec.from == kAll || spec.to == kAll); }
    // What one of `ranks` owns of a tensor, where each owns a share.
    static Range ShareOf(uint64_t bytes, uint32_t ranks, uint32_t rank);

    // A pass with this rank's memory: what it gives of the tensor and where what it gets goes, each of the whole
    // tensor; either is null if the pass makes no use of it.
    struct Way {
        Pass pass;
        const uint8_t* from = nullptr;
        uint8_t* into = nullptr;
        bool awaits = false;  // has no chunk before all ranks have called Ready
    };
    struct End {
        uint32_t tensor, left;  // ways that it has yet to go
        bool operator==(const End&) const = default;
    };
    // What ends all sums here: a rank has handed over something else than rank 0, which rank 0 alone finds; or the
    // segment says what cannot be.
    struct Fault {
        Code code;
        int32_t rank;  // whose doing it is, its number in the job; -1: any rank may have written it
        std::string text;
    };

    explicit SharedSums(std::shared_ptr<const HostRoom> room);

    // Hands over a tensor with its ways, one or two; all ranks hand over the same ones in the same order. The
    // memory must stay until Progress has told of the last way's end.
    void Start(uint32_t tensor, const Spec& spec, std::vector<Way> ways);
    // The way that awaits it may begin, as far as this rank is concerned.
    void Ready(uint32_t tensor);
    // Goes on with what is possible, about `bytes` of it. Adds the ways that have ended to `ended`.
    // Returns whether more is possible at once.
    bool Progress(uint64_t bytes, std::vector<End>* ended);
    // Asks to be woken. Returns false if something is possible already.
    bool Rest();
    // Whether a tensor is under way.
    bool IsUnderWay() const { return !calls_.empty(); }
    // As Progress would find it.
    bool CanProgress() const;
    // Once there is one, nothing more is summed.
    const std::optional<Fault>& fault() const { return fault_; }
    // Readable when another rank has woken this one; Woken() makes it unreadable again.
    int wake_fd() const { return room_->wakes[room_->rank].get(); }
    void Woken();

  private:
    friend class SharedSeam;  // fuzz/shared_fuzz.cc: a rank that lies

    static constexpr uint32_t kSlots = 4;
    static constexpr uint64_t kChunkBytes = 256 << 10;
    static constexpr uint64_t kBlockBytes = 16 << 10;  // summed at a time: it stays in the first cache
    static constexpr uint32_t kCalls = 256;            // that a rank may be ahead of another, or of its own first one

    // What one rank writes, and the others read.
    struct Board {
        alignas(64) std::atomic<uint64_t> handed_over{0};  // calls
        std::atomic<uint64_t> in{0}, sum{0}, out{0};       // chunks
        std::atomic<uint64_t> readied{0};                  // calls of Ready
        alignas(64) std::atomic<uint32_t> asleep{0};                    // the others write it as well
        alignas(64) std::array<std::atomic<uint64_t>, kCalls> calls{};  // a tensor's id and a digest of its spec
        std::array<std::atomic<uint64_t>, kCalls> ready{};  // by number of call: that number and 1, once it is Ready
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
        std::vector<Way> ways;
        std::vector<uint64_t> ends;  // by way: the number of chunks up to its end
        bool ready = false;          // of this rank
        uint64_t decided = 0, begun = 0, ended = 0;  // chunks; the first is rank 0's
        uint64_t chunks() const { return ends.back(); }
    };
    struct Chunk {
        uint64_t call = 0, number = 0;  // of the way's chunks
        size_t way = 0;
    };

    Call& CallOf(uint64_t number) { return calls_[number - first_call_]; }
    const Call& CallOf(uint64_t number) const { return calls_[number - first_call_]; }
    uint8_t* Slot(uint32_t rank, uint64_t chunk) const;
    Range PieceOf(const Call& call, const Chunk& chunk, uint32_t rank) const;
    uint64_t PieceBytes(const Pass& pass) const;
    uint64_t ChunksOf(const Pass& pass, uint64_t bytes) const;
    uint8_t* Place(const Pass& pass, uint32_t rank, uint64_t chunk, uint32_t owner) const;
    bool Gives(const Pass& pass, uint32_t owner) const;
    bool TakesOut(const Pass& pass) const;
    uint64_t Least(std::atomic<uint64_t> Board::*counter) const;  // of the other ranks

    uint64_t LastToHandOver() const;
    void Publish(uint64_t number);
    uint64_t SumReadied() const;
    bool IsReady(uint64_t number) const;
    bool MayDecide(uint64_t number) const;
    bool CanLook() const;
    void Look();
    bool CanHandOver() const { return handed_over_ < LastToHandOver(); }
    bool CanDecide() const;
    bool CanBringIn() const { return in_ < known_; }
    bool CanSum() const;
    bool CanTakeOut() const;
    void HandOver();
    void Compare(uint64_t end);
    void Decide();
    void Learn();
    bool IsNext(uint64_t number) const;
    void BringIn();
    void Sum();
    void TakeOut(std::vector<End>* ended);
    void AddPiece(const Spec& spec, const Way& way, const Range& own, uint64_t chunk);
    uint64_t BytesOf(uint64_t chunk) const;
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
    std::vector<uint64_t> awaiting_;                     // there, too: calls whose next chunk awaits Ready
    uint64_t readied_ = 0;                               // SumReadied() when they were looked at
    std::optional<Fault> fault_;
};

}  // namespace gradlane
