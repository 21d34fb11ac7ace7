#include "node/node.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace gradlane {

namespace {

constexpr size_t kReadBudget = 128 << 10;    // of one connection before the next has its turn
constexpr size_t kWriteBudget = 1 << 20;
constexpr size_t kInlineBytes = 64 << 10;    // what a calling thread writes itself before it leaves the rest to the I/O thread
constexpr uint64_t kWorkBytes = 256 << 10;   // of local sums between two looks at the sockets
constexpr size_t kEarlyBytes = 64 << 20;     // of what came before this process knew its tensor; beyond it, whoever sends waits
constexpr size_t kMaxStrangers = 64;         // connections that have not been let in
constexpr uint32_t kSmallestCut = 4 << 10;   // a tensor smaller than this is not cut: a packet has its price

// One lane a tensor: a connection receives one frame at a time, so no packet is ever admitted twice.
constexpr const char* kOtherLane = "a packet on another lane than its tensor's";

int64_t Now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Nonce FreshNonce() {
    Nonce nonce;
    for (size_t have = 0; have < nonce.size();) {
        const ssize_t n = getrandom(nonce.data() + have, nonce.size() - have, 0);
        if (n > 0) have += static_cast<size_t>(n);
    }
    return nonce;
}

uint32_t RankInQueue(const Spec& spec) { return spec.urgent_first ? spec.priority : 0; }

Spec AsSpec(const Definition& define) {
    Spec spec;
    spec.bytes = define.bytes;
    spec.dtype = static_cast<DType>(define.dtype);
    spec.op = static_cast<Op>(define.op);
    spec.whole = define.whole != 0;
    spec.urgent_first = define.urgent_first != 0;
    spec.lane = define.lane;
    spec.priority = define.priority;
    spec.from = define.from;
    spec.to = define.to;
    spec.at = define.at;
    spec.update = static_cast<RuleKind>(define.update);
    spec.staleness = define.staleness;
    spec.group = define.group;
    return spec;
}

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

// -- life ------------------------------------------------------------------------------------------------

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
      dealer_(options_.membership.servers) {
    const Membership& job = options_.membership;
    to_server_.assign(job.servers, std::vector<Connection*>(job.lanes, nullptr));
    to_worker_.assign(job.world, std::vector<Connection*>(job.lanes, nullptr));
    if (options_.server >= 0) {
        aggregator_ = std::make_unique<Aggregator>(static_cast<uint32_t>(options_.server), job.world, options_.rank,
                                                   options_.order, options_.packet_bytes,
                                                   static_cast<Outbox*>(this));
        port_ = PortOf(listener_);
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
    std::lock_guard guard(done_mutex_);
    over_all_ = true;
    done_.notify_all();
}

// -- the owner's side ------------------------------------------------------------------------------------

void Node::Submit(Command command) {
    {
        std::lock_guard guard(command_mutex_);
        commands_.push_back(std::move(command));
    }
    if (mutex_.try_lock()) {
        now_ns_ = Now();
        RunCommands(true);
        mutex_.unlock();
        // a command that came while the lock was held here found it taken, and has woken the I/O thread
        return;
    }
    Wake();
}

void Node::Wake() {
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof one);
}

void Node::Dial(uint32_t server, const std::string& address, uint16_t port) {
    Command command{Command::Kind::kDial, server, {}, nullptr, nullptr, false, port, address};
    Submit(std::move(command));
}

void Node::Define(uint32_t tensor, const Spec& spec, const void* from, void* into) {
    Submit({Command::Kind::kDefine, tensor, spec, static_cast<const uint8_t*>(from), static_cast<uint8_t*>(into), false, 0, {}});
}

void Node::Push(uint32_t tensor, bool notify, bool notify_sent, uint16_t flags, bool held) {
    {
        std::lock_guard guard(done_mutex_);
        open_.insert(tensor);
    }
    Submit({Command::Kind::kPush, tensor, {}, nullptr, nullptr, notify, 0, {}, notify_sent, flags, {}, held});
}

void Node::Release(uint32_t tensor) { Submit({Command::Kind::kRelease, tensor, {}, nullptr, nullptr, false, 0, {}}); }

void Node::SetRule(uint32_t group, const Rule& rule) {
    Submit({Command::Kind::kRule, group, {}, nullptr, nullptr, false, 0, {}, false, 0, rule});
}

void Node::Start(uint32_t tensor, const Spec& spec, const void* from, void* into, bool notify) {
    {
        std::lock_guard guard(done_mutex_);
        open_.insert(tensor);
    }
    Submit({Command::Kind::kStart, tensor, spec, static_cast<const uint8_t*>(from), static_cast<uint8_t*>(into), notify, 0, {}});
}

void Node::ForgetBelow(uint32_t tensor) { Submit({Command::Kind::kForget, tensor, {}, nullptr, nullptr, false, 0, {}}); }

void Node::Abort(const std::string& text) { Submit({Command::Kind::kAbort, 0, {}, nullptr, nullptr, false, 0, text}); }

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

// -- commands, under the lock ----------------------------------------------------------------------------

void Node::RunCommands(bool inline_call) {
    while (true) {
        Command command;
        {
            std::lock_guard guard(command_mutex_);
            if (commands_.empty()) break;
            command = std::move(commands_.front());
            commands_.pop_front();
        }
        Execute(command);
    }
    if (inline_call && aggregator_ && aggregator_->Work(kInlineBytes)) Wake();
    SweepOver();
    FlushTouched(inline_call ? kInlineBytes : kWriteBudget);
    if (inline_call && !resumed_.empty()) Wake();
}

void Node::Execute(Command& command) {
    switch (command.kind) {
        case Command::Kind::kDial: DoDial(command.tensor, command.text, command.port); break;
        case Command::Kind::kDefine: DoDefine(command.tensor, command.spec, command.from, command.into); break;
        case Command::Kind::kPush: DoPush(command.tensor, command.notify, command.notify_sent, command.flags, command.held); break;
        case Command::Kind::kStart:
            if (DoDefine(command.tensor, command.spec, command.from, command.into)) DoPush(command.tensor, command.notify, false, 0);
            break;
        case Command::Kind::kForget: {
            for (auto each = tensors_.begin(); each != tensors_.end();) {
                if (each->first < command.tensor) {
                    defined_bytes_ -= Footprint(each->second.spec, aggregator_ != nullptr);
                    if (aggregator_) aggregator_->Forget(each->first);
                    each = tensors_.erase(each);
                } else {
                    ++each;
                }
            }
            dealer_ = Dealer(options_.membership.servers);
            if (!options_.tell_tables) break;
            for (const auto& lanes : to_server_) {
                if (lanes[0] == nullptr) continue;
                lanes[0]->QueueControl(ControlFrame(FrameType::kForget, lanes[0]->sender, command.tensor, nullptr, 0));
                Touch(*lanes[0]);
            }
            break;
        }
        case Command::Kind::kRule: DoSetRule(command.tensor, command.rule); break;
        case Command::Kind::kRelease: DoRelease(command.tensor); break;
        case Command::Kind::kAbort: Fail({Code::kAborted, options_.rank, options_.server, command.text}); break;
    }
}

void Node::DoDial(uint32_t server, const std::string& address, uint16_t port) {
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
        connection->checksum = options_.checksum;
        connection->opened_ns = connection->heard_ns = connection->sent_ns = now_ns_;
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
        connections_.push_back(std::move(connection));
        Connection& added = *connections_.back();
        epoll_event event{};
        event.events = added.interest = EPOLLIN | EPOLLOUT;
        event.data.ptr = &added;
        epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, added.socket().get(), &event);
    }
}

