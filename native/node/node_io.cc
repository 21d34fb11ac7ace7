// Node's I/O thread: sleeping, reading and writing sockets, and the clock. Under the lock while it is awake.

#include "node/node.h"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace gradlane {

namespace {

constexpr size_t kReadBudget = 128 << 10;   // of one connection before the next has its turn
constexpr uint64_t kWorkBytes = 256 << 10;  // of local sums between two looks at the sockets

// How far a connection may be ahead of others that have packets to send. The default packet between hosts; with
// twice as much, four hosts lost again what turns had won (bench/notes/overhead.md).
constexpr uint64_t kLeadBytes = 128 << 10;
// A connection that has sent nothing for so long holds up nobody: its peer may wait for what others would send.
constexpr int64_t kPatienceNs = 50'000'000;
// Once a peer has left in order, what is still under way gets so long to end while all others are heard. A stall may take
// much longer, and is another question: whether a silent one comes back.
constexpr int64_t kLeftNs = 2'500'000'000;
// After a failure a node that closes reads for so long what its peers had under way. The kernel answers what nobody has read
// with a reset, and that would throw away the reason of the failure in a peer that has not read it yet.
constexpr int64_t kReadOnNs = 500'000'000;

}  // namespace

// -- sockets ----------------------------------------------------------------------------------------------

void Node::Touch(Connection& connection) {
    if (connection.touched || connection.state == Connection::State::kClosed) return;
    connection.touched = true;
    touched_.push_back(&connection);
}

// Returns whether there is more to send at once.
bool Node::FlushTouched(size_t budget) {
    PassTurns();
    // writing may touch others (a sum that ends), which then are in the list too
    for (size_t i = 0; i < touched_.size(); ++i) {
        if (touched_[i]->touched) WriteTo(*touched_[i], budget);
    }
    touched_.clear();
    const bool started = RunEngine();
    return PassTurns() || started;
}

void Node::Watch(Connection& connection, bool output) {
    if (connection.state == Connection::State::kClosed) return;
    const uint32_t interest = (connection.parked() ? 0u : uint32_t{EPOLLIN}) | (output ? uint32_t{EPOLLOUT} : 0u);
    if (interest == connection.interest) return;
    connection.interest = interest;
    epoll_event event{};
    event.events = interest;
    event.data.ptr = &connection;
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.socket().get(), &event);
}

void Node::WriteTo(Connection& connection, size_t budget) {
    if (connection.state == Connection::State::kClosed || connection.state == Connection::State::kConnecting) return;
    if (IsStuck(connection)) connection.Forgo(turn_);  // it went on without turns, and so did the others
    switch (connection.Write(*this, budget, now_ns_)) {
        case Connection::Io::kDone: Watch(connection, false); break;
        case Connection::Io::kBlocked:
        case Connection::Io::kMore: Watch(connection, true); break;
        default: {
            const Code code = connection.code();
            const std::string why = connection.why();
            // it may have said why before it closed
            if (connection.state == Connection::State::kOpen && !connection.parked()) ReadFrom(connection);
            if (connection.state != Connection::State::kClosed) Lose(connection, code, why);
            break;
        }
    }
}

void Node::ReadFrom(Connection& connection) {
    switch (connection.Read(*this, kReadBudget, now_ns_)) {
        case Connection::Io::kDone:
        case Connection::Io::kMore: break;
        case Connection::Io::kParked: Watch(connection, (connection.interest & EPOLLOUT) != 0); break;
        case Connection::Io::kEnd:
            if (connection.state != Connection::State::kClosed) Lose(connection, Code::kDied, "its process ended (the connection was closed)");
            break;
        default:
            if (connection.state != Connection::State::kClosed) Lose(connection, connection.code(), connection.why());
            break;
    }
}

void Node::ResumeParked(uint32_t tensor) {
    for (const auto& connection : connections_) {
        if (!connection->parked() || connection->parked_for != tensor || connection->state != Connection::State::kOpen) continue;
        connection->Resume();
        connection->heard_ns = now_ns_;
        Watch(*connection, (connection->interest & EPOLLOUT) != 0);
        resumed_.push_back(connection.get());
    }
}

// By the I/O thread alone: it may be a lot, and a calling thread has its own work to do.
void Node::ReadResumed() {
    for (size_t i = 0; i < resumed_.size(); ++i) {
        if (resumed_[i]->state != Connection::State::kClosed && !resumed_[i]->parked()) ReadFrom(*resumed_[i]);
    }
    resumed_.clear();
}

