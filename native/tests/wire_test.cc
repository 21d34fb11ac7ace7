#include <cstring>
#include <string>
#include <vector>

#include "node/greeting.h"
#include "node/layout.h"
#include "testing/check.h"
#include "wire/frame.h"

using namespace gradlane;

namespace {

Header SomeHeader() {
    Header header;
    header.type = FrameType::kPush;
    header.flags = kFlagChecksum;
    header.tensor = 0x01020304;
    header.offset = 0x1112131415161718;
    header.length = 30720;
    header.iteration = 7;
    header.priority = 3;
    header.sender = 0xABCD;
    header.payload_crc = 0xDEADBEEF;
    return header;
}

std::string Hex(const uint8_t* bytes, size_t n) {
    std::string hex;
    for (size_t i = 0; i < n; ++i) {
        hex += "0123456789abcdef"[bytes[i] >> 4];
        hex += "0123456789abcdef"[bytes[i] & 15];
    }
    return hex;
}

Membership Job() {
    Membership job;
    job.world = 3;
    job.servers = 2;
    job.lanes = 1;
    job.job = 42;
    job.generation = 1;
    job.secret = {1, 2, 3};
    return job;
}

Hello HelloOf(const Membership& job) {
    Hello hello;
    hello.rank = 1;
    hello.world = job.world;
    hello.servers = job.servers;
    hello.lanes = job.lanes;
    hello.job = job.job;
    hello.generation = job.generation;
    hello.fingerprint = job.fingerprint;
    hello.nonce.fill(9);
    return hello;
}

struct Frame {
    Header header;
    std::vector<uint8_t> payload;
};

Frame Parse(const std::vector<uint8_t>& bytes) {
    Frame frame;
    REQUIRE(bytes.size() >= kHeaderBytes);
    REQUIRE(Decode(bytes.data(), &frame.header) == HeaderFault::kNone);
    frame.payload.assign(bytes.begin() + kHeaderBytes, bytes.end());
    REQUIRE(frame.payload.size() == frame.header.length);
    return frame;
}

// Both sides to their end; what each concluded.
std::pair<Verdict, Verdict> Greet(const Membership& ours, const Membership& theirs, const Hello& hello) {
    Nonce nonce;
    nonce.fill(5);
    ServerGreeting server(&ours, 0, nonce);
    WorkerGreeting worker(&theirs, hello);
    Frame frame = Parse(worker.Begin());
    Verdict of_server = server.Take(frame.header, frame.payload.data());
    Verdict of_worker;
    while (!of_server.send.empty() && of_worker.kind == Verdict::Kind::kGoOn) {
        frame = Parse(of_server.send);
        of_worker = worker.Take(frame.header, frame.payload.data());
        if (of_worker.send.empty()) break;
        frame = Parse(of_worker.send);
        of_server = server.Take(frame.header, frame.payload.data());
    }
    return {std::move(of_server), std::move(of_worker)};
}

}  // namespace

// The same bytes stand in tests/golden/wire.json, made by another encoder.
TEST(AHeaderHasItsGoldenBytes) {
    uint8_t bytes[kHeaderBytes];
    Encode(SomeHeader(), bytes);
    CHECK_EQ(Hex(bytes, sizeof bytes), std::string("474c01080403020118171615141312110078000007000000"
                                                   "03000000cdab0100efbeadde60b60acc"));
    Header back;
    CHECK(Decode(bytes, &back) == HeaderFault::kNone);
    CHECK(back == SomeHeader());
}

TEST(NoFlippedBitOfAHeaderPasses) {
    uint8_t bytes[kHeaderBytes];
    Encode(SomeHeader(), bytes);
    for (size_t bit = 0; bit < 8 * kHeaderBytes; ++bit) {
        bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        Header header;
        if (!CHECK(Decode(bytes, &header) != HeaderFault::kNone)) break;
        bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    }
}

TEST(LengthsThatATypeDoesNotAllowAreRefused) {
    uint8_t bytes[kHeaderBytes];
    Header header = SomeHeader(), back;
    for (const uint32_t length : {kMaxPacketBytes + 1, 0x7FFFFFFFu, 0xFFFFFFFFu}) {
        header.length = length;
        Encode(header, bytes);
        CHECK(Decode(bytes, &back) == HeaderFault::kLength);
    }
    header.type = FrameType::kHello;
    header.length = Hello::kBytes - 1;
    Encode(header, bytes);
    CHECK(Decode(bytes, &back) == HeaderFault::kLength);
}