std::shared_ptr<const Layout> Node::Cut(uint32_t tensor, const Spec& spec) {
    const uint32_t servers = options_.membership.servers;
    if (!options_.deal_evenly) return dealer_.Cut(spec.bytes, options_.packet_bytes, spec.at);
    Dealer alone(servers);
    if (spec.at != kDealt) return alone.Cut(spec.bytes, options_.packet_bytes, spec.at);
    if (spec.bytes <= kSmallestCut) return alone.Cut(spec.bytes, options_.packet_bytes, static_cast<int32_t>(tensor % servers));
    const uint64_t share = ((spec.bytes + servers - 1) / servers + 63) / 64 * 64;
    const auto packet = static_cast<uint32_t>(std::min<uint64_t>(options_.packet_bytes, share));
    return alone.Cut(spec.bytes, packet);
}

bool Node::DoDefine(uint32_t tensor, const Spec& spec, const uint8_t* from, uint8_t* into) {
    if (failed_) return false;
    if (const char* why = WhyNot(spec)) {
        Fail({Code::kProtocol, options_.rank, options_.server, "tensor " + std::to_string(tensor) + ": " + why});
        return false;
    }
    if (tensor != next_tensor_ || spec.lane >= options_.membership.lanes ||
        spec.at >= static_cast<int64_t>(options_.membership.servers)) {
        Fail({Code::kProtocol, options_.rank, options_.server, "tensor " + std::to_string(tensor) + ": not a definition that can be used"});
        return false;
    }
    const uint64_t footprint = Footprint(spec, aggregator_ != nullptr);
    if (footprint > options_.max_bytes - defined_bytes_ || tensors_.size() >= options_.max_tensors) {
        Fail({Code::kFull, options_.rank, options_.server,
              "tensor " + std::to_string(tensor) + " takes " + std::to_string(footprint) + " bytes: " +
                  std::to_string(defined_bytes_) + " bytes are registered and " + std::to_string(options_.max_bytes) +
                  " allowed"});
        return false;
    }
    ++next_tensor_;
    defined_bytes_ += footprint;
    Tensor state;
    state.spec = spec;
    state.layout = Cut(tensor, spec);
    state.from = from;
    state.into = into;
    if (options_.rank >= 0) {
        state.contributes = spec.from == kAll || spec.from == options_.rank;
        state.receives = spec.to == kAll ? spec.from != options_.rank : spec.to == options_.rank;
        state.received.resize((state.layout->packets + 63) / 64);
    }
    if (aggregator_) {
        const bool mine = !state.layout->by_server[static_cast<size_t>(options_.server)].empty();
        // one that is defined once is forgotten when its last packet is summed: with none here, it never would be
        try {
            if (mine || !spec.once) aggregator_->Define(tensor, spec, state.layout);
        } catch (const std::bad_alloc&) {
            Fail({Code::kFull, options_.rank, options_.server, "tensor " + std::to_string(tensor) + ": no memory for " + std::to_string(footprint) + " bytes"});
            return false;
        }
    }
    tensors_.insert_or_assign(tensor, std::move(state));
    if (options_.tell_tables && options_.rank >= 0) {
        uint8_t payload[Definition::kBytes];
        EncodeDefinition(AsDefinition(spec), payload);
        for (const auto& lanes : to_server_) {
            if (lanes[0] == nullptr) continue;
            lanes[0]->QueueControl(ControlFrame(FrameType::kDefine, lanes[0]->sender, tensor, payload, sizeof payload));
            Touch(*lanes[0]);
        }
    }
    TakeEarly(tensor);
    ResumeParked(tensor);
    return true;
}

