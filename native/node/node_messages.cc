// Node's messages: calls, waits, and the way from Messages to connections. See messages.h.

#include "node/node.h"

#include <chrono>

namespace gradlane {

namespace {

constexpr uint16_t kMessageLane = 0;

}  // namespace

std::shared_ptr<Transfer> Node::Send(uint32_t rank, uint32_t tag, uint32_t priority, const void* from, uint64_t bytes) {
    auto transfer = std::make_shared<Transfer>();
    transfer->rank = static_cast<int32_t>(rank);
    Submit(SendCommand{transfer, rank, tag, priority, static_cast<const uint8_t*>(from), bytes});
    return transfer;
}

std::shared_ptr<Transfer> Node::Receive(int32_t from, uint32_t tag, void* into, uint64_t bytes) {
    auto transfer = std::make_shared<Transfer>();
    transfer->rank = from;
    Submit(ReceiveCommand{transfer, from, tag, static_cast<uint8_t*>(into), bytes});
    return transfer;
}

bool Node::WaitFor(const Transfer& transfer, int64_t timeout_ms) {
    std::unique_lock lock(done_mutex_);
    done_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                   [&] { return transfer.over || failure_.code != Code::kNone || over_all_; });
    return transfer.over;
}

int32_t Node::IsOver(const Transfer& transfer, bool* over) {
    std::lock_guard guard(done_mutex_);
    *over = transfer.over;
    return transfer.rank;
}

// -- under the lock ---------------------------------------------------------------------------------------

bool Node::CanExchange(int64_t rank, uint32_t others) {
    if (failed_) return false;
    if (messages_ && rank >= kAnyone && rank < static_cast<int64_t>(others) && rank != options_.rank) return true;
    Fail({Code::kProtocol, options_.rank, -1,
          "no messages between rank " + std::to_string(options_.rank) + " and rank " + std::to_string(rank) +
              ": expected two workers whose processes have the servers of the same numbers"});
    return false;
}

void Node::Do(const SendCommand& command) {
    if (!CanExchange(command.rank, options_.membership.servers)) return;
    messages_->Send(command.transfer, command.rank, command.tag, command.priority, command.from, command.bytes);
}

void Node::Do(const ReceiveCommand& command) {
    if (!CanExchange(command.from, options_.membership.world)) return;
    messages_->Receive(command.transfer, command.from, command.tag, command.into, command.bytes);
}

void Node::PostRun(uint32_t rank, uint32_t priority, Run run) {
    Connection* connection = to_server_[rank][kMessageLane];
    if (connection == nullptr) {
        Fail({Code::kDied, static_cast<int32_t>(rank), -1, "rank " + std::to_string(rank) + " is not connected"});
        return;
    }
    Queue(*connection, priority, std::move(run));
}

void Node::PostAnswer(uint32_t rank, FrameType type, uint32_t number) {
    Connection* connection = to_worker_[rank][kMessageLane];
    if (connection == nullptr) return;  // it is lost, and the node has failed of it
    connection->QueueControl(ControlFrame(type, connection->sender, number, nullptr, 0));
    Touch(*connection);
}

void Node::Ended(Transfer& transfer, int32_t rank) {
    std::lock_guard guard(done_mutex_);
    transfer.over = true;
    transfer.rank = rank;
    done_.notify_all();
}

void Node::Mismatch(uint32_t rank, const std::string& text) { Fail({Code::kMismatch, static_cast<int32_t>(rank), -1, text}); }

Connection::Sink Node::OnMessageHeader(Connection& connection, const Header& header) {
    const bool is_answer = header.type == FrameType::kAccept || header.type == FrameType::kTaken;
    if (!messages_ || connection.lane != kMessageLane || connection.dialled() != is_answer) {
        return Connection::Sink::Fault(Code::kProtocol, "a message that cannot be here");
    }
    if (is_answer) return Connection::Sink::Take(connection.control_payload());
    return messages_->OnHeader(connection.peer, header);
}

bool Node::OnMessageFrame(Connection& connection, const Header& header) {
    const char* why = nullptr;
    switch (header.type) {
        case FrameType::kAccept: why = messages_->OnAccept(connection.peer, header.tensor); break;
        case FrameType::kTaken: why = messages_->OnTaken(connection.peer, header.tensor); break;
        default: messages_->OnFrame(connection.peer, header); break;
    }
    if (why != nullptr) Lose(connection, Code::kProtocol, why);
    return why == nullptr && connection.state != Connection::State::kClosed;
}

}  // namespace gradlane
