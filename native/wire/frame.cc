#include "wire/frame.h"

#include <bit>
#include <cstring>
#include <iterator>

#include "digest/crc32c.h"

namespace gradlane {

namespace {

// Little-endian whatever the host; compilers make single moves of these.
template <typename T>
void Put(uint8_t* into, T value) {
    for (size_t i = 0; i < sizeof(T); ++i) into[i] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i));
}

template <typename T>
T Get(const uint8_t* from) {
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(from[i]) << (8 * i);
    return static_cast<T>(value);
}

constexpr size_t kCrcAt = 36;
constexpr uint8_t kNesterov = 1, kMaximize = 2;

bool IsKnown(uint8_t type) {
    return type >= static_cast<uint8_t>(FrameType::kHello) && type <= static_cast<uint8_t>(FrameType::kReceived);
}

}  // namespace

void Encode(const Header& header, uint8_t* into) {
    Put<uint16_t>(into, kMagic);
    Put<uint8_t>(into + 2, kVersion);
    Put<uint8_t>(into + 3, static_cast<uint8_t>(header.type));
    Put<uint32_t>(into + 4, header.tensor);
    Put<uint64_t>(into + 8, header.offset);
    Put<uint32_t>(into + 16, header.length);
    Put<uint32_t>(into + 20, header.iteration);
    Put<uint32_t>(into + 24, header.priority);
    Put<uint16_t>(into + 28, header.sender);
    Put<uint16_t>(into + 30, header.flags);
    Put<uint32_t>(into + 32, header.payload_crc);
    Put<uint32_t>(into + kCrcAt, Crc32c(into, kCrcAt));
}

HeaderFault Decode(const uint8_t* from, Header* header) {
    if (Get<uint16_t>(from) != kMagic) return HeaderFault::kMagic;
    // before the version: a flipped bit in it is damage, not another version
    if (Get<uint32_t>(from + kCrcAt) != Crc32c(from, kCrcAt)) return HeaderFault::kChecksum;
    if (from[2] != kVersion) return HeaderFault::kVersion;
    if (!IsKnown(from[3])) return HeaderFault::kType;
    const auto type = static_cast<FrameType>(from[3]);
    const auto length = Get<uint32_t>(from + 16);
    if (length > (IsData(type) ? kMaxPacketBytes : kMaxControlBytes)) return HeaderFault::kLength;
    if (const auto expected = ControlBytes(type); expected && length != *expected) return HeaderFault::kLength;
    header->type = type;
    header->tensor = Get<uint32_t>(from + 4);
    header->offset = Get<uint64_t>(from + 8);
    header->length = length;
    header->iteration = Get<uint32_t>(from + 20);
    header->priority = Get<uint32_t>(from + 24);
    header->sender = Get<uint16_t>(from + 28);
    header->flags = Get<uint16_t>(from + 30);
    header->payload_crc = Get<uint32_t>(from + 32);
    return HeaderFault::kNone;
}

const char* Describe(HeaderFault fault) {
    switch (fault) {
        case HeaderFault::kNone: return "none";
        case HeaderFault::kMagic: return "it does not begin with gradlane's mark";
        case HeaderFault::kVersion: return "it speaks another version of the wire format";
        case HeaderFault::kChecksum: return "the checksum of a header does not match: damaged on the way";
        case HeaderFault::kType: return "a frame of unknown type";
        case HeaderFault::kLength: return "a frame whose length its type does not allow";
    }
    return "?";
}

void EncodeHello(const Hello& hello, uint8_t* into) {
    Put(into, hello.rank);
    Put(into + 4, hello.world);
    Put(into + 8, hello.server);
    Put(into + 12, hello.servers);
    Put(into + 16, hello.lane);
    Put(into + 18, hello.lanes);
    Put(into + 20, hello.dscp);
    Put(into + 21, hello.socket_priority);
    Put<uint16_t>(into + 22, 0);
    Put(into + 24, hello.job);
    Put(into + 32, hello.generation);
    std::memcpy(into + 40, hello.fingerprint.data(), 32);
    std::memcpy(into + 72, hello.nonce.data(), 32);
}