void Node::DoSetRule(uint32_t group, const Rule& rule) {
    if (failed_) return;
    uint8_t payload[kRuleBytes];
    EncodeRule(rule, payload);
    Rule said;  // as everybody else reads it: without numbers that its kind does not have
    const char* why = group < kMaxGroups ? DecodeRule(payload, &said) : "more groups than there can be";
    for (const auto& [tensor, state] : tensors_) {
        if (state.under_way && state.spec.update != RuleKind::kNone && state.spec.group == group) why = "its tensors are under way";
    }
    if (why != nullptr) {
        Fail({Code::kProtocol, options_.rank, -1, "the rule of group " + std::to_string(group) + ": " + why});
        return;
    }
    rules_[group] = said;
    if (aggregator_) aggregator_->SetRule(group, static_cast<uint32_t>(options_.rank), said);
    for (const auto& lanes : to_server_) {
        Connection* connection = lanes[kUpdateLane];
        if (connection == nullptr) continue;
        connection->QueueControl(ControlFrame(FrameType::kRule, connection->sender, group, payload, sizeof payload));
        Touch(*connection);
    }
}

void Node::DoPush(uint32_t tensor, bool notify, bool notify_sent, uint16_t flags, bool held) {
    if (failed_) return;
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end() || found->second.under_way) {
        Fail({Code::kProtocol, options_.rank, -1,
              "tensor " + std::to_string(tensor) + (found == tensors_.end() ? " was never defined" : " is under way already")});
        return;
    }
    Tensor& state = found->second;
    // what takes every worker to begin and to end cannot come to an end; of the rest, they may have done their part
    if (left_ns_ != 0 && state.spec.from == kAll && state.spec.to == kAll) {
        Fail({Code::kLeft, left_rank_, left_server_, left_name_ + " has left the job, and tensor " + std::to_string(tensor) + " was handed over"});
        return;
    }
    if ((flags & ~kUpdateFlags) != 0 || (flags != 0 && state.spec.update == RuleKind::kNone) ||
        (PartOf(flags) != Part::kSteps && static_cast<uint32_t>(PartOf(flags)) > StatesOf(state.spec.update)) ||
        (PartOf(flags) != Part::kParameters && state.pushes == 0)) {
        Fail({Code::kProtocol, options_.rank, -1, "tensor " + std::to_string(tensor) + " was handed over for what it does not have"});
        return;
    }
    if (state.spec.update != RuleKind::kNone && state.pushes != 0 && (flags & (kFlagQuiet | kFlagPlace)) == 0) {
        const auto rule = rules_.find(state.spec.group);
        if (rule == rules_.end() || rule->second.kind != state.spec.update) {
            Fail({Code::kProtocol, options_.rank, -1, "tensor " + std::to_string(tensor) + " was handed over, and its group has no rule of its kind"});
            return;
        }
    }
    const bool can_hold = aggregator_ && state.spec.from == kAll && state.spec.to == kAll && state.spec.update == RuleKind::kNone;
    if (held && !can_hold) {
        Fail({Code::kProtocol, options_.rank, -1, "tensor " + std::to_string(tensor) + " was to be held, and no server here sums it for all"});
        return;
    }
    state.under_way = true;
    state.held = held;
    state.notify = notify;
    state.notify_sent = notify_sent;
    state.iteration = state.spec.once ? OnlyIteration(state.spec) : state.pushes++;
    std::fill(state.received.begin(), state.received.end(), 0);
    state.unsent = 0;
    state.unreceived = state.receives ? state.layout->packets : 0;
    for (uint32_t server = 0; server < to_server_.size() && state.contributes; ++server) {
        const auto places = static_cast<uint32_t>(state.layout->by_server[server].size());
        if (places == 0) continue;
        if (static_cast<int32_t>(server) == options_.server) {
            if (!state.receives) state.unsent += places;  // told by Consumed
            continue;
        }
        Connection* connection = to_server_[server][state.spec.lane];
        if (connection == nullptr) {
            Fail({Code::kDied, -1, static_cast<int32_t>(server), "server " + std::to_string(server) + " is not connected"});
            return;
        }
        Run run;
        run.type = FrameType::kPush;
        run.tensor = tensor;
        run.flags = flags;
        run.iteration = state.iteration;
        run.priority = state.spec.priority;
        run.memory = state.from;
        run.layout = state.layout;
        run.server = server;
        run.end = places;
        state.unsent += places;
        connection->Queue(RankInQueue(state.spec), std::move(run));
        Touch(*connection);
    }
    // no sum is whole without this worker's part, so that a server is held by keeping that back
    if (aggregator_ && !held && aggregator_->Has(tensor)) {
        aggregator_->ArriveLocally(tensor, state.iteration, state.from, state.into, flags);
    }
    Settle(tensor, state);
    TakeEarly(tensor);
    if (state.receives && !state.contributes) ResumeParked(tensor);  // the others need not wait for this one to send
}

