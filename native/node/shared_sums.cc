#include "node/shared_sums.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace gradlane {

namespace {

constexpr uint64_t kAlign = 64;  // of shares: a multiple of every element and of a cache line

constexpr size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// What a rank tells rank 0 of a tensor: that it hands it over, with a digest of what it means by it, or that it is Ready.
constexpr uint64_t kReady = uint64_t{1} << 31;

uint64_t HandsOver(uint32_t tensor, const Spec& spec, size_t ways) {
    return uint64_t{tensor} << 32 | ((OnlyIteration(spec) + ways) & (kReady - 1));
}

}  // namespace

// -- the segment --------------------------------------------------------------------------------------------

size_t SharedSums::BytesFor(uint32_t ranks) {
    return RoundUp(sizeof(Decisions) + ranks * sizeof(Board), 4096) + ranks * (kSlotsBytes + kEarly * kSmallBytes);
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
    early_ = slots_ + room_->ranks * kSlotsBytes;
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

// What `rank` owns of a way's chunk, in the tensor.
Range SharedSums::PieceOf(const Call& call, size_t way, uint64_t number, uint32_t rank) const {
    const Pass& pass = call.ways[way].pass;
    const int32_t owner = OwnerOf(pass);
    if (owner != kDealt && static_cast<int32_t>(rank) != owner) return {};
    const Range share = owner == kDealt ? ShareOf(call.spec.bytes, room_->ranks, rank) : Range{0, call.spec.bytes};
    const uint64_t begin = share.begin + number * PieceBytes(pass);
    return {std::min(share.end, begin), std::min(share.end, begin + PieceBytes(pass))};
}

// From one owner's piece to the next in a slot: no share is larger than that of rank 0.
uint64_t SharedSums::Stride(const Call& call, size_t way, uint64_t number) const {
    const int32_t owner = OwnerOf(call.ways[way].pass);
    const Range piece = PieceOf(call, way, number, owner == kDealt ? 0 : static_cast<uint32_t>(owner));
    return RoundUp(piece.end - piece.begin, kAlign);
}

// Where a slot of `rank` has what `owner` owns of a chunk.
uint8_t* SharedSums::Place(const Chunk& chunk, uint32_t rank, uint32_t owner) const {
    const bool is_dealt = OwnerOf(chunk.call->ways[chunk.way].pass) == kDealt;
    return Slot(rank, chunk) + (is_dealt ? owner * Stride(*chunk.call, chunk.way, chunk.number) : 0);
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
        if (rank != room_->rank && (tells_others_ || (rank == 0 && (tells_rank0_ || frees_slots_)))) Wake(rank);
    }
    tells_others_ = tells_rank0_ = frees_slots_ = false;
}

// Either this rank sees that the other has gone to rest, or that one sees what was written before (Rest()).
void SharedSums::Wake(uint32_t rank) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::atomic<uint32_t>& asleep = boards_[rank]->asleep;
    if (asleep.load(std::memory_order_relaxed) == 0) return;
    if (!tells_others_ && !tells_rank0_ && decisions_->awaits_room.load(std::memory_order_relaxed) == 0) return;
    if (asleep.exchange(0) == 0) return;
    const uint64_t one = 1;
    (void)!write(room_->wakes[rank].get(), &one, sizeof one);
}

bool SharedSums::Rest() {
    if (!IsUnderWay()) return true;  // nobody needs it: others go on without a rank that has done its part
    if (room_->rank == 0) decisions_->awaits_room.store(!undecided_.empty(), std::memory_order_relaxed);
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
    Call call{spec, std::move(ways), {}};
    Pass& pass = call.ways[0].pass;
    if (call.ways.size() == 1 && pass.from == kAll && pass.to == kAll && pass.at == kDealt && spec.bytes <= kSmallBytes) pass.at = 0;
    uint64_t end = 0;
    for (const Way& way : call.ways) call.ends.push_back(end += ChunksOf(way.pass, spec.bytes));
    const uint64_t telling = HandsOver(tensor, spec, call.ways.size());
    if (end != 0 && room_->rank != 0 && IsSmall(call)) BringEarly(tensor, &call);
    // an empty one ends when rank 0 has heard of it
    if (end != 0 || room_->rank == 0) calls_.insert_or_assign(tensor, std::move(call));
    if (end != 0) waiting_.push_back(tensor);
    untold_.push_back(telling);
}

