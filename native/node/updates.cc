#include "node/updates.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "reduce/reduce.h"
#include "update/update.h"

namespace gradlane {

namespace {

// With as many digits as tell the number from all others.
std::string Shortest(double number) {
    char text[32];
    for (int digits = 6; digits <= 17; ++digits) {
        std::snprintf(text, sizeof text, "%.*g", digits, number);
        if (std::strtod(text, nullptr) == number) break;
    }
    return text;
}

// Which number of two rules is not the same, for people.
std::string Difference(const Rule& one, uint32_t rank, const Rule& other, uint32_t other_rank) {
    constexpr std::pair<const char*, double Rule::*> kNumbers[] = {
        {"lr", &Rule::lr},       {"weight_decay", &Rule::weight_decay}, {"momentum", &Rule::momentum}, {"dampening", &Rule::dampening},
        {"beta1", &Rule::beta1}, {"beta2", &Rule::beta2},               {"eps", &Rule::epsilon}};
    const std::string on = " on rank " + std::to_string(rank), on_other = " on rank " + std::to_string(other_rank);
    for (const auto& [number, of] : kNumbers) {
        if (one.*of != other.*of) return number + (' ' + Shortest(one.*of)) + on + " and " + Shortest(other.*of) + on_other;
    }
    return "another update rule" + on + " than" + on_other;
}

}  // namespace

void Updates::Define(uint32_t tensor, const Spec& spec, std::shared_ptr<const Layout> layout) {
    Kept kept;
    kept.spec = spec;
    kept.layout = std::move(layout);
    for (const Piece& piece : Pieces(kept)) {
        kept.first.push_back(kept.values);
        kept.values += piece.length / sizeof(float);
    }
    const size_t places = Pieces(kept).size();
    kept.memory.resize(kept.values * (1 + StatesOf(spec.update)));
    kept.slots.resize(places);
    kept.pushes.resize(places * world_);
    kept.iterations.resize(places * world_);
    kept.unanswered.resize(places * words_);
    kept.asked.resize(places * world_);
    if (spec.staleness == 0 && order_ == Order::kRank) kept.in_order.resize(places * world_);
    kept_.insert_or_assign(tensor, std::move(kept));
}

uint64_t Updates::NeededBytes(const Spec& spec, const Layout& layout) const {
    const auto& pieces = layout.by_server[server_];
    uint64_t bytes = 0;
    for (const Piece& piece : pieces) bytes += piece.length;
    // in step: gradients, or their sum, and what answers the last ones; else an answer of its own for each worker
    const uint64_t buffers = spec.staleness != 0 ? world_ : 1 + (order_ == Order::kRank ? world_ : 1);
    return bytes * (1 + StatesOf(spec.update)) + pieces.size() * buffers * packets_.capacity();
}

int64_t Updates::Admit(const Header& header, uint32_t sender, const char** why) const {
    const auto found = kept_.find(header.tensor);
    if (found == kept_.end()) {
        *why = "a tensor that nobody registered";
        return -1;
    }
    const Kept& kept = found->second;
    const int64_t place = kept.layout->Find(server_, header.offset, header.length);
    if (place < 0) {
        *why = "a packet that is not one of its tensor's";
        return -1;
    }
    const auto at = static_cast<size_t>(place);
    if ((kept.unanswered[at * words_ + sender / 64] >> (sender % 64) & 1) != 0) {
        *why = "a packet before the last one was answered";
        return -1;
    }
    const uint64_t pushes = kept.pushes[at * world_ + sender];
    if (header.iteration != static_cast<uint32_t>(pushes)) {
        *why = "a packet of another iteration";
        return -1;
    }
    const Part part = PartOf(header.flags);
    const bool has_gradient = (header.flags & (kFlagQuiet | kFlagPlace)) == 0;
    if (part != Part::kSteps && static_cast<uint32_t>(part) > StatesOf(kept.spec.update)) {
        *why = "a part that its tensor does not have";
        return -1;
    }
    if (part != Part::kParameters && (has_gradient || pushes == 0)) {
        *why = "a part beside a gradient or before the first values";
        return -1;
    }
    const auto rule = rules_.find(Key(kept.spec.group, sender));
    if (pushes != 0 && has_gradient && (rule == rules_.end() || rule->second.kind != kept.spec.update)) {
        *why = "a gradient without a rule of its tensor's kind";
        return -1;
    }
    return place;
}

void Updates::Arrive(uint32_t tensor, uint32_t place, uint32_t sender, BufferRef payload, uint16_t flags) {
    const uint8_t* gradient = payload.data();
    Take(tensor, kept_.at(tensor), place, sender, gradient, std::move(payload), flags);
}

void Updates::ArriveLocally(uint32_t tensor, const uint8_t* from, uint8_t* into, uint16_t flags) {
    Kept& kept = kept_.at(tensor);
    kept.from = from;
    kept.into = into;
    kept.flags = flags;
    if (!kept.slots.empty()) work_[QueuePriority(kept.spec)].push_back({tensor, 0});
}

bool Updates::Work(uint64_t bytes) {
    while (!work_.empty() && bytes != 0) {
        const auto first = work_.begin();
        LocalRun& run = first->second.front();
        const auto found = kept_.find(run.tensor);
        bool over = found == kept_.end();
        while (!over && bytes != 0) {
            Kept& kept = found->second;
            const uint32_t place = run.next++;
            over = run.next == kept.slots.size();
            const Piece& piece = Pieces(kept)[place];
            bytes -= std::min<uint64_t>(bytes, piece.length);
            Take(run.tensor, kept, place, static_cast<uint32_t>(local_), kept.from + piece.offset, {}, kept.flags);
        }
        if (!over) continue;
        first->second.pop_front();
        if (first->second.empty()) work_.erase(first);
    }
    return !work_.empty();
}

bool Updates::IsWaiting() const {
    return std::any_of(kept_.begin(), kept_.end(), [this](const auto& each) { return IsWaiting(each.first); });
}

bool Updates::IsWaiting(uint32_t tensor) const {
    const auto found = kept_.find(tensor);
    if (found == kept_.end()) return false;
    const auto& unanswered = found->second.unanswered;
    return std::any_of(unanswered.begin(), unanswered.end(), [](uint64_t bits) { return bits != 0; });
}

void Updates::Take(uint32_t tensor, Kept& kept, uint32_t place, uint32_t sender, const uint8_t* gradient, BufferRef payload,
                   uint16_t flags) {
    if (broken_) return;
    Slot& slot = kept.slots[place];
    uint64_t* iterations = kept.iterations.data() + place * world_;
    uint64_t& pushes = kept.pushes[place * world_ + sender];
    const bool places = pushes == 0 || (flags & kFlagPlace) != 0, quiet = places || (flags & kFlagQuiet) != 0;
    const bool fetches = !places && PartOf(flags) != Part::kParameters;
    if (places && sender == 0) Place(kept, place, PartOf(flags), gradient);
    if (pushes == 0 || fetches) {
        // nobody's gradient
    } else if (kept.spec.staleness == 0) {
        if (!Gather(kept, place, sender, gradient, std::move(payload), quiet)) return;
    } else if (!quiet) {
        Step(kept, place, RuleOf(kept, sender), gradient);
    }
    payload.reset();
    kept.asked[place * world_ + sender] = PartOf(flags);
    kept.unanswered[place * words_ + sender / 64] |= uint64_t{1} << (sender % 64);
    ++pushes;
    if (!fetches && iterations[sender]++ == slot.least) slot.least = *std::min_element(iterations, iterations + world_);
    if (slot.arrived == world_) StepBySum(kept, place);
    Answer(tensor, kept, place);
}

// Staleness 0: one of an iteration's gradients, or the word that there is none.
bool Updates::Gather(Kept& kept, uint32_t place, uint32_t sender, const uint8_t* gradient, BufferRef payload, bool quiet) {
    Slot& slot = kept.slots[place];
    ++slot.arrived;
    if (!quiet && slot.gradients++ == 0) slot.leader = sender;
    if (!quiet && !(RuleOf(kept, sender) == RuleOf(kept, slot.leader))) {
        broken_ = true;
        outbox_->Disagree(sender, "parameter group " + std::to_string(kept.spec.group) + ": got " +
                                      Difference(RuleOf(kept, slot.leader), slot.leader, RuleOf(kept, sender), sender) +
                                      ", expected the same on all ranks");
        return false;
    }
    if (quiet) return true;
    const uint32_t length = Pieces(kept)[place].length;
    BufferRef& into = kept.in_order.empty() ? slot.sum : kept.in_order[place * world_ + sender];
    if (into) {
        Reduce(DType::kF32, Op::kSum, into.data(), gradient, length / sizeof(float));
    } else if (payload) {
        into = std::move(payload);
    } else {
        into = packets_.Take();
        std::memcpy(into.data(), gradient, length);
    }
    return true;
}

void Updates::StepBySum(Kept& kept, uint32_t place) {
    Slot& slot = kept.slots[place];
    for (uint32_t rank = 0; rank < world_ && !kept.in_order.empty(); ++rank) {
        BufferRef part = std::move(kept.in_order[place * world_ + rank]);
        if (!part) continue;
        if (slot.sum) {
            Reduce(DType::kF32, Op::kSum, slot.sum.data(), part.data(), Pieces(kept)[place].length / sizeof(float));
        } else {
            slot.sum = std::move(part);
        }
    }
    slot.arrived = slot.gradients = 0;
    if (!slot.sum) return;  // nobody had a gradient: as an optimizer passes over parameters without one
    Step(kept, place, RuleOf(kept, slot.leader), slot.sum.data());
    slot.sum.reset();
}

void Updates::Step(Kept& kept, uint32_t place, const Rule& rule, const uint8_t* gradient) {
    const uint32_t states = StatesOf(kept.spec.update);
    Update(rule, ++kept.slots[place].steps, State(kept, place, 0), reinterpret_cast<const float*>(gradient),
           states > 0 ? State(kept, place, 1) : nullptr, states > 1 ? State(kept, place, 2) : nullptr,
           Pieces(kept)[place].length / sizeof(float));
}

void Updates::Place(Kept& kept, uint32_t place, Part part, const uint8_t* values) {
    if (part != Part::kSteps) {
        std::memcpy(State(kept, place, static_cast<uint32_t>(part)), values, Pieces(kept)[place].length);
        return;
    }
    float steps;
    std::memcpy(&steps, values, sizeof steps);
    // no count is beyond this, and nothing but a count is cast
    kept.slots[place].steps = steps >= 0 && steps < 0x1p53f ? static_cast<uint64_t>(steps) : 0;
}

void Updates::Read(Kept& kept, uint32_t place, Part part, uint8_t* into) {
    const uint32_t length = Pieces(kept)[place].length;
    if (part != Part::kSteps) {
        std::memcpy(into, State(kept, place, static_cast<uint32_t>(part)), length);
        return;
    }
    const auto steps = static_cast<float>(kept.slots[place].steps);
    for (size_t at = 0; at < length; at += sizeof steps) std::memcpy(into + at, &steps, sizeof steps);
}

void Updates::Answer(uint32_t tensor, Kept& kept, uint32_t place) {
    const Slot& slot = kept.slots[place];
    const uint64_t* pushes = kept.pushes.data() + place * world_;
    const uint64_t* iterations = kept.iterations.data() + place * world_;
    if (pushes[0] == 0) return;  // rank 0's values are not there yet
    const Piece& piece = Pieces(kept)[place];
    BufferRef copy;  // the same for all that are answered with parameters now
    for (size_t word = 0; word < words_; ++word) {
        uint64_t& bits = kept.unanswered[place * words_ + word];
        for (uint64_t left = bits; left != 0; left &= left - 1) {
            const auto rank = static_cast<uint32_t>(word * 64 + static_cast<size_t>(__builtin_ctzll(left)));
            if (kept.spec.staleness != kUnbounded && iterations[rank] > slot.least + kept.spec.staleness) continue;
            bits &= ~(left & -left);
            const Part part = kept.asked[place * world_ + rank];
            if (static_cast<int32_t>(rank) == local_) {
                Read(kept, place, part, kept.into + piece.offset);
                outbox_->Delivered(tensor, 1);
                continue;
            }
            if (part != Part::kParameters) {
                BufferRef read = packets_.Take();
                Read(kept, place, part, read.data());
                outbox_->ReturnTo(rank, tensor, kept.spec, kept.layout, place, static_cast<uint32_t>(pushes[rank] - 1), std::move(read));
                continue;
            }
            if (!copy) {
                copy = packets_.Take();
                Read(kept, place, part, copy.data());
            }
            outbox_->ReturnTo(rank, tensor, kept.spec, kept.layout, place, static_cast<uint32_t>(pushes[rank] - 1), copy);
        }
    }
}

}  // namespace gradlane
