// Node's messages: calls, waits, and the way from Messages to connections. See messages.h.

#include "node/node.h"

#include <algorithm>
#include <chrono>

namespace gradlane {

namespace {

constexpr uint16_t kMessageLane = 0;
constexpr uint64_t kAttendedBytes = 1 << 20;  // read from a rank under the lock at a time

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

// Of the threads that wait for messages one attends the mailboxes, and the others wait for what it finds.
bool Node::WaitFor(const Transfer& transfer, int64_t timeout_ms) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    std::unique_lock lock(done_mutex_);
    while (!IsEnded(transfer)) {
        if (!mail_ || attended_) {
            const auto is_my_turn = [&] { return IsEnded(transfer) || (mail_ && !attended_); };
            if (!done_.wait_until(lock, end, is_my_turn)) break;
            continue;
        }
        attended_ = true;
        const std::shared_ptr<Mailboxes> mail = mail_;  // its memory stays, even if the node is closed meanwhile
        lock.unlock();
        const bool in_time = Attend(*mail, transfer, end.time_since_epoch().count());
        lock.lock();
        attended_ = false;
        done_.notify_all();
        if (!in_time) break;
    }
    return transfer.over;
}

int32_t Node::IsOver(const Transfer& transfer, bool* over) {
    std::unique_lock lock(done_mutex_);
    // a message that nobody waits for may lie in its mailbox
    if (const std::shared_ptr<Mailboxes> mail = mail_; mail && !IsEnded(transfer) && !attended_ && mail->IsReady()) {
        lock.unlock();
        if (mutex_.try_lock()) {
            now_ns_ = Now();
            bool more = false;
            if (!broken_) Guarded([&] { more = RunMail(kInlineBytes); });
            mutex_.unlock();
            if (more) Wake();
        }
        lock.lock();
    }
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

void Node::Do(const ExchangeCommand& command) {
    const auto& [tensor, priority, parts] = command;
    if (failed_) return;
    const std::string name = "tensor " + std::to_string(tensor);
    const uint32_t world = options_.membership.world;
    std::vector<bool> named(world);
    bool is_usable = messages_ && tensor == next_tensor_ && parts.size() + 1 == world && world == options_.membership.servers;
    for (const ExchangePart& part : parts) {
        is_usable = is_usable && part.rank < world && static_cast<int32_t>(part.rank) != options_.rank && !named[part.rank];
        if (is_usable) named[part.rank] = true;
    }
    if (!is_usable) {
        Fail({Code::kProtocol, options_.rank, -1, name + ": not an exchange that can be made: expected a part for every other worker"});
        return;
    }
    if (left_ns_ != 0) {  // nobody is done with it before it has this worker's part
        Fail({Code::kLeft, left_rank_, left_server_, left_name_ + " has left the job, and " + name + " was handed over"});
        return;
    }
    if (const auto early = early_.find(tensor); early != early_.end()) {
        const Early& first = early->second.front();
        const bool is_push = first.header.type == FrameType::kPush;
        const auto peer = static_cast<int32_t>(first.peer);
        Fail({Code::kMismatch, is_push ? peer : -1, is_push ? -1 : peer,
              (is_push ? "rank " : "server ") + std::to_string(peer) + ": " + Aggregator::kAnotherMeaning});
        return;
    }
    Exchanged exchanged{static_cast<uint32_t>(2 * parts.size()), std::vector<DType>(world)};
    for (const ExchangePart& part : parts) exchanged.into_dtypes[part.rank] = part.into_dtype;
    if (parts.empty()) {
        std::lock_guard guard(done_mutex_);
        open_.erase(tensor);
        done_.notify_all();
    } else {
        exchanges_.emplace(tensor, std::move(exchanged));
    }
    if (IsExchangedByOthers(tensor)) return;
    ++next_tensor_;
    for (const ExchangePart& part : parts) {
        if (failed_) return;
        for (const bool sends : {true, false}) {
            auto transfer = std::make_shared<Transfer>();
            transfer->exchange = tensor;
            if (sends) {
                messages_->Send(std::move(transfer), part.rank, ExchangeTag(tensor, part.from_dtype), priority, part.from, part.from_bytes);
            } else {
                messages_->Receive(std::move(transfer), static_cast<int32_t>(part.rank), ExchangeTag(tensor, part.into_dtype), part.into,
                                   part.into_bytes);
            }
        }
    }
    ResumeParked(tensor);
}

// Whether a message is of an exchange that this worker does not make, or of another dtype there. One that it has yet to come
// to may be made then.
bool Node::IsOfNoExchange(uint32_t rank, const Header& header) const {
    if (header.type != FrameType::kMessage || header.iteration < kExchangeTags) return false;
    const uint32_t behind = (next_tensor_ - 1 - header.iteration) % kExchangeIds;  // 0: the id that was defined last
    if (behind >= kExchangeIds / 2) return false;
    const uint32_t tensor = next_tensor_ - 1 - behind;
    const auto found = exchanges_.find(tensor);
    return found == exchanges_.end() || header.iteration != ExchangeTag(tensor, found->second.into_dtypes[rank]);
}

// Whether messages have come of an exchange with the id of `tensor`, which is about to be defined as something else or with
// other dtypes; the node has failed then.
bool Node::IsExchangedByOthers(uint32_t tensor) {
    if (!messages_ || !messages_->keeps_any()) return false;
    const auto found = exchanges_.find(tensor);
    for (uint8_t dtype = 0; IsValidDType(dtype); ++dtype) {
        const auto is_one = [dtype](DType other) { return static_cast<uint8_t>(other) == dtype; };
        const bool is_expected = found != exchanges_.end() &&
                                 std::any_of(found->second.into_dtypes.begin(), found->second.into_dtypes.end(), is_one);
        if (is_expected || !messages_->Keeps(ExchangeTag(tensor, static_cast<DType>(dtype)))) continue;
        Fail({Code::kMismatch, -1, -1, "tensor " + std::to_string(tensor) + ", which another rank exchanges: " + Aggregator::kAnotherMeaning});
        return true;
    }
    return false;
}

void Node::PostRun(uint32_t rank, uint32_t priority, Run run) {
    Connection* connection = to_server_[rank][kMessageLane];
    if (connection == nullptr) {
        Fail({Code::kDied, static_cast<int32_t>(rank), -1, "rank " + std::to_string(rank) + " is not connected"});
        return;
    }
    if (mail_) return mail_->Queue(rank, priority, std::move(run));
    Queue(*connection, priority, std::move(run));
}

void Node::PostAnswer(uint32_t rank, FrameType type, uint32_t number) {
    Connection* connection = to_worker_[rank][kMessageLane];
    if (connection == nullptr) return;  // it is lost, and the node has failed of it
    if (mail_) return mail_->QueueControl(rank, ControlFrame(type, connection->sender, number, nullptr, 0));
    connection->QueueControl(ControlFrame(type, connection->sender, number, nullptr, 0));
    Touch(*connection);
}

void Node::Ended(Transfer& transfer, int32_t rank) {
    const auto exchanged = transfer.exchange < 0 ? exchanges_.end() : exchanges_.find(static_cast<uint32_t>(transfer.exchange));
    if (transfer.exchange >= 0) {
        if (exchanged == exchanges_.end() || --exchanged->second.left != 0) return;
        exchanges_.erase(exchanged);
    }
    std::lock_guard guard(done_mutex_);
    if (transfer.exchange >= 0) open_.erase(static_cast<uint32_t>(transfer.exchange));
    transfer.over = true;
    transfer.rank = rank;
    done_.notify_all();
    if (mail_) mail_->bell().Rouse();
}

void Node::Mismatch(uint32_t rank, const std::string& text) { Fail({Code::kMismatch, static_cast<int32_t>(rank), -1, text}); }

Connection::Sink Node::OnMessageHeader(Connection& connection, const Header& header) {
    const bool is_answer = header.type == FrameType::kAccept || header.type == FrameType::kTaken;
    if (!messages_ || mail_ || connection.lane != kMessageLane || connection.dialled() != is_answer) {
        return Connection::Sink::Fault(Code::kProtocol, "a message that cannot be here");
    }
    if (is_answer) return Connection::Sink::Take(connection.control_payload());
    if (IsOfNoExchange(connection.peer, header)) return Connection::Sink::Fault(Code::kMismatch, Aggregator::kAnotherMeaning);
    return messages_->OnHeader(connection.peer, header);
}

bool Node::OnMessageFrame(Connection& connection, const Header& header) {
    const char* why = OnMailFrame(connection.peer, header);
    if (why != nullptr) Lose(connection, Code::kProtocol, why);
    return why == nullptr && connection.state != Connection::State::kClosed;
}

// -- through the mailboxes --------------------------------------------------------------------------------

Connection::Sink Node::OnMailHeader(uint32_t rank, const Header& header) {
    switch (header.type) {
        case FrameType::kMessage:
        case FrameType::kPart:
            if (IsOfNoExchange(rank, header)) return Connection::Sink::Fault(Code::kMismatch, Aggregator::kAnotherMeaning);
            return messages_->OnHeader(rank, header);
        case FrameType::kAccept:
        case FrameType::kTaken: return Connection::Sink::Take(nullptr);
        default: return Connection::Sink::Fault(Code::kProtocol, "a frame that is not of a message in its mailbox");
    }
}

const char* Node::OnMailFrame(uint32_t rank, const Header& header) {
    if (failed_) return nullptr;
    switch (header.type) {
        case FrameType::kAccept: return messages_->OnAccept(rank, header.tensor);
        case FrameType::kTaken: return messages_->OnTaken(rank, header.tensor);
        default: messages_->OnFrame(rank, header); return nullptr;
    }
}

void Node::OnMailSent(uint32_t rank, const Header& header) { messages_->OnSent(rank, header); }

void Node::OnMailFault(uint32_t rank, Code code, const char* why) {
    Connection* connection = to_worker_[rank][kMessageLane];
    if (connection == nullptr) connection = to_server_[rank][kMessageLane];
    if (connection != nullptr) return Lose(*connection, code, why);
    Fail({code, static_cast<int32_t>(rank), -1, "rank " + std::to_string(rank) + ": " + why});
}

// Returns whether there is more to do at once.
bool Node::RunMail(uint64_t bytes) { return mail_ && !failed_ && mail_->Pump(bytes); }

// What commands have queued. A thread that attends the mailboxes does not see it before there is more.
bool Node::SendMail(uint64_t bytes) { return mail_ && !failed_ && mail_->Write(bytes); }

// Before the I/O thread sleeps: what another rank waits for wakes it, unless a thread waits for messages. Returns false
// if there is something to do after all.
bool Node::RestMail() {
    if (!mail_ || failed_ || attended_) return true;
    mail_->bell().LeaveUnlessAsleep();
    return !mail_->IsInsisted();
}

// What a rank has said before it was gone came in time, too.
void Node::HearLast() {
    RunMail(kAttendedBytes);  // more than there is in a ring
}

// Reads and writes the mailboxes until `transfer` has ended. Without the lock. Returns false at end_ns.
bool Node::Attend(Mailboxes& mail, const Transfer& transfer, int64_t end_ns) {
    const auto is_ended = [&] {
        std::lock_guard guard(done_mutex_);
        return IsEnded(transfer);
    };
    mail.bell().Look();
    bool ended = false, more = false;
    while (true) {
        if (more || mail.IsReady()) {
            std::lock_guard guard(mutex_);
            now_ns_ = Now();
            more = false;
            if (!broken_) Guarded([&] { more = RunMail(kAttendedBytes); });
        }
        ended = is_ended();
        const int64_t now = Now();
        if (ended || now >= end_ns) break;
        // To look for a while first, and yield, was now much faster and now much slower (bench/notes/overhead.md).
        if (!more) mail.bell().Sleep(end_ns - now, [&] { return mail.IsReady() || is_ended(); });
    }
    mail.bell().Leave();
    if (more || mail.IsInsisted()) Wake();
    return ended;
}

}  // namespace gradlane
