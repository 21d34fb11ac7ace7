// Node: one process's part in the data plane: a worker, a server, or both, with one thread that
// does all I/O.
//
// A worker registers tensors (Define) and hands them over, iteration after iteration (Push). The
// node sends their packets to the servers, in the order of packet_queue.h, and Wait returns when
// the sums are in the tensor's memory. A server sums the packets that arrive and returns the sums.
// A worker and a server in one process exchange packets without a socket.
//
// Threads: any thread may call the methods below. One lock guards the state; the I/O thread holds
// it while it works and not while it sleeps. Every call becomes a Command. If the lock is free, the
// calling thread takes it, runs the commands and makes a small message's first write at once, which
// saves a wake-up; otherwise the I/O thread runs them.
//
// The code is in node.cc (life, calls and waits), node_tensors.cc (what the commands do), node_messages.cc,
// node_shared.cc (the memory of a host), node_peers.cc (meeting and losing peers), node_frames.cc (frames from
// peers) and node_io.cc (the I/O thread).
//
// Errors: the first failure stands (failure()); every wait ends with it, and the node tells every
// other process. Before failure() has it and before a wait ends with it, the node has let go of the memory of all
// tensors and transfers that are not done: it neither writes to it nor reads from it again. An exception (no memory) is
// a failure too, after which the node does nothing more than tell it.

#pragma once

#include <sys/epoll.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

#include "net/socket.h"
#include "node/aggregator.h"
#include "node/connection.h"
#include "node/engine.h"
#include "node/greeting.h"
#include "node/hosts.h"
#include "node/mailboxes.h"
#include "node/messages.h"
#include "node/shared_sums.h"

namespace gradlane {

struct LaneMark {
    uint8_t dscp = 0, priority = 0;
};

struct NodeOptions {
    int32_t rank = -1;    // of the worker in this process; -1: none
    int32_t server = -1;  // index of the server in this process; -1: none
    Membership membership;
    std::string address = "127.0.0.1";  // to listen on, where there is a server
    uint16_t port = 0;                  // 0: any free one
    uint32_t packet_bytes = 30 << 10;   // a multiple of 64
    Order order = Order::kArrival;
    bool checksum = true;
    // Deal each tensor's packets evenly over the servers, not those of all tensors together, and let
    // connections take turns (node_io.cc).
    bool deal_evenly = false;
    bool tell_tables = false;  // servers in processes without a worker learn tensors from Define frames
    SocketOptions socket;
    std::vector<LaneMark> marks = {LaneMark{}};  // one a lane
    uint32_t ping_ms = 500, dead_ms = 2500, linger_ms = 2000;
    // How long meeting a peer may take: all attempts to dial it, and greetings on both sides while a peer is missing.
    // Once all are here, a caller has kStrangerMs.
    uint32_t greeting_ms = 5000;
    // Of the worker's tensors, and of the memory that the server here may need for all it is told of.
    uint64_t max_bytes = uint64_t{1} << 40;
    uint32_t max_tensors = 1 << 20;
};

struct Failure {
    Code code = Code::kNone;
    int32_t rank = -1;    // of the worker to blame, or -1
    int32_t server = -1;  // index of the server to blame, or -1
    std::string text;
};

struct NodeStats {
    uint64_t sent_bytes = 0, received_bytes = 0, sent_packets = 0, received_packets = 0;
    uint64_t held_bytes = 0, most_held_bytes = 0;  // packet buffers of the server
    uint64_t refused = 0;                          // connections that were closed before they were let in
    uint64_t wakeups = 0;
};

class Node : private Connection::Owner, private Outbox, private Messages::Post, private Mailboxes::Owner {
  public:
    // Starts the I/O thread and, if there is a server in this process, begins to listen. Returns
    // null if the options or the system do not allow it; `why` then has the reason.
    static std::unique_ptr<Node> Start(NodeOptions options, Failure* why);
    ~Node() override;

    // The port that the server listens on; 0 without a server.
    uint16_t port() const { return port_; }

    // Connects the worker to a server in another process, with one connection a lane. If that
    // fails, the node fails.
    void Dial(uint32_t server, const std::string& address, uint16_t port);

    // Waits until every connection of this node is open. Returns false after timeout_ms, with what
    // is missing in `missing`, or after a failure.
    bool Join(int64_t timeout_ms, std::string* missing);

