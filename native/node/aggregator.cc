#include "node/aggregator.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace gradlane {

namespace {
constexpr size_t kKeptBytes = 32u << 20;  // of free buffers: what a burst needed is not given back at once
}

Aggregator::Aggregator(uint32_t server, uint32_t world, int32_t local, Order order, uint32_t packet_bytes, Outbox* outbox)
    : server_(server),
      world_(world),
      local_(local),
      order_(order),
      outbox_(outbox),
      words_((world + 63) / 64),
      packets_(packet_bytes, kKeptBytes / packet_bytes),
      wide_(packet_bytes * 2, kKeptBytes / packet_bytes / 2),
      updates_(server, world, local, order, &packets_, outbox) {
    everybody_.resize(world);
    std::iota(everybody_.begin(), everybody_.end(), 0u);
}

void Aggregator::Define(uint32_t tensor, const Spec& spec, std::shared_ptr<const Layout> layout) {
    if (spec.update != RuleKind::kNone) return updates_.Define(tensor, spec, std::move(layout));
    Sum sum;
    sum.spec = spec;
    sum.layout = std::move(layout);
    const bool everybody = spec.from == kAll;
    sum.workers = &WorkersOf(spec);
    const auto workers = static_cast<uint32_t>(sum.workers->size());
    sum.local = local_ >= 0 && (everybody || spec.from == local_);
    sum.remote = (everybody ? workers : 1) - (sum.local ? 1 : 0);
    // whoever alone contributes has the data already
    sum.delivers = local_ >= 0 && (spec.to == kAll ? spec.from != local_ : spec.to == local_);
    const uint32_t receivers = spec.to == kAll ? workers - (everybody ? 0 : 1) : 1;
    sum.returns = receivers > (sum.delivers ? 1u : 0u);
    sum.wide = IsHalf(spec.dtype) && everybody && workers > 2;
    const size_t places = Pieces(sum).size();
    sum.slots.resize(places);
    sum.unsummed = static_cast<uint32_t>(places);
    if (spec.once) {
        sum.iteration = OnlyIteration(spec);
        for (Slot& slot : sum.slots) slot.iteration = sum.iteration;
    }
    sum.seen.resize(places * words_);
    if (order_ == Order::kRank && everybody) sum.in_order.resize(places * world_);
    if (spec.whole) sum.finished.resize(places);
    sums_.insert_or_assign(tensor, std::move(sum));
}

uint64_t Aggregator::NeededBytes(const Spec& spec, const Layout& layout) const {
    if (spec.update != RuleKind::kNone) return updates_.NeededBytes(spec, layout);
    const bool everybody = spec.from == kAll;
    // contributions one by one or their sum, and a sum that has not left; a sum in f32 takes two
    const uint64_t workers = WorkersOf(spec).size();
    const uint64_t parts = order_ == Order::kRank && everybody ? workers : IsHalf(spec.dtype) && everybody && workers > 2 ? 2 : 1;
    return layout.by_server[server_].size() * (parts + 1) * packets_.capacity();
}

int64_t Aggregator::Admit(const Header& header, uint32_t sender, const char** why) const {
    const auto found = sums_.find(header.tensor);
    if (found == sums_.end()) return updates_.Admit(header, sender, why);
    const Sum& sum = found->second;
    if (sum.spec.from != kAll && static_cast<uint32_t>(sum.spec.from) != sender) {
        *why = "a contribution from a worker that has none to make";
        return -1;
    }
    if (sum.spec.rail && std::find(sum.workers->begin(), sum.workers->end(), sender) == sum.workers->end()) {
        *why = kAnotherMeaning;
        return kDisagrees;
    }
    const int64_t place = sum.layout->Find(server_, header.offset, header.length);
    if (sum.spec.once && (place < 0 || header.iteration != sum.slots[place].iteration)) {
        *why = kAnotherMeaning;
        return kDisagrees;
    }
    if (place < 0) {
        *why = "a packet that is not one of its tensor's";
        return -1;
    }
    // A packet alone may be done with an iteration that the tensor is not done with.
    if (header.iteration != sum.slots[place].iteration || (sum.spec.whole && header.iteration != sum.iteration)) {
        *why = "a packet of another iteration";
        return -1;
    }
    if (sum.seen[place * words_ + sender / 64] >> (sender % 64) & 1) {
        *why = "the same packet a second time";
        return -1;
    }
    return place;
}

