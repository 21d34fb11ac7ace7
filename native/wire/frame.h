// A frame on the wire: 40 bytes of header, then `length` bytes of payload. The format is described
// in native/wire/wire.md; this file is that page as code, and golden bytes in tests/golden/wire.json hold
// both to it.
//
// Nothing here reads or writes a socket or allocates. Decode() says whether a header is
// well-formed; the receiver checks every field of it against what it has registered itself. Any
// thread may call.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "update/rule.h"

namespace gradlane {

inline constexpr size_t kHeaderBytes = 40;
inline constexpr uint16_t kMagic = 0x4C47;  // "GL"
inline constexpr uint8_t kVersion = 1;
inline constexpr size_t kMaxControlBytes = 256;       // payload of everything that is not gradient data
inline constexpr uint32_t kMaxPacketBytes = 1 << 20;  // payload of a push, a result or a message

enum class FrameType : uint8_t {
    kHello = 1,      // worker: who I am, and what must agree
    kChallenge = 2,  // server: a nonce, and the proof that it knows the secret
    kProof = 3,      // worker: the proof that it knows the secret
    kWelcome = 4,    // server: you are in
    kReject = 5,     // server: you are not, and why
    kDefine = 6,     // worker: an entry of the table of tensors
    kForget = 7,     // worker: tensors below this id are over
    kPush = 8,       // worker: a packet of its gradient
    kResult = 9,     // server: a packet of the sum
    kPing = 10,      // either: I am alive
    kAbort = 11,     // either: the job is over, and why
    kGoodbye = 12,   // either: I leave in order, nothing more will follow
    kRule = 13,      // worker: how the gradients that it pushes from now on update a group of tensors
    kMessage = 14,   // worker: a small message to the worker there, or the offer of a larger one
    kPart = 15,      // worker: a packet of a message that was accepted
    kAccept = 16,    // server: the worker here receives what was offered
    kTaken = 17,     // server: bytes of small messages that the worker here has received
    kReceived = 18,  // server: it has all of a push that asked for an answer
};

inline constexpr uint16_t kFlagChecksum = 1;  // payload_crc holds the CRC32C of the payload
// Flags of a push of a tensor that is updated. kFlagQuiet: the push has no gradient. kFlagPlace:
// its payload replaces a part of what the servers keep. FlagsOf says which part, and the server
// answers with that part.
inline constexpr uint16_t kFlagQuiet = 2, kFlagPlace = 4;
enum class Part : uint8_t { kParameters = 0, kFirst = 1, kSecond = 2, kSteps = 3 };
constexpr uint16_t FlagsOf(Part part) { return static_cast<uint16_t>(static_cast<uint16_t>(part) << 3); }
constexpr Part PartOf(uint16_t flags) { return static_cast<Part>(flags >> 3 & 3); }
// Of the last packet of a push: the server answers with kReceived.
inline constexpr uint16_t kFlagAcknowledge = 32;
inline constexpr uint16_t kUpdateFlags = kFlagQuiet | kFlagPlace | FlagsOf(Part::kSteps);

struct Header {
    FrameType type = FrameType::kPing;
    uint16_t flags = 0;
    uint32_t tensor = 0;
    uint64_t offset = 0;
    uint32_t length = 0;
    uint32_t iteration = 0;
    uint32_t priority = 0;  // 0 is the most urgent
    uint16_t sender = 0;    // rank of a worker, index of a server
    uint32_t payload_crc = 0;

    bool operator==(const Header&) const = default;
};

enum class HeaderFault : uint8_t { kNone, kMagic, kVersion, kChecksum, kType, kLength };

// Writes exactly kHeaderBytes, the header's own checksum included.
void Encode(const Header& header, uint8_t* into);

// Reads exactly kHeaderBytes. On a fault, `header` is left as it was.
HeaderFault Decode(const uint8_t* from, Header* header);

const char* Describe(HeaderFault fault);

inline bool IsMessage(FrameType type) { return type == FrameType::kMessage || type == FrameType::kPart; }
inline bool IsData(FrameType type) { return type == FrameType::kPush || type == FrameType::kResult || IsMessage(type); }

// -- payloads of control frames: fixed sizes, checked before they are read -------------------------------

using Nonce = std::array<uint8_t, 32>;
using Digest = std::array<uint8_t, 32>;

struct Hello {
    static constexpr size_t kBytes = 104;
    uint32_t rank = 0, world = 0;      // of the worker
    uint32_t server = 0, servers = 0;  // the server that it wants to reach, and their number
    uint16_t lane = 0, lanes = 0;
    uint8_t dscp = 0, socket_priority = 0;  // how the server marks what it returns on this lane
    uint64_t job = 0, generation = 0;
    Digest fingerprint{};  // of everything else that must agree
    Nonce nonce{};
};
void EncodeHello(const Hello& hello, uint8_t* into);
Hello DecodeHello(const uint8_t* from);

struct Definition {
    static constexpr size_t kBytes = 40;
    uint64_t bytes = 0;
    uint8_t dtype = 0, op = 0;
    uint8_t whole = 0, urgent_first = 0;
    uint16_t lane = 0;
    uint8_t update = 0, urgent_sums = 0;
    uint32_t priority = 0;
    int32_t from = -1, to = -1, at = -1;
    uint32_t staleness = 0, group = 0;
    bool operator==(const Definition&) const = default;
};
void EncodeDefinition(const Definition& define, uint8_t* into);
Definition DecodeDefinition(const uint8_t* from);

inline constexpr size_t kRuleBytes = 48;
void EncodeRule(const Rule& rule, uint8_t* into);
// Fills `rule` and returns null, or returns what is wrong with it.
const char* DecodeRule(const uint8_t* from, Rule* rule);

inline constexpr size_t kChallengeBytes = sizeof(Nonce) + sizeof(Digest);
inline constexpr size_t kProofBytes = sizeof(Digest);

// The size that the payload of a control frame must have; nullopt for kReject and kAbort, which
// have texts of up to kMaxControlBytes.
std::optional<uint32_t> ControlBytes(FrameType type);

}  // namespace gradlane
