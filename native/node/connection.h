// Connection: frames over one TCP connection. When it reads, it puts each payload where its owner
// says, straight from the kernel. When it writes, it asks its PacketQueue for the next packets only
// when the socket can take them.
//
// A connection knows frames, not what they mean. It is owned by one node and used under the node's
// lock.

#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "net/socket.h"
#include "node/greeting.h"
#include "node/packet_queue.h"
#include "wire/frame.h"

namespace gradlane {

// Where a connection leads, to dial it again.
struct Target {
    std::string host;
    uint16_t port = 0;  // 0: it cannot be dialled again
    uint32_t attempts = 0;
};

class Connection {
  public:
    enum class State : uint8_t { kConnecting, kGreeting, kOpen, kClosed };

    // Where the payload of a frame goes, or why it is not taken.
    struct Sink {
        enum class Kind : uint8_t { kTake, kDrop, kPark, kFault } kind = Kind::kTake;
        uint8_t* into = nullptr;
        Code code = Code::kProtocol;
        const char* why = "";
        static Sink Take(uint8_t* into) { return {Kind::kTake, into, Code::kNone, ""}; }
        // The payload is read and goes nowhere, and nobody hears of the frame.
        static Sink Drop() { return {Kind::kDrop, nullptr, Code::kNone, ""}; }
        static Sink Park() { return {Kind::kPark, nullptr, Code::kNone, ""}; }
        static Sink Fault(Code code, const char* why) { return {Kind::kFault, nullptr, code, why}; }
    };

    class Owner {
      public:
        virtual ~Owner() = default;
        // A header has come. Sink::Park: the connection reads nothing until Resume(), and then asks
        // again.
        virtual Sink OnHeader(Connection& connection, const Header& header) = 0;
        // A frame has come whole and its checksum holds. Returns false if the connection was
        // closed, so that it stops reading.
        virtual bool OnFrame(Connection& connection, const Header& header) = 0;
        // A packet of a push or a message has been copied into the kernel: its memory is not read again.
        virtual void OnSent(Connection& connection, const Header& header) = 0;
        // Whether the connection may take its next packet now. If not, it takes none until it is
        // written to again.
        virtual bool IsTurn(const Connection& connection) = 0;
    };

    enum class Io : uint8_t {
        kDone,     // nothing more to read or write for now
        kBlocked,  // writing: the socket is full
        kMore,     // the budget is used up
        kParked,
        kEnd,    // the peer closed
        kFault,  // code() and why()
    };

    Connection(Fd socket, bool dialled, State state) : socket_(std::move(socket)), dialled_(dialled), state(state) {}

    Io Read(Owner& owner, size_t budget, int64_t now_ns);
    Io Write(Owner& owner, size_t budget, int64_t now_ns);

    void Queue(uint32_t priority, Run run, bool among_sums = false) {
        among_sums ? queue_.PutSums(priority, std::move(run)) : queue_.Put(priority, std::move(run));
    }
    void QueueControl(const std::vector<uint8_t>& frame) { control_.insert(control_.end(), frame.begin(), frame.end()); }
    bool has_output() const { return has_packets() || !control_.empty() || batch_left_ != 0; }
    uint32_t priority() const { return queue_.priority(); }  // of the next packet
    size_t queued_packets() const { return queue_.packets(); }
    bool has_packets() const { return !queue_.empty() || batch_packets_ != 0; }
    bool awaits_turn() const { return awaits_turn_; }  // it has packets, and Owner::IsTurn has said no
    bool can_ping() const { return !has_output() || awaits_turn_; }  // the socket has room
    uint64_t taken_bytes() const { return taken_bytes_; }  // of payloads, and what Forgo() added
    // Counts as if at least this much had been taken.
    void Forgo(uint64_t bytes) { taken_bytes_ = std::max(taken_bytes_, bytes); }
    // From now on no memory of the owner's is used: drops what is queued, keeps the rest of what has begun to be sent here,
    // and drops the rest of the packet that is coming. Throws std::bad_alloc where there is no memory to keep it.
    void LetGo();
    void Resume() { parked_ = false; }
    void Drop();  // closes the socket and drops what was queued

