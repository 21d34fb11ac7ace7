// Sockets: file descriptors that close themselves, and the few calls on TCP that gradlane makes. No
// call blocks. A call that fails returns a text that names the call and the kernel's reason. Any
// thread may call.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace gradlane {

// In a forked child all of them are closed: a child that held a connection open would hide its parent's end.
class Fd {
  public:
    Fd() = default;
    explicit Fd(int fd);
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Fd();
    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

  private:
    int fd_ = -1;
};

struct SocketOptions {
    uint32_t unsent_bytes = 64 << 10;   // TCP_NOTSENT_LOWAT: what the kernel may hold that is not on its way yet
    uint32_t send_buffer_bytes = 0;     // SO_SNDBUF, which also bounds what is on its way; 0: the kernel's choice
    uint8_t dscp = 0;
    uint8_t priority = 0;
    std::string congestion;  // empty: the host's default
};

// Listens on exactly `address` (an IPv4 or IPv6 literal). port 0: any free one. On failure: an empty Fd and `why`.
Fd Listen(const std::string& address, uint16_t port, std::string* why);
uint16_t PortOf(const Fd& listener);

// Begins to connect; the socket becomes writable when that has ended, and ErrorOf() tells how.
Fd Connect(const std::string& address, uint16_t port, std::string* why);
Fd Accept(const Fd& listener);
int ErrorOf(const Fd& socket);

void Configure(const Fd& socket, const SocketOptions& options);
// From now on a poller calls the socket readable when this many bytes have come, or its end has (SO_RCVLOWAT).
void AwaitBytes(const Fd& socket, size_t bytes);
// How long ago the peer's host last acknowledged anything; 0 where the kernel does not tell.
int64_t NanosecondsSinceAck(const Fd& socket);
std::string PeerOf(const Fd& socket);  // "10.0.0.2:41234"
// Where a peer comes from, as far as it cannot choose freely: its IPv4 address, or the network (/64) of its IPv6 address.
uint64_t OriginOf(const Fd& socket);
bool IsLoopback(const std::string& address);

}  // namespace gradlane