// Whether rank 0 adds up all of it, and may be given the parts before it decides. All ranks wait for the sum, so that none
// brings another part to the same place before it is there.
bool SharedSums::IsSmall(const Call& call) {
    const Way& way = call.ways[0];
    const bool is_rank_0s = way.pass.from == kAll && way.pass.to == kAll && way.pass.at == 0;
    return call.ways.size() == 1 && is_rank_0s && !way.awaits && call.spec.bytes <= kSmallBytes;
}

// Copies this rank's part to where rank 0 finds it without a decision, if there is room.
void SharedSums::BringEarly(uint32_t tensor, Call* call) {
    if (free_early_ == 0) return;
    const auto first = static_cast<uint32_t>(std::countr_zero(free_early_));
    free_early_ ^= 1u << first;
    call->early = first + 1;
    std::memcpy(Early(room_->rank, call->early), call->ways[0].from, call->spec.bytes);
    given_.push_back(tensor);
}

void SharedSums::Ready(uint32_t tensor) { untold_.push_back(uint64_t{tensor} << 32 | kReady); }

bool SharedSums::CanTell() const {
    if (untold_.empty() || room_->rank == 0) return !untold_.empty();
    const uint64_t told = boards_[room_->rank]->told.load(std::memory_order_relaxed);
    return told - decisions_->heard[room_->rank].load(std::memory_order_acquire) < kTold;
}

void SharedSums::TellAll() {
    Board& board = *boards_[room_->rank];
    for (; CanTell(); untold_.pop_front()) {
        if (room_->rank == 0) {
            Hear(0, untold_.front(), 0);
            continue;
        }
        const uint64_t told = board.told.load(std::memory_order_relaxed);
        const auto found = calls_.find(static_cast<uint32_t>(untold_.front() >> 32));
        board.early[told % kTold].store(found == calls_.end() ? 0 : found->second.early, std::memory_order_relaxed);
        board.tellings[told % kTold].store(untold_.front(), std::memory_order_relaxed);
        board.told.store(told + 1, std::memory_order_release);
        tells_rank0_ = true;
    }
}

std::vector<uint32_t> SharedSums::TakeWaiting() {
    std::vector<uint32_t> waiting;
    if (out_ != known_) return waiting;
    for (const uint32_t tensor : waiting_) {
        const auto found = calls_.find(tensor);
        if (found != calls_.end() && found->second.begun == 0) waiting.push_back(tensor);
    }
    waiting_.clear();
    return waiting;
}

// -- rank 0 -------------------------------------------------------------------------------------------------

bool SharedSums::CanHear() const {
    for (uint32_t rank = 1; rank < room_->ranks && room_->rank == 0; ++rank) {
        if (boards_[rank]->told.load(std::memory_order_acquire) != heard_[rank]) return true;
    }
    return false;
}

void SharedSums::HearAll() {
    for (uint32_t rank = 1; rank < room_->ranks; ++rank) {
        const uint64_t told = boards_[rank]->told.load(std::memory_order_acquire), before = heard_[rank];
        if (told - before > kTold) return CannotBe();
        for (uint64_t each = before; each != told && !fault_; ++each) {
            Hear(rank, boards_[rank]->tellings[each % kTold].load(std::memory_order_relaxed),
                 boards_[rank]->early[each % kTold].load(std::memory_order_relaxed));
        }
        heard_[rank] = told;
        decisions_->heard[rank].store(told, std::memory_order_release);
        // a rank that has no room to tell more waits for this; every half of the room is soon enough
        tells_others_ |= before / (kTold / 2) != told / (kTold / 2);
    }
}

