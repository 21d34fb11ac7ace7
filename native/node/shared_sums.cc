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

Range SharedSums::ShareOf(uint64_t bytes, uint32_t ranks, uint32_t rank) {
    const uint64_t share = RoundUp((bytes + ranks - 1) / ranks, kAlign);
    return {std::min(bytes, rank * share), std::min(bytes, (rank + 1) * share)};
}

namespace {

// The rank that owns all, or kDealt.
int32_t OwnerOf(const Pass& pass) { return pass.from == kOwn ? kDealt : pass.from == kAll ? pass.at : pass.from; }

}  // namespace

// Of a share, in one chunk.
uint64_t SharedSums::PieceBytes(const Pass& pass) const {
    return OwnerOf(pass) == kDealt ? kChunkBytes / room_->ranks / kAlign * kAlign : kChunkBytes;
}

uint64_t SharedSums::ChunksOf(const Pass& pass, uint64_t bytes) const {
    const Range most = OwnerOf(pass) == kDealt ? ShareOf(bytes, room_->ranks, 0) : Range{0, bytes};
    return (most.end + PieceBytes(pass) - 1) / PieceBytes(pass);
}

// What `rank` owns of a chunk, in the tensor.
Range SharedSums::PieceOf(const Call& call, const Chunk& chunk, uint32_t rank) const {
    const Pass& pass = call.ways[chunk.way].pass;
    const int32_t owner = OwnerOf(pass);
    if (owner != kDealt && static_cast<int32_t>(rank) != owner) return {};
    const Range share = owner == kDealt ? ShareOf(call.spec.bytes, room_->ranks, rank) : Range{0, call.spec.bytes};
    const uint64_t begin = share.begin + chunk.number * PieceBytes(pass);
    return {std::min(share.end, begin), std::min(share.end, begin + PieceBytes(pass))};
}

// Where a slot of `rank` has what `owner` owns of a chunk.
uint8_t* SharedSums::Place(const Pass& pass, uint32_t rank, uint64_t chunk, uint32_t owner) const {
    return Slot(rank, chunk) + (OwnerOf(pass) == kDealt ? owner * PieceBytes(pass) : 0);
}

// Whether this rank brings in what `owner` owns.
bool SharedSums::Gives(const Pass& pass, uint32_t owner) const {
    return pass.from == kAll ? owner != room_->rank : owner == room_->rank;
}

// Whether this rank gets what others own.
bool SharedSums::TakesOut(const Pass& pass) const {
    const auto rank = static_cast<int32_t>(room_->rank);
    return pass.to == kAll ? OwnerOf(pass) != rank : pass.to == rank && OwnerOf(pass) != rank;
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

void SharedSums::Start(uint32_t tensor, const Spec& spec, std::vector<Way> ways) {
    Call call{tensor, spec, std::move(ways), {}};
    uint64_t end = 0;
    for (const Way& way : call.ways) call.ends.push_back(end += ChunksOf(way.pass, spec.bytes));
    calls_.push_back(std::move(call));
}

// The number of the call before which calls can be handed over now, or, by rank 0, be compared.
uint64_t SharedSums::LastToHandOver() const {
    // a call's entry of Board::ready is its own until it has ended here
    const uint64_t here = std::min(first_call_ + calls_.size(), first_call_ + kCalls);
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
        if (call.ready) Publish(handed_over_);
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
            const std::string tensor = "tensor " + std::to_string(call.tensor), first = "rank " + std::to_string(room_->numbers[0]);
            const std::string who = "rank " + std::to_string(room_->numbers[rank]);
            fault_ = {Code::kMismatch, static_cast<int32_t>(room_->numbers[rank]),
                      theirs >> 32 == call.tensor
                          ? who + " has handed over " + tensor + " with another size, type, operation, root or priority than " + first
                          : who + " has handed over tensor " + std::to_string(theirs >> 32) + " where " + first + " has " + tensor};
            return;
        }
        if (call.ready) Publish(handed_over_);
        if (call.chunks() == 0) continue;
        if (MayDecide(handed_over_)) {
            undecided_.insert({QueuePriority(call.spec), handed_over_});
        } else {
            awaiting_.push_back(handed_over_);
        }
    }
    decisions_->compared.store(handed_over_, std::memory_order_release);
    // a rank whose calls have no room waits for this; every half of the room is soon enough
    if (before / (kCalls / 2) != handed_over_ / (kCalls / 2)) WakeOthers();
}

// An empty one ends when it is handed over: there is no chunk.
void SharedSums::DropEnded() {
    while (!calls_.empty() && first_call_ < handed_over_ && calls_.front().ended == calls_.front().chunks()) {
        calls_.pop_front();
        ++first_call_;
    }
}

