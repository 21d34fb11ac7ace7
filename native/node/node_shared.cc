// What Node does with the memory that it shares with the other ranks of its host. All of it under the lock.

#include "node/node.h"

namespace gradlane {

void Node::Share(HostRoom room) {
    std::lock_guard guard(mutex_);
    if (failed_ || broken_) return;
    if (room.ranks != options_.membership.world || static_cast<int32_t>(room.rank) != options_.rank || next_tensor_ != 0) {
        Fail({Code::kProtocol, options_.rank, -1, "the memory of a host was to be shared by other ranks than the job has, or too late"});
        return;
    }
    const size_t offset = SharedSums::BytesFor(room.ranks);
    const auto memory = std::make_shared<const HostRoom>(std::move(room));
    shared_ = std::make_unique<SharedSums>(memory);
    if (messages_) {
        std::lock_guard done(done_mutex_);
        mail_ = std::make_shared<Mailboxes>(memory, offset, static_cast<Mailboxes::Owner*>(this));
    }
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &shared_;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, shared_->wake_fd(), &event);
    Wake();  // others may have sent already
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

}  // namespace gradlane
