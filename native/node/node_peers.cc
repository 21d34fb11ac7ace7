// How Node meets its peers and how it loses them. All of it under the lock.

#include "node/node.h"

#include <fcntl.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <unordered_map>

namespace gradlane {

namespace {

constexpr size_t kMaxStrangers = 64;      // connections that have not been let in
constexpr uint32_t kStrangerMs = 5000;  // for which each of them is kept where no member is missing

Nonce FreshNonce() {
    Nonce nonce;
    for (size_t have = 0; have < nonce.size();) {
        const ssize_t n = getrandom(nonce.data() + have, nonce.size() - have, 0);
        if (n > 0) have += static_cast<size_t>(n);
    }
    return nonce;
}

std::string NoGreeting(uint32_t within_ms, uint32_t attempts) {
    const std::string why = "no end of the greeting within " + std::to_string(within_ms) + " ms";
    return attempts < 2 ? why : why + ", in " + std::to_string(attempts) + " attempts: the server takes the call and hangs up";
}

}  // namespace

// -- meeting ----------------------------------------------------------------------------------------------

void Node::Do(const DialCommand& command) {
    const auto& [server, address, port] = command;
    const int64_t by_ns = now_ns_ + int64_t{options_.greeting_ms} * 1'000'000;
    for (uint16_t lane = 0; lane < options_.membership.lanes && !failed_; ++lane) Try({server, lane, {address, port, 0}, by_ns});
}

void Node::Try(Attempt attempt) {
    const Membership& job = options_.membership;
    std::string why;
    if (attempt.target.attempts != 0 && now_ns_ >= attempt.greeted_by_ns) {
        Fail({Code::kTimeout, -1, static_cast<int32_t>(attempt.server),
              NameOfServer(attempt.server) + " at " + attempt.target.host + ":" + std::to_string(attempt.target.port) +
                  ": " + NoGreeting(options_.greeting_ms, attempt.target.attempts)});
        return;
    }
    Fd socket = Connect(attempt.target.host, attempt.target.port, &why);
    if (!socket) {
        Fail({Code::kSystem, -1, static_cast<int32_t>(attempt.server), why});
        return;
    }
    SocketOptions marked = options_.socket;
    marked.dscp = options_.marks[attempt.lane].dscp;
    marked.priority = options_.marks[attempt.lane].priority;
    Configure(socket, marked);
    auto connection = std::make_unique<Connection>(std::move(socket), true, Connection::State::kConnecting);
    connection->peer = attempt.server;
    connection->lane = attempt.lane;
    connection->address = attempt.target.host + ":" + std::to_string(attempt.target.port);
    connection->sender = static_cast<uint16_t>(options_.rank);
    connection->greeted_by_ns = attempt.greeted_by_ns;
    Hello hello;
    hello.rank = static_cast<uint32_t>(options_.rank);
    hello.world = job.world;
    hello.server = attempt.server;
    hello.servers = job.servers;
    hello.lane = attempt.lane;
    hello.lanes = job.lanes;
    hello.dscp = marked.dscp;
    hello.socket_priority = marked.priority;
    hello.job = job.job;
    hello.generation = job.generation;
    hello.fingerprint = job.fingerprint;
    hello.nonce = FreshNonce();
    connection->as_worker = std::make_unique<WorkerGreeting>(&options_.membership, hello);
    connection->target = std::move(attempt.target);
    ++connection->target.attempts;
    Add(std::move(connection), EPOLLIN | EPOLLOUT);
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
        const uint64_t origin = OriginOf(socket);
        if (Connection* leaves = WhoMakesRoom(origin)) Lose(*leaves, Code::kTimeout, "too many that do not say who they are");
        Configure(socket, options_.socket);
        auto connection = std::make_unique<Connection>(std::move(socket), false, Connection::State::kGreeting);
        connection->address = PeerOf(connection->socket());
        connection->origin = origin;
        connection->greeted_by_ns = now_ns_ + int64_t{options_.greeting_ms} * 1'000'000;
        connection->sender = static_cast<uint16_t>(options_.server);
        connection->as_server =
            std::make_unique<ServerGreeting>(&options_.membership, static_cast<uint32_t>(options_.server), FreshNonce());
        Add(std::move(connection), EPOLLIN);
    }
}

