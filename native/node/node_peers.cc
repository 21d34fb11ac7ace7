// How Node meets its peers and how it loses them. All of it under the lock.

#include "node/node.h"

#include <fcntl.h>
#include <sys/random.h>

#include <cerrno>

namespace gradlane {

namespace {

constexpr size_t kMaxStrangers = 64;  // connections that have not been let in

Nonce FreshNonce() {
    Nonce nonce;
    for (size_t have = 0; have < nonce.size();) {
        const ssize_t n = getrandom(nonce.data() + have, nonce.size() - have, 0);
        if (n > 0) have += static_cast<size_t>(n);
    }
    return nonce;
}

}  // namespace

// -- meeting ----------------------------------------------------------------------------------------------

void Node::Do(const DialCommand& command) {
    const auto& [server, address, port] = command;
    const Membership& job = options_.membership;
    for (uint16_t lane = 0; lane < job.lanes && !failed_; ++lane) {
        std::string why;
        Fd socket = Connect(address, port, &why);
        if (!socket) {
            Fail({Code::kSystem, -1, static_cast<int32_t>(server), why});
            return;
        }
        SocketOptions marked = options_.socket;
        marked.dscp = options_.marks[lane].dscp;
        marked.priority = options_.marks[lane].priority;
        Configure(socket, marked);
        auto connection = std::make_unique<Connection>(std::move(socket), true, Connection::State::kConnecting);
        connection->peer = server;
        connection->lane = lane;
        connection->address = address + ":" + std::to_string(port);
        connection->sender = static_cast<uint16_t>(options_.rank);
        Hello hello;
        hello.rank = static_cast<uint32_t>(options_.rank);
        hello.world = job.world;
        hello.server = server;
        hello.servers = job.servers;
        hello.lane = lane;
        hello.lanes = job.lanes;
        hello.dscp = marked.dscp;
        hello.socket_priority = marked.priority;
        hello.job = job.job;
        hello.generation = job.generation;
        hello.fingerprint = job.fingerprint;
        hello.nonce = FreshNonce();
        connection->as_worker = std::make_unique<WorkerGreeting>(&options_.membership, hello);
        Add(std::move(connection), EPOLLIN | EPOLLOUT);
    }
}

void Node::Add(std::unique_ptr<Connection> connection, uint32_t interest) {
    connection->checksum = options_.checksum;
    connection->opened_ns = connection->heard_ns = connection->sent_ns = now_ns_;
    connection->interest = interest;
    epoll_event event{};
    event.events = interest;
    event.data.ptr = connection.get();
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection->socket().get(), &event);
    connections_.push_back(std::move(connection));
}

void Node::Hear(bool callers) {
    hears_ = callers;
    epoll_event event{};
    event.events = callers ? uint32_t{EPOLLIN} : 0u;
    event.data.ptr = &listener_;
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
}

void Node::AcceptAll() {
    while (true) {
        Fd socket = Accept(listener_);
        if (!socket) {
            if (errno != EMFILE && errno != ENFILE) return;
            // out of descriptors: take the caller off the queue and hang up, or epoll would tell of it for ever
            const bool had_reserve = static_cast<bool>(reserve_);
            reserve_ = Fd();
            const bool was_one = static_cast<bool>(Accept(listener_));  // the kernel says so of an empty queue, too
            reserve_ = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
            stats_.refused += was_one;
            if (was_one) continue;
            if (!had_reserve) Hear(false);  // somebody else took that one as well: until the next tick
            return;
        }
        size_t strangers = 0;
        Connection* oldest = nullptr;
        for (const auto& connection : connections_) {
            if (connection->dialled() || connection->state != Connection::State::kGreeting) continue;
            ++strangers;
            // rather one that has said nothing yet than one of ours in the middle of its greeting
            if (oldest == nullptr || (oldest->received_bytes != 0 && connection->received_bytes == 0)) oldest = connection.get();
        }
        if (strangers >= kMaxStrangers) Lose(*oldest, Code::kTimeout, "too many that do not say who they are");
        Configure(socket, options_.socket);
        auto connection = std::make_unique<Connection>(std::move(socket), false, Connection::State::kGreeting);
        connection->address = PeerOf(connection->socket());
        connection->sender = static_cast<uint16_t>(options_.server);
        connection->as_server =
            std::make_unique<ServerGreeting>(&options_.membership, static_cast<uint32_t>(options_.server), FreshNonce());
        Add(std::move(connection), EPOLLIN);
    }
}