    // From now on, what SharedSums takes of the tensors goes through the memory of this host, and between hosts only
    // once for each of them (node_shared.cc); and so do all messages, if all workers are on this host. All workers of
    // the job call this after Join and before they define or start a tensor or send a message.
    //   room: the workers of this host. Its segment has HostBytesFor(ranks).
    //   host_of: by rank, the number of its host. Every host has equally many.
    void Share(HostRoom room, const std::vector<uint32_t>& host_of);
    static size_t HostBytesFor(uint32_t ranks) { return SharedSums::BytesFor(ranks) + Mailboxes::BytesFor(ranks); }

    // Registers a tensor. Ids grow by one from 0.
    //   from, into: the worker's memory that is sent and that the sum goes to, `spec.bytes` each.
    //     They may be the same; either is null if the spec makes no use of it. The memory must stay
    //     until ForgetBelow or, of a tensor that is defined once, until the tensor is done.
    void Define(uint32_t tensor, const Spec& spec, const void* from, void* into);
    // Hands over the worker's part of the next iteration of `tensor`, which is in memory.
    //   notify: Take() tells when the tensor is done.
    //   notify_sent: Take() tells, before that, when the kernel has all of the worker's part.
    //   flags: 0, or, of a tensor with an update and where this iteration has no gradient,
    //     kFlagQuiet or kFlagPlace with FlagsOf(a part).
    //   held: the server in this process keeps its sums of the tensor until Release, and nothing
    //     tells that the tensor is done before that.
    void Push(uint32_t tensor, bool notify, bool notify_sent = false, uint16_t flags = 0, bool held = false);
    // Lets go of what a Push held.
    void Release(uint32_t tensor);
    // Sets how this worker's gradients update the tensors of a group, from the next push on. None
    // of the group's tensors may be in flight. The first push of such a tensor needs no rule: it
    // brings the parameters' first values, of which the servers take rank 0's.
    void SetRule(uint32_t group, const Rule& rule);
    // Define and Push in one call, for a tensor that is defined once.
    void Start(uint32_t tensor, const Spec& spec, const void* from, void* into, bool notify);
    // What goes to another worker and what comes from it. Either may be of no bytes.
    struct ExchangePart {
        uint32_t rank = 0;
        DType from_dtype = DType::kU8, into_dtype = DType::kU8;  // both sides give the same one
        const uint8_t* from = nullptr;
        uint64_t from_bytes = 0;
        uint8_t* into = nullptr;
        uint64_t into_bytes = 0;
    };
    // Sends every other worker a part and receives one from each. It takes the id of a tensor that is defined once, and Wait
    // and IsDone know it; its parts are messages (messages.h) with tags of their own.
    void Exchange(uint32_t tensor, uint32_t priority, std::vector<ExchangePart> parts);
    // Ends every tensor whose id is below `tensor`. None of them may be in flight.
    void ForgetBelow(uint32_t tensor);

    // Waits until the pushed `tensor` is done: the sum is in its memory, and the node does not read
    // the memory any more. Returns false after timeout_ms or a failure.
    bool Wait(uint32_t tensor, int64_t timeout_ms);
    bool IsDone(uint32_t tensor);
    // Waits for the first event, and returns all events since the last call, in order: the id of
    // each tensor that is done, and ~id of each whose part has been sent. Returns nothing after
    // timeout_ms, a failure or Close.
    std::vector<int64_t> Take(int64_t timeout_ms);

    // Messages between two workers whose processes have the servers of the same numbers.
    // Tags are below kExchangeTags. Messages with the same source and tag arrive in the order they were sent.
    // The memory must stay until the transfer is over.
    std::shared_ptr<Transfer> Send(uint32_t rank, uint32_t tag, uint32_t priority, const void* from, uint64_t bytes);
    // from: a rank, or kAnyone. A message of another size than `bytes` fails the node.
    std::shared_ptr<Transfer> Receive(int32_t from, uint32_t tag, void* into, uint64_t bytes);
    // Returns false after timeout_ms or a failure.
    bool WaitFor(const Transfer& transfer, int64_t timeout_ms);
    // Returns Transfer::rank.
    int32_t IsOver(const Transfer& transfer, bool* over);

