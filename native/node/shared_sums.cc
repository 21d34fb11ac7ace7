#include "node/shared_sums.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace gradlane {

namespace {

constexpr uint64_t kAlign = 64;  // of shares: a multiple of every element and of a cache line

constexpr size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

uint64_t EntryOf(uint32_t tensor, const Spec& spec) { return uint64_t{tensor} << 32 | OnlyIteration(spec); }

}  // namespace

// -- the segment --------------------------------------------------------------------------------------------

size_t SharedSums::BytesFor(uint32_t ranks) {
    return RoundUp(sizeof(Decisions) + ranks * sizeof(Board), 4096) + ranks * kSlots * kChunkBytes;
}

SharedSums::SharedSums(std::shared_ptr<const HostRoom> room) : room_(std::move(room)), wide_(kBlockBytes / 2) {
    static_assert(std::atomic<uint64_t>::is_always_lock_free, "locks are not shared between processes");
    // A fresh segment has zeros, and every number begins with zero: no rank has to make them first.
    uint8_t* at = room_->segment.data();
    decisions_ = reinterpret_cast<Decisions*>(at);
    at += sizeof(Decisions);
    for (uint32_t rank = 0; rank < room_->ranks; ++rank, at += sizeof(Board)) {
        boards_.push_back(reinterpret_cast<Board*>(at));
    }
    slots_ = room_->segment.data() + RoundUp(static_cast<size_t>(at - room_->segment.data()), 4096);
}

uint8_t* SharedSums::Slot(uint32_t rank, uint64_t chunk) const {
    return slots_ + (rank * kSlots + chunk % kSlots) * kChunkBytes;
}

// What `rank` owns of a chunk.
SharedSums::Range SharedSums::Share(const Spec& spec, uint64_t length, uint32_t rank) const {
    if (spec.from != kAll) return {0, 0};
    if (spec.at != kDealt) return {0, static_cast<int32_t>(rank) == spec.at ? length : 0};
    const uint64_t share = RoundUp((length + room_->ranks - 1) / room_->ranks, kAlign);
    return {std::min(length, rank * share), std::min(length, (rank + 1) * share)};
}

bool SharedSums::Receives(const Spec& spec) const {
    const auto rank = static_cast<int32_t>(room_->rank);
    return spec.to == kAll ? spec.from != rank : spec.to == rank;
}

// -- between ranks ------------------------------------------------------------------------------------------

uint64_t SharedSums::Least(std::atomic<uint64_t> Board::*counter) const {
    uint64_t least = UINT64_MAX;
    for (uint32_t rank = 0; rank < room_->ranks; ++rank) {
        if (rank != room_->rank) least = std::min(least, (boards_[rank]->*counter).load(std::memory_order_acquire));
    }
    return least;
}

void SharedSums::WakeOthers() {
    for (uint32_t rank = 0; rank < room_->ranks; ++rank) {
        if (rank != room_->rank) Wake(rank);
    }
}

// Either this rank sees that the other has gone to rest, or that one sees what was written before (Rest()).
void SharedSums::Wake(uint32_t rank) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::atomic<uint32_t>& asleep = boards_[rank]->asleep;
    if (asleep.load(std::memory_order_relaxed) == 0 || asleep.exchange(0) == 0) return;
    const uint64_t one = 1;
    (void)!write(room_->wakes[rank].get(), &one, sizeof one);
}

bool SharedSums::Rest() {
    if (!IsUnderWay()) return true;  // nobody needs it: others go on without a rank that has done its part
    boards_[room_->rank]->asleep.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return !CanProgress();
}

void SharedSums::Woken() {
    uint64_t count;
    (void)!read(wake_fd(), &count, sizeof count);
}

// -- calls --------------------------------------------------------------------------------------------------

void SharedSums::Start(uint32_t tensor, const Spec& spec, const uint8_t* from, uint8_t* into) {
    calls_.push_back({tensor, spec, from, into, (spec.bytes + kChunkBytes - 1) / kChunkBytes});
}

// The number of the call before which calls can be handed over now, or, by rank 0, be compared.
uint64_t SharedSums::LastToHandOver() const {
    const uint64_t here = first_call_ + calls_.size();
    if (room_->rank == 0) return std::min(here, Least(&Board::handed_over));
    return std::min(here, decisions_->compared.load(std::memory_order_acquire) + kCalls);
}