bool Node::OnGreeting(Connection& connection, const Header& header) {
    const bool accepted = !connection.dialled();
    Verdict verdict = accepted ? connection.as_server->Take(header, connection.control_payload())
                               : connection.as_worker->Take(header, connection.control_payload());
    if (verdict.kind == Verdict::Kind::kOpen && accepted) {
        const Hello& hello = connection.as_server->hello();
        const Connection* present = to_worker_[hello.rank][hello.lane];
        if (present != nullptr || static_cast<int32_t>(hello.rank) == options_.rank) {
            verdict.kind = Verdict::Kind::kRefused;
            verdict.code = Code::kDuplicate;
            verdict.text = "rank " + std::to_string(hello.rank) + " is here already, from " +
                           (present != nullptr ? PeerOf(present->socket()) : std::string("this process"));
            verdict.send = ReasonFrame(FrameType::kReject, connection.sender, verdict.code, static_cast<int32_t>(hello.rank), verdict.text);
        }
    }
    if (!verdict.send.empty()) {
        connection.QueueControl(verdict.send);
        Touch(connection);
    }
    if (verdict.kind == Verdict::Kind::kGoOn) return true;
    if (verdict.kind == Verdict::Kind::kRefused) {
        WriteTo(connection, kInlineBytes);  // the refusal, if there is one
        const std::string where = connection.address;
        if (connection.state != Connection::State::kClosed) Lose(connection, verdict.code, verdict.text);
        if (accepted && verdict.code == Code::kMismatch) {
            // one of this job, proved, that can never join: the job cannot begin, and everybody shall hear why
            const Hello& hello = connection.as_server->hello();
            const Membership& job = options_.membership;
            if (hello.job == job.job && hello.generation == job.generation && missing_connections() != 0) {
                const auto rank = static_cast<int32_t>(hello.rank & 0xFFFF);
                Fail({Code::kMismatch, rank, -1, "rank " + std::to_string(hello.rank) + " at " + where + ": " + verdict.text});
            }
        }
        return false;
    }
    return Opened(connection);
}

bool Node::Opened(Connection& connection) {
    connection.state = Connection::State::kOpen;
    if (connection.dialled()) {
        to_server_[connection.peer][connection.lane] = &connection;
    } else {
        const Hello& hello = connection.as_server->hello();
        connection.peer = hello.rank;
        connection.lane = hello.lane;
        to_worker_[hello.rank][hello.lane] = &connection;
        SocketOptions marked = options_.socket;
        marked.dscp = hello.dscp;
        marked.priority = hello.socket_priority;
        Configure(connection.socket(), marked);
    }
    if (failed_) Tell(connection, failure());  // it comes to a job that is over already
    if (missing_connections() == 0) {
        std::lock_guard guard(done_mutex_);
        joined_ = true;
        missing_.clear();
        done_.notify_all();
    }
    return true;
}

uint32_t Node::missing_connections() const {
    uint32_t missing = 0;
    const auto count = [&missing](const std::vector<std::vector<Connection*>>& table, int32_t self) {
        for (size_t peer = 0; peer < table.size(); ++peer) {
            if (static_cast<int32_t>(peer) == self) continue;
            for (const Connection* lane : table[peer]) missing += lane == nullptr;
        }
    };
    if (options_.rank >= 0) count(to_server_, options_.server);
    if (options_.server >= 0) count(to_worker_, options_.rank);
    return missing;
}

// -- leaving ----------------------------------------------------------------------------------------------