    // Carries out a plan from now on, in place of the one before, of which nothing may be under way. The
    // engine's messages are one or more tensors each that were defined; Take() does not tell of them.
    void CarryOut(std::shared_ptr<Engine> engine);
    // A new iteration of the plan; all messages of the one before have arrived.
    void Begin(int64_t iteration);
    // The gradient of a tensor of the plan is in its memory, or it has none in this iteration (`lacks`), where servers
    // update it. Returns the time, in ns of the monotonic clock.
    int64_t Ready(uint32_t tensor, bool lacks = false);
    // No more gradients follow for now: what is ready is sent at once.
    void Flush();
    // Engine::Wait, for a thread that has nothing else to do: it sends what is ready at once.
    bool WaitArrived(int64_t tensor, uint64_t interruptions, int64_t timeout_ms);
    // What the engine has noted; see Engine.
    std::vector<Engine::Span> Spans(bool last);
    std::vector<Engine::Fact> Facts();
    Dispatcher::State EngineState();

    // Waits until every worker that is connected to this server has said goodbye. Returns false
    // after timeout_ms, a failure or Close.
    bool AwaitGoodbyes(int64_t timeout_ms);

    // Says that this process cannot go on: fails this node and every other one of the job. When it returns, the node has
    // failed.
    void Abort(const std::string& text);
    // The first failure; its code is kNone while there is none.
    Failure failure();
    NodeStats stats();

    // Sends what is queued, says goodbye and ends the thread, within about linger_ms.
    void Close();

  private:
    friend class NodeSeam;  // fuzz/seam.h: a node without its thread

    // What a calling thread writes before it leaves the rest to the I/O thread.
    static constexpr size_t kInlineBytes = 64 << 10;
    // What the I/O thread writes to one connection before it turns to the next.
    static constexpr size_t kWriteBudget = 1 << 20;

    static constexpr uint32_t kSmallestCut = 4 << 10;   // a tensor smaller than this is not cut: a packet has its price
    static constexpr size_t kReserveBytes = 256 << 10;  // an ABORT for each connection of a large job
    static constexpr int64_t kLingerNs = 300'000;     // how long a gradient that is ready may wait for others to go with it

    static int64_t Now();

    struct Tensor {
        Spec spec;
        std::shared_ptr<const Layout> layout;
        uint64_t needed_bytes = 0;  // that it was admitted with
        const uint8_t* from = nullptr;
        uint8_t* into = nullptr;
        bool contributes = false, receives = false;
        bool shared = false;           // it goes through the memory of this host
        std::vector<SharedSums::Way> ways;  // in which it does, where it does so more than once
        bool adds_first = false;       // the first of them comes before the rail's exchange
        uint32_t ways_left = 0;        // that it has yet to go
        bool awaited = false;          // the last of them waits for what the rail exchanges, or for Release
        bool given = false;            // what this rank gives is on its way
        std::unique_ptr<uint8_t[]> scratch;  // this host's sum, where the worker here does not get the result
        bool under_way = false, notify = false, notify_sent = false, held = false;
        bool by_engine = false;  // the plan has started it, and hears of it
        uint32_t iteration = 0;  // of the push under way
        uint32_t pushes = 0;
        uint32_t unsent = 0, unreceived = 0;  // packets; unsent counts what servers have yet to say, too
        std::vector<bool> unheard;            // by server: whether it has yet to say that it has its packets
        std::vector<uint64_t> received;       // a bit a packet, in the order of Layout::first
    };
    // A call of a method above, with its arguments, until a thread that has the lock runs it.
    struct DialCommand {
        uint32_t server = 0;
        std::string address;
        uint16_t port = 0;
    };
    struct DefineCommand {
        uint32_t tensor = 0;
        Spec spec;
        const uint8_t* from = nullptr;
        uint8_t* into = nullptr;
    };
    struct PushCommand {
        uint32_t tensor = 0;
        bool notify = false, notify_sent = false;
        uint16_t flags = 0;
        bool held = false, by_engine = false;
    };
    struct StartCommand {
        DefineCommand define;
        PushCommand push;
    };
    struct ExchangeCommand {
        uint32_t tensor = 0, priority = 0;
        std::vector<ExchangePart> parts;
    };
    struct ReleaseCommand {
        uint32_t tensor = 0;
    };
    struct SetRuleCommand {
        uint32_t group = 0;
        Rule rule{};
    };
    struct ForgetCommand {
        uint32_t below = 0;
    };
    struct SendCommand {
        std::shared_ptr<Transfer> transfer;
        uint32_t rank = 0, tag = 0, priority = 0;
        const uint8_t* from = nullptr;
        uint64_t bytes = 0;
    };
    struct ReceiveCommand {
        std::shared_ptr<Transfer> transfer;
        int32_t from = kAnyone;
        uint32_t tag = 0;
        uint8_t* into = nullptr;
        uint64_t bytes = 0;
    };
    struct AbortCommand {
        std::string text;
    };
    struct CarryOutCommand {
        std::shared_ptr<Engine> engine;
    };
    struct BeginCommand {
        int64_t iteration = 0;
    };
    struct ReadyCommand {
        uint32_t tensor = 0;
        int64_t at_ns = 0;
        bool lacks = false;
    };
    using Command = std::variant<DialCommand, DefineCommand, PushCommand, StartCommand, ReleaseCommand, SetRuleCommand,
                                 ForgetCommand, AbortCommand, SendCommand, ReceiveCommand, ExchangeCommand, CarryOutCommand, BeginCommand, ReadyCommand>;

