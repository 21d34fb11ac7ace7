#include "schedule/dispatcher.h"

#include <algorithm>

namespace gradlane {

bool Schedule::IsValid() const {
    const auto is_message = [this](uint32_t index) { return index < messages.size(); };
    const auto is_valid = [this](const Message& message) {
        return message.lane < windows.size() &&
               std::ranges::all_of(message.needs, [this](uint32_t tensor) { return tensor < tensors; });
    };
    return std::ranges::all_of(messages, is_valid) && std::ranges::all_of(second_phases, is_message) &&
           (!sequence || std::ranges::all_of(*sequence, is_message));
}

Dispatcher::Dispatcher(Schedule schedule)
    : schedule_(std::move(schedule)), ordered_(schedule_.follow || schedule_.sequence), waiters_(schedule_.tensors) {
    for (uint32_t index = 0; index < schedule_.messages.size(); ++index) {
        for (const uint32_t tensor : schedule_.messages[index].needs) waiters_[tensor].push_back(index);
    }
    Begin();
}

void Dispatcher::Begin() {
    const auto& messages = schedule_.messages;
    needs_.resize(messages.size());
    std::ranges::transform(messages, needs_.begin(), [](const auto& message) { return message.needs.size(); });
    is_ready_.assign(schedule_.tensors, 0);
    is_in_flight_.assign(messages.size(), 0);
    is_reduced_.assign(messages.size(), 0);
    lanes_.resize(schedule_.windows.size());
    for (LaneState& lane : lanes_) {
        lane.queue.clear();
        lane.order.clear();
        lane.next = 0;
        lane.in_flight_bytes = 0;
        lane.in_flight.clear();
    }
    if (schedule_.sequence && !schedule_.follow) {
        std::vector<uint8_t> is_second(messages.size());
        for (const uint32_t index : *schedule_.sequence) {
            lanes_[messages[index].lane].order.push_back({index, is_second[index] != 0});
            is_second[index] = 1;
        }
    }
    arrivals_ = ready_ = 0;
    unfinished_ = unreduced_ = static_cast<uint32_t>(messages.size());
}

void Dispatcher::Ready(uint32_t tensor, Starts* starts) {
    is_ready_[tensor] = 1;
    ++ready_;
    touched_.clear();
    for (const uint32_t message : waiters_[tensor]) {
        if (--needs_[message] > 0) continue;
        touched_.push_back(schedule_.messages[message].lane);
        if (!ordered_) Enqueue(message);
    }
    if (touched_.size() > 1) {
        std::ranges::sort(touched_);
        touched_.erase(std::ranges::unique(touched_).begin(), touched_.end());
    }
    for (const uint32_t lane : touched_) Start(lane, starts);
}

void Dispatcher::Finished(uint32_t message, Starts* starts) {
    const Schedule::Message& details = schedule_.messages[message];
    LaneState& lane = lanes_[details.lane];
    is_in_flight_[message] = 0;
    lane.in_flight_bytes -= details.bytes;
    if (schedule_.windows[details.lane]) lane.in_flight.erase(std::ranges::find(lane.in_flight, message));
    if (is_reduced_[message]) {
        --unfinished_;
        return Start(details.lane, starts);
    }
    --unreduced_;
    if (details.two_phase) {
        is_reduced_[message] = 1;
    } else {
        --unfinished_;
    }
    if (unreduced_ > 0 || schedule_.second_phases.empty()) return Start(details.lane, starts);
    for (const uint32_t second : schedule_.second_phases) {
        if (ordered_) {
            lanes_[schedule_.messages[second].lane].order.push_back({second, true});
        } else {
            Enqueue(second);
        }
    }
    for (uint32_t index = 0; index < lanes_.size(); ++index) Start(index, starts);
}

void Dispatcher::Allow(uint32_t message, Starts* starts) {
    const uint32_t lane = schedule_.messages[message].lane;
    lanes_[lane].order.push_back({message, false});
    Start(lane, starts);
}

std::vector<uint32_t> Dispatcher::Blocking() const {
    std::vector<uint32_t> blocking;
    for (const LaneState& lane : lanes_) {
        // what is at the head after a fact has not started for want of room: the window is not empty
        if (Head(lane)) blocking.push_back(lane.in_flight.front());
    }
    return blocking;
}

Dispatcher::State Dispatcher::Describe() const {
    State state;
    state.unfinished = unfinished_;
    for (uint32_t message = 0; message < is_in_flight_.size(); ++message) {
        if (is_in_flight_[message]) state.in_flight.push_back(message);
    }
    for (uint32_t tensor = 0; tensor < schedule_.tensors; ++tensor) {
        if (!is_ready_[tensor]) state.missing.push_back(tensor);
    }
    return state;
}

void Dispatcher::Enqueue(uint32_t message) {
    const Schedule::Message& details = schedule_.messages[message];
    std::vector<Waiting>& queue = lanes_[details.lane].queue;
    queue.push_back({details.priority, arrivals_++, message});
    std::push_heap(queue.begin(), queue.end());
}

void Dispatcher::Start(uint32_t index, Starts* starts) {
    LaneState& lane = lanes_[index];
    const std::optional<uint64_t>& window = schedule_.windows[index];
    while (const std::optional<uint32_t> message = Head(lane)) {
        const uint64_t bytes = schedule_.messages[*message].bytes;
        if (window && lane.in_flight_bytes > 0 && lane.in_flight_bytes + bytes > *window) return;
        if (ordered_) {
            ++lane.next;
        } else {
            std::pop_heap(lane.queue.begin(), lane.queue.end());
            lane.queue.pop_back();
        }
        is_in_flight_[*message] = 1;
        lane.in_flight_bytes += bytes;
        if (window) lane.in_flight.push_back(*message);
        starts->push_back(*message);
    }
}

std::optional<uint32_t> Dispatcher::Head(const LaneState& lane) const {
    if (!ordered_) return lane.queue.empty() ? std::nullopt : std::optional(lane.queue.front().message);
    if (lane.next == lane.order.size()) return std::nullopt;
    const auto [message, is_second] = lane.order[lane.next];
    const bool is_eligible = is_second ? is_reduced_[message] != 0 : needs_[message] == 0;
    return is_eligible ? std::optional(message) : std::nullopt;
}

}  // namespace gradlane
