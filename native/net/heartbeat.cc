#include "net/heartbeat.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

namespace gradlane {

namespace {

// What is kept for a peer that does not read, beyond the kernel's buffers: more than a job says while it waits for one
// rank. With more to send than that, the peer is given up.
constexpr size_t kMostUnsent = 1 << 20;

}  // namespace

Heartbeat::Heartbeat(std::string beat, std::chrono::milliseconds interval)
    : beat_(std::move(beat)), interval_(interval), thread_(&Heartbeat::Run, this) {}

Heartbeat::~Heartbeat() { Close(); }

void Heartbeat::Add(int fd) {
    const std::lock_guard lock(mutex_);
    lived_ = Clock::now();
    Beat(fd, connections_[fd]);
}

void Heartbeat::Send(int fd, std::string_view frame) {
    const std::lock_guard lock(mutex_);
    lived_ = Clock::now();
    const auto found = connections_.find(fd);
    if (found != connections_.end() && !closed_) Queue(fd, found->second, frame);
}

void Heartbeat::Remove(int fd) {
    const std::lock_guard lock(mutex_);
    lived_ = Clock::now();
    connections_.erase(fd);
}

void Heartbeat::Lives() {
    const std::lock_guard lock(mutex_);
    lived_ = Clock::now();
}

void Heartbeat::Close() {
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
    }
    closing_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void Heartbeat::Run() {
    std::unique_lock lock(mutex_);
    while (!closing_.wait_until(lock, Clock::now() + interval_, [this] { return closed_; })) {
        for (auto& [fd, connection] : connections_) Beat(fd, connection);
    }
}

void Heartbeat::Beat(int fd, Connection& connection) {
    Flush(fd, connection);
    if (!connection.unsent.empty()) return;  // beats on top would tell the peer no more than what it has not read
    const auto silent = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - lived_).count();
    const auto told = static_cast<uint32_t>(std::min<int64_t>(silent, UINT32_MAX));
    std::string frame = beat_;
    for (int bits = 0; bits < 32; bits += 8) frame.push_back(static_cast<char>(told >> bits & 0xFF));
    Queue(fd, connection, frame);
}

void Heartbeat::Queue(int fd, Connection& connection, std::string_view frame) {
    if (connection.broken) return;
    connection.unsent += frame;
    Flush(fd, connection);
    if (connection.unsent.size() > kMostUnsent) {
        connection = {.unsent = {}, .broken = true};
        shutdown(fd, SHUT_RDWR);  // half a frame may be on its way: nothing can follow it
    }
}

void Heartbeat::Flush(int fd, Connection& connection) {
    while (!connection.unsent.empty()) {
        const ssize_t n = send(fd, connection.unsent.data(), connection.unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0) {
            connection.unsent.erase(0, static_cast<size_t>(n));
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return;
        } else if (errno != EINTR) {
            connection = {.unsent = {}, .broken = true};
        }
    }
}

}  // namespace gradlane