// -- what awaits other hosts --------------------------------------------------------------------------------

void SharedSums::Ready(uint32_t tensor) {
    const auto found = std::lower_bound(calls_.begin(), calls_.end(), tensor,
                                        [](const Call& call, uint32_t wanted) { return call.tensor < wanted; });
    const uint64_t number = first_call_ + static_cast<uint64_t>(found - calls_.begin());
    found->ready = true;
    if (number < handed_over_) Publish(number);  // else when it is handed over
}

void SharedSums::Publish(uint64_t number) {
    Board& board = *boards_[room_->rank];
    board.ready[number % kCalls].store(number + 1, std::memory_order_relaxed);
    board.readied.fetch_add(1, std::memory_order_release);
    if (room_->rank != 0) Wake(0);
}

uint64_t SharedSums::SumReadied() const {
    uint64_t sum = 0;
    for (const Board* board : boards_) sum += board->readied.load(std::memory_order_acquire);
    return sum;
}

bool SharedSums::IsReady(uint64_t number) const {
    return std::all_of(boards_.begin(), boards_.end(), [&](const Board* board) {
        return board->ready[number % kCalls].load(std::memory_order_acquire) == number + 1;
    });
}

// Whether a call's next chunk may be decided, which is not the first of another way than the chunk before but for the
// first of all.
bool SharedSums::MayDecide(uint64_t number) const {
    const Call& call = CallOf(number);
    const size_t way = call.decided < call.ends[0] ? 0 : 1;
    return !call.ways[way].awaits || IsReady(number);
}

bool SharedSums::CanLook() const { return !awaiting_.empty() && SumReadied() != readied_; }

// Of rank 0: takes up the calls that awaited what has come.
void SharedSums::Look() {
    readied_ = SumReadied();  // before the calls are looked at: what is readied meanwhile is seen next time
    std::erase_if(awaiting_, [this](uint64_t number) {
        if (!IsReady(number)) return false;
        undecided_.insert({QueuePriority(CallOf(number).spec), number});
        return true;
    });
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
        if (++call.decided == call.chunks()) {
            undecided_.erase(first);
        } else if (call.decided == call.ends[0] && !MayDecide(first->second)) {
            awaiting_.push_back(first->second);
            undecided_.erase(first);
        }
    }
    decisions_->decided.store(decided_, std::memory_order_release);
    WakeOthers();
}

// Whether a call may have one more chunk now.
bool SharedSums::IsNext(uint64_t number) const {
    if (number < first_call_ || number >= handed_over_) return false;
    const Call& call = CallOf(number);
    return call.begun < call.chunks() && (!call.ways[call.begun < call.ends[0] ? 0 : 1].awaits || call.ready);
}

// A chunk is decided when its slots are free on all ranks, so that `in` never waits.
void SharedSums::Learn() {
    const uint64_t decided = decisions_->decided.load(std::memory_order_acquire);
    for (; known_ != decided; ++known_) {
        const uint64_t number = decisions_->calls[known_ % kSlots].load(std::memory_order_relaxed);
        if (known_ == out_ + kSlots || !IsNext(number)) {
            fault_ = {Code::kProtocol, -1, "the memory that this host's ranks share says what cannot be: one of them wrote what it must not"};
            return;
        }
        Call& call = CallOf(number);
        const uint64_t begun = call.begun++;
        const size_t way = begun < call.ends[0] ? 0 : 1;
        chunks_[known_ % kSlots] = {number, begun - (way == 0 ? 0 : call.ends[0]), way};
    }
}

void SharedSums::BringIn() {
    const Chunk& chunk = chunks_[in_ % kSlots];
    const Call& call = CallOf(chunk.call);
    const Way& way = call.ways[chunk.way];
    for (uint32_t owner = 0; owner < room_->ranks; ++owner) {
        const Range piece = PieceOf(call, chunk, owner);
        if (piece.begin == piece.end || !Gives(way.pass, owner)) continue;
        std::memcpy(Place(way.pass, room_->rank, in_, owner), way.from + piece.begin, piece.end - piece.begin);
    }
    boards_[room_->rank]->in.store(++in_, std::memory_order_release);
    WakeOthers();
}

bool SharedSums::CanSum() const {
    if (sum_ == in_) return false;
    const Chunk& chunk = chunks_[sum_ % kSlots];
    const Call& call = CallOf(chunk.call);
    if (call.ways[chunk.way].pass.from != kAll) return true;
    const Range own = PieceOf(call, chunk, room_->rank);
    return own.begin == own.end || Least(&Board::in) > sum_;
}