void SharedSums::Hear(uint32_t rank, uint64_t telling, uint32_t early) {
    const auto tensor = static_cast<uint32_t>(telling >> 32);
    Asked& asked = asked_[tensor];
    const uint64_t own = uint64_t{1} << rank;
    uint64_t& told = (telling & kReady) != 0 ? asked.ready : asked.handed_over;
    if ((told & own) != 0 || asked_.size() > kAsked || early > kEarly) return CannotBe();
    told |= own;
    asked.digests.resize(room_->ranks);
    asked.early.resize(room_->ranks);
    if ((telling & kReady) == 0) {
        asked.digests[rank] = static_cast<uint32_t>(telling);
        asked.early[rank] = early;
        if (asked.handed_over == AllRanks()) Compare(tensor, asked);
    }
    if (fault_ || asked.handed_over != AllRanks()) return;
    Call& call = calls_.at(tensor);
    if (call.chunks() == 0) {
        calls_.erase(tensor);
        asked_.erase(tensor);
        return;
    }
    if ((telling & kReady) == 0) {
        asked.number = numbered_++;
        if (IsSmall(call)) call.all_early = std::move(asked.early);
    }
    if (MayDecide(call, asked)) undecided_.insert({QueuePriority(call.spec), asked.number, tensor});
}

void SharedSums::Compare(uint32_t tensor, const Asked& asked) {
    for (uint32_t rank = 1; rank < room_->ranks && !fault_; ++rank) {
        if (asked.digests[rank] == asked.digests[0]) continue;
        const auto number = [this](uint32_t of) { return std::to_string(room_->numbers[of]); };
        fault_ = {Code::kMismatch, static_cast<int32_t>(room_->numbers[rank]),
                  "rank " + number(rank) + " has handed over tensor " + std::to_string(tensor) +
                      " with another size, type, operation, root or priority than rank " + number(0)};
    }
}

// Whether a call's next chunk may be decided.
bool SharedSums::MayDecide(const Call& call, const Asked& asked) const {
    return call.decided < call.chunks() && (!call.ways[call.WayOf(call.decided)].awaits || asked.ready == AllRanks());
}

// Of the most urgent chunk, which is not cut in two at the end of the slots.
uint64_t SharedSums::NextPlace() const {
    const Call& call = calls_.at(std::get<2>(*undecided_.begin()));
    const size_t way = call.WayOf(call.decided);
    const uint64_t stride = Stride(call, way, call.decided - (way == 0 ? 0 : call.ends[0]));
    const uint64_t bytes = OwnerOf(call.ways[way].pass) == kDealt ? room_->ranks * stride : stride;
    const uint64_t left = kSlotsBytes - place_ % kSlotsBytes;
    return place_ + bytes + (left < bytes ? left : 0);
}

bool SharedSums::CanDecide() const {
    if (undecided_.empty()) return false;
    const uint64_t out = std::min(out_, Least(&Board::out));
    if (out == decided_) return true;
    return decided_ - out < kChunks && NextPlace() - places_[out % kChunks] <= kSlotsBytes;
}

void SharedSums::Decide() {
    while (CanDecide()) {
        const auto first = undecided_.begin();
        const uint32_t tensor = std::get<2>(*first);
        Call& call = calls_.at(tensor);
        const size_t way = call.WayOf(call.decided);
        const uint64_t end = NextPlace(), stride = Stride(call, way, call.decided - (way == 0 ? 0 : call.ends[0]));
        const uint64_t begin = end - (OwnerOf(call.ways[way].pass) == kDealt ? room_->ranks * stride : stride);
        chosen_[decided_ % kChunks] = uint64_t{tensor} << 32 | begin % kSlotsBytes;
        decisions_->chunks[decided_ % kChunks].store(chosen_[decided_ % kChunks], std::memory_order_relaxed);
        places_[decided_ % kChunks] = begin;
        place_ = end;
        ++decided_;
        ++call.decided;
        if (!MayDecide(call, asked_.at(tensor))) undecided_.erase(first);
        if (call.decided == call.chunks()) asked_.erase(tensor);
    }
    decisions_->decided.store(decided_, std::memory_order_release);
    tells_others_ = true;
}