bool Aggregator::IsComplete(const Sum& sum, const Slot& slot) const {
    return slot.arrived == sum.remote && (!sum.local || sum.local_iteration == static_cast<int64_t>(slot.iteration)) &&
           // a worker here that only listens must have said where to
           (!sum.delivers || sum.into != nullptr);
}

void Aggregator::Arrive(uint32_t tensor, uint32_t place, uint32_t sender, BufferRef payload, uint16_t flags) {
    const auto found = sums_.find(tensor);
    if (found == sums_.end()) return updates_.Arrive(tensor, place, sender, std::move(payload), flags);
    Sum& sum = found->second;
    Slot& slot = sum.slots[place];
    sum.seen[place * words_ + sender / 64] |= uint64_t{1} << (sender % 64);
    if (!sum.in_order.empty()) {
        sum.in_order[place * world_ + sender] = std::move(payload);
    } else {
        Add(sum, place, std::move(payload));
    }
    ++slot.arrived;
    if (IsComplete(sum, slot)) Finish(tensor, sum, place);
}

void Aggregator::Add(Sum& sum, uint32_t place, BufferRef payload) {
    Slot& slot = sum.slots[place];
    const Piece& piece = Pieces(sum)[place];
    const size_t n = piece.length / ElementBytes(sum.spec.dtype);
    if (sum.wide) {
        if (!slot.sum) {
            slot.sum = wide_.Take();
            Widen(sum.spec.dtype, reinterpret_cast<float*>(slot.sum.data()), payload.data(), n);
        } else {
            WidenReduce(sum.spec.dtype, sum.spec.op, reinterpret_cast<float*>(slot.sum.data()), payload.data(), n);
        }
    } else if (!slot.sum) {
        slot.sum = std::move(payload);  // the first to come is where the others are added
    } else {
        Reduce(sum.spec.dtype, sum.spec.op, slot.sum.data(), payload.data(), n);
    }
}

void Aggregator::ArriveLocally(uint32_t tensor, uint32_t iteration, const uint8_t* from, uint8_t* into, uint16_t flags) {
    const auto found = sums_.find(tensor);
    if (found == sums_.end()) return updates_.ArriveLocally(tensor, from, into, flags);
    Sum& sum = found->second;
    sum.local_iteration = iteration;
    sum.from = from;
    sum.into = into;
    if (!Pieces(sum).empty()) work_[QueuePriority(sum.spec)].push_back({tensor, iteration, 0});
}

bool Aggregator::IsWaiting() const {
    return std::any_of(sums_.begin(), sums_.end(), [this](const auto& each) { return IsWaiting(each.first); }) || updates_.IsWaiting();
}

bool Aggregator::IsWaiting(uint32_t tensor) const {
    const auto found = sums_.find(tensor);
    if (found == sums_.end()) return updates_.IsWaiting(tensor);
    const Sum& sum = found->second;
    return sum.finished_slots != 0 || std::any_of(sum.slots.begin(), sum.slots.end(), [](const Slot& slot) { return slot.arrived != 0; });
}

bool Aggregator::Work(uint64_t bytes) {
    while (!work_.empty()) {
        const auto first = work_.begin();
        LocalRun& run = first->second.front();
        const auto found = sums_.find(run.tensor);
        bool over = found == sums_.end();
        while (!over) {
            Sum& sum = found->second;
            const Slot& slot = sum.slots[run.next];
            const uint32_t place = run.next++;
            over = run.next == sum.slots.size();
            // what came later than the hand-over has found it, and finished by itself
            if (slot.iteration == run.iteration && IsComplete(sum, slot)) {
                const uint32_t length = Pieces(sum)[place].length;
                Finish(run.tensor, sum, place);
                if (length >= bytes) {
                    bytes = 0;
                    break;
                }
                bytes -= length;
            }
        }
        if (over) {
            first->second.pop_front();
            if (first->second.empty()) work_.erase(first);
        }
        if (bytes == 0) return !work_.empty() || updates_.has_work();
    }
    return updates_.Work(bytes);
}

