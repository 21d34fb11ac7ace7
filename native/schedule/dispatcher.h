// Dispatcher: facts in, starts out. The rules are those of src/gradlane/schedule/dispatcher.py, which
// is the specification; tests hold the two to the same answers, fact by fact.
//
// A Dispatcher has no clock, no thread and no I/O, and never blocks. Its driver owns it alone.

#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace gradlane {

// The parts of a plan that decide when messages start.
struct Schedule {
    struct Message {
        uint64_t bytes = 0;
        uint32_t priority = 0;  // 0 is the most urgent
        uint32_t lane = 0;
        bool two_phase = false;
        std::vector<uint32_t> needs;  // tensors that must be ready, each once
    };

    uint32_t tensors = 0;
    std::vector<Message> messages;
    std::vector<std::optional<uint64_t>> windows;  // of each lane, in bytes; none: no limit
    // the order of starts within each lane; a message comes once more where its second phase has a place of its own
    std::optional<std::vector<uint32_t>> sequence;
    std::vector<uint32_t> second_phases;  // the others, in the order of their second phases
    bool follow = false;                  // a coordinator tells the order, by Allow

    // Whether every index is in range.
    bool IsValid() const;
};

class Dispatcher {
  public:
    // The messages to start now, in order. Each call below appends to them.
    using Starts = std::vector<uint32_t>;

    // schedule: a valid one.
    explicit Dispatcher(Schedule schedule);

    // A new iteration begins; the one before has finished, or had no gradient ready.
    void Begin();

    // The gradient of `tensor` is ready, for the first time in this iteration.
    void Ready(uint32_t tensor, Starts* starts);

    // A message that is in flight has finished, or the first phase of a two-phase message has.
    void Finished(uint32_t message, Starts* starts);

    // The coordinator put `message` next (Schedule::follow).
    void Allow(uint32_t message, Starts* starts);

    const Schedule& schedule() const { return schedule_; }
    bool done() const { return unfinished_ == 0; }
    bool IsReady(uint32_t tensor) const { return is_ready_[tensor]; }
    bool AnyIsReady() const { return ready_ > 0; }
    // The messages that need `tensor`; the same in every iteration, so that any thread may ask.
    const std::vector<uint32_t>& WaitersOf(uint32_t tensor) const { return waiters_[tensor]; }
    bool IsInFlight(uint32_t message) const { return is_in_flight_[message]; }
    // Of each lane whose next message waits for room in the window, the message in flight that started
    // first.
    std::vector<uint32_t> Blocking() const;
    // Whether `message` is two-phase and its first phase has finished.
    bool IsInSecondPhase(uint32_t message) const { return is_reduced_[message]; }

    // For messages to people: how many messages are unfinished, which are in flight, which tensors are
    // not ready.
    struct State {
        uint32_t unfinished = 0;
        std::vector<uint32_t> in_flight, missing;
    };
    State Describe() const;

  private:
    struct Waiting {
        uint32_t priority, arrival, message;
        // std::push_heap keeps the largest in front: the most urgent, then the first that came.
        bool operator<(const Waiting& other) const {
            return std::pair(priority, arrival) > std::pair(other.priority, other.arrival);
        }
    };

    struct Entry {
        uint32_t message;
        bool is_second;  // its second phase
    };

    struct LaneState {
        std::vector<Waiting> queue;  // a heap, if messages start by priority
        std::vector<Entry> order;    // if they start in an order that is given
        size_t next = 0;              // the place in `order` of the next message
        uint64_t in_flight_bytes = 0;
        std::vector<uint32_t> in_flight;  // in the order of their starts, if the lane has a window
    };

    void Enqueue(uint32_t message);
    void Start(uint32_t lane, Starts* starts);
    std::optional<uint32_t> Head(const LaneState& lane) const;

    const Schedule schedule_;
    const bool ordered_;
    std::vector<std::vector<uint32_t>> waiters_;  // of each tensor: the messages that need it
    std::vector<uint32_t> needs_;                 // of each message: how many tensors are missing
    std::vector<uint8_t> is_ready_, is_in_flight_, is_reduced_;
    std::vector<LaneState> lanes_;
    std::vector<uint32_t> touched_;  // used within Ready: lanes whose messages may start
    uint32_t arrivals_ = 0, ready_ = 0, unfinished_ = 0, unreduced_ = 0;
};

}  // namespace gradlane