void Node::OnEvent(Connection& connection, uint32_t events) {
    if (connection.state == Connection::State::kClosed) return;
    if (connection.state == Connection::State::kConnecting) {
        if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) == 0) return;
        if (const int error = ErrorOf(connection.socket()); error != 0) {
            Lose(connection, Code::kDied, std::string("cannot be reached: ") + std::strerror(error));
            return;
        }
        connection.state = Connection::State::kGreeting;
        connection.QueueControl(connection.as_worker->Begin());
    }
    if ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) {
        if (!connection.parked()) {
            ReadFrom(connection);
        } else if ((events & (EPOLLERR | EPOLLHUP)) != 0) {
            Lose(connection, Code::kDied, "its process ended (the connection was reset)");
        }
    }
    if (connection.state != Connection::State::kClosed && (events & EPOLLOUT) != 0) WriteTo(connection, kWriteBudget);
}

// -- turns ------------------------------------------------------------------------------------------------

// A tensor that is dealt evenly over the servers is done when the slowest connection has carried its part. TCP alone
// shares a link unevenly, above all after a loss: some connections end early, and while the others catch up, a part of
// the link is not used. So connections with packets to send take turns: none is more than kLeadBytes ahead of another.

void Node::Queue(Connection& connection, uint32_t priority, Run run, bool among_sums) {
    if (!connection.has_packets()) {
        connection.Forgo(turn_);
        connection.queued_ns = now_ns_;
    }
    connection.Queue(priority, std::move(run), among_sums);
    Touch(connection);
}

bool Node::IsStuck(const Connection& connection) const {
    return now_ns_ - std::max(connection.sent_ns, connection.queued_ns) > kPatienceNs;
}

// Among those that can send. asking: the one that wants to take a packet, which can; or null.
void Node::FindLeastTurn(const Connection* asking) {
    uint64_t least = UINT64_MAX;
    for (const auto& each : connections_) {
        const bool can_send = each.get() == asking || each->awaits_turn() || !IsStuck(*each);
        if (!can_send || !each->has_packets() || each->taken_bytes() >= least) continue;
        least = each->taken_bytes();
        least_priority_ = each->priority();
    }
    if (least != UINT64_MAX) least_turn_ = least;
}

// Whether it is not too far ahead, or has something more urgent to send.
bool Node::GoesFirst(const Connection& connection) const {
    return connection.taken_bytes() <= least_turn_ + kLeadBytes || connection.priority() < least_priority_;
}

bool Node::IsTurn(const Connection& connection) {
    if (!options_.deal_evenly) return true;
    if (connection.taken_bytes() > least_turn_ + kLeadBytes) {
        FindLeastTurn(&connection);  // what was found before may be too little, never too much
        if (!GoesFirst(connection)) {
            turn_awaited_ = true;
            return false;
        }
    }
    turn_ = connection.taken_bytes();
    return true;
}

// Touches the connections whose turn has come. Returns whether there are any.
bool Node::PassTurns() {
    if (!turn_awaited_) return false;
    FindLeastTurn(nullptr);
    turn_awaited_ = false;
    bool any = false;
    for (const auto& each : connections_) {
        if (!each->awaits_turn()) continue;
        turn_awaited_ = true;
        if (!GoesFirst(*each)) continue;
        Touch(*each);
        any = true;
    }
    return any;
}

// -- the thread -------------------------------------------------------------------------------------------