// -- chunks -------------------------------------------------------------------------------------------------

void SharedSums::CannotBe() {
    fault_ = {Code::kProtocol, -1, "the memory that this host's ranks share says what cannot be: one of them wrote what it must not"};
}

uint64_t SharedSums::Decided() const { return room_->rank == 0 ? decided_ : decisions_->decided.load(std::memory_order_acquire); }

// Whether a call can have one more chunk, with that place in the slots.
bool SharedSums::MayBegin(const Call& call, uint64_t offset) const {
    if (call.begun == call.chunks()) return false;
    const size_t way = call.WayOf(call.begun);
    const uint64_t stride = Stride(call, way, call.begun - (way == 0 ? 0 : call.ends[0]));
    const uint64_t bytes = OwnerOf(call.ways[way].pass) == kDealt ? room_->ranks * stride : stride;
    return offset % kAlign == 0 && offset <= kSlotsBytes && bytes <= kSlotsBytes - offset;
}

// A chunk is decided when its slots are free on all ranks, so that `in` never waits.
void SharedSums::Learn() {
    const uint64_t decided = Decided();
    for (; known_ != decided; ++known_) {
        const uint64_t chunk =
            room_->rank == 0 ? chosen_[known_ % kChunks] : decisions_->chunks[known_ % kChunks].load(std::memory_order_relaxed);
        const auto tensor = static_cast<uint32_t>(chunk >> 32);
        const auto found = calls_.find(tensor);
        if (known_ == out_ + kChunks || found == calls_.end() || !MayBegin(found->second, static_cast<uint32_t>(chunk))) return CannotBe();
        Call& call = found->second;
        const uint64_t begun = call.begun++;
        const size_t way = call.WayOf(begun);
        chunks_[known_ % kChunks] = {tensor, &call, way, begun - (way == 0 ? 0 : call.ends[0]), static_cast<uint32_t>(chunk)};
    }
}

void SharedSums::BringIn() {
    const Chunk& chunk = chunks_[in_ % kChunks];
    const Way& way = chunk.call->ways[chunk.way];
    for (uint32_t owner = 0; owner < room_->ranks; ++owner) {
        const Range piece = PieceOf(chunk, owner);
        if (piece.begin == piece.end || !Gives(way.pass, owner) || chunk.call->early != 0) continue;
        std::memcpy(Place(chunk, room_->rank, owner), way.from + piece.begin, piece.end - piece.begin);
    }
    boards_[room_->rank]->in.store(++in_, std::memory_order_release);
    tells_others_ |= chunk.call->early == 0;
    if (chunk.call->early == 0 && chunk.way == 0 && chunk.number + 1 == chunk.call->ends[0]) given_.push_back(chunk.tensor);
}

bool SharedSums::CanSum() const {
    if (sum_ == in_) return false;
    const Chunk& chunk = chunks_[sum_ % kChunks];
    if (chunk.call->ways[chunk.way].pass.from != kAll) return true;
    const Range own = PieceOf(chunk, room_->rank);
    if (own.begin == own.end) return true;
    for (uint32_t rank = 0; rank < room_->ranks; ++rank) {
        if (rank == room_->rank || EarlyOf(chunk, rank) != 0) continue;
        if (boards_[rank]->in.load(std::memory_order_acquire) <= sum_) return false;
    }
    return true;
}

void SharedSums::Sum() {
    const Chunk& chunk = chunks_[sum_ % kChunks];
    const Pass& pass = chunk.call->ways[chunk.way].pass;
    if (pass.from == kAll) AddPiece(chunk, PieceOf(chunk, room_->rank));
    boards_[room_->rank]->sum.store(++sum_, std::memory_order_release);
    const int32_t owner = OwnerOf(pass);
    tells_others_ |= pass.from == kAll && pass.to != kOwn && (owner == kDealt || owner == static_cast<int32_t>(room_->rank));
}