void Node::DoRelease(uint32_t tensor) {
    if (failed_) return;
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end() || !found->second.held) {
        Fail({Code::kProtocol, options_.rank, -1, "tensor " + std::to_string(tensor) + " was released, and is not held"});
        return;
    }
    Tensor& state = found->second;
    state.held = false;
    aggregator_->ArriveLocally(tensor, state.iteration, state.from, state.into);
    Settle(tensor, state);
}

void Node::Settle(uint32_t tensor, Tensor& state) {
    if (state.notify_sent && state.unsent == 0) {
        state.notify_sent = false;
        std::lock_guard guard(done_mutex_);
        finished_.push_back(~static_cast<int64_t>(tensor));
        done_.notify_all();
    }
    if (!state.under_way || state.held || state.unsent != 0 || state.unreceived != 0) return;
    state.under_way = false;
    if (state.spec.once) {
        defined_bytes_ -= Footprint(state.spec, aggregator_ != nullptr);
        over_.push_back(tensor);
    }
    std::lock_guard guard(done_mutex_);
    open_.erase(tensor);
    if (state.notify) finished_.push_back(tensor);
    done_.notify_all();
}

// What was over while its state was in use.
void Node::SweepOver() {
    for (const uint32_t tensor : over_) tensors_.erase(tensor);
    over_.clear();
    for (const uint32_t tensor : summed_) aggregator_->Forget(tensor);
    summed_.clear();
}

// -- sums ------------------------------------------------------------------------------------------------

void Node::Return(uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place,
                  uint32_t iteration, BufferRef sum) {
    for (uint32_t rank = 0; rank < to_worker_.size(); ++rank) {
        const auto signed_rank = static_cast<int32_t>(rank);
        if (signed_rank == options_.rank || (spec.to != kAll ? spec.to != signed_rank : spec.from == signed_rank)) continue;
        QueueResult(rank, tensor, spec, layout, place, iteration, sum);
    }
}

void Node::ReturnTo(uint32_t rank, uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place,
                    uint32_t iteration, BufferRef parameters) {
    QueueResult(rank, tensor, spec, layout, place, iteration, std::move(parameters));
}

void Node::QueueResult(uint32_t rank, uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place,
                       uint32_t iteration, BufferRef result) {
    Connection* connection = to_worker_[rank][spec.lane];
    if (connection == nullptr) return;  // it is lost, and the node has failed of it
    Run run;
    run.type = FrameType::kResult;
    run.tensor = tensor;
    run.iteration = iteration;
    run.priority = spec.priority;
    run.layout = layout;
    run.server = static_cast<uint32_t>(options_.server);
    run.next = place;
    run.end = place + 1;
    run.buffer = std::move(result);
    connection->Queue(RankInQueue(spec), std::move(run));
    Touch(*connection);
}