void Node::Tick(int64_t now_ns) {
    const int64_t ping_ns = int64_t{options_.ping_ms} * 1'000'000, dead_ns = int64_t{options_.dead_ms} * 1'000'000;
    // after a stop of this process (a debugger, SIGSTOP, a sleeping machine) the silence was ours
    const bool was_away = now_ns - ticked_ns_ > ping_ns + 1'000'000'000;
    ticked_ns_ = now_ns;
    if (!hears_) Hear(true);
    for (Attempt& attempt : std::exchange(attempts_, {})) {
        if (!failed_ && !closing_) Try(std::move(attempt));
    }
    const bool is_joined = missing_connections() == 0;
    bool all_heard = !was_away;
    for (const auto& connection : connections_) {
        if (connection->state == Connection::State::kClosed) continue;
        if (was_away) connection->heard_ns = now_ns;
        if (connection->parked()) {
            // nothing is read from it, but its host acknowledges pings. Where pings cannot leave, since the peer does
            // not read either, silence means nothing.
            connection->heard_ns = now_ns - (connection->can_ping() ? NanosecondsSinceAck(connection->socket()) : 0);
        }
        if (connection->state != Connection::State::kOpen) {
            HangUpOnLate(*connection, now_ns, is_joined);
            continue;
        }
        if (connection->left) continue;
        if (connection->awaits_rest() && !connection->parked()) {  // on a slow link a part is a sign of life
            ReadFrom(*connection);
            if (connection->state == Connection::State::kClosed) continue;
        }
        if (now_ns - connection->heard_ns > dead_ns) {
            Lose(*connection, Code::kStalled, "has said nothing for " + std::to_string((now_ns - connection->heard_ns) / 1'000'000) +
                                                  " ms, though it is connected");
            continue;
        }
        all_heard &= now_ns - connection->heard_ns <= 3 * ping_ns;
        if (now_ns - connection->sent_ns > ping_ns - 1'000'000 && connection->can_ping()) {
            connection->QueueControl(ControlFrame(FrameType::kPing, connection->sender, 0, nullptr, 0));
            Touch(*connection);
        }
    }
    if (left_ns_ != 0 && !all_heard) left_ns_ = now_ns;
    if (left_ns_ != 0 && !failed_ && now_ns - left_ns_ > std::min(dead_ns, kLeftNs)) {
        bool waits = options_.rank < 0 && aggregator_->IsWaiting();
        if (options_.rank >= 0) {
            std::lock_guard guard(done_mutex_);
            waits = !open_.empty() || (engine_ && engine_->IsUnderWay());
        }
        waits |= messages_ && messages_->WaitsFor(left_, static_cast<uint32_t>(options_.rank));
        if (waits) Fail({Code::kLeft, left_rank_, left_server_, left_name_ + " has left the job, and something still waits for it"});
    }
    std::lock_guard guard(done_mutex_);
    if (!joined_) {
        missing_.clear();
        const auto list = [this](const char* what, const std::vector<std::vector<Connection*>>& table, int32_t self) {
            for (size_t peer = 0; peer < table.size(); ++peer) {
                if (static_cast<int32_t>(peer) == self) continue;
                if (std::count(table[peer].begin(), table[peer].end(), nullptr) == 0) continue;
                missing_ += (missing_.empty() ? "" : ", ") + std::string(what) + std::to_string(peer);
            }
        };
        if (options_.rank >= 0) list("server ", to_server_, options_.server);
        if (options_.server >= 0) list("rank ", to_worker_, options_.rank);
    }
}

void Node::Reap() {
    connections_.remove_if([](const std::unique_ptr<Connection>& connection) { return connection->state == Connection::State::kClosed; });
}

// What is done between two sleeps, under the lock. True: there is more to do at once.
bool Node::Turn(const epoll_event* events, int n) {
    now_ns_ = Now();
    RunCommands(false);
    ReadResumed();
    for (int i = 0; i < n; ++i) {
        void* what = events[i].data.ptr;
        if (what == &listener_) {
            AcceptAll();
        } else if (what == &shared_) {
            shared_->Woken();
        } else if (what != &wake_) {
            OnEvent(*static_cast<Connection*>(what), events[i].events);
            RunEngine();
            SweepOver();
            FlushTouched(kWriteBudget);
        }
    }
    ReadResumed();  // a definition may have come: no event tells of what waited for it, and Reap() may free it
    bool more = RunShared(kWorkBytes);
    more |= aggregator_ && !failed_ && aggregator_->Work(kWorkBytes);
    more |= attended_ ? SendMail(kWorkBytes) : RunMail(kWorkBytes);
    more |= RunEngine();
    SweepOver();
    if (now_ns_ - ticked_ns_ >= tick_ns()) Tick(now_ns_);
    more |= FlushTouched(kWriteBudget);
    Reap();
    return more || !RestShared() || !RestMail();
}

// Sleeps until something happens or `timeout_ms` have passed. Gradients that become ready one soon after
// another are handed over together: each alone would cost a wake-up and a call to the kernel.
int Node::Sleep(std::vector<epoll_event>& events, int timeout_ms) {
    const auto most = static_cast<int>(events.size());
    int n = epoll_wait(epoll_.get(), events.data(), most, timeout_ms);
    const auto is_wake = [this](const epoll_event& event) { return event.data.ptr == &wake_; };
    const auto hear = [&] {
        // before the commands are run, so that the wake-up of a later one is not taken for theirs
        if (std::none_of(events.begin(), events.begin() + std::max(n, 0), is_wake)) return false;
        uint64_t count;
        (void)!read(wake_.get(), &count, sizeof count);
        wake_pending_ = false;
        return true;
    };
    if (!hear() || urgent_.exchange(false) || n > 1) return n;
    lingering_ = true;
    pollfd poll{epoll_.get(), POLLIN, 0};
    const timespec linger{0, kLingerNs};
    ppoll(&poll, 1, &linger, nullptr);
    lingering_ = false;
    n = epoll_wait(epoll_.get(), events.data(), most, 0);
    if (hear()) urgent_ = false;
    return n;
}