Hello DecodeHello(const uint8_t* from) {
    Hello hello;
    hello.rank = Get<uint32_t>(from);
    hello.world = Get<uint32_t>(from + 4);
    hello.server = Get<uint32_t>(from + 8);
    hello.servers = Get<uint32_t>(from + 12);
    hello.lane = Get<uint16_t>(from + 16);
    hello.lanes = Get<uint16_t>(from + 18);
    hello.dscp = from[20];
    hello.socket_priority = from[21];
    hello.job = Get<uint64_t>(from + 24);
    hello.generation = Get<uint64_t>(from + 32);
    std::memcpy(hello.fingerprint.data(), from + 40, 32);
    std::memcpy(hello.nonce.data(), from + 72, 32);
    return hello;
}

void EncodeDefinition(const Definition& define, uint8_t* into) {
    Put(into, define.bytes);
    Put(into + 8, define.dtype);
    Put(into + 9, define.op);
    Put(into + 10, define.whole);
    Put(into + 11, define.urgent_first);
    Put(into + 12, define.lane);
    Put(into + 14, define.update);
    Put(into + 15, define.urgent_sums);
    Put(into + 16, define.priority);
    Put(into + 20, define.from);
    Put(into + 24, define.to);
    Put(into + 28, define.at);
    Put(into + 32, define.staleness);
    Put(into + 36, define.group);
}

Definition DecodeDefinition(const uint8_t* from) {
    Definition define;
    define.bytes = Get<uint64_t>(from);
    define.dtype = from[8];
    define.op = from[9];
    define.whole = from[10];
    define.urgent_first = from[11];
    define.lane = Get<uint16_t>(from + 12);
    define.priority = Get<uint32_t>(from + 16);
    define.from = Get<int32_t>(from + 20);
    define.to = Get<int32_t>(from + 24);
    define.at = Get<int32_t>(from + 28);
    define.update = from[14];
    define.urgent_sums = from[15];
    define.staleness = Get<uint32_t>(from + 32);
    define.group = Get<uint32_t>(from + 36);
    return define;
}

void EncodeRule(const Rule& rule, uint8_t* into) {
    const bool is_adam = rule.kind == RuleKind::kAdam || rule.kind == RuleKind::kAdamW;
    Put(into, static_cast<uint8_t>(rule.kind));
    Put<uint8_t>(into + 1, static_cast<uint8_t>((rule.nesterov ? kNesterov : 0) | (rule.maximize ? kMaximize : 0)));
    Put<uint16_t>(into + 2, 0);
    Put<uint32_t>(into + 4, 0);
    const double numbers[] = {rule.lr, rule.weight_decay, is_adam ? rule.beta1 : rule.momentum, is_adam ? rule.beta2 : rule.dampening,
                              is_adam ? rule.epsilon : 0};
    for (size_t i = 0; i < std::size(numbers); ++i) Put(into + 8 + 8 * i, std::bit_cast<uint64_t>(numbers[i]));
}

const char* DecodeRule(const uint8_t* from, Rule* rule) {
    if (!IsValidRuleKind(from[0])) return "a rule that is not known";
    Rule said;
    said.kind = static_cast<RuleKind>(from[0]);
    said.nesterov = (from[1] & kNesterov) != 0;
    said.maximize = (from[1] & kMaximize) != 0;
    double numbers[5];
    for (size_t i = 0; i < std::size(numbers); ++i) numbers[i] = std::bit_cast<double>(Get<uint64_t>(from + 8 + 8 * i));
    said.lr = numbers[0];
    said.weight_decay = numbers[1];
    if (said.kind == RuleKind::kAdam || said.kind == RuleKind::kAdamW) {
        said.beta1 = numbers[2];
        said.beta2 = numbers[3];
        said.epsilon = numbers[4];
    } else {
        said.momentum = numbers[2];
        said.dampening = numbers[3];
    }
    if (const char* why = WhyNot(said)) return why;
    *rule = said;
    return nullptr;
}

std::optional<uint32_t> ControlBytes(FrameType type) {
    switch (type) {
        case FrameType::kHello: return Hello::kBytes;
        case FrameType::kChallenge: return kChallengeBytes;
        case FrameType::kProof: return kProofBytes;
        case FrameType::kDefine: return Definition::kBytes;
        case FrameType::kRule: return kRuleBytes;
        case FrameType::kWelcome:
        case FrameType::kForget:
        case FrameType::kPing:
        case FrameType::kAccept:
        case FrameType::kTaken:
        case FrameType::kReceived:
        case FrameType::kGoodbye: return 0;
        case FrameType::kReject:
        case FrameType::kAbort:
        case FrameType::kPush:
        case FrameType::kMessage:
        case FrameType::kPart:
        case FrameType::kResult: return std::nullopt;
    }
    return std::nullopt;
}

}  // namespace gradlane