void Node::Delivered(uint32_t tensor, uint32_t packets) {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) return;
    found->second.unreceived -= packets;
    Settle(tensor, found->second);
}

void Node::Consumed(uint32_t tensor, uint32_t packets) {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) return;
    found->second.unsent -= packets;
    Settle(tensor, found->second);
}

void Node::OnSent(Connection&, uint32_t tensor) {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) return;
    --found->second.unsent;
    Settle(tensor, found->second);
}

// -- frames ----------------------------------------------------------------------------------------------

Connection::Sink Node::OnHeader(Connection& connection, const Header& header) {
    if (connection.state == Connection::State::kGreeting) {
        if (IsData(header.type)) return Connection::Sink::Fault(Code::kAuth, "data before the greeting was over");
        return Connection::Sink::Take(connection.control_payload());
    }
    switch (header.type) {
        case FrameType::kPush: return OnPushHeader(connection, header);
        case FrameType::kResult: return OnResultHeader(connection, header);
        case FrameType::kDefine:
        case FrameType::kForget:
            if (connection.dialled() || options_.rank >= 0) return Connection::Sink::Fault(Code::kProtocol, "a table that nobody asked for");
            return Connection::Sink::Take(connection.control_payload());
        case FrameType::kRule:
            if (connection.dialled() || connection.lane != kUpdateLane || header.tensor >= kMaxGroups) {
                return Connection::Sink::Fault(Code::kProtocol, "a rule that cannot be here");
            }
            return Connection::Sink::Take(connection.control_payload());
        case FrameType::kPing:
        case FrameType::kAbort:
        case FrameType::kGoodbye: return Connection::Sink::Take(connection.control_payload());
        default: return Connection::Sink::Fault(Code::kProtocol, "a frame of the greeting after it was over");
    }
}

Connection::Sink Node::OnPushHeader(Connection& connection, const Header& header) {
    if (connection.dialled()) return Connection::Sink::Fault(Code::kProtocol, "a push from a server");
    if (header.length > options_.packet_bytes) return Connection::Sink::Fault(Code::kProtocol, "a packet larger than packets are here");
    if (!aggregator_->Has(header.tensor)) {
        // whoever is ahead of this process waits, and holds up nobody but itself
        if (header.tensor < next_tensor_) return Connection::Sink::Fault(Code::kProtocol, "a packet of a tensor that is over");
        return Ahead(connection, header);
    }
    const char* why = "";
    const int64_t place = aggregator_->Admit(header, connection.peer, &why);
    if (place < 0) return Connection::Sink::Fault(place == Aggregator::kDisagrees ? Code::kMismatch : Code::kProtocol, why);
    if (connection.lane != aggregator_->LaneOf(header.tensor)) return Connection::Sink::Fault(Code::kProtocol, kOtherLane);
    connection.place = static_cast<uint32_t>(place);
    connection.receiving = aggregator_->Take();
    return Connection::Sink::Take(connection.receiving.data());
}

Connection::Sink Node::OnResultHeader(Connection& connection, const Header& header) {
    if (!connection.dialled()) return Connection::Sink::Fault(Code::kProtocol, "a result from a worker");
    if (IsAhead(header)) return Ahead(connection, header);
    Code code;
    const char* why;
    const int64_t bit = AdmitResult(header, connection.peer, &code, &why);
    if (bit < 0) return Connection::Sink::Fault(code, why);
    const Tensor& state = tensors_.at(header.tensor);
    if (connection.lane != state.spec.lane) return Connection::Sink::Fault(Code::kProtocol, kOtherLane);
    connection.place = static_cast<uint32_t>(bit);
    return Connection::Sink::Take(state.into + header.offset);
}

// Whether a result is one that this process waits for: its bit in Tensor::received, or -1 and why not.
int64_t Node::AdmitResult(const Header& header, uint32_t server, Code* code, const char** why) const {
    *code = Code::kProtocol;
    *why = "a result that nobody waits for";
    const auto found = tensors_.find(header.tensor);
    if (found == tensors_.end() || !found->second.under_way) return -1;
    const Tensor& state = found->second;
    const int64_t place = state.layout->Find(server, header.offset, header.length);
    if (!state.receives || header.iteration != state.iteration || place < 0) {
        if (state.spec.once) {
            *code = Code::kMismatch;
            *why = Aggregator::kAnotherMeaning;
        }
        return -1;
    }
    const uint64_t bit = state.layout->first[server] + static_cast<uint64_t>(place);
    *why = "the same packet a second time";
    return (state.received[bit / 64] >> (bit % 64) & 1) != 0 ? -1 : static_cast<int64_t>(bit);
}

