// Node as its owner sees it: life, calls and waits. What the calls ask for is in node_tensors.cc.

#include "node/node.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace gradlane {

namespace {

const char* WhyNot(const NodeOptions& options) {
    const Membership& job = options.membership;
    if (job.world == 0 || job.world > 65535) return "world: expected 1 to 65535 workers";
    if (job.servers == 0 || job.servers > 65535) return "servers: expected 1 to 65535";
    if (options.rank < -1 || options.rank >= static_cast<int64_t>(job.world)) return "rank: expected one below the world size";
    if (options.server < -1 || options.server >= static_cast<int64_t>(job.servers)) return "server: expected an index below servers";
    if (options.rank < 0 && options.server < 0) return "neither a worker nor a server";
    if (options.packet_bytes == 0 || options.packet_bytes % 64 != 0 || options.packet_bytes > kMaxPacketBytes / 2) {
        return "packet_bytes: expected a multiple of 64 up to 512 KiB";
    }
    if (job.lanes == 0 || job.lanes > 64 || options.marks.size() != job.lanes) return "lanes: expected 1 to 64, with marks for each";
    if (options.server >= 0 && job.secret.empty() && !IsLoopback(options.address)) {
        return "a server off loopback needs a secret";
    }
    return nullptr;
}

}  // namespace

// -- life -------------------------------------------------------------------------------------------------

std::unique_ptr<Node> Node::Start(NodeOptions options, Failure* why) {
    if (const char* fault = WhyNot(options)) {
        *why = {Code::kProtocol, -1, -1, fault};
        return nullptr;
    }
    Fd listener;
    if (options.server >= 0) {
        std::string text;
        listener = Listen(options.address, options.port, &text);
        if (!listener) {
            *why = {Code::kSystem, -1, -1, text};
            return nullptr;
        }
    }
    std::unique_ptr<Node> node(new Node(std::move(options), std::move(listener)));
    if (!node->epoll_ || !node->wake_) {
        *why = {Code::kSystem, -1, -1, std::string("epoll: ") + std::strerror(errno)};
        return nullptr;
    }
    try {
        node->thread_ = std::thread([raw = node.get()] { raw->Loop(); });
    } catch (const std::system_error& error) {
        *why = {Code::kSystem, -1, -1, std::string("cannot start the I/O thread: ") + error.what()};
        return nullptr;
    }
    return node;
}

Node::Node(NodeOptions options, Fd listener)
    : options_(std::move(options)),
      pid_(getpid()),
      listener_(std::move(listener)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      reserve_(open("/dev/null", O_RDONLY | O_CLOEXEC)),
      early_buffers_(options_.packet_bytes, 16),
      dealer_(options_.membership.servers),
      reserve_bytes_(new uint8_t[kReserveBytes]) {
    const Membership& job = options_.membership;
    to_server_.assign(job.servers, std::vector<Connection*>(job.lanes, nullptr));
    to_worker_.assign(job.world, std::vector<Connection*>(job.lanes, nullptr));
    if (options_.server >= 0) {
        aggregator_ = std::make_unique<Aggregator>(static_cast<uint32_t>(options_.server), job.world, options_.rank,
                                                   options_.order, options_.packet_bytes,
                                                   static_cast<Outbox*>(this));
        port_ = PortOf(listener_);
    }
    if (options_.rank >= 0 && options_.rank == options_.server) {
        const uint32_t processes = std::max(job.world, job.servers);
        messages_ = std::make_unique<Messages>(processes, options_.packet_bytes, static_cast<Messages::Post*>(this));
        left_.resize(processes);
    }
    ticked_ns_ = now_ns_ = Now();
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &wake_;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
    if (listener_) {
        event.data.ptr = &listener_;
        epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event);
    }
    joined_ = missing_connections() == 0;
}

Node::~Node() { Close(); }

void Node::Close() {
    if (!thread_.joinable()) return;
    if (getpid() != pid_) {
        thread_.detach();
        return;
    }
    stop_ = true;
    Wake();
    thread_.join();
    std::lock_guard state(mutex_);
    std::lock_guard guard(done_mutex_);
    over_all_ = true;
    TellWaiting();
    mail_.reset();
}

// That there is a failure or the end. Under done_mutex_.
void Node::TellWaiting() {
    done_.notify_all();
    if (awaited_) awaited_->Interrupt();
    if (mail_) mail_->bell().Rouse();
}

int64_t Node::Now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// -- the owner's side -------------------------------------------------------------------------------------

void Node::Submit(Command command) {
    {
        std::lock_guard guard(command_mutex_);
        commands_.push_back(std::move(command));
    }
    RunOrWake();
}

void Node::RunOrWake() {
    if (mutex_.try_lock()) {
        now_ns_ = Now();
        if (!broken_) Guarded([this] { RunCommands(true); });
        mutex_.unlock();
        // a command that came while the lock was held here found it taken, and has woken the I/O thread
        return;
    }
    Wake();
}

void Node::SubmitSoon(Command command, uint64_t bytes) {
    {
        std::lock_guard guard(command_mutex_);
        commands_.push_back(std::move(command));
        soon_bytes_ += bytes;
        if (soon_bytes_ >= kInlineBytes) urgent_ = true;
    }
    if (bytes != 0 && (urgent_ || !lingering_)) Nudge();
}

void Node::Wake() {
    urgent_ = true;
    Nudge();
}

void Node::Nudge() {
    if (wake_pending_.exchange(true)) return;
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof one);
}

void Node::Dial(uint32_t server, const std::string& address, uint16_t port) {
    Submit(DialCommand{server, address, port});
}