void Node::OnGoodbye(Connection& connection) {
    if (connection.left) return;
    connection.left = true;
    if (messages_) left_[connection.peer] = true;  // as worker or as server: both end with its process
    if (left_ns_ == 0) {
        left_ns_ = now_ns_;
        left_name_ = NameOf(connection);
        (connection.dialled() ? left_server_ : left_rank_) = static_cast<int32_t>(connection.peer);
    }
    if (options_.rank >= 0) return;
    // it has all of its sums, so that nothing is queued for it: it need not wait until the others are done, too
    connection.said_goodbye = true;
    connection.QueueControl(ControlFrame(FrameType::kGoodbye, connection.sender, 0, nullptr, 0));
    Touch(connection);
    if (++goodbyes_ < size_t{options_.membership.world} * options_.membership.lanes) return;
    std::lock_guard guard(done_mutex_);
    all_left_ = true;
    done_.notify_all();
}

std::string Node::NameOf(const Connection& connection) const {
    return (connection.dialled() ? "server " : "rank ") + std::to_string(connection.peer);
}

void Node::Lose(Connection& connection, Code code, const std::string& why) {
    if (code == Code::kDied) HearLast();
    const bool was_open = connection.state == Connection::State::kOpen;
    Failure failure{code, -1, -1, NameOf(connection) + " at " + connection.address + ": " + why};
    (connection.dialled() ? failure.server : failure.rank) = static_cast<int32_t>(connection.peer);
    const bool is_ours = (was_open || connection.dialled()) && !connection.left && !closing_ && !failed_;
    if (is_ours && was_open && code != Code::kDied && LetGo(connection)) Tell(connection, failure);  // or it would take this for our end
    if (!was_open && !connection.dialled()) ++stats_.refused;  // a stranger: not this job's business
    End(connection);
    if (is_ours) Fail(std::move(failure));
}

void Node::End(Connection& connection) {
    if (connection.state == Connection::State::kOpen) {
        auto& table = connection.dialled() ? to_server_ : to_worker_;
        table[connection.peer][connection.lane] = nullptr;
    }
    stats_.sent_bytes += connection.sent_bytes;
    stats_.received_bytes += connection.received_bytes;
    stats_.sent_packets += connection.sent_packets;
    stats_.received_packets += connection.received_packets;
    connection.sent_bytes = connection.received_bytes = connection.sent_packets = connection.received_packets = 0;
    connection.Drop();
}

// As Connection::LetGo. Returns false where it has ended, for want of memory.
bool Node::LetGo(Connection& connection) noexcept {
    try {
        connection.LetGo();
        return true;
    } catch (const std::exception&) {
        End(connection);
        return false;
    }
}

// Of the owner's memory nothing is written or read from now on, except by calls that will hear that the node has failed.
void Node::LetGoOfAll() noexcept {
    failed_ = true;
    if (mail_) mail_->Close();
    for (const auto& connection : connections_) {
        if (connection->state != Connection::State::kClosed) LetGo(*connection);
    }
    ended_.clear();
    to_start_.clear();
}

// Best effort: whoever does not get it sees the end of the connection. The connection has let go.
void Node::Tell(Connection& connection, const Failure& failure) {
    const int32_t blamed = failure.rank >= 0 ? failure.rank : failure.server >= 0 ? -2 - failure.server : -1;
    connection.QueueControl(ReasonFrame(FrameType::kAbort, connection.sender, failure.code, blamed, failure.text));
    connection.Write(*this, kInlineBytes, now_ns_);
    Watch(connection, connection.has_output());
}

// Whoever waits is told last: it may use its memory for something else then.
void Node::Fail(Failure failure) {
    if (failed_) return;
    LetGoOfAll();
    for (const auto& connection : connections_) {
        if (connection->state == Connection::State::kOpen) Tell(*connection, failure);
    }
    std::lock_guard guard(done_mutex_);
    failure_ = std::move(failure);
    TellWaiting();
}

}  // namespace gradlane
