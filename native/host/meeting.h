// Meeting: the ranks of one host come together and share a Segment.
//
// Rank 0 makes the segment and listens on an abstract Unix socket, which exists in its network
// namespace alone and ends with it. The others call, and both sides prove that they know the job's
// secret. A process of another user is refused by what the kernel says of it (SO_PEERCRED). Rank 0
// hands over the segment, and each rank's eventfd, by which the others wake it. When all have mapped
// the segment, all have met; otherwise all fail, with the reason of the one that could not.
//
//     rank 0                        another rank
//     CHALLENGE nonce       ->
//                           <-      PROOF rank, nonce, proof; its eventfd
//     SEGMENT bytes, proof  ->                                      when all have come
//                           <-      READY, or SORRY and why
//     GO, or SORRY and why  ->                                      when all are ready
//
// One thread uses a Meeting. Nothing blocks but Wait.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "host/segment.h"
#include "net/socket.h"

namespace gradlane {

// Rank 0 sends each rank a descriptor for every rank, and the kernel lets a user have 1,024 on their way where nobody
// has raised that.
inline constexpr uint32_t kMaxHostRanks = 32;

// What the ranks of a host share. They have numbers of their own, from 0: `rank` of `ranks`.
struct HostRoom {
    uint32_t rank = 0, ranks = 0;
    std::vector<uint32_t> numbers;  // by rank: its number in the whole job, which errors have
    Segment segment;
    std::vector<Fd> wakes;  // by rank: an eventfd that wakes it
};

class Meeting {
  public:
    enum class State : uint8_t { kGoingOn, kMet, kFailed };
    // The values cross the socket. kLimit: memory or descriptors could not be had; kEnded: a rank is gone; kRefused:
    // another user, or one that does not know the secret.
    enum class Fault : uint8_t { kNone = 0, kLimit = 1, kEnded = 2, kRefused = 3 };
    using Nonce = std::array<uint8_t, 32>;

    // Of rank 0. numbers: as in HostRoom. Never null; what cannot begin has failed.
    static std::unique_ptr<Meeting> Lead(std::vector<uint32_t> numbers, size_t bytes, std::vector<uint8_t> secret);
    // Of another rank. name: what rank 0's Meeting has. Never null, either.
    static std::unique_ptr<Meeting> Join(const std::string& name, uint32_t rank, std::vector<uint32_t> numbers, size_t bytes,
                                         std::vector<uint8_t> secret);
    ~Meeting();

    // The abstract socket's, without the zero before it.
    const std::string& name() const { return name_; }
    // Goes on for at most timeout_ms.
    State Wait(int64_t timeout_ms);
    // Once kFailed: the kind, the reason, and the number of the rank that it is about.
    Fault fault() const { return fault_; }
    const std::string& why() const { return why_; }
    int32_t blamed() const { return blamed_; }
    // While kGoingOn: the numbers of the ranks that rank 0 still waits for, as "1, 3".
    std::string missing() const;
    // Once kMet, and only once.
    HostRoom Take() { return std::move(room_); }

  private:
    struct Caller {
        Fd socket;
        Nonce nonce{}, theirs{};  // rank 0's for it, and its own
        int32_t rank = -1;  // once it has proved who it is
        bool ready = false;
    };
    struct Message;

    Meeting(uint32_t rank, std::vector<uint32_t> numbers, size_t bytes, std::vector<uint8_t> secret);
    int32_t NumberOf(uint32_t rank) const { return static_cast<int32_t>(room_.numbers[rank]); }
    std::string NameOf(uint32_t rank) const { return "rank " + std::to_string(room_.numbers[rank]); }
    std::string Name() const { return NameOf(room_.rank); }
    void Begin();
    void Fail(Fault fault, std::string why, int32_t blamed);
    void FailAll(Fault fault, const std::string& why, int32_t blamed);
    void AcceptAll();
    void OnCaller(Caller& caller);
    void OnProof(Caller& caller, Message& message);
    void HandOver();
    void OnRank0();
    void OnSegment(Message& message);

    const std::vector<uint8_t> secret_;
    std::string name_;
    const size_t bytes_;
    State state_ = State::kGoingOn;
    Fault fault_ = Fault::kNone;
    std::string why_;
    int32_t blamed_ = -1;
    HostRoom room_;
    Fd listener_;                                  // of rank 0
    std::vector<std::unique_ptr<Caller>> callers_;  // of rank 0
    Fd socket_;                                    // of another rank
    Nonce theirs_{}, mine_{};                      // there, too
};

}  // namespace gradlane