TEST(PacketsCoverATensorOnceAndServersEvenly) {
    for (uint32_t servers = 1; servers < 5; ++servers) {
        for (const uint64_t bytes : {uint64_t{0}, uint64_t{4}, uint64_t{640}, uint64_t{641}, uint64_t{100'000}}) {
            Dealer dealer(servers);
            const auto layout = dealer.Cut(bytes, 640);
            std::vector<int> times(bytes);
            uint64_t most = 0, least = bytes;
            for (uint32_t server = 0; server < servers; ++server) {
                uint64_t dealt = 0;
                for (const Piece& piece : layout->by_server[server]) {
                    CHECK(piece.length > 0 && piece.offset + piece.length <= bytes);
                    for (uint64_t at = piece.offset; at < piece.offset + piece.length; ++at) ++times[at];
                    dealt += piece.length;
                    CHECK(layout->Find(server, piece.offset, piece.length) >= 0);
                    CHECK_EQ(layout->Find(server, piece.offset, piece.length + 1), -1);
                    CHECK_EQ(layout->Find(server, piece.offset + 1, piece.length), -1);
                }
                most = std::max(most, dealt);
                least = std::min(least, dealt);
            }
            for (const int each : times) {
                if (!CHECK_EQ(each, 1)) return;
            }
            CHECK(most - least <= 640);
        }
    }
}

TEST(ATensorThatIsDealtAloneIsCutIntoEqualPartsOfServers) {
    constexpr uint32_t kMost = 256 << 10;
    for (uint32_t servers = 1; servers < 8; ++servers) {
        for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{4097}, uint64_t{1'000'000}, uint64_t{9'999'999}, uint64_t{100'000'000}}) {
            const auto layout = Dealer::CutEvenly(bytes, kMost, servers);
            const uint64_t each = (bytes + uint64_t{servers} * kMost - 1) / (uint64_t{servers} * kMost);  // packets: as few as can be
            CHECK(layout->packets <= each * servers);
            uint64_t sum = 0, most = 0, least = bytes;
            for (const auto& pieces : layout->by_server) {
                CHECK(pieces.size() <= each);
                uint64_t dealt = 0;
                for (const Piece& piece : pieces) {
                    CHECK(piece.length <= kMost && piece.offset % 64 == 0);
                    dealt += piece.length;
                }
                sum += dealt;
                most = std::max(most, dealt);
                least = std::min(least, dealt);
            }
            CHECK_EQ(sum, bytes);
            CHECK(most - least <= 64 * each * servers);  // lengths are rounded up, and the last packets lack that
        }
    }
}

TEST(AWorkerAndAServerOfOneJobMeet) {
    const Membership job = Job();
    const auto [server, worker] = Greet(job, job, HelloOf(job));
    CHECK(server.kind == Verdict::Kind::kOpen);
    CHECK(worker.kind == Verdict::Kind::kOpen);
}

TEST(AnotherSecretIsFoundByTheWorkerFirst) {
    const Membership job = Job();
    Membership other = job;
    other.secret = {1, 2, 4};
    const auto [server, worker] = Greet(job, other, HelloOf(other));
    CHECK(worker.kind == Verdict::Kind::kRefused);
    CHECK(worker.code == Code::kAuth);
    CHECK(server.kind == Verdict::Kind::kGoOn);
}

TEST(AWorkerThatDoesNotKnowTheSecretIsRefusedWhateverItProves) {
    const Membership job = Job();
    Nonce nonce;
    nonce.fill(5);
    ServerGreeting server(&job, 0, nonce);
    const Frame hello = Parse(WorkerGreeting(&job, HelloOf(job)).Begin());
    const Frame challenge = Parse(server.Take(hello.header, hello.payload.data()).send);
    // the server's own proof, reflected
    Header header;
    header.type = FrameType::kProof;
    header.length = kProofBytes;
    const Verdict verdict = server.Take(header, challenge.payload.data() + sizeof(Nonce));
    CHECK(verdict.kind == Verdict::Kind::kRefused);
    CHECK(verdict.code == Code::kAuth);
    CHECK_EQ(verdict.text, std::string("wrong secret"));
}

