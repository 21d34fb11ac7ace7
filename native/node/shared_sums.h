// SharedSums: tensors of which all ranks of a host give or get the whole, summed and moved through the
// memory that the ranks share (host/meeting.h), without a socket.
//
// A tensor passes once, or twice where the ranks of other hosts add to it in between (node_shared.cc):
// each Pass says who gives, who adds and who gets. It goes in chunks. Each rank has a slot for each chunk
// in its part of the segment, as large as the chunk, and a chunk goes through three steps on every rank:
//
//     in    copy the shares that other ranks own into this rank's slot
//     sum   add all ranks' parts of the own share, in rank order, from their slots
//     out   copy the sums of the other shares from their owners' slots
//
// A tensor is cut into as many shares as there are ranks, and each rank owns one; where a pass has one
// owner, that rank owns all. A chunk has a piece of each share. What is only moved has no sum: it is
// copied from the slot of the rank that gives it. Numbers that only rise say how many chunks each rank
// has brought through each step. Nobody waits here: Progress does what is possible, and a rank that has
// nothing to do is woken by its eventfd, once for all small chunks that one Progress has brought on.
//
// Each rank tells rank 0 what it hands over, in any order. Rank 0 decides chunk by chunk which tensor is
// next: the most urgent of those that all ranks have handed over (of equal ones the one that all had
// first), once it has seen that all mean the same. A pass that awaits something has no chunk before all
// ranks are Ready, so that no slot is ever held for the network.
//
// Any rank may have written what the segment says, which is not believed: a rank uses no number of it that cannot be.
//
// A small sum is rank 0's to add up, and the others bring their parts with what they tell it, so that it has the sum as
// soon as it has decided: they are woken once, and not once more for the decision.
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
#include <tuple>
#include <unordered_map>
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
    // Whether a tensor goes this way: one that all ranks know, and that servers do not keep.
    static bool Takes(const Spec& spec) { return spec.update == RuleKind::kNone && (spec.from == kAll || spec.to == kAll); }
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

    // Hands over a tensor with its ways, one or two; all ranks hand over the same ones, each in its own order. The
    // memory must stay until Progress has told of the last way's end. Then the tensor may be handed over again.
    void Start(uint32_t tensor, const Spec& spec, std::vector<Way> ways);
    // The way that awaits it may begin, as far as this rank is concerned.
    void Ready(uint32_t tensor);
    // Goes on with what is possible, about `bytes` of it. Adds the ways that have ended to `ended`.
    // Returns whether more is possible at once.
    bool Progress(uint64_t bytes, std::vector<End>* ended);
    // Of which tensors all that this rank gives is in the segment, since the last call.
    std::vector<uint32_t> TakeGiven() { return std::exchange(given_, {}); }
    // Which tensors wait for ranks that have not handed them over, while nothing else goes on here. Told of each once.
    std::vector<uint32_t> TakeWaiting();
    // Asks to be woken. Returns false if something is possible already.
    bool Rest();
    // Whether a tensor is under way.
    bool IsUnderWay() const { return !calls_.empty() || !untold_.empty(); }
    // As Progress would find it.
    bool CanProgress() const;
    // Once there is one, nothing more is summed.
    const std::optional<Fault>& fault() const { return fault_; }
    // Readable when another rank has woken this one; Woken() makes it unreadable again.
    int wake_fd() const { return room_->wakes[room_->rank].get(); }
    void Woken();

  private:
    friend class SharedSeam;  // fuzz/shared_fuzz.cc: a rank that lies

    static constexpr uint32_t kChunks = 256;             // in flight
    static constexpr uint64_t kSlotsBytes = 1 << 20;     // of a rank: for all its chunks in flight
    static constexpr uint64_t kChunkBytes = 256 << 10;
    static constexpr uint64_t kBlockBytes = 16 << 10;    // summed at a time: it stays in the first cache
    static constexpr uint64_t kSmallBytes = 16 << 10;    // of a sum whose parts are brought early
    static constexpr uint32_t kEarly = 32;               // such parts of a rank at a time; others go as large ones do
    static constexpr uint64_t kWakeBytes = 64 << 10;     // brought on before those that wait are woken
    static constexpr uint32_t kTold = 256;               // that rank 0 has not heard yet
    static constexpr size_t kAsked = 1 << 20;            // tensors that some ranks have and others do not

    // What one rank writes, and the others read.
    struct Board {
        alignas(64) std::atomic<uint64_t> in{0};  // chunks
        std::atomic<uint64_t> sum{0}, out{0};
        std::atomic<uint64_t> told{0};
        alignas(64) std::atomic<uint32_t> asleep{0};            // the others write it as well
        alignas(64) std::array<std::atomic<uint64_t>, kTold> tellings{};  // to rank 0, see HandsOver
        std::array<std::atomic<uint32_t>, kTold> early{};       // with them: which of kEarly has the part, from 1; 0: none
    };
    // What rank 0 writes for all.
    struct Decisions {
        alignas(64) std::atomic<uint64_t> decided{0};           // chunks
        std::atomic<uint32_t> awaits_room{0};                   // it rests, and has chunks to decide when slots are free
        std::array<std::atomic<uint64_t>, kChunks> chunks{};    // tensor, and where in the slots
        std::array<std::atomic<uint64_t>, kMaxHostRanks> heard{};  // of each rank's tellings
    };
    struct Call {
        Spec spec;
        std::vector<Way> ways;
        std::vector<uint64_t> ends;  // by way: the number of chunks up to its end
        uint64_t decided = 0, begun = 0, ended = 0;  // chunks; the first is rank 0's
        uint32_t early = 0;                 // where this rank's part is, as in Board
        std::vector<uint32_t> all_early{};  // of rank 0: where those of all ranks are
        uint64_t chunks() const { return ends.back(); }
        size_t WayOf(uint64_t chunk) const { return chunk < ends[0] ? 0 : 1; }
    };
    // What rank 0 has heard of a tensor.
    struct Asked {
        uint64_t handed_over = 0, ready = 0;    // ranks, a bit for each
        std::vector<uint32_t> digests, early;   // by rank
        uint64_t number = 0;                    // in the order in which all had handed them over
    };
    struct Chunk {
        uint32_t tensor = 0;
        Call* call = nullptr;
        size_t way = 0;
        uint64_t number = 0;  // of the way's chunks
        uint64_t offset = 0;  // in the slots
    };

    uint8_t* Slot(uint32_t rank, const Chunk& chunk) const { return slots_ + rank * kSlotsBytes + chunk.offset; }
    Range PieceOf(const Call& call, size_t way, uint64_t number, uint32_t rank) const;
    Range PieceOf(const Chunk& chunk, uint32_t rank) const { return PieceOf(*chunk.call, chunk.way, chunk.number, rank); }
    uint64_t PieceBytes(const Pass& pass) const;
    uint64_t Stride(const Call& call, size_t way, uint64_t number) const;
    uint64_t ChunksOf(const Pass& pass, uint64_t bytes) const;
    uint8_t* Place(const Chunk& chunk, uint32_t rank, uint32_t owner) const;
    static uint32_t EarlyOf(const Chunk& chunk, uint32_t rank) { return chunk.call->all_early.empty() ? 0 : chunk.call->all_early[rank]; }
    uint8_t* Early(uint32_t rank, uint32_t early) const { return early_ + (rank * kEarly + early - 1) * kSmallBytes; }
    static bool IsSmall(const Call& call);
    void BringEarly(uint32_t tensor, Call* call);
    bool Gives(const Pass& pass, uint32_t owner) const;
    bool TakesOut(const Pass& pass) const;
    uint64_t Least(std::atomic<uint64_t> Board::*counter) const;  // of the other ranks

    bool CanTell() const;
    void TellAll();
    bool CanHear() const;
    void HearAll();
    void Hear(uint32_t rank, uint64_t telling, uint32_t early);
    void Compare(uint32_t tensor, const Asked& asked);
    bool MayDecide(const Call& call, const Asked& asked) const;
    uint64_t AllRanks() const { return UINT64_MAX >> (64 - room_->ranks); }
    uint64_t NextPlace() const;
    bool CanDecide() const;
    bool CanBringIn() const { return in_ < known_; }
    bool CanSum() const;
    bool CanTakeOut() const;
    void Decide();
    uint64_t Decided() const;
    void Learn();
    bool MayBegin(const Call& call, uint64_t offset) const;
    void CannotBe();
    void BringIn();
    void Sum();
    void TakeOut(std::vector<End>* ended);
    void AddPiece(const Chunk& chunk, const Range& own);
    uint64_t BytesOf(uint64_t chunk) const;
    void WakeOthers();
    void Wake(uint32_t rank);

    const std::shared_ptr<const HostRoom> room_;
    Decisions* decisions_;
    std::vector<Board*> boards_;  // by rank
    uint8_t *slots_, *early_;
    std::vector<float> wide_;

    std::unordered_map<uint32_t, Call> calls_;  // by tensor: those that have not ended
    std::deque<uint64_t> untold_;               // tellings that rank 0 has had no room for
    std::vector<uint32_t> given_, waiting_;     // see TakeGiven; handed over since TakeWaiting
    uint64_t known_ = 0, in_ = 0, sum_ = 0, out_ = 0;  // chunks
    std::array<Chunk, kChunks> chunks_{};
    uint32_t free_early_ = UINT32_MAX;          // a bit for each of kEarly
    bool tells_others_ = false, tells_rank0_ = false, frees_slots_ = false;  // what was written since they were woken
    // Of rank 0:
    std::unordered_map<uint32_t, Asked> asked_;
    std::set<std::tuple<uint32_t, uint64_t, uint32_t>> undecided_;  // priority, Asked::number, tensor
    uint64_t decided_ = 0, numbered_ = 0;
    uint64_t place_ = 0;                       // of the next chunk, in all bytes that slots have ever had
    std::array<uint64_t, kChunks> places_{};   // of those decided
    std::array<uint64_t, kChunks> chosen_{};   // what Decisions::chunks says, which another rank may have changed
    std::array<uint64_t, kMaxHostRanks> heard_{};  // likewise
    std::optional<Fault> fault_;
};

}  // namespace gradlane