void SharedSums::AddPiece(const Chunk& chunk, const Range& own) {
    const Spec& spec = chunk.call->spec;
    const Way& way = chunk.call->ways[chunk.way];
    const bool is_wide = IsHalf(spec.dtype) && room_->ranks > 2;
    const bool gets = way.pass.to < 0 || way.pass.to == static_cast<int32_t>(room_->rank);
    uint8_t* sums = Place(chunk, room_->rank, room_->rank);  // where nobody else needs anything
    for (uint64_t at = own.begin; at < own.end; at += kBlockBytes) {
        const uint64_t length = std::min(kBlockBytes, own.end - at), behind = at - own.begin;
        const size_t n = length / ElementBytes(spec.dtype);
        for (uint32_t rank = 0; rank < room_->ranks; ++rank) {
            const uint32_t early = EarlyOf(chunk, rank);
            const uint8_t* part = rank == room_->rank ? way.from + at
                                  : early != 0        ? Early(rank, early) + behind
                                                      : Place(chunk, rank, room_->rank) + behind;
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
    const Chunk& chunk = chunks_[out_ % kChunks];
    const Pass& pass = chunk.call->ways[chunk.way].pass;
    if (!TakesOut(pass)) return true;
    const auto step = pass.from == kAll ? &Board::sum : &Board::in;
    const int32_t owner = OwnerOf(pass);
    return (owner == kDealt ? Least(step) : (boards_[static_cast<size_t>(owner)]->*step).load(std::memory_order_acquire)) > out_;
}

void SharedSums::TakeOut(std::vector<End>* ended) {
    const Chunk& chunk = chunks_[out_ % kChunks];
    Call& call = *chunk.call;
    const Way& way = call.ways[chunk.way];
    for (uint32_t owner = 0; owner < room_->ranks && TakesOut(way.pass); ++owner) {
        const Range piece = PieceOf(chunk, owner);
        if (piece.begin == piece.end || owner == room_->rank) continue;
        std::memcpy(way.into + piece.begin, Place(chunk, owner, owner), piece.end - piece.begin);
    }
    boards_[room_->rank]->out.store(++out_, std::memory_order_release);
    frees_slots_ = true;
    if (++call.ended != call.ends[chunk.way]) return;
    ended->push_back({chunk.tensor, static_cast<uint32_t>(call.ways.size() - 1 - chunk.way)});
    if (call.early != 0) free_early_ |= 1u << (call.early - 1);
    if (call.ended == call.chunks()) calls_.erase(chunk.tensor);
}

uint64_t SharedSums::BytesOf(uint64_t chunk) const { return std::min(kChunkBytes, chunks_[chunk % kChunks].call->spec.bytes); }

// -- progress -----------------------------------------------------------------------------------------------

bool SharedSums::CanProgress() const {
    if (fault_ || !IsUnderWay()) return false;
    return Decided() != known_ || CanBringIn() || CanSum() || CanTakeOut() || CanTell() ||
           CanHear() || CanDecide();
}

// What others wait for is done first: a chunk's last steps before the first ones of the next.
bool SharedSums::Progress(uint64_t bytes, std::vector<End>* ended) {
    uint64_t done = 0, waking = kWakeBytes;
    while (!fault_ && IsUnderWay()) {
        if (CanTell()) TellAll();
        if (CanHear()) HearAll();
        if (fault_) break;
        if (CanDecide()) Decide();
        Learn();
        if (fault_) break;
        if (CanTakeOut()) {
            done += BytesOf(out_);
            TakeOut(ended);
        } else if (CanSum()) {
            done += BytesOf(sum_);
            Sum();
        } else if (CanBringIn()) {
            done += BytesOf(in_);
            BringIn();
        } else {
            break;
        }
        if (done >= bytes) break;
        if (done < waking) continue;
        WakeOthers();
        waking = done + kWakeBytes;
    }
    WakeOthers();
    return done >= bytes && CanProgress();
}

}  // namespace gradlane