    // A packet that has come before this process can use it: a push of a tensor that is not
    // registered here yet, or a result before the worker has said where it goes.
    struct Early {
        uint32_t peer;
        Header header;
        BufferRef payload;
    };

    // To connect with a server; one that the server has hung up on is made again at the next tick.
    struct Attempt {
        uint32_t server;
        uint16_t lane;
        Target target;
        int64_t greeted_by_ns;
    };

    Node(NodeOptions options, Fd listener);

    // Connection::Owner
    Connection::Sink OnHeader(Connection& connection, const Header& header) override;
    bool OnFrame(Connection& connection, const Header& header) override;
    void OnSent(Connection& connection, const Header& header) override;
    bool OnReceived(const Connection& connection, const Header& header);
    bool IsTurn(const Connection& connection) override;
    // Outbox
    void Return(uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place,
                uint32_t iteration, BufferRef sum) override;
    void ReturnTo(uint32_t rank, uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place,
                  uint32_t iteration, BufferRef parameters) override;
    void Delivered(uint32_t tensor, uint32_t packets) override;
    void Consumed(uint32_t tensor, uint32_t packets) override;
    void Over(uint32_t tensor) override { summed_.push_back(tensor); }
    void Disagree(uint32_t rank, const std::string& text) override { Fail({Code::kMismatch, static_cast<int32_t>(rank), -1, text}); }

    // Messages::Post
    void PostRun(uint32_t rank, uint32_t priority, Run run) override;
    void PostAnswer(uint32_t rank, FrameType type, uint32_t number) override;
    void Ended(Transfer& transfer, int32_t rank) override;
    void Mismatch(uint32_t rank, const std::string& text) override;
    // Mailboxes::Owner
    Connection::Sink OnMailHeader(uint32_t rank, const Header& header) override;
    const char* OnMailFrame(uint32_t rank, const Header& header) override;
    void OnMailSent(uint32_t rank, const Header& header) override;
    void OnMailFault(uint32_t rank, Code code, const char* why) override;

    void Submit(Command command);
    void RunOrWake();
    bool IsCommandPending();
    // As Submit, but the calling thread does nothing itself, and the I/O thread may wait for more of the
    // kind. bytes: that will be sent of it; with none it is run with the command that follows.
    void SubmitSoon(Command command, uint64_t bytes);
    void RunCommands(bool inline_call);
    void Do(const DialCommand& command);
    bool Do(const DefineCommand& command);  // false: the node has failed
    void Do(const PushCommand& command);
    void Do(const StartCommand& command);
    void Do(const ReleaseCommand& command);
    void Do(const SetRuleCommand& command);
    void Do(const ForgetCommand& command);
    void Do(const AbortCommand& command);
    bool CanExchange(int64_t rank, uint32_t others);
    void Do(const SendCommand& command);
    void Do(const ReceiveCommand& command);
    void Do(const ExchangeCommand& command);
    bool IsOfNoExchange(uint32_t rank, const Header& header) const;
    bool IsExchangedByOthers(uint32_t tensor);
    void Do(const CarryOutCommand& command);
    void Do(const BeginCommand& command);
    void Do(const ReadyCommand& command);
    void StartMessages();
    bool RunEngine();
    void QueueResult(uint32_t rank, uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout,
                     uint32_t place, uint32_t iteration, BufferRef result, uint32_t crc);
    uint32_t ChecksumOf(const Layout& layout, uint32_t place, const BufferRef& result) const;
    struct Route;
    int32_t OwnerOf(uint32_t tensor, const Spec& spec) const;
    Route RouteOf(const DefineCommand& define) const;
    std::shared_ptr<const Layout> CutForRail(uint32_t tensor, const Spec& spec) const;
    bool RegisterShared(const DefineCommand& define);
    void PushShared(uint32_t tensor, Tensor& state);
    bool Refuse(uint32_t tensor, const Spec& spec);
    bool LetGoOfWaiting();
    void Contribute(uint32_t tensor, Tensor& state, uint16_t flags);
    bool RunShared(uint64_t bytes);
    bool RestShared();
    bool RunMail(uint64_t bytes);
    bool SendMail(uint64_t bytes);
    bool RestMail();
    bool Attend(Mailboxes& mail, const Transfer& transfer, int64_t end_ns);
    void HearLast();
    void TellWaiting();
    std::shared_ptr<const Layout> Cut(uint32_t tensor, const Spec& spec);
    std::shared_ptr<const Layout> CutAlone(uint32_t tensor, uint64_t bytes, uint32_t servers, int32_t at) const;
    bool Register(const DefineCommand& command, int32_t teller);  // teller: the rank that a server has it from, or -1
    bool Admit(const DefineCommand& command, int32_t teller, Tensor* state);
    void Sent(uint32_t tensor, Tensor& state);
    void Settle(uint32_t tensor, Tensor& state);
    void SweepOver();

