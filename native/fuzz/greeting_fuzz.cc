// Both sides of the greeting, fed frames that are well-formed and otherwise anything: recorded ones, damaged ones, and
// honest proofs of a hello that is not. Nobody is let in who has not proved every word of it.

#include <cstring>

#include "digest/sha256.h"
#include "fuzz/fuzz.h"
#include "node/greeting.h"

using namespace gradlane;

namespace {

Membership Job() {
    Membership job;
    job.world = 3;
    job.servers = 2;
    job.lanes = 2;
    job.job = 7;
    job.generation = 1;
    job.secret = {1, 2, 3, 4};
    return job;
}

// As native/wire/wire.md has it.
Digest Proof(const Membership& job, char role, const Hello& hello, const Nonce& nonce) {
    std::vector<uint8_t> said(1 + Hello::kBytes + sizeof nonce);
    said[0] = static_cast<uint8_t>(role);
    EncodeHello(hello, said.data() + 1);
    std::memcpy(said.data() + 1 + Hello::kBytes, nonce.data(), sizeof nonce);
    return HmacSha256(job.secret, said);
}

Header HeaderOf(FrameType type, size_t length) {
    Header header;
    header.type = type;
    header.length = static_cast<uint32_t>(length);
    return header;
}

// The payload's edits: pairs of a place and what is added there.
void Edit(std::vector<uint8_t>& payload, fuzz::Input& input) {
    for (int edits = input.Byte() % 4; edits > 0 && !payload.empty(); --edits) {
        const uint8_t at = input.Byte();
        payload[at % payload.size()] ^= input.Byte();
    }
}

// What the type may carry, of `payload` or of zeros.
std::vector<uint8_t> Sized(FrameType type, std::vector<uint8_t> payload) {
    payload.resize(ControlBytes(type).value_or(static_cast<uint32_t>(std::min(payload.size(), kMaxControlBytes))));
    return payload;
}

void FuzzServer(fuzz::Input& input) {
    const Membership job = Job();
    Nonce nonce, theirs;
    nonce.fill(5);
    theirs.fill(9);
    ServerGreeting server(&job, 1, nonce);
    Hello hello;
    hello.rank = 2;
    hello.world = job.world;
    hello.server = 1;
    hello.servers = job.servers;
    hello.lanes = job.lanes;
    hello.job = job.job;
    hello.generation = job.generation;
    hello.nonce = theirs;
    bool proved = false, greeted = false;
    while (!input.empty()) {
        const uint8_t what = input.Byte();
        auto type = static_cast<FrameType>(1 + input.Byte() % 12);
        std::vector<uint8_t> payload = {};
        if (what % 4 == 0) {
            type = FrameType::kHello;
            payload.resize(Hello::kBytes);
            EncodeHello(hello, payload.data());
        } else if (what % 4 == 1) {
            type = FrameType::kProof;
            const Digest proof = Proof(job, 'w', greeted ? server.hello() : hello, nonce);
            payload.assign(proof.begin(), proof.end());
        } else if (what % 4 == 2) {  // the server's own proof, reflected
            type = FrameType::kProof;
            const Digest proof = Proof(job, 's', greeted ? server.hello() : hello, nonce);
            payload.assign(proof.begin(), proof.end());
        } else {
            payload = input.Bytes(kMaxControlBytes);
        }
        Edit(payload, input);
        payload = Sized(type, std::move(payload));
        if (greeted && type == FrameType::kProof) {
            const Digest honest = Proof(job, 'w', server.hello(), nonce);
            proved = std::equal(honest.begin(), honest.end(), payload.begin());
        }
        const Verdict verdict = server.Take(HeaderOf(type, payload.size()), payload.data());
        greeted = greeted || type == FrameType::kHello;
        if (verdict.kind == Verdict::Kind::kGoOn) continue;
        if (verdict.kind == Verdict::Kind::kOpen) {
            const Hello& said = server.hello();
            MUST(proved);
            MUST(said.rank < 3 && said.world == 3 && said.server == 1 && said.servers == 2 && said.lane < 2 && said.lanes == 2);
            MUST(said.job == 7 && said.generation == 1 && said.fingerprint == job.fingerprint && said.dscp < 64);
        } else if (!proved) {
            MUST(verdict.code == Code::kAuth || verdict.code == Code::kProtocol);  // a stranger learns no more
        }
        return;
    }
}

void FuzzWorker(fuzz::Input& input) {
    const Membership job = Job();
    Hello hello;
    hello.nonce.fill(9);
    WorkerGreeting worker(&job, hello);
    bool proved = false;
    while (!input.empty()) {
        const uint8_t what = input.Byte();
        auto type = static_cast<FrameType>(1 + input.Byte() % 12);
        std::vector<uint8_t> payload;
        Nonce nonce;
        nonce.fill(what);
        if (what % 4 <= 1) {
            type = FrameType::kChallenge;
            payload.assign(nonce.begin(), nonce.end());
            const Digest proof = Proof(job, what % 4 == 0 ? 's' : 'w', hello, nonce);
            payload.insert(payload.end(), proof.begin(), proof.end());
        } else if (what % 4 == 2) {
            type = FrameType::kWelcome;
        } else {
            payload = input.Bytes(kMaxControlBytes);
        }
        Edit(payload, input);
        payload = Sized(type, std::move(payload));
        if (type == FrameType::kChallenge && !proved) {
            std::copy_n(payload.begin(), sizeof nonce, nonce.begin());
            const Digest honest = Proof(job, 's', hello, nonce);
            proved = std::equal(honest.begin(), honest.end(), payload.begin() + sizeof nonce);
        }
        const Verdict verdict = worker.Take(HeaderOf(type, payload.size()), payload.data());
        if (verdict.kind == Verdict::Kind::kOpen) MUST(proved && type == FrameType::kWelcome);
        if (!verdict.send.empty()) MUST(proved);
        for (const char c : verdict.text) MUST(c >= ' ' && c <= '~');
        if (verdict.kind != Verdict::Kind::kGoOn) return;
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    fuzz::Input input(data, size);
    if (input.Byte() % 2 == 0) {
        FuzzServer(input);
    } else {
        FuzzWorker(input);
    }
    return 0;
}