// What an exception has left half done may not be used any more: the node says that it fails, and does nothing else.
void Node::Break(const char* why) noexcept {
    broken_ = true;
    reserve_bytes_.reset();
    // epoll would tell of what is not read any more without end
    for (const auto& connection : connections_) {
        if (connection->state != Connection::State::kClosed) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection->socket().get(), nullptr);
    }
    if (listener_) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
    try {
        const uint64_t held = aggregator_ ? aggregator_->held_bytes() : 0;
        const std::string name = options_.rank >= 0 ? "rank " + std::to_string(options_.rank) : "server " + std::to_string(options_.server);
        Fail({Code::kFull, options_.rank, options_.rank < 0 ? options_.server : -1,
              name + " cannot go on (" + why + "): it holds " + std::to_string(held) + " bytes of packets in flight, and has admitted " +
                  std::to_string(defined_bytes_) + " of " + std::to_string(options_.max_bytes) +
                  " bytes; give its host more memory, or allow fewer bytes"});
    } catch (const std::exception&) {  // not even the memory to say so: whoever waits here shall hear it
        LetGoOfAll();
        std::lock_guard guard(done_mutex_);
        failure_.code = Code::kFull;
        TellWaiting();
    }
    Wake();
}

// After Break(): sends what is queued, which is the reason. Returns whether there is more.
bool Node::Drain() noexcept {
    bool more = false;
    for (const auto& connection : connections_) {
        if (connection->state != Connection::State::kOpen || !connection->has_output()) continue;
        try {
            if (connection->Write(*this, kWriteBudget, now_ns_) == Connection::Io::kFault) connection->Drop();
        } catch (const std::exception&) {
            connection->Drop();
        }
        more |= connection->has_output();
    }
    return more;
}

void Node::Loop() {
    pthread_setname_np(pthread_self(), "gradlane-io");  // for ps and perf
    std::vector<epoll_event> events(64);
    int64_t stop_by_ns = 0;
    bool working = false, turn_awaited = false;
    while (true) {
        const int64_t until_tick = ticked_ns_ + tick_ns() - Now();
        const int64_t idle_ms = turn_awaited ? kPatienceNs / 1'000'000 : 1000;
        const int timeout = working ? 0 : static_cast<int>(std::clamp<int64_t>(until_tick / 1'000'000 + 1, 0, idle_ms));
        const int n = Sleep(events, stop_by_ns != 0 ? std::min(timeout, 10) : timeout);
        std::lock_guard guard(mutex_);
        ++stats_.wakeups;
        working = false;
        if (!broken_) Guarded([&] { working = Turn(events.data(), std::max(n, 0)); });
        turn_awaited = turn_awaited_;
        if (broken_) {
            now_ns_ = Now();
            if (stop_by_ns == 0) stop_by_ns = now_ns_ + int64_t{options_.linger_ms} * 1'000'000;
            if (!Drain() || now_ns_ >= stop_by_ns) break;
            continue;
        }
        if (!stop_) continue;
        if (stop_by_ns == 0) {
            closing_ = true;
            stop_by_ns = now_ns_ + int64_t{options_.linger_ms} * 1'000'000;
        }
        // what is queued leaves first; then goodbye; then everybody else's goodbye is awaited, so that no
        // connection is reset while the other side still reads
        bool waits = false;
        for (const auto& connection : connections_) {
            if (connection->state != Connection::State::kOpen) continue;
            const bool is_rank = messages_ && connection->peer < left_.size() && !left_[connection->peer];
            if (connection->has_output() || (is_rank && !failed_ && mail_ && mail_->HasOutput(connection->peer))) {
                waits = true;  // after a failure, its reason
            } else if (failed_) {
                waits |= !connection->left && now_ns_ - failed_ns_ < kReadOnNs;
            } else if (!connection->said_goodbye) {
                connection->said_goodbye = true;
                connection->QueueControl(ControlFrame(FrameType::kGoodbye, connection->sender, 0, nullptr, 0));
                WriteTo(*connection, kWriteBudget);
                waits = true;
            } else if (!connection->left) {
                waits = true;
            }
        }
        if (!waits || now_ns_ >= stop_by_ns) break;
    }
    std::lock_guard guard(mutex_);
    for (const auto& connection : connections_) {
        if (connection->state != Connection::State::kClosed) connection->Drop();
    }
    connections_.clear();
    touched_.clear();
    resumed_.clear();
    for (auto* table : {&to_server_, &to_worker_}) {
        for (auto& lanes : *table) std::fill(lanes.begin(), lanes.end(), nullptr);
    }
    failed_ = true;  // what is handed over from now on goes nowhere
    shared_.reset();
    listener_ = Fd();
    reserve_ = Fd();
    epoll_ = Fd();
}

}  // namespace gradlane
