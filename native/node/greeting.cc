#include "node/greeting.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "digest/crc32c.h"
#include "digest/sha256.h"

namespace gradlane {

namespace {

// What is proved: the role (so that a proof cannot be reflected), both nonces, and every word of the greeting.
Digest Prove(const Membership& membership, char role, const Hello& hello, const Nonce& server_nonce) {
    std::vector<uint8_t> said(1 + Hello::kBytes + server_nonce.size());
    said[0] = static_cast<uint8_t>(role);
    EncodeHello(hello, said.data() + 1);
    std::copy(server_nonce.begin(), server_nonce.end(), said.begin() + 1 + Hello::kBytes);
    return HmacSha256(membership.secret, said);
}

std::string Differ(const char* what, uint64_t theirs, uint64_t ours) {
    return std::string(what) + ": the worker says " + std::to_string(theirs) + ", the server says " + std::to_string(ours);
}

Verdict Refuse(Code code, std::string text) {
    Verdict verdict;
    verdict.kind = Verdict::Kind::kRefused;
    verdict.code = code;
    verdict.text = std::move(text);
    return verdict;
}

}  // namespace

std::vector<uint8_t> ControlFrame(FrameType type, uint16_t sender, uint32_t tensor, const void* payload, size_t bytes) {
    std::vector<uint8_t> frame(kHeaderBytes + bytes);
    if (bytes != 0) std::memcpy(frame.data() + kHeaderBytes, payload, bytes);
    Header header;
    header.type = type;
    header.flags = kFlagChecksum;
    header.tensor = tensor;
    header.length = static_cast<uint32_t>(bytes);
    header.sender = sender;
    header.payload_crc = Crc32c(frame.data() + kHeaderBytes, bytes);
    Encode(header, frame.data());
    return frame;
}

std::vector<uint8_t> ReasonFrame(FrameType type, uint16_t sender, Code code, int32_t rank, const std::string& text) {
    std::vector<uint8_t> payload(5);
    payload[0] = static_cast<uint8_t>(code);
    for (size_t i = 0; i < 4; ++i) payload[1 + i] = static_cast<uint8_t>(static_cast<uint32_t>(rank) >> (8 * i));
    const size_t kept = std::min(text.size(), kMaxControlBytes - payload.size());
    payload.insert(payload.end(), text.begin(), text.begin() + static_cast<ptrdiff_t>(kept));
    return ControlFrame(type, sender, 0, payload.data(), payload.size());
}

Reason ReadReason(const uint8_t* payload, size_t bytes) {
    Reason reason;
    if (bytes < 5) return reason;
    if (payload[0] >= static_cast<uint8_t>(Code::kDied) && payload[0] <= static_cast<uint8_t>(Code::kSystem)) {
        reason.code = static_cast<Code>(payload[0]);
    }
    uint32_t rank = 0;
    for (size_t i = 0; i < 4; ++i) rank |= static_cast<uint32_t>(payload[1 + i]) << (8 * i);
    reason.rank = static_cast<int32_t>(rank);
    for (size_t i = 5; i < bytes; ++i) {
        const char c = static_cast<char>(payload[i]);
        reason.text.push_back(c >= ' ' && c <= '~' ? c : '?');
    }
    return reason;
}

Verdict ServerGreeting::Take(const Header& header, const uint8_t* payload) {
    const auto index = static_cast<uint16_t>(server_);
    if (!greeted_) {
        if (header.type != FrameType::kHello) return Refuse(Code::kProtocol, "the first frame is not a hello");
        greeted_ = true;
        hello_ = DecodeHello(payload);
        expected_ = Prove(*membership_, 'w', hello_, nonce_);
        uint8_t challenge[kChallengeBytes];
        const Digest proof = Prove(*membership_, 's', hello_, nonce_);
        std::memcpy(challenge, nonce_.data(), nonce_.size());
        std::memcpy(challenge + nonce_.size(), proof.data(), proof.size());
        Verdict verdict;
        verdict.send = ControlFrame(FrameType::kChallenge, index, 0, challenge, sizeof challenge);
        return verdict;
    }
    if (header.type != FrameType::kProof) return Refuse(Code::kProtocol, "a frame other than the proof");
    if (!EqualConstantTime(std::span(payload, kProofBytes), expected_)) {
        Verdict verdict = Refuse(Code::kAuth, "wrong secret");
        verdict.send = ReasonFrame(FrameType::kReject, index, verdict.code, -1, verdict.text);
        return verdict;
    }
    std::string difference;
    if (hello_.job != membership_->job) {
        difference = "another job's worker";
    } else if (hello_.generation != membership_->generation) {
        difference = Differ("generation of the job", hello_.generation, membership_->generation);
    } else if (hello_.world != membership_->world) {
        difference = Differ("world size", hello_.world, membership_->world);
    } else if (hello_.rank >= membership_->world) {
        difference = "rank " + std::to_string(hello_.rank) + " in a world of " + std::to_string(membership_->world);
    } else if (hello_.servers != membership_->servers) {
        difference = Differ("number of servers", hello_.servers, membership_->servers);
    } else if (hello_.server != server_) {
        difference = Differ("index of the server", hello_.server, server_);
    } else if (hello_.lanes != membership_->lanes || hello_.lane >= hello_.lanes) {
        difference = Differ("number of lanes", hello_.lanes, membership_->lanes);
    } else if (hello_.fingerprint != membership_->fingerprint) {
        difference = "the fingerprints of model, plan and options differ";
    } else if (hello_.dscp > 63 || hello_.socket_priority > 15) {
        difference = "marks that do not exist: dscp " + std::to_string(hello_.dscp);
    }
    if (!difference.empty()) {
        Verdict verdict = Refuse(Code::kMismatch, difference);
        verdict.send = ReasonFrame(FrameType::kReject, index, verdict.code, static_cast<int32_t>(hello_.rank), difference);
        return verdict;
    }
    Verdict verdict;
    verdict.kind = Verdict::Kind::kOpen;
    verdict.send = ControlFrame(FrameType::kWelcome, index, 0, nullptr, 0);
    return verdict;
}

std::vector<uint8_t> WorkerGreeting::Begin() const {
    uint8_t payload[Hello::kBytes];
    EncodeHello(hello_, payload);
    return ControlFrame(FrameType::kHello, static_cast<uint16_t>(hello_.rank), 0, payload, sizeof payload);
}

Verdict WorkerGreeting::Take(const Header& header, const uint8_t* payload) {
    if (header.type == FrameType::kReject) {
        Reason reason = ReadReason(payload, header.length);
        if (reason.text.empty()) reason.text = "refused this worker and gave no reason";
        return Refuse(reason.code == Code::kNone ? Code::kProtocol : reason.code, std::move(reason.text));
    }
    if (!challenged_) {
        if (header.type != FrameType::kChallenge) return Refuse(Code::kProtocol, "the server's first frame is not a challenge");
        challenged_ = true;
        Nonce nonce;
        std::memcpy(nonce.data(), payload, nonce.size());
        const Digest expected = Prove(*membership_, 's', hello_, nonce);
        if (!EqualConstantTime(std::span(payload + nonce.size(), kProofBytes), expected)) {
            return Refuse(Code::kAuth, "the server does not know this job's secret");
        }
        const Digest proof = Prove(*membership_, 'w', hello_, nonce);
        Verdict verdict;
        verdict.send =
            ControlFrame(FrameType::kProof, static_cast<uint16_t>(hello_.rank), 0, proof.data(), proof.size());
        return verdict;
    }
    if (header.type != FrameType::kWelcome) return Refuse(Code::kProtocol, "a frame other than a welcome");
    Verdict verdict;
    verdict.kind = Verdict::Kind::kOpen;
    return verdict;
}

}  // namespace gradlane