BufferRef Aggregator::AddInRankOrder(Sum& sum, uint32_t place) {
    const Piece& piece = Pieces(sum)[place];
    const DType dtype = sum.spec.dtype;
    const size_t n = piece.length / ElementBytes(dtype);
    BufferRef result = sum.wide ? wide_.Take() : packets_.Take();
    for (const uint32_t rank : *sum.workers) {
        BufferRef& held = sum.in_order[place * world_ + rank];
        const bool is_first = rank == sum.workers->front();
        const uint8_t* part = static_cast<int32_t>(rank) == local_ ? sum.from + piece.offset : held.data();
        if (sum.wide) {
            auto* wide = reinterpret_cast<float*>(result.data());
            if (is_first) {
                Widen(dtype, wide, part, n);
            } else {
                WidenReduce(dtype, sum.spec.op, wide, part, n);
            }
        } else if (is_first) {
            std::memcpy(result.data(), part, piece.length);
        } else {
            Reduce(dtype, sum.spec.op, result.data(), part, n);
        }
        held.reset();
    }
    return result;
}

void Aggregator::Finish(uint32_t tensor, Sum& sum, uint32_t place) {
    Slot& slot = sum.slots[place];
    const Piece& piece = Pieces(sum)[place];
    const DType dtype = sum.spec.dtype;
    const size_t n = piece.length / ElementBytes(dtype);
    const uint8_t* from = sum.local ? sum.from + piece.offset : nullptr;
    uint8_t* into = sum.delivers ? sum.into + piece.offset : nullptr;
    BufferRef result;
    bool delivered = into == nullptr;
    if (!sum.in_order.empty()) {
        result = AddInRankOrder(sum, place);
    } else {
        result = std::move(slot.sum);
        if (from != nullptr && !result) {  // nobody else contributes
            if (sum.returns) {
                result = packets_.Take();
                std::memcpy(result.data(), from, piece.length);
            }
            if (into != nullptr && into != from) std::memcpy(into, from, piece.length);
            delivered = true;
        } else if (from != nullptr && sum.wide) {
            WidenReduce(dtype, sum.spec.op, reinterpret_cast<float*>(result.data()), from, n);
        } else if (from != nullptr && into == from) {
            ReduceBoth(dtype, sum.spec.op, result.data(), into, n);
            delivered = true;
        } else if (from != nullptr) {
            Reduce(dtype, sum.spec.op, result.data(), from, n);
        }
    }
    if (sum.wide) {
        BufferRef narrow = packets_.Take();
        Narrow(dtype, narrow.data(), reinterpret_cast<const float*>(result.data()), n);
        result = std::move(narrow);
    }
    if (!delivered) std::memcpy(into, result.data(), piece.length);
    const uint32_t iteration = slot.iteration;
    slot.sum.reset();
    slot.arrived = 0;
    ++slot.iteration;
    std::fill_n(sum.seen.begin() + static_cast<ptrdiff_t>(place * words_), words_, 0);
    if (from != nullptr && into == nullptr) outbox_->Consumed(tensor, 1);
    Emit(tensor, sum, place, iteration, std::move(result));
    if (sum.spec.once && --sum.unsummed == 0) outbox_->Over(tensor);
}

void Aggregator::Emit(uint32_t tensor, Sum& sum, uint32_t place, uint32_t iteration, BufferRef result) {
    if (!sum.spec.whole) {
        if (sum.returns) outbox_->Return(tensor, sum.spec, sum.layout, place, iteration, std::move(result));
        if (sum.delivers) outbox_->Delivered(tensor, 1);
        return;
    }
    sum.finished[place] = std::move(result);
    if (++sum.finished_slots < sum.slots.size()) return;
    sum.finished_slots = 0;
    ++sum.iteration;
    for (uint32_t each = 0; each < sum.slots.size(); ++each) {
        BufferRef finished = std::move(sum.finished[each]);
        if (sum.returns) outbox_->Return(tensor, sum.spec, sum.layout, each, iteration, std::move(finished));
    }
    if (sum.delivers) outbox_->Delivered(tensor, static_cast<uint32_t>(sum.slots.size()));
}

}  // namespace gradlane
