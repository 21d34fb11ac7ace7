#include "net/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>

namespace gradlane {

namespace {

// Which descriptors are held by an Fd: a bit each. For the child of a fork, which may take no lock.
std::array<std::atomic<uint64_t>, (1 << 20) / 64> held;

// Whether it was marked before. Descriptors beyond the table are held all the same, and stay open in a child.
bool Mark(int fd, bool is_held) {
    if (fd < 0 || fd >= 1 << 20) return fd >= 0;
    const uint64_t bit = uint64_t{1} << (fd % 64);
    std::atomic<uint64_t>& word = held[static_cast<size_t>(fd) / 64];
    return ((is_held ? word.fetch_or(bit) : word.fetch_and(~bit)) & bit) != 0;
}

void CloseInChild() {
    for (size_t i = 0; i < held.size(); ++i) {
        const uint64_t word = held[i].exchange(0);
        for (int bit = 0; bit < 64; ++bit) {
            if ((word >> bit & 1) != 0) close(static_cast<int>(i * 64) + bit);
        }
    }
}

[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, &CloseInChild);

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Literals only: a name could stand for several addresses, and would be looked up with a wait.
Addresses Resolve(const std::string& address, uint16_t port, std::string* why) {
    addrinfo hints{};
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int code = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (code != 0) *why = "address " + address + ": " + gai_strerror(code) + "; expected an IPv4 or IPv6 literal";
    return Addresses(found, &freeaddrinfo);
}

Fd Fail(const char* call, const std::string& address, uint16_t port, std::string* why) {
    *why = std::string(call) + " " + address + " port " + std::to_string(port) + ": " + std::strerror(errno);
    return Fd();
}

void Set(const Fd& socket, int level, int name, int value) { setsockopt(socket.get(), level, name, &value, sizeof value); }

}  // namespace

Fd::Fd(int fd) : fd_(fd) { Mark(fd, true); }

Fd::~Fd() {
    if (fd_ >= 0 && Mark(fd_, false)) close(fd_);
}

Fd Listen(const std::string& address, uint16_t port, std::string* why) {
    const Addresses at = Resolve(address, port, why);
    if (!at) return Fd();
    Fd socket(::socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) return Fail("socket for", address, port, why);
    Set(socket, SOL_SOCKET, SO_REUSEADDR, 1);
    if (at->ai_family == AF_INET6) Set(socket, IPPROTO_IPV6, IPV6_V6ONLY, 1);
    if (bind(socket.get(), at->ai_addr, at->ai_addrlen) != 0) return Fail("bind", address, port, why);
    if (listen(socket.get(), 256) != 0) return Fail("listen on", address, port, why);
    return socket;
}

uint16_t PortOf(const Fd& listener) {
    sockaddr_storage at{};
    socklen_t length = sizeof at;
    getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &length);
    return ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&at)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&at)->sin_port);
}

Fd Connect(const std::string& address, uint16_t port, std::string* why) {
    const Addresses to = Resolve(address, port, why);
    if (!to) return Fd();
    Fd socket(::socket(to->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) return Fail("socket for", address, port, why);
    if (connect(socket.get(), to->ai_addr, to->ai_addrlen) != 0 && errno != EINPROGRESS) {
        return Fail("connect to", address, port, why);
    }
    return socket;
}

Fd Accept(const Fd& listener) { return Fd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)); }

int ErrorOf(const Fd& socket) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    return error;
}

// What a kernel does not know of these (an old one, a container's) costs speed, not correctness: not an error.
// No TCP_USER_TIMEOUT: it also ends a connection whose peer is there and does not read for that long, which a worker
// that is behind has a right to. Whether a peer lives is told by what is heard of it (Node::Tick).
void Configure(const Fd& socket, const SocketOptions& options) {
    Set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    Set(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, static_cast<int>(options.unsent_bytes));
    if (options.send_buffer_bytes != 0) Set(socket, SOL_SOCKET, SO_SNDBUF, static_cast<int>(options.send_buffer_bytes));
    if (options.dscp != 0) {
        Set(socket, IPPROTO_IP, IP_TOS, options.dscp << 2);
        Set(socket, IPPROTO_IPV6, IPV6_TCLASS, options.dscp << 2);
    }
    // after IP_TOS, which sets a priority of its own
    if (options.priority != 0) Set(socket, SOL_SOCKET, SO_PRIORITY, options.priority);
    if (!options.congestion.empty()) {
        setsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, options.congestion.data(),
                   static_cast<socklen_t>(options.congestion.size()));
    }
}

void AwaitBytes(const Fd& socket, size_t bytes) { Set(socket, SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(bytes)); }

int64_t NanosecondsSinceAck(const Fd& socket) {
    tcp_info info{};
    socklen_t length = sizeof info;
    if (getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return 0;
    return int64_t{info.tcpi_last_ack_recv} * 1'000'000;
}

std::string PeerOf(const Fd& socket) {
    sockaddr_storage at{};
    socklen_t length = sizeof at;
    if (getpeername(socket.get(), reinterpret_cast<sockaddr*>(&at), &length) != 0) return "unknown";
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getnameinfo(reinterpret_cast<sockaddr*>(&at), length, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return "unknown";
    }
    return std::string(host) + ":" + port;
}

uint64_t OriginOf(const Fd& socket) {
    sockaddr_storage at{};
    socklen_t length = sizeof at;
    if (getpeername(socket.get(), reinterpret_cast<sockaddr*>(&at), &length) != 0) return 0;
    if (at.ss_family == AF_INET) return ntohl(reinterpret_cast<const sockaddr_in&>(at).sin_addr.s_addr);
    if (at.ss_family != AF_INET6) return 0;
    const in6_addr& six = reinterpret_cast<const sockaddr_in6&>(at).sin6_addr;
    const bool is_four = IN6_IS_ADDR_V4MAPPED(&six);
    uint64_t origin = 0;
    for (size_t i = is_four ? 12 : 0; i < (is_four ? 16u : 8u); ++i) origin = origin << 8 | six.s6_addr[i];
    return origin;
}

bool IsLoopback(const std::string& address) {
    in_addr four{};
    if (inet_pton(AF_INET, address.c_str(), &four) == 1) return (ntohl(four.s_addr) >> 24) == 127;
    in6_addr six{};
    return inet_pton(AF_INET6, address.c_str(), &six) == 1 && IN6_IS_ADDR_LOOPBACK(&six);
}

}  // namespace gradlane
