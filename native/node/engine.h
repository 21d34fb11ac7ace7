// Engine: carries out one plan over a node, from a gradient's readiness to its sum, without the
// owner's threads: what ends on the I/O thread starts the next message there.
//
// It is src/gradlane/schedule/engine.py over this transport: the Dispatcher decides, a message is
// one tensor of the node or several, which are its pieces, it leaves its lane's window when this
// worker's part has been sent, and it has arrived when its sum is in the memory of the plan's
// tensors. The engine notes when what
// happened, and on request what the Dispatcher was told and answered.
//
// Threads: the owner begins iterations on one thread; any thread may ask and wait. Another one may ask what a ready
// gradient completes, between a begin and the end of its sums. The node calls the methods
// that are marked so, under its lock. What both use is atomic, or guarded by a lock of its own.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "reduce/reduce.h"
#include "schedule/dispatcher.h"

namespace gradlane {

// Where the bytes of one message are.
struct MessageMemory {
    struct Range {
        uint8_t* at = nullptr;
        uint64_t bytes = 0;
        std::optional<DType> half{};  // of f32 that travel as f16 or bf16; otherwise the range is copied as it is
    };
    uint8_t* message = nullptr;  // what the node sends and receives
    std::vector<Range> ranges;   // in place of which it stands, copied before and after; empty: it is the memory itself

    void Gather() const;   // from the ranges to the message
    void Scatter() const;  // and back
};

class Engine {
  public:
    enum class Kind : uint8_t { kReady, kSend, kReceive };
    // What happened when: of a tensor (kReady) or a message, in ns of the monotonic clock.
    struct Span {
        Kind kind;
        int64_t iteration;
        uint32_t subject;
        int64_t start_ns, end_ns;
    };
    enum class What : uint8_t { kBegin, kReady, kFinished };
    // What the Dispatcher was told and which messages it then started.
    struct Fact {
        What what;
        uint32_t subject;
        Dispatcher::Starts starts;
    };
    static constexpr size_t kIterations = 64;        // of spans that are kept
    static constexpr size_t kLoggedIterations = 20;  // of facts
    static constexpr int64_t kAll = -1;              // every tensor

    // schedule: a valid one. carried: the tensors of each message, each once. firsts[i]: the node's first tensor of
    // message i; the last entry is one past the end. forwards: whether a server returns packets as they are summed;
    // otherwise it returns a message whole, so that its way back begins when it has been sent.
    Engine(Schedule schedule, std::vector<std::vector<uint32_t>> carried, std::vector<MessageMemory> memory,
           std::vector<uint32_t> firsts, bool forwards, bool keeps_log);

    // -- the owner ---------------------------------------------------------------------------------

    // A new iteration; every message of the one before has arrived. Node::Begin calls it.
    void BeginIteration();
    bool HasArrived(uint32_t tensor) const { return missing_[tensor].load() == 0; }
    bool AllArrived() const { return not_arrived_.load() == 0; }
    // Waits until `tensor` (or kAll) has arrived, for `timeout_ms` at most, or until an interruption
    // after the number of them was `interruptions`. Returns whether it has arrived. Any thread may call it.
    bool Wait(int64_t tensor, uint64_t interruptions, int64_t timeout_ms);
    // Ends a wait: there is something else to look at. Any thread may call it.
    void Interrupt();
    uint64_t interruptions() const { return interruptions_.load(); }
    // For how long so far a message was under way; since the last time that none was, it does not count yet.
    int64_t communicated_ns() const { return communicated_ns_.load(); }
    // `tensor` is ready: the bytes of the messages that now have all they need, 0 if there are none and
    // so nothing to start.
    uint64_t Completes(uint32_t tensor);
    uint32_t tensors() const { return static_cast<uint32_t>(missing_.size()); }

    // -- the node, under its lock --------------------------------------------------------------------

    uint32_t FirstOf(uint32_t message) const { return firsts_[message]; }
    bool IsTwoPhase(uint32_t message) const { return dispatcher_.schedule().messages[message].two_phase; }
    // Whether it has no gradient in this iteration.
    bool IsQuiet(uint32_t message) const { return quiet_[message]; }
    bool IsUnderWay() const { return under_way_ > 0; }

    // Facts. `starts`: messages to start now, for each of which the node calls Starting and then hands
    // it over, or releases it where it is in its second phase.
    void OnBegin(int64_t iteration);
    // Returns false if there is no such tensor, or if it was ready before in this iteration. lacks: it has no gradient, and
    // what carries it goes without.
    bool OnReady(uint32_t tensor, int64_t at_ns, bool lacks, Dispatcher::Starts* starts);
    void OnSent(uint32_t node_tensor, Dispatcher::Starts* starts);
    void OnDone(uint32_t node_tensor, Dispatcher::Starts* starts);
    // `message` is about to be started. Returns whether that is its second phase.
    bool Starting(uint32_t message);

    // Those of the last iteration, or of all that are kept.
    std::vector<Span> Spans(bool last) const;
    std::vector<Fact> Facts() const;
    Dispatcher::State Describe() const { return dispatcher_.Describe(); }

  private:
    static int64_t Now();

    bool IsThere(int64_t tensor) const { return tensor == kAll ? AllArrived() : HasArrived(static_cast<uint32_t>(tensor)); }
    void Note(Kind kind, uint32_t subject, int64_t start_ns, int64_t end_ns);
    void Log(What what, uint32_t subject, const Dispatcher::Starts& starts, size_t from);
    uint32_t MessageOf(uint32_t node_tensor) const;
    void Finished(uint32_t message, Dispatcher::Starts* starts);

    Dispatcher dispatcher_;
    const std::vector<std::vector<uint32_t>> carried_;
    const std::vector<MessageMemory> memory_;
    const std::vector<uint32_t> firsts_;
    const bool forwards_, keeps_log_;
    std::vector<uint32_t> messages_of_;  // of each tensor: how many messages carry it
    std::vector<uint32_t> lacks_;        // of each message: tensors that are not ready, as the owner knows
    std::vector<bool> quiet_;            // of each message

    int64_t iteration_ = -1;
    uint32_t under_way_ = 0;  // messages that the node has
    int64_t under_way_since_ns_ = 0;
    std::vector<int64_t> began_ns_;
    std::vector<uint32_t> unsent_, undone_;  // of each message: pieces
    std::deque<std::vector<Span>> spans_;
    std::deque<std::vector<Fact>> facts_;

    std::vector<std::atomic<uint32_t>> missing_;  // of each tensor: messages that have not arrived
    std::atomic<uint32_t> not_arrived_{0};
    std::atomic<uint64_t> interruptions_{0};
    std::atomic<int64_t> communicated_ns_{0};
    static constexpr int64_t kNothing = -2;
    static constexpr int64_t kSeveral = -3;  // of several threads, each its own: all are woken, and look
    std::atomic<int64_t> awaited_{kNothing};
    std::mutex wait_mutex_;  // taken last
    uint32_t waiting_ = 0;   // threads, under wait_mutex_
    std::condition_variable arrived_;
};

}  // namespace gradlane
