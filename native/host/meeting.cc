#include "host/meeting.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <span>

#include "digest/sha256.h"

namespace gradlane {

namespace {

enum Type : uint8_t { kChallenge = 1, kProof = 2, kSegment = 3, kReady = 4, kSorry = 5, kGo = 6 };

constexpr size_t kMaxStrangers = 64;
constexpr size_t kMaxText = 400;

Meeting::Nonce FreshNonce() {
    Meeting::Nonce nonce{};
    for (size_t have = 0; have < nonce.size();) {
        const ssize_t n = getrandom(nonce.data() + have, nonce.size() - have, 0);
        if (n > 0) have += static_cast<size_t>(n);
    }
    return nonce;
}

// Says which side proves, so that neither can return the other's proof.
Digest ProofOf(std::span<const uint8_t> secret, const char* side, const Meeting::Nonce& rank0s, const Meeting::Nonce& callers,
               uint32_t rank) {
    const std::string label = std::string("gradlane host ") + side + " " + std::to_string(rank) + " ";
    std::vector<uint8_t> said(label.begin(), label.end());
    said.insert(said.end(), rank0s.begin(), rank0s.end());
    said.insert(said.end(), callers.begin(), callers.end());
    return HmacSha256(secret, said);
}

bool IsSameUser(const Fd& socket) {
    ucred peer{};
    socklen_t length = sizeof peer;
    return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

socklen_t AbstractAddress(const std::string& name, sockaddr_un* address) {
    *address = {};
    address->sun_family = AF_UNIX;
    const size_t length = std::min(name.size(), sizeof address->sun_path - 1);
    std::memcpy(address->sun_path + 1, name.data(), length);  // after a zero: not a file
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

std::string Failed(const std::string& call) { return call + ": " + std::strerror(errno); }

}  // namespace

// A packet of the socket, which arrives whole, and descriptors with it.
struct Meeting::Message {
    std::vector<uint8_t> bytes;
    std::vector<Fd> fds;

    explicit Message(uint8_t type = 0) : bytes(1, type) {}
    void Add(const void* data, size_t n) {
        bytes.resize(bytes.size() + n);
        std::memcpy(bytes.data() + bytes.size() - n, data, n);
    }
    template <typename T>
    T Get(size_t at) const {
        T value;
        std::memcpy(&value, bytes.data() + at, sizeof value);
        return value;
    }
    std::string Text(size_t at) const { return std::string(bytes.begin() + static_cast<ptrdiff_t>(at), bytes.end()); }

    bool Send(const Fd& socket, std::span<const int> passed = {}) const {
        std::vector<uint8_t> control(CMSG_SPACE(passed.size_bytes()));
        iovec part{const_cast<uint8_t*>(bytes.data()), bytes.size()};
        msghdr header{};
        header.msg_iov = &part;
        header.msg_iovlen = 1;
        if (!passed.empty()) {
            header.msg_control = control.data();
            header.msg_controllen = control.size();
            cmsghdr* item = CMSG_FIRSTHDR(&header);
            item->cmsg_level = SOL_SOCKET;
            item->cmsg_type = SCM_RIGHTS;
            item->cmsg_len = CMSG_LEN(passed.size_bytes());
            std::memcpy(CMSG_DATA(item), passed.data(), passed.size_bytes());
        }
        return sendmsg(socket.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
    }

    // 1: there is one; 0: none yet; -1: the other side is gone.
    int Receive(const Fd& socket) {
        bytes.assign(1024, 0);
        std::vector<uint8_t> control(CMSG_SPACE((kMaxHostRanks + 1) * sizeof(int)));
        iovec part{bytes.data(), bytes.size()};
        msghdr header{};
        header.msg_iov = &part;
        header.msg_iovlen = 1;
        header.msg_control = control.data();
        header.msg_controllen = control.size();
        const ssize_t n = recvmsg(socket.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
        for (cmsghdr* item = n < 0 ? nullptr : CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
            if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
            for (size_t at = 0; at + CMSG_LEN(0) < item->cmsg_len; at += sizeof(int)) {
                int fd = -1;
                std::memcpy(&fd, CMSG_DATA(item) + at, sizeof fd);
                fds.emplace_back(fd);
            }
        }
        if (n <= 0 || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) return -1;
        bytes.resize(static_cast<size_t>(n));
        return 1;
    }
};

// -- life -------------------------------------------------------------------------------------------------

Meeting::Meeting(uint32_t rank, std::vector<uint32_t> numbers, size_t bytes, std::vector<uint8_t> secret)
    : secret_(std::move(secret)), bytes_(bytes) {
    room_.rank = rank;
    room_.ranks = static_cast<uint32_t>(numbers.size());
    room_.numbers = std::move(numbers);
}

Meeting::~Meeting() = default;

std::unique_ptr<Meeting> Meeting::Lead(std::vector<uint32_t> numbers, size_t bytes, std::vector<uint8_t> secret) {
    std::unique_ptr<Meeting> meeting(new Meeting(0, std::move(numbers), bytes, std::move(secret)));
    meeting->Begin();
    return meeting;
}

std::unique_ptr<Meeting> Meeting::Join(const std::string& name, uint32_t rank, std::vector<uint32_t> numbers, size_t bytes,
                                       std::vector<uint8_t> secret) {
    std::unique_ptr<Meeting> meeting(new Meeting(rank, std::move(numbers), bytes, std::move(secret)));
    meeting->name_ = name;
    meeting->Begin();
    return meeting;
}

void Meeting::Begin() {
    if (room_.ranks < 2 || room_.ranks > kMaxHostRanks || room_.rank >= room_.ranks) {
        return Fail(Fault::kLimit, "number " + std::to_string(room_.rank) + " of " + std::to_string(room_.ranks) +
                                       " ranks of one host, expected one of 2 to " + std::to_string(kMaxHostRanks), -1);
    }
    const int32_t number = NumberOf(room_.rank);
    const std::string name = Name() + ": ";
    room_.wakes.resize(room_.ranks);
    room_.wakes[room_.rank] = Fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!room_.wakes[room_.rank] || !socket) return Fail(Fault::kLimit, name + Failed("a descriptor"), number);
    sockaddr_un address;
    if (room_.rank != 0) {
        const socklen_t length = AbstractAddress(name_, &address);
        if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
            return Fail(Fault::kEnded, name + Failed("the Unix socket of " + NameOf(0)), NumberOf(0));
        }
        if (!IsSameUser(socket)) return Fail(Fault::kRefused, NameOf(0) + " on this host belongs to another user than " + Name(), NumberOf(0));
        socket_ = std::move(socket);
        return;
    }
    std::string why;
    room_.segment = Segment::Create(bytes_, &why);
    if (!room_.segment) return Fail(Fault::kLimit, name + why, number);
    name_ = "gradlane-";
    for (const uint8_t byte : FreshNonce()) name_ += "0123456789abcdef"[byte & 15];
    const socklen_t length = AbstractAddress(name_, &address);
    if (bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(socket.get(), static_cast<int>(kMaxHostRanks)) != 0) {
        return Fail(Fault::kLimit, name + Failed("a Unix socket"), number);
    }
    listener_ = std::move(socket);
}

Meeting::State Meeting::Wait(int64_t timeout_ms) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
    while (state_ == State::kGoingOn) {
        std::vector<pollfd> polled{{listener_ ? listener_.get() : socket_.get(), POLLIN, 0}};
        for (const auto& caller : callers_) polled.push_back({caller->socket.get(), POLLIN, 0});
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
        if (left <= 0) break;
        if (poll(polled.data(), polled.size(), static_cast<int>(left)) <= 0) continue;
        if (!listener_) {
            OnRank0();
            continue;
        }
        for (size_t i = 1; i < polled.size() && state_ == State::kGoingOn; ++i) {
            if (polled[i].revents != 0) OnCaller(*callers_[i - 1]);
        }
        std::erase_if(callers_, [](const auto& caller) { return !caller->socket; });
        if (state_ == State::kGoingOn && polled[0].revents != 0) AcceptAll();
    }
    return state_;
}

std::string Meeting::missing() const {
    if (!listener_) return std::to_string(NumberOf(0));
    std::string missing;
    for (uint32_t rank = 1; rank < room_.ranks; ++rank) {
        const auto is_ready = [&](const auto& caller) { return caller->rank == static_cast<int32_t>(rank) && caller->ready; };
        if (std::any_of(callers_.begin(), callers_.end(), is_ready)) continue;
        missing += (missing.empty() ? "" : ", ") + std::to_string(NumberOf(rank));
    }
    return missing;
}

void Meeting::Fail(Fault fault, std::string why, int32_t blamed) {
    state_ = State::kFailed;
    fault_ = fault;
    why_ = std::move(why);
    blamed_ = blamed;
}

// -- rank 0 -----------------------------------------------------------------------------------------------

void Meeting::AcceptAll() {
    while (Fd socket = Accept(listener_)) {
        const auto is_stranger = [](const auto& caller) { return caller->rank < 0; };
        if (!IsSameUser(socket) || std::count_if(callers_.begin(), callers_.end(), is_stranger) >= static_cast<ptrdiff_t>(kMaxStrangers)) continue;
        auto caller = std::make_unique<Caller>();
        caller->socket = std::move(socket);
        caller->nonce = FreshNonce();
        Message challenge(kChallenge);
        challenge.Add(caller->nonce.data(), caller->nonce.size());
        if (challenge.Send(caller->socket)) callers_.push_back(std::move(caller));
    }
}

void Meeting::OnCaller(Caller& caller) {
    Message message;
    const int got = message.Receive(caller.socket);
    if (got == 0) return;
    const int32_t rank = caller.rank;
    if (got > 0 && rank < 0 && message.bytes[0] == kProof) return OnProof(caller, message);
    if (got > 0 && rank >= 0 && !caller.ready && message.bytes[0] == kReady) {
        caller.ready = true;
        if (!missing().empty()) return;
        for (const auto& each : callers_) Message(kGo).Send(each->socket);  // one that is gone is missed elsewhere
        state_ = State::kMet;
        return;
    }
    if (rank < 0) {  // a stranger
        caller.socket = Fd();
        return;
    }
    const std::string name = NameOf(static_cast<uint32_t>(rank));
    const int32_t number = NumberOf(static_cast<uint32_t>(rank));
    if (got > 0 && message.bytes[0] == kSorry) return FailAll(Fault::kLimit, name + ": " + message.Text(1), number);
    FailAll(Fault::kEnded, name + " ended while the ranks of this host met", number);
}

void Meeting::OnProof(Caller& caller, Message& message) {
    Nonce nonce;
    Digest proof;
    bool known = message.bytes.size() == 1 + sizeof(uint32_t) + nonce.size() + proof.size() && message.fds.size() == 1;
    if (known) {
        const auto rank = message.Get<uint32_t>(1);
        nonce = message.Get<Nonce>(5);
        proof = message.Get<Digest>(5 + nonce.size());
        known = rank > 0 && rank < room_.ranks && !room_.wakes[rank] &&
                EqualConstantTime(proof, ProofOf(secret_, "caller", caller.nonce, nonce, room_.numbers[rank]));
        if (known) {
            caller.rank = static_cast<int32_t>(rank);
            caller.theirs = nonce;
            room_.wakes[rank] = std::move(message.fds[0]);
            const bool all = std::all_of(room_.wakes.begin(), room_.wakes.end(), [](const Fd& wake) { return static_cast<bool>(wake); });
            if (all) HandOver();
        }
    }
    if (!known) caller.socket = Fd();
}

void Meeting::HandOver() {
    std::vector<int> passed{room_.segment.fd().get()};
    for (const Fd& wake : room_.wakes) passed.push_back(wake.get());
    for (const auto& caller : callers_) {
        if (caller->rank < 0) continue;
        Message message(kSegment);
        const uint64_t bytes = room_.segment.bytes();
        const Digest proof = ProofOf(secret_, "rank0", caller->nonce, caller->theirs, room_.numbers[static_cast<size_t>(caller->rank)]);
        message.Add(&bytes, sizeof bytes);
        message.Add(proof.data(), proof.size());
        if (!message.Send(caller->socket, passed)) {
            return FailAll(Fault::kLimit, Name() + ": " + Failed("handing over the memory of this host"), NumberOf(0));
        }
    }
}

void Meeting::FailAll(Fault fault, const std::string& why, int32_t blamed) {
    Message message(kSorry);
    const std::string text = why.substr(0, kMaxText);
    message.Add(&fault, sizeof fault);
    message.Add(&blamed, sizeof blamed);
    message.Add(text.data(), text.size());
    for (const auto& caller : callers_) {
        if (caller->rank >= 0) message.Send(caller->socket);
    }
    callers_.clear();
    Fail(fault, why, blamed);
}

// -- another rank -----------------------------------------------------------------------------------------

void Meeting::OnRank0() {
    Message message;
    const int got = message.Receive(socket_);
    if (got == 0) return;
    const uint8_t type = got > 0 ? message.bytes[0] : 0;
    const bool has_segment = static_cast<bool>(room_.segment);
    if (type == kChallenge && message.bytes.size() == 1 + theirs_.size()) {
        theirs_ = message.Get<Nonce>(1);
        mine_ = FreshNonce();
        const Digest proof = ProofOf(secret_, "caller", theirs_, mine_, room_.numbers[room_.rank]);
        Message answer(kProof);
        answer.Add(&room_.rank, sizeof room_.rank);
        answer.Add(mine_.data(), mine_.size());
        answer.Add(proof.data(), proof.size());
        const int wake = room_.wakes[room_.rank].get();
        if (!answer.Send(socket_, {&wake, 1})) Fail(Fault::kEnded, Failed("answering " + NameOf(0)), NumberOf(0));
    } else if (type == kSegment && !has_segment) {
        OnSegment(message);
    } else if (type == kGo && has_segment) {
        state_ = State::kMet;
    } else if (type == kSorry && message.bytes.size() > 2 + sizeof(int32_t) && message.bytes[1] <= static_cast<uint8_t>(Fault::kRefused)) {
        Fail(static_cast<Fault>(message.bytes[1]), message.Text(2 + sizeof(int32_t)), message.Get<int32_t>(2));
    } else {
        Fail(Fault::kEnded, NameOf(0) + " ended while the ranks of this host met, or refused this one", NumberOf(0));
    }
}

void Meeting::OnSegment(Message& message) {
    const Digest expected = ProofOf(secret_, "rank0", theirs_, mine_, room_.numbers[room_.rank]);
    if (message.bytes.size() != 1 + sizeof(uint64_t) + expected.size() || message.fds.size() != 1 + room_.ranks ||
        !EqualConstantTime(message.Get<Digest>(1 + sizeof(uint64_t)), expected)) {
        return Fail(Fault::kRefused, "whoever has the socket of " + NameOf(0) + " does not know the job's secret", NumberOf(0));
    }
    std::string why = "got " + std::to_string(message.Get<uint64_t>(1)) + " bytes of shared memory, expected " + std::to_string(bytes_);
    if (message.Get<uint64_t>(1) == bytes_) room_.segment = Segment::Map(std::move(message.fds[0]), bytes_, &why);
    if (!room_.segment) {
        Message sorry(kSorry);
        sorry.Add(why.data(), std::min(why.size(), kMaxText));
        sorry.Send(socket_);
        return Fail(Fault::kLimit, Name() + ": " + why, NumberOf(room_.rank));
    }
    for (uint32_t rank = 0; rank < room_.ranks; ++rank) {
        if (rank != room_.rank) room_.wakes[rank] = std::move(message.fds[1 + rank]);
    }
    if (!Message(kReady).Send(socket_)) Fail(Fault::kEnded, Failed("answering " + NameOf(0)), NumberOf(0));
}

}  // namespace gradlane