TEST(ARecordedProofIsWorthNothingUnderAnotherNonce) {
    const Membership job = Job();
    Nonce first, second;
    first.fill(5);
    second.fill(6);
    ServerGreeting then(&job, 0, first), now(&job, 0, second);
    WorkerGreeting worker(&job, HelloOf(job));
    const Frame hello = Parse(worker.Begin());
    const Frame challenge = Parse(then.Take(hello.header, hello.payload.data()).send);
    const Frame proof = Parse(worker.Take(challenge.header, challenge.payload.data()).send);
    now.Take(hello.header, hello.payload.data());
    CHECK(now.Take(proof.header, proof.payload.data()).code == Code::kAuth);
}

TEST(WhatDiffersIsNamed) {
    const Membership job = Job();
    const auto refusal = [&job](auto change) {
        Hello hello = HelloOf(job);
        change(hello);
        return Greet(job, job, hello).second.text;
    };
    CHECK_EQ(refusal([](Hello& hello) { hello.world = 2; }), std::string("world size: the worker says 2, the server says 3"));
    CHECK_EQ(refusal([](Hello& hello) { hello.job = 7; }), std::string("another job's worker"));
    CHECK_EQ(refusal([](Hello& hello) { hello.generation = 0; }),
             std::string("generation of the job: the worker says 0, the server says 1"));
    CHECK_EQ(refusal([](Hello& hello) { hello.rank = 3; }), std::string("rank 3 in a world of 3"));
    CHECK_EQ(refusal([](Hello& hello) { hello.server = 1; }),
             std::string("index of the server: the worker says 1, the server says 0"));
    CHECK_EQ(refusal([](Hello& hello) { hello.fingerprint[0] = 1; }), std::string("the fingerprints of model, plan and options differ"));
}

TEST(FramesOutOfOrderEndTheGreeting) {
    const Membership job = Job();
    ServerGreeting server(&job, 0, Nonce{});
    Header header;
    header.type = FrameType::kProof;
    header.length = kProofBytes;
    uint8_t payload[kMaxControlBytes] = {};
    CHECK(server.Take(header, payload).kind == Verdict::Kind::kRefused);
}

TEST(AReasonIsReadBackWithNothingUnprintable) {
    const std::string text = std::string("bad\n\x01 news") + std::string(400, 'x');
    const Frame frame = Parse(ReasonFrame(FrameType::kAbort, 1, Code::kDied, 2, text));
    const Reason reason = ReadReason(frame.payload.data(), frame.payload.size());
    CHECK(reason.code == Code::kDied);
    CHECK_EQ(reason.rank, 2);
    CHECK_EQ(reason.text.substr(0, 11), std::string("bad?? newsx"));
    CHECK(frame.payload.size() <= kMaxControlBytes);
}

TEST(ARuleIsReadBackAsItWasWritten) {
    Rule rule;
    rule.kind = RuleKind::kMomentum;
    rule.nesterov = true;
    rule.lr = 0.1;
    rule.weight_decay = 0.01;
    rule.momentum = 0.9;
    uint8_t bytes[kRuleBytes];
    EncodeRule(rule, bytes);
    CHECK_EQ(Hex(bytes, sizeof bytes),
             "02010000000000009a9999999999b93f7b14ae47e17a843fcdccccccccccec3f00000000000000000000000000000000");
    Rule read;
    CHECK(DecodeRule(bytes, &read) == nullptr);
    CHECK(read == rule);
    rule = {};
    rule.kind = RuleKind::kAdamW;
    rule.maximize = true;
    rule.lr = 0.001;
    rule.beta1 = 0.5;
    rule.beta2 = 0.75;
    rule.epsilon = 1;
    EncodeRule(rule, bytes);
    CHECK_EQ(Hex(bytes, sizeof bytes),
             "0402000000000000fca9f1d24d62503f0000000000000000000000000000e03f000000000000e83f000000000000f03f");
    CHECK(DecodeRule(bytes, &read) == nullptr);
    CHECK(read == rule);
}

TEST(ARuleThatNoOptimizerHasIsNotRead) {
    Rule rule;
    rule.kind = RuleKind::kSgd;
    rule.lr = 1;
    uint8_t bytes[kRuleBytes];
    EncodeRule(rule, bytes);
    Rule read;
    bytes[15] = 0xFF;  // a negative one, and a large one
    CHECK(DecodeRule(bytes, &read) != nullptr);
    EncodeRule(rule, bytes);
    for (const int kind : {0, 5, 255}) {
        bytes[0] = static_cast<uint8_t>(kind);
        CHECK(DecodeRule(bytes, &read) != nullptr);
    }
    CHECK(read == Rule{});
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
