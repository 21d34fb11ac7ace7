// Greeting: how a worker and a server authenticate one another before a byte of gradient moves.
// There are two state machines, one a side, which take frames and give frames, without sockets,
// clocks or threads. The order of events is that of native/wire/wire.md:
//
//     worker                          server
//     HELLO (who, what, nonce)  --->
//                               <---  CHALLENGE (nonce, proof)      the server knows the secret
//     PROOF                     --->                                the worker knows it
//                               <---  WELCOME, or REJECT (why)
//
// The server compares what must agree only after the worker has proved that it knows the secret, so
// that a stranger learns nothing. A job without a secret (on loopback only) goes through the same
// steps with an empty one.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "wire/frame.h"

namespace gradlane {

enum class Code : uint8_t {
    kNone = 0,
    kDied = 1,       // the peer's process or host is gone: its connection broke
    kStalled = 2,    // the peer is connected and says nothing
    kAborted = 3,    // the peer failed and said why
    kLeft = 4,       // the peer left in order while something still waited for it
    kMismatch = 5,   // something that must agree does not
    kAuth = 6,       // wrong or missing secret
    kDuplicate = 7,  // this rank is here already
    kCorrupt = 8,    // a checksum does not match
    kProtocol = 9,   // the peer sent what it must not
    kTimeout = 10,   // no end within the time allowed
    kFull = 11,      // more than this server agreed to hold
    kSystem = 12,    // the operating system refused
};

struct Verdict {
    enum class Kind : uint8_t { kGoOn, kOpen, kRefused } kind = Kind::kGoOn;
    Code code = Code::kNone;
    std::string text;
    std::vector<uint8_t> send;  // whole frames
};

// What both sides of a job know.
struct Membership {
    uint32_t world = 0, servers = 0;
    uint16_t lanes = 1;
    uint64_t job = 0, generation = 0;
    Digest fingerprint{};
    std::vector<uint8_t> secret;
};

class ServerGreeting {
  public:
    ServerGreeting(const Membership* membership, uint32_t server, const Nonce& nonce)
        : membership_(membership), server_(server), nonce_(nonce) {}

    // A frame of the greeting has come whole. After kOpen or kRefused, none is expected.
    Verdict Take(const Header& header, const uint8_t* payload);

    const Hello& hello() const { return hello_; }  // to be believed only after kOpen

  private:
    const Membership* const membership_;
    const uint32_t server_;
    const Nonce nonce_;
    bool greeted_ = false;
    Hello hello_;
    Digest expected_{};
};

class WorkerGreeting {
  public:
    // hello: the worker's first payload; its nonce must be fresh.
    WorkerGreeting(const Membership* membership, const Hello& hello) : membership_(membership), hello_(hello) {}

    std::vector<uint8_t> Begin() const;
    Verdict Take(const Header& header, const uint8_t* payload);

  private:
    const Membership* const membership_;
    const Hello hello_;
    bool challenged_ = false;
};

// Makes a whole control frame, with its checksum.
std::vector<uint8_t> ControlFrame(FrameType type, uint16_t sender, uint32_t tensor, const void* payload, size_t bytes);

// Makes a kReject or kAbort frame. Its payload is a byte of code, four bytes that say who is to
// blame (a rank; -2 - i for server i; -1 for the sender), and at most 251 bytes of text.
std::vector<uint8_t> ReasonFrame(FrameType type, uint16_t sender, Code code, int32_t rank, const std::string& text);
struct Reason {
    Code code = Code::kNone;
    int32_t rank = -1;
    std::string text;
};
// Reads such a payload; the code is kNone if there is none that exists. Unprintable bytes of the text become '?'.
Reason ReadReason(const uint8_t* payload, size_t bytes);

}  // namespace gradlane