void SharedSums::HandOver() {
    const uint64_t end = LastToHandOver();
    if (room_->rank == 0) return Compare(end);
    Board& board = *boards_[room_->rank];
    for (; handed_over_ < end; ++handed_over_) {
        const Call& call = CallOf(handed_over_);
        board.calls[handed_over_ % kCalls].store(EntryOf(call.tensor, call.spec), std::memory_order_relaxed);
    }
    board.handed_over.store(handed_over_, std::memory_order_release);
    Wake(0);
}

void SharedSums::Compare(uint64_t end) {
    const uint64_t before = handed_over_;
    for (; handed_over_ < end; ++handed_over_) {
        const Call& call = CallOf(handed_over_);
        const uint64_t own = EntryOf(call.tensor, call.spec);
        for (uint32_t rank = 1; rank < room_->ranks; ++rank) {
            const uint64_t theirs = boards_[rank]->calls[handed_over_ % kCalls].load(std::memory_order_relaxed);
            if (theirs == own) continue;
            const std::string tensor = "tensor " + std::to_string(call.tensor), who = "rank " + std::to_string(rank);
            difference_ = {rank, theirs >> 32 == call.tensor
                                     ? who + " has handed over " + tensor + " with another size, type, operation, root or priority than rank 0"
                                     : who + " has handed over tensor " + std::to_string(theirs >> 32) + " where rank 0 has " + tensor};
            return;
        }
        if (call.chunks != 0) undecided_.insert({QueuePriority(call.spec), handed_over_});
    }
    decisions_->compared.store(handed_over_, std::memory_order_release);
    // a rank whose calls have no room waits for this; every half of the room is soon enough
    if (before / (kCalls / 2) != handed_over_ / (kCalls / 2)) WakeOthers();
}

// An empty one ends when it is handed over: there is no chunk.
void SharedSums::DropEnded() {
    while (!calls_.empty() && first_call_ < handed_over_ && calls_.front().ended == calls_.front().chunks) {
        calls_.pop_front();
        ++first_call_;
    }
}

// -- chunks -------------------------------------------------------------------------------------------------

bool SharedSums::CanDecide() const {
    return !undecided_.empty() && decided_ < std::min(out_, Least(&Board::out)) + kSlots;
}

void SharedSums::Decide() {
    while (CanDecide()) {
        const auto first = undecided_.begin();
        Call& call = CallOf(first->second);
        decisions_->calls[decided_ % kSlots].store(first->second, std::memory_order_relaxed);
        ++decided_;
        if (++call.decided == call.chunks) undecided_.erase(first);
    }
    decisions_->decided.store(decided_, std::memory_order_release);
    WakeOthers();
}

// A chunk is decided when its slots are free on all ranks, so that `in` never waits.
void SharedSums::Learn() {
    const uint64_t decided = decisions_->decided.load(std::memory_order_acquire);
    for (; known_ < decided; ++known_) {
        const uint64_t number = decisions_->calls[known_ % kSlots].load(std::memory_order_relaxed);
        Call& call = CallOf(number);
        const uint64_t offset = call.begun++ * kChunkBytes;
        chunks_[known_ % kSlots] = {number, offset, std::min(kChunkBytes, call.spec.bytes - offset)};
    }
}

void SharedSums::BringIn() {
    const Chunk& chunk = chunks_[in_ % kSlots];
    const Call& call = CallOf(chunk.call);
    if (call.spec.from == kAll || call.spec.from == static_cast<int32_t>(room_->rank)) {
        const Range own = Share(call.spec, chunk.length, room_->rank);
        const uint8_t* from = call.from + chunk.offset;
        uint8_t* slot = Slot(room_->rank, in_);
        std::memcpy(slot, from, own.begin);
        std::memcpy(slot + own.end, from + own.end, chunk.length - own.end);
    }
    boards_[room_->rank]->in.store(++in_, std::memory_order_release);
    WakeOthers();
}

bool SharedSums::CanSum() const {
    if (sum_ == in_) return false;
    const Chunk& chunk = chunks_[sum_ % kSlots];
    const Range own = Share(CallOf(chunk.call).spec, chunk.length, room_->rank);
    return own.begin == own.end || Least(&Board::in) > sum_;
}

