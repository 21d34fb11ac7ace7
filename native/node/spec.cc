#include "node/spec.h"

#include "digest/crc32c.h"

namespace gradlane {

Definition AsDefinition(const Spec& spec) {
    Definition define;
    define.bytes = spec.bytes;
    define.dtype = static_cast<uint8_t>(spec.dtype);
    define.op = static_cast<uint8_t>(spec.op);
    define.whole = spec.whole;
    define.urgent_first = spec.urgent_first;
    define.urgent_sums = spec.urgent_sums;
    define.update = static_cast<uint8_t>(spec.update);
    define.lane = spec.lane;
    define.priority = spec.priority;
    define.from = spec.from;
    define.to = spec.to;
    define.at = spec.at;
    define.staleness = spec.staleness;
    define.group = spec.group;
    return define;
}

Spec AsSpec(const Definition& define) {
    Spec spec;
    spec.bytes = define.bytes;
    spec.dtype = static_cast<DType>(define.dtype);
    spec.op = static_cast<Op>(define.op);
    spec.whole = define.whole != 0;
    spec.urgent_first = define.urgent_first != 0;
    spec.urgent_sums = define.urgent_sums != 0;
    spec.lane = define.lane;
    spec.priority = define.priority;
    spec.from = define.from;
    spec.to = define.to;
    spec.at = define.at;
    spec.update = static_cast<RuleKind>(define.update);
    spec.staleness = define.staleness;
    spec.group = define.group;
    return spec;
}

uint32_t OnlyIteration(const Spec& spec) {
    uint8_t bytes[Definition::kBytes];
    EncodeDefinition(AsDefinition(spec), bytes);
    const uint32_t digest = Crc32c(bytes, sizeof bytes);
    return spec.of_bytes == 0 ? digest : Crc32c(reinterpret_cast<const uint8_t*>(&spec.of_bytes), sizeof spec.of_bytes, digest);
}

bool IsBeside(const Spec& spec) { return spec.at != kDealt && (spec.from == kAll || spec.from == spec.at) && (spec.to == kAll || spec.to == spec.at); }

const char* WhyNot(const Spec& spec) {
    if (spec.bytes % ElementBytes(spec.dtype) != 0) return "a part of an element";
    // with nothing to wait for, its sender could go on and on, and the sums for those who read slowly would pile up
    if ((spec.from != kAll || spec.to != kAll) && !spec.once && !IsBeside(spec)) {
        return "a tensor of one sender or receiver, which can be used once only";
    }
    if (spec.urgent_first && spec.urgent_sums) return "all packets by priority, and sums alone";
    if (spec.update == RuleKind::kNone) return nullptr;
    if (spec.dtype != DType::kF32 || spec.op != Op::kSum) return "only sums of f32 can be updated";
    if (spec.from != kAll || spec.to != kAll || spec.once || spec.whole) return "an update is of all workers, for all, packet by packet";
    if (spec.lane != kUpdateLane || spec.group >= kMaxGroups) return "a lane or a group that updates do not have";
    return nullptr;
}

}  // namespace gradlane