void SharedSums::Sum() {
    const Chunk& chunk = chunks_[sum_ % kSlots];
    const Call& call = CallOf(chunk.call);
    const Way& way = call.ways[chunk.way];
    if (way.pass.from == kAll) AddPiece(call.spec, way, PieceOf(call, chunk, room_->rank), sum_);
    boards_[room_->rank]->sum.store(++sum_, std::memory_order_release);
    if (way.pass.from == kAll && way.pass.to != kOwn) WakeOthers();
}

void SharedSums::AddPiece(const Spec& spec, const Way& way, const Range& own, uint64_t chunk) {
    const bool is_wide = IsHalf(spec.dtype) && room_->ranks > 2;
    const bool gets = way.pass.to < 0 || way.pass.to == static_cast<int32_t>(room_->rank);
    uint8_t* sums = Place(way.pass, room_->rank, chunk, room_->rank);  // where nobody else needs anything
    for (uint64_t at = own.begin; at < own.end; at += kBlockBytes) {
        const uint64_t length = std::min(kBlockBytes, own.end - at), behind = at - own.begin;
        const size_t n = length / ElementBytes(spec.dtype);
        for (uint32_t rank = 0; rank < room_->ranks; ++rank) {
            const uint8_t* part = rank == room_->rank ? way.from + at : Place(way.pass, rank, chunk, room_->rank) + behind;
            if (is_wide && rank == 0) {
                Widen(spec.dtype, wide_.data(), part, n);
            } else if (is_wide) {
                WidenReduce(spec.dtype, spec.op, wide_.data(), part, n);
            } else if (rank == 0) {
                std::memcpy(sums + behind, part, length);
            } else {
                Reduce(spec.dtype, spec.op, sums + behind, part, n);
            }
        }
        if (is_wide) Narrow(spec.dtype, sums + behind, wide_.data(), n);
        if (gets) std::memcpy(way.into + at, sums + behind, length);
    }
}

bool SharedSums::CanTakeOut() const {
    if (out_ == sum_) return false;
    const Chunk& chunk = chunks_[out_ % kSlots];
    const Pass& pass = CallOf(chunk.call).ways[chunk.way].pass;
    if (!TakesOut(pass)) return true;
    const auto step = pass.from == kAll ? &Board::sum : &Board::in;
    const int32_t owner = OwnerOf(pass);
    return (owner == kDealt ? Least(step) : (boards_[static_cast<size_t>(owner)]->*step).load(std::memory_order_acquire)) > out_;
}

void SharedSums::TakeOut(std::vector<End>* ended) {
    const Chunk& chunk = chunks_[out_ % kSlots];
    Call& call = CallOf(chunk.call);
    const Way& way = call.ways[chunk.way];
    for (uint32_t owner = 0; owner < room_->ranks && TakesOut(way.pass); ++owner) {
        const Range piece = PieceOf(call, chunk, owner);
        if (piece.begin == piece.end || owner == room_->rank) continue;
        std::memcpy(way.into + piece.begin, Place(way.pass, owner, out_, owner), piece.end - piece.begin);
    }
    boards_[room_->rank]->out.store(++out_, std::memory_order_release);
    if (room_->rank != 0) Wake(0);  // to decide the next
    if (++call.ended == call.ends[chunk.way]) {
        ended->push_back({call.tensor, static_cast<uint32_t>(call.ways.size() - 1 - chunk.way)});
    }
}

uint64_t SharedSums::BytesOf(uint64_t chunk) const { return std::min(kChunkBytes, CallOf(chunks_[chunk % kSlots].call).spec.bytes); }

// -- progress -----------------------------------------------------------------------------------------------

bool SharedSums::CanProgress() const {
    if (fault_ || !IsUnderWay()) return false;
    return decisions_->decided.load(std::memory_order_acquire) != known_ || CanBringIn() || CanSum() || CanTakeOut() || CanHandOver() ||
           CanLook() || CanDecide();
}

// What others wait for is done first: a chunk's last steps before the first ones of the next.
bool SharedSums::Progress(uint64_t bytes, std::vector<End>* ended) {
    while (!fault_ && IsUnderWay()) {
        if (CanHandOver()) HandOver();
        if (fault_) break;
        if (CanLook()) Look();
        if (CanDecide()) Decide();
        Learn();
        if (fault_) break;
        uint64_t length = 0;
        if (CanTakeOut()) {
            length = BytesOf(out_);
            TakeOut(ended);
        } else if (CanSum()) {
            length = BytesOf(sum_);
            Sum();
        } else if (CanBringIn()) {
            length = BytesOf(in_);
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