// The stranger that goes before one more of `origin` is let in; null: there is room. Of the origin with most strangers, the
// newcomer counted, the oldest goes: an attacker drives out itself before anybody else, and who shares its origin has as
// long as it takes to fill all places again. What strangers have said is no reason: the hello of an honest one may be on
// its way, and an attacker's byte costs nothing.
Connection* Node::WhoMakesRoom(uint64_t origin) {
    size_t strangers = 0;
    std::unordered_map<uint64_t, size_t> of_origin;
    const auto is_stranger = [](const Connection& connection) {
        return !connection.dialled() && connection.state == Connection::State::kGreeting;
    };
    for (const auto& connection : connections_) {
        if (!is_stranger(*connection)) continue;
        ++strangers;
        ++of_origin[connection->origin];
    }
    if (strangers < kMaxStrangers) return nullptr;
    ++of_origin[origin];
    size_t most = 0;
    for (const auto& connection : connections_) {
        if (is_stranger(*connection)) most = std::max(most, of_origin[connection->origin]);
    }
    for (const auto& connection : connections_) {  // the oldest first
        if (is_stranger(*connection) && of_origin[connection->origin] == most) return connection.get();
    }
    return nullptr;
}

// At each tick, of a connection that is not open yet.
void Node::HangUpOnLate(Connection& connection, int64_t now_ns, bool is_joined) {
    int64_t by_ns = connection.greeted_by_ns;
    // nobody is missing: it is no member, or a process too many
    if (is_joined && !connection.dialled()) by_ns = std::min(by_ns, connection.opened_ns + int64_t{kStrangerMs} * 1'000'000);
    if (now_ns < by_ns) return;
    Lose(connection, Code::kTimeout, NoGreeting(options_.greeting_ms, connection.target.attempts));
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
    return connection.dialled() ? NameOfServer(connection.peer) : "rank " + std::to_string(connection.peer);
}

// A server inside of a worker's process goes by that worker's rank, which is its own index.
std::string Node::NameOfServer(uint32_t server) const {
    return (options_.tell_tables ? "server " : "rank ") + std::to_string(server);
}

void Node::Lose(Connection& connection, Code code, const std::string& why) {
    if (code == Code::kDied) HearLast();
    const bool was_open = connection.state == Connection::State::kOpen;
    const bool hung_up = connection.state == Connection::State::kGreeting && code == Code::kDied && connection.target.port != 0;
    Failure failure{code, -1, -1, NameOf(connection) + " at " + connection.address + ": " + why};
    (connection.dialled() ? failure.server : failure.rank) = static_cast<int32_t>(connection.peer);
    const bool is_ours = (was_open || connection.dialled()) && !connection.left && !closing_ && !failed_;
    if (is_ours && was_open && code != Code::kDied && LetGo(connection)) Tell(connection, failure);  // or it would take this for our end
    if (!was_open && !connection.dialled()) ++stats_.refused;  // a stranger: not this job's business
    End(connection);
    if (!is_ours) return;
    if (hung_up) {
        // the peer lives, since it has taken the call: it has no descriptor left, or too many strangers
        attempts_.push_back({connection.peer, connection.lane, std::move(connection.target), connection.greeted_by_ns});
        return;
    }
    Fail(std::move(failure));
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

// A failure of which a member has told: what it says is in its name, since nothing shows that it is so.
Failure Node::Told(const Connection& connection, Reason reason) const {
    const Membership& job = options_.membership;
    const auto speaker = static_cast<int32_t>(connection.peer);
    if (reason.text.empty()) reason = {Code::kAborted, -1, ""};  // it blames whom it likes, without a reason
    const int64_t server = -2 - int64_t{reason.rank};
    Failure failure{reason.code == Code::kNone ? Code::kAborted : reason.code, -1, -1, ""};
    if (reason.rank >= 0 && static_cast<uint32_t>(reason.rank) < job.world) {
        failure.rank = reason.rank;
    } else if (server >= 0 && server < int64_t{job.servers}) {
        failure.server = static_cast<int32_t>(server);
    } else {
        (connection.dialled() ? failure.server : failure.rank) = speaker;
    }
    // a server beside a worker speaks with that worker's name
    const bool is_server = connection.dialled() && options_.tell_tables;
    const std::string name = (is_server ? "server " : "rank ") + std::to_string(speaker);
    const bool of_itself = options_.tell_tables ? (connection.dialled() ? failure.server : failure.rank) == speaker
                                                : failure.rank == speaker || failure.server == speaker;
    if (reason.text.empty()) {
        failure.text = name + " has ended the job and gave no reason";
    } else if (of_itself && reason.text.starts_with(name + " ")) {
        failure.text = std::move(reason.text);
    } else {
        failure.text = name + " says: " + reason.text;
    }
    return failure;
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
    failed_ns_ = Now();
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
