// Spec: what all processes of a job know of a tensor, the same on all workers and servers. A Spec
// is a value; any thread may use its own.

#pragma once

#include <cstdint>

#include "node/layout.h"
#include "reduce/reduce.h"
#include "update/rule.h"
#include "wire/frame.h"

namespace gradlane {

inline constexpr uint32_t kUnbounded = UINT32_MAX;  // of Spec::staleness
inline constexpr uint16_t kUpdateLane = 0;          // rules and what they govern travel on one connection, in order
inline constexpr uint32_t kMaxGroups = 1024;

struct Spec {
    uint64_t bytes = 0;
    DType dtype = DType::kF32;
    Op op = Op::kSum;
    int32_t from = kAll;        // kAll: every worker contributes; else this one alone (broadcast, all-gather)
    int32_t to = kAll;          // kAll: every worker gets the result; else this one alone (reduce, reduce-scatter)
    int32_t at = kDealt;        // kDealt: packets are dealt to all servers; else this one has them all
    bool whole = false;         // a server returns what it has of the tensor at once, not packet by packet
    bool urgent_first = false;  // packets are ordered by priority, not by arrival
    bool urgent_sums = false;   // only sums are, and only among themselves
    bool once = false;          // one iteration and no more
    uint32_t priority = 0;
    uint16_t lane = 0;
    RuleKind update = RuleKind::kNone;  // else servers keep the parameters, see Updates
    // Of an update: the number of iterations that a worker may be ahead, or kUnbounded.
    uint32_t staleness = 0;
    uint32_t group = 0;                 // of an update: the group whose rule governs it
    uint64_t of_bytes = 0;  // of the tensor that this is a piece of, if it is one: all pieces say so (OnlyIteration)
    // Every worker means the ranks of this worker's rail (node/hosts.h). No part of what crosses the wire: all ranks
    // find it alike.
    bool rail = false;
    // Each server that gets packets of a push says when it has them all, and only then has the push been sent. No part of
    // the definition: the push itself says so.
    bool acknowledged = false;
    bool operator==(const Spec&) const = default;
};

// The priority by which packets of this tensor queue among others, to be sent or to be summed.
inline uint32_t QueuePriority(const Spec& spec) { return spec.urgent_first ? spec.priority : 0; }

Definition AsDefinition(const Spec& spec);
Spec AsSpec(const Definition& define);

// What stands for the iteration of a tensor that is defined once: a digest of its definition, so
// that processes which mean different things by one id notice it at the first packet.
uint32_t OnlyIteration(const Spec& spec);

// Whether the one sender or receiver has all packets at the server beside it. That server takes no packet of the next
// iteration until it has summed this one, and what it returns to slow readers takes memory of its own process alone.
bool IsBeside(const Spec& spec);

// Returns null, or why no process can use this spec.
const char* WhyNot(const Spec& spec);

enum class Order : uint8_t { kArrival, kRank };  // of additions; rank order gives the same bits whatever the schedule

}  // namespace gradlane
