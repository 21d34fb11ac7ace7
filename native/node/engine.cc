#include "node/engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace gradlane {

void MessageMemory::Gather() const {
    uint8_t* into = message;
    for (const Range& range : ranges) {
        if (range.half) {
            const size_t n = range.bytes / sizeof(float);
            Narrow(*range.half, into, reinterpret_cast<const float*>(range.at), n);
            into += n * ElementBytes(*range.half);
        } else {
            std::memcpy(into, range.at, range.bytes);
            into += range.bytes;
        }
    }
}

void MessageMemory::Scatter() const {
    const uint8_t* from = message;
    for (const Range& range : ranges) {
        if (range.half) {
            const size_t n = range.bytes / sizeof(float);
            Widen(*range.half, reinterpret_cast<float*>(range.at), from, n);
            from += n * ElementBytes(*range.half);
        } else {
            std::memcpy(range.at, from, range.bytes);
            from += range.bytes;
        }
    }
}

Engine::Engine(Schedule schedule, std::vector<std::vector<uint32_t>> carried, std::vector<MessageMemory> memory,
               std::vector<uint32_t> firsts, bool forwards, bool keeps_log)
    : dispatcher_(std::move(schedule)),
      carried_(std::move(carried)),
      memory_(std::move(memory)),
      firsts_(std::move(firsts)),
      forwards_(forwards),
      keeps_log_(keeps_log),
      messages_of_(dispatcher_.schedule().tensors, 0),
      lacks_(carried_.size(), 0),
      quiet_(carried_.size(), false),
      began_ns_(carried_.size(), 0),
      unsent_(carried_.size(), 0),
      undone_(carried_.size(), 0),
      missing_(dispatcher_.schedule().tensors) {
    for (uint32_t message = 0; message < carried_.size(); ++message) {
        for (const uint32_t tensor : carried_[message]) ++messages_of_[tensor];
    }
}

int64_t Engine::Now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// -- the owner --------------------------------------------------------------------------------------------

void Engine::BeginIteration() {
    for (size_t tensor = 0; tensor < missing_.size(); ++tensor) missing_[tensor].store(messages_of_[tensor]);
    not_arrived_.store(static_cast<uint32_t>(carried_.size()));
    for (size_t message = 0; message < lacks_.size(); ++message) {
        lacks_[message] = static_cast<uint32_t>(dispatcher_.schedule().messages[message].needs.size());
    }
}

uint64_t Engine::Completes(uint32_t tensor) {
    uint64_t bytes = 0;
    if (tensor >= tensors()) return 0;  // OnReady refuses it
    for (const uint32_t message : dispatcher_.WaitersOf(tensor)) {
        if (--lacks_[message] == 0) bytes += dispatcher_.schedule().messages[message].bytes;
    }
    return bytes;
}

bool Engine::Wait(int64_t tensor, uint64_t interruptions, int64_t timeout_ms) {
    std::unique_lock lock(wait_mutex_);
    awaited_.store(waiting_++ == 0 ? tensor : kSeveral);
    arrived_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                      [&] { return IsThere(tensor) || interruptions_.load() != interruptions; });
    if (--waiting_ == 0) awaited_.store(kNothing);
    return IsThere(tensor);
}

void Engine::Interrupt() {
    std::lock_guard guard(wait_mutex_);
    interruptions_.fetch_add(1);
    arrived_.notify_all();
}

// -- the node ---------------------------------------------------------------------------------------------

void Engine::OnBegin(int64_t iteration) {
    iteration_ = iteration;
    dispatcher_.Begin();
    quiet_.assign(quiet_.size(), false);
    spans_.emplace_back();
    if (spans_.size() > kIterations) spans_.pop_front();
    if (!keeps_log_) return;
    facts_.push_back({Fact{What::kBegin, 0, {}}});
    if (facts_.size() > kLoggedIterations) facts_.pop_front();
}

bool Engine::OnReady(uint32_t tensor, int64_t at_ns, bool lacks, Dispatcher::Starts* starts) {
    if (spans_.empty() || tensor >= tensors() || dispatcher_.IsReady(tensor)) return false;
    if (lacks) {
        for (const uint32_t message : dispatcher_.WaitersOf(tensor)) {
            const auto& carried = carried_[message];
            if (std::find(carried.begin(), carried.end(), tensor) != carried.end()) quiet_[message] = true;
        }
    }
    Note(Kind::kReady, tensor, at_ns, at_ns);
    const size_t from = starts->size();
    dispatcher_.Ready(tensor, starts);
    Log(What::kReady, tensor, *starts, from);
    return true;
}

bool Engine::Starting(uint32_t message) {
    began_ns_[message] = Now();
    if (dispatcher_.IsInSecondPhase(message)) return true;
    if (under_way_++ == 0) under_way_since_ns_ = began_ns_[message];
    unsent_[message] = undone_[message] = firsts_[message + 1] - firsts_[message];
    memory_[message].Gather();
    return false;
}

uint32_t Engine::MessageOf(uint32_t node_tensor) const {
    return static_cast<uint32_t>(std::upper_bound(firsts_.begin(), firsts_.end(), node_tensor) - firsts_.begin()) - 1;
}

void Engine::OnSent(uint32_t node_tensor, Dispatcher::Starts* starts) {
    const uint32_t message = MessageOf(node_tensor);
    if (--unsent_[message] != 0) return;
    const int64_t now = Now();
    Note(Kind::kSend, message, began_ns_[message], now);
    if (!forwards_) began_ns_[message] = now;
    Finished(message, starts);
}

void Engine::OnDone(uint32_t node_tensor, Dispatcher::Starts* starts) {
    const uint32_t message = MessageOf(node_tensor);
    if (--undone_[message] != 0) return;
    memory_[message].Scatter();
    const int64_t now = Now();
    if (--under_way_ == 0) communicated_ns_.fetch_add(now - under_way_since_ns_);
    Note(Kind::kReceive, message, began_ns_[message], now);
    for (const uint32_t tensor : carried_[message]) missing_[tensor].fetch_sub(1);
    not_arrived_.fetch_sub(1);
    const int64_t awaited = awaited_.load();
    if (awaited != kNothing && (awaited == kSeveral || IsThere(awaited))) {
        std::lock_guard guard(wait_mutex_);
        arrived_.notify_all();
    }
    if (IsTwoPhase(message)) Finished(message, starts);
}

void Engine::Finished(uint32_t message, Dispatcher::Starts* starts) {
    const size_t from = starts->size();
    dispatcher_.Finished(message, starts);
    Log(What::kFinished, message, *starts, from);
}

void Engine::Note(Kind kind, uint32_t subject, int64_t start_ns, int64_t end_ns) {
    spans_.back().push_back({kind, iteration_, subject, start_ns, end_ns});
}

void Engine::Log(What what, uint32_t subject, const Dispatcher::Starts& starts, size_t from) {
    if (keeps_log_) facts_.back().push_back({what, subject, {starts.begin() + static_cast<std::ptrdiff_t>(from), starts.end()}});
}

std::vector<Engine::Span> Engine::Spans(bool last) const {
    std::vector<Span> spans;
    for (size_t i = last && !spans_.empty() ? spans_.size() - 1 : 0; i < spans_.size(); ++i) {
        spans.insert(spans.end(), spans_[i].begin(), spans_[i].end());
    }
    return spans;
}

std::vector<Engine::Fact> Engine::Facts() const {
    std::vector<Fact> facts;
    for (const auto& each : facts_) facts.insert(facts.end(), each.begin(), each.end());
    return facts;
}

}  // namespace gradlane