// Of a tensor that this process will only come to. Its bytes are kept: to leave them in the socket would hold up what
// is behind them, which may be what this process waits for before it comes to that tensor.
Connection::Sink Node::Ahead(Connection& connection, const Header& header) {
    if (header.length > options_.packet_bytes) return Connection::Sink::Fault(Code::kProtocol, "a packet larger than packets are here");
    if (header.tensor >= next_tensor_ && header.tensor - next_tensor_ > options_.max_tensors) {
        return Connection::Sink::Fault(Code::kProtocol, "a tensor that cannot be");
    }
    if (early_buffers_.taken_bytes() + options_.packet_bytes > kEarlyBytes) {
        connection.parked_for = header.tensor;
        return Connection::Sink::Park();
    }
    connection.early = true;
    connection.receiving = early_buffers_.Take();
    return Connection::Sink::Take(connection.receiving.data());
}

// A push is ahead of a server that does not know its tensor; a result, also of a worker that has yet to say where to.
bool Node::IsAhead(const Header& header) const {
    if (header.tensor >= next_tensor_) return true;
    if (header.type == FrameType::kPush) return false;
    const auto found = tensors_.find(header.tensor);
    if (found == tensors_.end()) return false;
    const Tensor& state = found->second;
    return state.receives && !state.contributes && !state.under_way && !state.spec.once && header.iteration == state.pushes;
}

// What was kept of this tensor and can be used now.
void Node::TakeEarly(uint32_t tensor) {
    const auto found = early_.find(tensor);
    if (found == early_.end()) return;
    std::vector<Early> kept = std::move(found->second);
    early_.erase(found);
    for (Early& early : kept) {
        // a tensor is defined, and then pushed, under one lock: its results are ahead only until then
        if (early.header.type == FrameType::kResult && !tensors_.at(tensor).under_way) {
            early_[tensor].push_back(std::move(early));
        } else if (!OnEarly(std::move(early))) {
            return;
        }
    }
}

bool Node::OnEarly(Early early) {
    const Header& header = early.header;
    if (IsAhead(header)) {
        early_[header.tensor].push_back(std::move(early));
        return true;
    }
    const bool is_push = header.type == FrameType::kPush;
    Code code = Code::kProtocol;
    const char* why = "a packet of a tensor that is over";
    int64_t place = -1;
    if (!is_push) {
        place = AdmitResult(header, early.peer, &code, &why);
    } else if (aggregator_->Has(header.tensor)) {
        place = aggregator_->Admit(header, early.peer, &why);
        if (place == Aggregator::kDisagrees) code = Code::kMismatch;
    }
    if (place < 0) {
        const auto peer = static_cast<int32_t>(early.peer);
        Fail({code, is_push ? peer : -1, is_push ? -1 : peer, (is_push ? "rank " : "server ") + std::to_string(peer) + ": " + why});
        return false;
    }
    if (is_push) {
        aggregator_->Arrive(header.tensor, static_cast<uint32_t>(place), early.peer, std::move(early.payload), header.flags);
        return true;
    }
    Tensor& state = tensors_.at(header.tensor);
    std::memcpy(state.into + header.offset, early.payload.data(), header.length);
    state.received[static_cast<size_t>(place) / 64] |= uint64_t{1} << (place % 64);
    --state.unreceived;
    Settle(header.tensor, state);
    return true;
}

bool Node::OnFrame(Connection& connection, const Header& header) {
    if (connection.state == Connection::State::kGreeting) return OnGreeting(connection, header);
    if (connection.early) {
        connection.early = false;
        return OnEarly({connection.peer, header, std::move(connection.receiving)});
    }
    switch (header.type) {
        case FrameType::kPush:
            if (!aggregator_->Has(header.tensor)) {  // forgotten since its header came
                Lose(connection, Code::kProtocol, "a packet of a tensor that is over");
                return false;
            }
            aggregator_->Arrive(header.tensor, connection.place, connection.peer, std::move(connection.receiving),
                                header.flags);
            return true;
        case FrameType::kResult: {
            const auto found = tensors_.find(header.tensor);
            if (found == tensors_.end() || !found->second.under_way) return true;
            found->second.received[connection.place / 64] |= uint64_t{1} << (connection.place % 64);
            --found->second.unreceived;
            Settle(header.tensor, found->second);
            return true;
        }
        case FrameType::kDefine: return OnDefineFrame(connection, header);
        case FrameType::kRule: return OnRuleFrame(connection, header);
        case FrameType::kForget:
            for (auto each = told_.begin(); each != told_.end();) {
                if (each->first >= header.tensor) {
                    ++each;
                    continue;
                }
                defined_bytes_ -= Footprint(AsSpec(each->second), true);
                aggregator_->Forget(each->first);
                tensors_.erase(each->first);
                dealer_ = Dealer(options_.membership.servers);
                each = told_.erase(each);
            }
            return true;
        case FrameType::kAbort: {
            Reason reason = ReadReason(connection.control_payload(), header.length);
            Failure failure{reason.code, std::max(reason.rank, -1), reason.rank < -1 ? -2 - reason.rank : -1, std::move(reason.text)};
            if (reason.rank == -1) (connection.dialled() ? failure.server : failure.rank) = static_cast<int32_t>(connection.peer);
            Fail(std::move(failure));
            return false;
        }
        case FrameType::kGoodbye: OnGoodbye(connection); return true;
        default: return true;
    }
}