    const Fd& socket() const { return socket_; }
    bool dialled() const { return dialled_; }
    bool parked() const { return parked_; }
    bool awaits_rest() const { return awaited_ > 1; }  // the poller does not tell of every byte
    Code code() const { return code_; }
    const std::string& why() const { return why_; }
    uint8_t* control_payload() { return control_payload_.data(); }

  private:
    // One read takes many small frames into the stage. Large payloads are read past it.
    static constexpr size_t kStageBytes = 4096;
    static constexpr size_t kBatch = 16;  // packets in one call to the kernel, when they are small
    // A packet is of use only when it is whole, so the poller need not tell of each part. Of a larger one it tells
    // twice or more, so that the kernel's buffer need not hold it.
    static constexpr size_t kMostAwaited = 256 << 10;
    // A larger batch would choose packets too early.
    static constexpr size_t kBatchBytes = 24 << 10;

    Io Parse(Owner& owner);
    Io Fault(Code code, std::string why);
    void Received(size_t bytes);
    void AwaitRest();
    void FillBatch(Owner& owner);

    Fd socket_;
    const bool dialled_;
    bool parked_ = false;
    Code code_ = Code::kNone;
    std::string why_;

    // reading
    std::array<uint8_t, kStageBytes> stage_;
    size_t stage_begin_ = 0, stage_end_ = 0;
    Header header_;
    bool in_payload_ = false;
    uint8_t* into_ = nullptr;  // where the rest of the payload goes
    bool drops_ = false;       // it goes nowhere
    size_t remaining_ = 0;
    uint32_t crc_ = 0;  // of what has come of it
    size_t awaited_ = 1;  // bytes that must have come before the poller tells
    std::array<uint8_t, kMaxControlBytes> control_payload_;

    // writing
    PacketQueue queue_;
    std::vector<uint8_t> control_, control_sending_;
    std::array<std::array<uint8_t, kHeaderBytes>, kBatch> headers_;
    std::array<Packet, kBatch> packets_;
    size_t batch_packets_ = 0;
    std::array<iovec, 2 * kBatch + 1> iov_;
    size_t iov_begin_ = 0, iov_end_ = 0;
    size_t batch_left_ = 0;
    std::vector<uint8_t> kept_;  // what is left of the batch, after LetGo
    bool awaits_turn_ = false;
    uint64_t taken_bytes_ = 0;

  public:
    // What the node notes about a connection.
    State state;
    std::string address;  // of the peer, for messages
    uint32_t peer = 0;  // index of the server that was dialled, or rank of the worker that called
    uint16_t lane = 0;
    uint16_t sender = 0;     // what this side puts into its headers
    bool checksum = true;    // of payloads
    bool left = false;       // the peer said goodbye
    bool said_goodbye = false;
    uint32_t interest = 0;   // of the poller
    bool touched = false;    // has output that no thread has tried to write yet
    bool early = false;      // what is being received came too early, see Node::Early
    uint32_t place = 0;      // of the push that is being received
    BufferRef receiving;     // the buffer that it is received into
    int64_t heard_ns = 0, sent_ns = 0, opened_ns = 0;
    int64_t greeted_by_ns = 0;  // when the greeting must have ended, further attempts included
    uint64_t origin = 0;        // of one that has called, see OriginOf
    Target target;              // of one that was dialled
    int64_t queued_ns = 0;   // when packets were queued where there were none
    uint32_t parked_for = 0;  // the tensor of a parked push
    std::unique_ptr<ServerGreeting> as_server;
    std::unique_ptr<WorkerGreeting> as_worker;
    uint64_t received_bytes = 0, sent_bytes = 0, received_packets = 0, sent_packets = 0;
};

}  // namespace gradlane
