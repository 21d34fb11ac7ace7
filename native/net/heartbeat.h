// Heartbeat: the sending side of a control channel. It sends the owner's frames, and on every
// connection a beat at once and then at each interval, from a thread of its own: a process is heard
// of even while its interpreter does not run.
//
// Threads: any thread may call; one lock guards all, so that frames and beats are never mixed. No
// call waits for a peer: what the kernel does not take now is kept, and sent first at the next beat or frame.
// Descriptors are the caller's, who removes one before closing it.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>

namespace gradlane {

class Heartbeat {
  public:
    // beat: a frame but for its last 4 bytes. They are added to each: for how many milliseconds no
    //   thread of the interpreter has made a call here, little-endian.
    Heartbeat(std::string beat, std::chrono::milliseconds interval);
    ~Heartbeat();
    Heartbeat(const Heartbeat&) = delete;
    Heartbeat& operator=(const Heartbeat&) = delete;

    void Add(int fd);
    // Sends a whole frame. Of a descriptor that was not added, or whose connection is broken, nothing is sent:
    // whoever reads from it finds out.
    void Send(int fd, std::string_view frame);
    void Remove(int fd);
    // The interpreter runs. Every other call says so too.
    void Lives();
    // Ends the thread. Nothing is sent any more.
    void Close();

  private:
    using Clock = std::chrono::steady_clock;

    struct Connection {
        std::string unsent;
        bool broken = false;
    };

    void Run();
    void Beat(int fd, Connection& connection);
    static void Queue(int fd, Connection& connection, std::string_view frame);
    static void Flush(int fd, Connection& connection);

    const std::string beat_;
    const std::chrono::milliseconds interval_;
    std::mutex mutex_;
    std::condition_variable closing_;
    bool closed_ = false;
    Clock::time_point lived_ = Clock::now();
    std::unordered_map<int, Connection> connections_;  // by descriptor
    std::thread thread_;                               // last: it uses all of the above
};

}  // namespace gradlane