    void Loop();
    // Does `work`, which is all that the node does under its lock; an exception becomes the node's failure.
    template <typename Work>
    void Guarded(Work work) {
        try {
            work();
        } catch (const std::exception& error) {
            Break(error.what());
        }
    }
    void Break(const char* why) noexcept;
    bool Drain() noexcept;
    int Sleep(std::vector<epoll_event>& events, int timeout_ms);
    bool Turn(const epoll_event* events, int n);
    int64_t tick_ns() const { return int64_t{options_.ping_ms} * 500'000; }
    void OnEvent(Connection& connection, uint32_t events);
    void AcceptAll();
    void Add(std::unique_ptr<Connection> connection, uint32_t interest);
    void Hear(bool callers);
    void ReadFrom(Connection& connection);
    void WriteTo(Connection& connection, size_t budget);
    bool FlushTouched(size_t budget);
    void ResumeParked(uint32_t tensor);
    void ReadResumed();
    void Wake();   // the I/O thread does what there is to do at once,
    void Nudge();  // or waits a little for more
    void Touch(Connection& connection);
    void Queue(Connection& connection, uint32_t priority, Run run, bool among_sums = false);
    bool IsStuck(const Connection& connection) const;
    void FindLeastTurn(const Connection* asking);
    bool GoesFirst(const Connection& connection) const;
    bool PassTurns();
    void Watch(Connection& connection, bool output);
    void Tick(int64_t now_ns);
    void Reap();

    Connection::Sink OnPushHeader(Connection& connection, const Header& header);
    Connection::Sink OnResultHeader(Connection& connection, const Header& header);
    Connection::Sink OnMessageHeader(Connection& connection, const Header& header);
    bool OnMessageFrame(Connection& connection, const Header& header);
    Connection::Sink Ahead(Connection& connection, const Header& header);
    bool OnEarly(Early early);
    Code OverCode() const;
    const char* OverText() const;
    bool IsAhead(const Header& header) const;
    int64_t AdmitResult(const Header& header, uint32_t server, Code* code, const char** why) const;
    void TakeEarly(uint32_t tensor);
    void Try(Attempt attempt);
    Connection* WhoMakesRoom(uint64_t origin);
    void HangUpOnLate(Connection& connection, int64_t now_ns, bool is_joined);
    bool OnGreeting(Connection& connection, const Header& header);
    void OnGoodbye(Connection& connection);
    bool OnDefineFrame(Connection& connection, const Header& header);
    bool OnForgetFrame(Connection& connection, const Header& header);
    bool OnRuleFrame(Connection& connection, const Header& header);
    bool Opened(Connection& connection);
    void Lose(Connection& connection, Code code, const std::string& why);
    void End(Connection& connection);
    bool LetGo(Connection& connection) noexcept;
    void LetGoOfAll() noexcept;
    void Tell(Connection& connection, const Failure& failure);
    void Fail(Failure failure);
    std::string NameOf(const Connection& connection) const;
    std::string NameOfServer(uint32_t server) const;
    Failure Told(const Connection& connection, Reason reason) const;
    uint32_t missing_connections() const;

    bool IsShared(uint32_t tensor) const;
    // Whether no wait for `transfer` has to go on.
    bool IsEnded(const Transfer& transfer) const { return transfer.over || failure_.code != Code::kNone || over_all_; }

    const NodeOptions options_;
    const pid_t pid_;  // of the process that has the I/O thread; a fork of it has none
    Fd listener_, epoll_, wake_, reserve_;
    uint16_t port_ = 0;
    std::thread thread_;

    std::mutex mutex_;  // guards everything down to the next mutex
    BufferPool early_buffers_;
    std::unordered_map<uint32_t, std::vector<Early>> early_;
    std::unique_ptr<SharedSums> shared_;  // null: all goes over the connections
    std::unique_ptr<Hosts> hosts_;        // where there is shared_
    std::unique_ptr<Aggregator> aggregator_;  // before the connections, which hold buffers of its pools
    std::unique_ptr<Messages> messages_;      // where this process has a worker and the server of the same number
    struct Exchanged {
        uint32_t left = 0;                // transfers
        std::vector<DType> into_dtypes;  // by rank
    };
    std::unordered_map<uint32_t, Exchanged> exchanges_;  // that are under way
    std::list<std::unique_ptr<Connection>> connections_;
    std::vector<std::vector<Connection*>> to_server_, to_worker_;  // by peer and lane; null: not open
    std::vector<Connection*> touched_;
    // Turns between connections: taken_bytes() of the one that took a packet last, and the least of
    // any that has packets (or less), with the priority of what that one sends next.
    uint64_t turn_ = 0, least_turn_ = 0;
    uint32_t least_priority_ = 0;
    bool turn_awaited_ = false;  // a connection awaits its turn
    std::unordered_map<uint32_t, Tensor> tensors_;
    Dealer dealer_;
    uint32_t next_tensor_ = 0;  // ids below this have been defined
    uint64_t defined_bytes_ = 0;
    std::unordered_map<uint32_t, Rule> rules_;  // of this worker, by group
    // In a server without a worker: each tensor as the first worker to tell of it has defined it.
    std::unordered_map<uint32_t, Definition> told_;
    // Tensors that were defined once and are done for the worker here, or summed by the server
    // here. SweepOver() forgets them when no call further up uses their state.
    std::vector<uint32_t> over_, summed_;
    // Connections that read again after they were parked. They may have input that they have
    // already taken from the kernel, so that epoll does not report it.
    std::vector<Connection*> resumed_;
    std::vector<Attempt> attempts_;
    // In a server without a worker: the ranks that were the first to end tensors, each with the id that its tensors
    // are below. Of ids below remembered_from_ it is forgotten.
    std::deque<std::pair<uint32_t, uint32_t>> ended_by_;
    uint32_t remembered_from_ = 0;
    uint64_t served_ = 0, most_served_ = 0;  // there, too: packets here of all tensors that it was told of, now and at most
    bool failed_ = false, closing_ = false, hears_ = true;
    int64_t failed_ns_ = 0;                 // when it failed
    bool broken_ = false;                   // by an exception: nothing but what is queued is sent
    std::unique_ptr<uint8_t[]> reserve_bytes_;  // given back where memory has run out, to say so with
    int64_t left_ns_ = 0;  // when the first peer left in order; 0: none has
    std::vector<bool> left_;  // by rank: the worker has said goodbye
    std::string left_name_;
    int32_t left_rank_ = -1, left_server_ = -1;
    std::shared_ptr<Engine> engine_;
    std::vector<int64_t> ended_;    // what the engine is to hear: a tensor that is done, ~tensor: sent
    Dispatcher::Starts to_start_;   // what it has answered
    size_t goodbyes_ = 0;  // connections whose peer has left in order
    int64_t ticked_ns_ = 0, now_ns_ = 0;
    NodeStats stats_;

    std::mutex command_mutex_;  // taken after mutex_ or alone
    std::deque<Command> commands_;
    uint64_t soon_bytes_ = 0;  // of commands that may wait for others

    std::mutex done_mutex_;  // taken last
    std::condition_variable done_;
    std::shared_ptr<Mailboxes> mail_;     // null: messages go over the connections; set under both mutexes, used under mutex_
    std::atomic<bool> attended_{false};  // by a thread that waits for a message; set under done_mutex_
    std::shared_ptr<Engine> awaited_;  // whose waits a failure ends
    std::unordered_set<uint32_t> open_;  // pushed and not done
    std::deque<int64_t> finished_;  // ~tensor: sent
    Failure failure_;
    bool joined_ = false, all_left_ = false, over_all_ = false;
    std::string missing_;

    std::atomic<bool> stop_{false};
    std::atomic<bool> wake_pending_{false};  // the I/O thread was woken and has not heard it yet
    std::atomic<bool> urgent_{false};        // and is not to wait for more
    std::atomic<bool> lingering_{false};     // it waits for more, and will see whatever comes
};

}  // namespace gradlane