void Node::Define(uint32_t tensor, const Spec& spec, const void* from, void* into) {
    Submit(DefineCommand{tensor, spec, static_cast<const uint8_t*>(from), static_cast<uint8_t*>(into)});
}

void Node::Push(uint32_t tensor, bool notify, bool notify_sent, uint16_t flags, bool held) {
    {
        std::lock_guard guard(done_mutex_);
        open_.insert(tensor);
    }
    Submit(PushCommand{tensor, notify, notify_sent, flags, held});
}

void Node::Release(uint32_t tensor) { Submit(ReleaseCommand{tensor}); }

void Node::SetRule(uint32_t group, const Rule& rule) { Submit(SetRuleCommand{group, rule}); }

void Node::Start(uint32_t tensor, const Spec& spec, const void* from, void* into, bool notify) {
    {
        std::lock_guard guard(done_mutex_);
        open_.insert(tensor);
    }
    DefineCommand define{tensor, spec, static_cast<const uint8_t*>(from), static_cast<uint8_t*>(into)};
    Submit(StartCommand{std::move(define), PushCommand{tensor, notify, false, 0, false}});
}

void Node::Exchange(uint32_t tensor, uint32_t priority, std::vector<ExchangePart> parts) {
    {
        std::lock_guard guard(done_mutex_);
        open_.insert(tensor);
    }
    Submit(ExchangeCommand{tensor, priority, std::move(parts)});
}

void Node::ForgetBelow(uint32_t tensor) { Submit(ForgetCommand{tensor}); }

void Node::Abort(const std::string& text) {
    Submit(AbortCommand{text});
    if (getpid() != pid_) return;
    std::unique_lock lock(done_mutex_);
    done_.wait(lock, [this] { return failure_.code != Code::kNone || over_all_; });
}

void Node::CarryOut(std::shared_ptr<Engine> engine) {
    {
        std::lock_guard guard(done_mutex_);
        awaited_ = engine;
        if (failure_.code != Code::kNone) engine->Interrupt();
    }
    Submit(CarryOutCommand{std::move(engine)});
}

void Node::Begin(int64_t iteration) {
    {
        std::lock_guard guard(done_mutex_);
        awaited_->BeginIteration();
    }
    SubmitSoon(BeginCommand{iteration}, 0);  // runs with the first gradient that starts something
}

int64_t Node::Ready(uint32_t tensor, bool lacks) {
    const int64_t now = Now();
    SubmitSoon(ReadyCommand{tensor, now, lacks}, awaited_->Completes(tensor));
    return now;
}

bool Node::IsCommandPending() {
    std::lock_guard guard(command_mutex_);
    return !commands_.empty();
}

void Node::Flush() {
    if (IsCommandPending()) Wake();
}

bool Node::WaitArrived(int64_t tensor, uint64_t interruptions, int64_t timeout_ms) {
    if (IsCommandPending()) RunOrWake();
    return awaited_->Wait(tensor, interruptions, timeout_ms);
}

std::vector<Engine::Span> Node::Spans(bool last) {
    std::lock_guard guard(mutex_);
    return engine_ ? engine_->Spans(last) : std::vector<Engine::Span>();
}

Dispatcher::State Node::EngineState() {
    std::lock_guard guard(mutex_);
    return engine_ ? engine_->Describe() : Dispatcher::State();
}

std::vector<Engine::Fact> Node::Facts() {
    std::lock_guard guard(mutex_);
    return engine_ ? engine_->Facts() : std::vector<Engine::Fact>();
}

bool Node::Join(int64_t timeout_ms, std::string* missing) {
    std::unique_lock lock(done_mutex_);
    done_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                   [this] { return joined_ || failure_.code != Code::kNone || over_all_; });
    *missing = missing_;
    return joined_ && failure_.code == Code::kNone;
}

bool Node::Wait(uint32_t tensor, int64_t timeout_ms) {
    std::unique_lock lock(done_mutex_);
    done_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this, tensor] {
        return open_.count(tensor) == 0 || failure_.code != Code::kNone || over_all_;
    });
    return open_.count(tensor) == 0;
}

bool Node::IsDone(uint32_t tensor) {
    std::lock_guard guard(done_mutex_);
    return open_.count(tensor) == 0;
}

std::vector<int64_t> Node::Take(int64_t timeout_ms) {
    std::unique_lock lock(done_mutex_);
    done_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                   [this] { return !finished_.empty() || failure_.code != Code::kNone || over_all_; });
    std::vector<int64_t> taken(finished_.begin(), finished_.end());
    finished_.clear();
    return taken;
}

bool Node::AwaitGoodbyes(int64_t timeout_ms) {
    std::unique_lock lock(done_mutex_);
    done_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                   [this] { return all_left_ || failure_.code != Code::kNone || over_all_; });
    return all_left_ && failure_.code == Code::kNone;
}

Failure Node::failure() {
    std::lock_guard guard(done_mutex_);
    return failure_;
}

NodeStats Node::stats() {
    std::lock_guard guard(mutex_);
    NodeStats stats = stats_;
    for (const auto& connection : connections_) {
        stats.sent_bytes += connection->sent_bytes;
        stats.received_bytes += connection->received_bytes;
        stats.sent_packets += connection->sent_packets;
        stats.received_packets += connection->received_packets;
    }
    if (aggregator_) {
        stats.held_bytes = aggregator_->held_bytes();
        stats.most_held_bytes = aggregator_->most_held_bytes();
    }
    return stats;
}

}  // namespace gradlane