void Node::OnGoodbye(Connection& connection) {
    if (connection.left) return;
    connection.left = true;
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

bool Node::OnDefineFrame(Connection& connection, const Header& header) {
    const Definition define = DecodeDefinition(connection.control_payload());
    const auto told = told_.find(header.tensor);
    std::string difference;
    if (told != told_.end()) {
        if (told->second == define) return true;
        difference = "tensor " + std::to_string(header.tensor) + ": rank " + std::to_string(connection.peer) + " says " +
                     std::to_string(define.bytes) + " bytes of type " + std::to_string(define.dtype) + ", another said " +
                     std::to_string(told->second.bytes) + " of type " + std::to_string(told->second.dtype);
    } else if (header.tensor < next_tensor_) {
        return true;  // over already: this rank's word comes late
    } else if (!IsValidDType(define.dtype) || !IsValidOp(define.op) || define.from < kAll || define.to < kAll || define.at < kDealt ||
               !IsValidRuleKind(define.update) || define.from >= static_cast<int64_t>(options_.membership.world) ||
               define.to >= static_cast<int64_t>(options_.membership.world)) {
        difference = "tensor " + std::to_string(header.tensor) + ": a definition that cannot be";
    }
    if (!difference.empty()) {
        Fail({Code::kMismatch, static_cast<int32_t>(connection.peer), -1, difference});
        return false;
    }
    if (!DoDefine(header.tensor, AsSpec(define), nullptr, nullptr)) return false;
    told_.emplace(header.tensor, define);
    return true;
}

bool Node::OnRuleFrame(Connection& connection, const Header& header) {
    Rule rule;
    if (const char* why = DecodeRule(connection.control_payload(), &rule)) {
        Lose(connection, Code::kProtocol, why);
        return false;
    }
    aggregator_->SetRule(header.tensor, connection.peer, rule);
    return true;
}

// -- losing peers ----------------------------------------------------------------------------------------

std::string Node::NameOf(const Connection& connection) const {
    return (connection.dialled() ? "server " : "rank ") + std::to_string(connection.peer);
}

void Node::Lose(Connection& connection, Code code, const std::string& why) {
    const bool was_open = connection.state == Connection::State::kOpen;
    Failure failure{code, -1, -1, NameOf(connection) + " at " + connection.address + ": " + why};
    (connection.dialled() ? failure.server : failure.rank) = static_cast<int32_t>(connection.peer);
    const bool is_ours = (was_open || connection.dialled()) && !connection.left && !closing_ && !failed_;
    if (is_ours && was_open && code != Code::kDied) Tell(connection, failure);  // or it would take this for our end
    if (was_open) {
        auto& table = connection.dialled() ? to_server_ : to_worker_;
        table[connection.peer][connection.lane] = nullptr;
    } else if (!connection.dialled()) {
        ++stats_.refused;  // a stranger: not this job's business
    }
    stats_.sent_bytes += connection.sent_bytes;
    stats_.received_bytes += connection.received_bytes;
    stats_.sent_packets += connection.sent_packets;
    stats_.received_packets += connection.received_packets;
    connection.sent_bytes = connection.received_bytes = connection.sent_packets = connection.received_packets = 0;
    connection.Drop();
    if (is_ours) Fail(std::move(failure));
}

// Best effort: whoever does not get it sees the end of the connection.
void Node::Tell(Connection& connection, const Failure& failure) {
    const int32_t blamed = failure.rank >= 0 ? failure.rank : failure.server >= 0 ? -2 - failure.server : -1;
    connection.Abandon();
    connection.QueueControl(ReasonFrame(FrameType::kAbort, connection.sender, failure.code, blamed, failure.text));
    connection.Write(*this, kInlineBytes, now_ns_);
    Watch(connection, connection.has_output());
}

void Node::Fail(Failure failure) {
    if (failed_) return;
    failed_ = true;
    for (const auto& connection : connections_) {
        if (connection->state == Connection::State::kOpen) Tell(*connection, failure);
    }
    std::lock_guard guard(done_mutex_);
    failure_ = std::move(failure);
    done_.notify_all();
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

// -- the I/O thread --------------------------------------------------------------------------------------

void Node::Touch(Connection& connection) {
    if (connection.touched || connection.state == Connection::State::kClosed) return;
    connection.touched = true;
    touched_.push_back(&connection);
}

void Node::FlushTouched(size_t budget) {
    // writing may touch others (a sum that ends), which then are in the list too
    for (size_t i = 0; i < touched_.size(); ++i) {
        if (touched_[i]->touched) WriteTo(*touched_[i], budget);
    }
    touched_.clear();
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
        connection->checksum = options_.checksum;
        connection->opened_ns = connection->heard_ns = connection->sent_ns = now_ns_;
        connection->as_server =
            std::make_unique<ServerGreeting>(&options_.membership, static_cast<uint32_t>(options_.server), FreshNonce());
        connections_.push_back(std::move(connection));
        Connection& added = *connections_.back();
        epoll_event event{};
        event.events = added.interest = EPOLLIN;
        event.data.ptr = &added;
        epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, added.socket().get(), &event);
    }
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

void Node::Tick(int64_t now_ns) {
    const int64_t ping_ns = int64_t{options_.ping_ms} * 1'000'000, dead_ns = int64_t{options_.dead_ms} * 1'000'000;
    // after a stop of this process (a debugger, SIGSTOP, a sleeping machine) the silence was ours
    const bool was_away = now_ns - ticked_ns_ > ping_ns + 1'000'000'000;
    ticked_ns_ = now_ns;
    if (!hears_) Hear(true);
    for (const auto& connection : connections_) {
        if (connection->state == Connection::State::kClosed) continue;
        if (was_away) connection->heard_ns = now_ns;
        if (connection->parked()) {
            // nothing is read from it, but its host acknowledges pings. Where pings cannot leave, since the peer does
            // not read either, silence means nothing.
            connection->heard_ns = now_ns - (connection->has_output() ? 0 : NanosecondsSinceAck(connection->socket()));
        }
        if (connection->state != Connection::State::kOpen) {
            if (now_ns - connection->opened_ns > int64_t{options_.greeting_ms} * 1'000'000) {
                Lose(*connection, Code::kTimeout, "no end of the greeting within " + std::to_string(options_.greeting_ms) + " ms");
            }
            continue;
        }
        if (connection->left) continue;
        if (now_ns - connection->heard_ns > dead_ns) {
            Lose(*connection, Code::kStalled, "has said nothing for " + std::to_string((now_ns - connection->heard_ns) / 1'000'000) +
                                                  " ms, though it is connected");
            continue;
        }
        if (now_ns - connection->sent_ns > ping_ns - 1'000'000 && !connection->has_output()) {
            connection->QueueControl(ControlFrame(FrameType::kPing, connection->sender, 0, nullptr, 0));
            Touch(*connection);
        }
    }
    if (left_ns_ != 0 && !failed_ && now_ns - left_ns_ > dead_ns) {
        bool waits = options_.rank < 0 && aggregator_->IsWaiting();
        if (options_.rank >= 0) {
            std::lock_guard guard(done_mutex_);
            waits = !open_.empty();
        }
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
        if (what == &wake_) {
            uint64_t count;
            (void)!read(wake_.get(), &count, sizeof count);
        } else if (what == &listener_) {
            AcceptAll();
        } else {
            OnEvent(*static_cast<Connection*>(what), events[i].events);
            SweepOver();
            FlushTouched(kWriteBudget);
        }
    }
    ReadResumed();  // a definition may have come: no event tells of what waited for it, and Reap() may free it
    const bool working = aggregator_ && aggregator_->Work(kWorkBytes);
    SweepOver();
    if (now_ns_ - ticked_ns_ >= tick_ns()) Tick(now_ns_);
    FlushTouched(kWriteBudget);
    Reap();
    return working;
}

void Node::Loop() {
    std::vector<epoll_event> events(64);
    int64_t stop_by_ns = 0;
    bool working = false;
    while (true) {
        const int64_t until_tick = ticked_ns_ + tick_ns() - Now();
        const int timeout = working ? 0 : static_cast<int>(std::clamp<int64_t>(until_tick / 1'000'000 + 1, 0, 1000));
        const int n = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), stop_by_ns != 0 ? std::min(timeout, 10) : timeout);
        std::lock_guard guard(mutex_);
        ++stats_.wakeups;
        working = Turn(events.data(), std::max(n, 0));
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
            if (connection->has_output()) {
                waits = true;  // after a failure, its reason
            } else if (failed_) {
                continue;
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
    listener_ = Fd();
    reserve_ = Fd();
    epoll_ = Fd();
}

}  // namespace gradlane