void SharedSums::Sum() {
    const Chunk& chunk = chunks_[sum_ % kSlots];
    const Call& call = CallOf(chunk.call);
    AddShare(call, chunk, sum_);
    boards_[room_->rank]->sum.store(++sum_, std::memory_order_release);
    if (call.spec.from == kAll) WakeOthers();
}

void SharedSums::AddShare(const Call& call, const Chunk& chunk, uint64_t number) {
    const Spec& spec = call.spec;
    const Range own = Share(spec, chunk.length, room_->rank);
    const bool is_wide = IsHalf(spec.dtype) && room_->ranks > 2;
    uint8_t* sums = Slot(room_->rank, number);  // where the own share would be, which nobody else needs
    for (uint64_t begin = own.begin; begin < own.end; begin += kBlockBytes) {
        const uint64_t length = std::min(kBlockBytes, own.end - begin);
        const size_t n = length / ElementBytes(spec.dtype);
        for (uint32_t rank = 0; rank < room_->ranks; ++rank) {
            const uint8_t* part = (rank == room_->rank ? call.from + chunk.offset : Slot(rank, number)) + begin;
            if (is_wide && rank == 0) {
                Widen(spec.dtype, wide_.data(), part, n);
            } else if (is_wide) {
                WidenReduce(spec.dtype, spec.op, wide_.data(), part, n);
            } else if (rank == 0) {
                std::memcpy(sums + begin, part, length);
            } else {
                Reduce(spec.dtype, spec.op, sums + begin, part, n);
            }
        }
        if (is_wide) Narrow(spec.dtype, sums + begin, wide_.data(), n);
        if (Receives(spec)) std::memcpy(call.into + chunk.offset + begin, sums + begin, length);
    }
}

bool SharedSums::CanTakeOut() const {
    if (out_ == sum_) return false;
    const Chunk& chunk = chunks_[out_ % kSlots];
    const Spec& spec = CallOf(chunk.call).spec;
    if (!Receives(spec)) return true;
    if (spec.from != kAll) return boards_[static_cast<size_t>(spec.from)]->in.load(std::memory_order_acquire) > out_;
    if (spec.at != kDealt) return boards_[static_cast<size_t>(spec.at)]->sum.load(std::memory_order_acquire) > out_;
    return Least(&Board::sum) > out_;
}

void SharedSums::TakeOut(std::vector<uint32_t>* ended) {
    const Chunk& chunk = chunks_[out_ % kSlots];
    Call& call = CallOf(chunk.call);
    if (Receives(call.spec)) {
        uint8_t* into = call.into + chunk.offset;
        if (call.spec.from != kAll) std::memcpy(into, Slot(static_cast<uint32_t>(call.spec.from), out_), chunk.length);
        for (uint32_t rank = 0; rank < room_->ranks; ++rank) {
            const Range share = Share(call.spec, chunk.length, rank);
            if (rank != room_->rank) std::memcpy(into + share.begin, Slot(rank, out_) + share.begin, share.end - share.begin);
        }
    }
    boards_[room_->rank]->out.store(++out_, std::memory_order_release);
    if (room_->rank != 0) Wake(0);  // to decide the next
    if (++call.ended == call.chunks) ended->push_back(call.tensor);
}

// -- progress -----------------------------------------------------------------------------------------------

bool SharedSums::CanProgress() const {
    if (difference_ || !IsUnderWay()) return false;
    return decisions_->decided.load(std::memory_order_acquire) > known_ || CanBringIn() || CanSum() || CanTakeOut() || CanHandOver() ||
           CanDecide();
}

// What others wait for is done first: a chunk's last steps before the first ones of the next.
bool SharedSums::Progress(uint64_t bytes, std::vector<uint32_t>* ended) {
    while (!difference_ && IsUnderWay()) {
        if (CanHandOver()) HandOver();
        if (difference_) break;
        if (CanDecide()) Decide();
        Learn();
        uint64_t length = 0;
        if (CanTakeOut()) {
            length = chunks_[out_ % kSlots].length;
            TakeOut(ended);
        } else if (CanSum()) {
            length = chunks_[sum_ % kSlots].length;
            Sum();
        } else if (CanBringIn()) {
            length = chunks_[in_ % kSlots].length;
            BringIn();
        } else {
            break;
        }
        DropEnded();
        if (length >= bytes) return CanProgress();
        bytes -= length;
    }
    DropEnded();
    return false;
}

}  // namespace gradlane
