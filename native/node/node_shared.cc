// What Node does with the memory that it shares with the other ranks of its host. All of it under the lock.

#include <sched.h>

#include "node/node.h"

namespace gradlane {

namespace {

constexpr uint64_t kHelpBytes = 256 << 10;  // before the lock is free for others
// How long a thread that waits for a sum looks for what other ranks write before it sleeps: longer than a wake-up takes,
// or ranks that have slept once would make one another sleep each time. The I/O thread does not look: what it would take
// of the processor, the training thread can use.
constexpr int64_t kSpinNs = 200'000;
constexpr int64_t kHelpNs = 100'000'000;  // then it hears signals, and sees what time it is

// Whoever looks while another rank has no core to write with keeps it from one.
bool HasCores(uint32_t ranks) {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 && static_cast<uint32_t>(CPU_COUNT(&cores)) >= ranks;
}

void Relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

void Node::Share(HostRoom room) {
    std::lock_guard guard(mutex_);
    if (failed_ || broken_) return;
    if (room.ranks != options_.membership.world || static_cast<int32_t>(room.rank) != options_.rank || next_tensor_ != 0) {
        Fail({Code::kProtocol, options_.rank, -1, "the memory of a host was to be shared by other ranks than the job has, or too late"});
        return;
    }
    helps_ = HasCores(room.ranks);
    shared_ = std::make_unique<SharedSums>(std::move(room));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &shared_;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, shared_->wake_fd(), &event);
}

bool Node::IsShared(uint32_t tensor) const {
    const auto found = tensors_.find(tensor);
    return found != tensors_.end() && found->second.shared;
}

void Node::StartShared(const StartCommand& command) {
    const auto& [tensor, spec, from, into] = command.define;
    if (failed_) return;
    const std::string name = "tensor " + std::to_string(tensor);
    const auto world = static_cast<int64_t>(options_.membership.world);
    const char* why = WhyNot(spec);
    if (tensor != next_tensor_ || spec.at >= world || spec.from >= world || spec.to >= world) why = "not a definition that can be used";
    if (why != nullptr) {
        Fail({Code::kProtocol, options_.rank, -1, name + ": " + why});
        return;
    }
    if (left_ns_ != 0) {
        Fail({Code::kLeft, left_rank_, left_server_, left_name_ + " has left the job, and " + name + " was handed over"});
        return;
    }
    if (const auto early = early_.find(tensor); early != early_.end() && !early->second.empty()) {
        const auto rank = static_cast<int32_t>(early->second.front().peer);
        Fail({Code::kMismatch, rank, -1, "rank " + std::to_string(rank) + " has sent packets of " + name +
                                             ", which is summed in this host's memory here"});
        return;
    }
    ++next_tensor_;
    Tensor state;
    state.spec = spec;
    state.shared = state.under_way = true;
    state.notify = command.push.notify;
    state.unreceived = spec.bytes == 0 ? 0 : 1;
    shared_->Start(tensor, spec, from, into);
    Settle(tensor, tensors_.insert_or_assign(tensor, std::move(state)).first->second);
}

// Returns whether there is more to do at once.
bool Node::RunShared(uint64_t bytes) {
    if (!shared_ || failed_) return false;
    std::vector<uint32_t> ended;
    const bool more = shared_->Progress(bytes, &ended);
    for (const uint32_t tensor : ended) {
        Tensor& state = tensors_.at(tensor);
        state.unreceived = 0;
        Settle(tensor, state);
    }
    if (const auto& difference = shared_->difference()) {
        Fail({Code::kMismatch, static_cast<int32_t>(difference->rank), -1, difference->text});
    }
    return more;
}

// Before a thread leaves the rest to the I/O thread. Returns false if there is something to do after all.
bool Node::RestShared() { return !shared_ || failed_ || !shared_->IsUnderWay() || shared_->Rest(); }

// A thread that waits for `tensor` does the I/O thread's work meanwhile, which saves two wake-ups.
void Node::HelpShared(uint32_t tensor) {
    const int64_t began = Now();
    bool goes_on = true;
    for (int64_t moved = began, now = began; goes_on && now - moved < kSpinNs && now - began < kHelpNs && !IsDone(tensor); now = Now()) {
        if (is_due_ || !mutex_.try_lock()) {
            Relax();
            continue;
        }
        goes_on = !failed_ && !broken_ && shared_;
        if (goes_on) {
            now_ns_ = now;
            shared_->Stay();
            if (shared_->CanProgress()) {
                Guarded([this] { RunShared(kHelpBytes); });
                moved = now;
            }
        }
        mutex_.unlock();
        Relax();
    }
    std::lock_guard guard(mutex_);
    if (!broken_ && !RestShared()) Wake();
}

}  // namespace gradlane
