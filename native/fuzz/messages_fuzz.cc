// Three workers' Messages, whose frames travel as an input says: in order on each way and priority, as
// a connection's are, and otherwise in any order. The input also says who sends, who receives, and
// whether worker 2 tells lies.
//
// A model knows the order of the sends. Whatever happens, a receive gets the first message of its
// source and tag that no earlier receive got, whole; of lies, a header is refused or they harm nobody
// but the liar; and what is kept for receives that have not come is bounded.

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "fuzz/fuzz.h"
#include "node/messages.h"

using namespace gradlane;

namespace {

constexpr uint32_t kWorkers = 3, kTags = 3, kPacket = 256;
constexpr uint64_t kCredit = 8 << 10;  // holds as many packets as a node's does
constexpr uint64_t kSizes[] = {0, 1, 200, 280, 600};  // the last two are offered, and have two and three parts

struct Frame {
    Header header;
    std::vector<uint8_t> payload;
};

struct World;

struct Worker final : Messages::Post {
    Worker(World* world, uint32_t self) : world(world), self(self), messages(kWorkers, kPacket, this, kCredit) {}
    void PostRun(uint32_t rank, uint32_t priority, Run run) override { runs[rank][priority].push_back(std::move(run)); }
    void PostAnswer(uint32_t rank, FrameType type, uint32_t number) override;
    void Ended(Transfer& transfer, int32_t rank) override {
        MUST(!transfer.over);
        transfer.over = true;
        transfer.rank = rank;
    }
    void Mismatch(uint32_t, const std::string&) override { mismatched = true; }

    World* const world;
    const uint32_t self;
    Messages messages;
    std::map<uint32_t, std::map<uint32_t, std::deque<Run>>> runs;  // to whom, by priority
    bool mismatched = false;
};

struct Said {
    std::shared_ptr<Transfer> transfer = std::make_shared<Transfer>();
    uint32_t from = 0, tag = 0;
    bool received = false;
    std::vector<uint8_t> bytes;
};

struct Heard {
    std::shared_ptr<Transfer> transfer = std::make_shared<Transfer>();
    int32_t from = kAnyone;
    uint32_t tag = 0;
    bool checked = false;
    std::vector<uint8_t> bytes;
};

struct World {
    std::vector<std::unique_ptr<Worker>> workers;
    std::map<std::pair<uint32_t, uint32_t>, std::deque<Header>> answers;  // from whom, to whom
    std::vector<std::vector<std::unique_ptr<Said>>> said;                 // to whom
    std::vector<std::vector<std::unique_ptr<Heard>>> heard;               // by whom
    bool lied = false;
};

void Worker::PostAnswer(uint32_t rank, FrameType type, uint32_t number) {
    Header header;
    header.type = type;
    header.tensor = number;
    world->answers[{self, rank}].push_back(header);
}

// Gives `to` a frame of `from`. False: it is refused.
bool Give(World& world, uint32_t from, uint32_t to, const Header& header, const uint8_t* payload) {
    Messages& messages = world.workers[to]->messages;
    const Connection::Sink sink = messages.OnHeader(from, header);
    if (sink.kind == Connection::Sink::Kind::kFault) return false;
    if (header.length != 0) std::memcpy(sink.into, payload, header.length);
    messages.OnFrame(from, header);
    return true;
}

bool HasMore(World& world, uint32_t from, uint32_t to) { return !world.answers[{from, to}].empty() || !world.workers[from]->runs[to].empty(); }

// Moves the next frame from `from` to `to`, if there is one. False: it was refused.
bool Move(World& world, uint32_t from, uint32_t to) {
    auto& answers = world.answers[{from, to}];
    if (!answers.empty()) {  // control frames go first
        const Header header = answers.front();
        answers.pop_front();
        Messages& messages = world.workers[to]->messages;
        return (header.type == FrameType::kAccept ? messages.OnAccept(from, header.tensor) : messages.OnTaken(from, header.tensor)) == nullptr;
    }
    auto& by_priority = world.workers[from]->runs[to];
    if (by_priority.empty()) return true;
    PacketQueue queue;
    const uint32_t priority = by_priority.begin()->first;
    Run& run = by_priority.begin()->second.front();
    Run rest = run;
    queue.Put(priority, std::move(rest));
    const Packet packet = queue.Next();
    std::vector<uint8_t> payload(packet.payload, packet.payload + packet.header.length);
    if (++run.next == run.end) {
        by_priority.begin()->second.pop_front();
        if (by_priority.begin()->second.empty()) by_priority.erase(priority);
    }
    world.workers[from]->messages.OnSent(to, packet.header);
    return Give(world, from, to, packet.header, payload.data());
}

// The first messages of a source and tag belong to its receives in order. Of receives from anyone only what they got is known.
void Check(World& world, uint32_t rank) {
    for (const auto& heard : world.heard[rank]) {
        if (!heard->transfer->over || heard->checked) continue;
        heard->checked = true;
        if (world.lied && heard->transfer->rank == 2) continue;
        bool found = false;
        for (const auto& said : world.said[rank]) {
            if (found || said->received || said->tag != heard->tag || static_cast<int32_t>(said->from) != heard->transfer->rank) continue;
            if (said->bytes != heard->bytes) continue;
            said->received = found = true;
        }
        MUST(found);
    }
}

// Whether so much that one sent is not received by the other that its credit may be used up, but for what is given back in lots.
bool MayBeHeldUp(const World& world, uint32_t from, uint32_t to) {
    uint64_t kept = 0;
    for (const auto& said : world.said[to]) {
        if (said->from == from && !said->received) kept += Messages::kEnvelopeBytes + (said->bytes.size() <= kPacket ? said->bytes.size() : 0);
    }
    return kept + Messages::kEnvelopeBytes > kCredit * 3 / 4;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    fuzz::Input input(data, size);
    World world;
    for (uint32_t self = 0; self < kWorkers; ++self) world.workers.push_back(std::make_unique<Worker>(&world, self));
    world.said.resize(kWorkers);
    world.heard.resize(kWorkers);
    const uint8_t how = input.Byte();
    const bool one_size = (how & 1) != 0;  // else some receives are of another size than what is sent
    bool fine = true;
    uint8_t stamp = 0;
    for (int steps = 0; !input.empty() && fine && steps < 300; ++steps) {
        const uint8_t deed = input.Byte(), more = input.Byte();
        const uint32_t self = deed / 8 % kWorkers, other = (self + 1 + deed / 64 % 2) % kWorkers;
        const uint32_t tag = more % kTags;
        const uint64_t bytes = kSizes[one_size ? how / 2 % 5 : more / 4 % 5];
        switch (deed % 8) {
            case 0:
            case 1: {
                auto said = std::make_unique<Said>();
                said->from = self;
                said->tag = tag;
                said->bytes.assign(bytes, ++stamp);
                world.workers[self]->messages.Send(said->transfer, other, tag, more / 64, said->bytes.data(), bytes);
                world.said[other].push_back(std::move(said));
                break;
            }
            case 2:
            case 3: {
                auto heard = std::make_unique<Heard>();
                heard->from = (more & 128) != 0 ? kAnyone : static_cast<int32_t>(other);
                heard->tag = tag;
                heard->bytes.assign(bytes, 0);
                world.workers[self]->messages.Receive(heard->transfer, heard->from, tag, heard->bytes.data(), bytes);
                world.heard[self].push_back(std::move(heard));
                break;
            }
            case 4:
                if (self == 2 && (how & 128) != 0) {  // a lie
                    world.lied = true;
                    Header header;
                    header.type = (more & 1) != 0 ? FrameType::kMessage : FrameType::kPart;
                    header.tensor = input.Byte() % 8;
                    header.iteration = input.Byte() % kTags;
                    header.offset = (more & 2) != 0 ? input.Word() : kSizes[input.Byte() % 5];
                    header.length = static_cast<uint32_t>((more & 4) != 0 ? header.offset % (4 * kPacket) : 0);
                    const std::vector<uint8_t> payload(header.length, 7);
                    (void)Give(world, self, other, header, payload.data());
                } else if (self == 2 && (how & 64) != 0) {
                    world.lied = true;
                    Messages& messages = world.workers[other]->messages;
                    (void)((more & 1) != 0 ? messages.OnAccept(self, input.Byte() % 8) : messages.OnTaken(self, static_cast<uint32_t>(input.Word())));
                }
                break;
            default: {
                const bool taken = Move(world, self, other);
                const bool mismatched = std::any_of(world.workers.begin(), world.workers.end(), [](const auto& each) { return each->mismatched; });
                if (mismatched || world.lied) {
                    fine = taken;
                } else {
                    MUST(taken);
                }
                fine = fine && !mismatched;
                break;
            }
        }
        for (uint32_t rank = 0; rank < kWorkers; ++rank) {
            if (world.workers[rank]->mismatched) MUST(!one_size || world.lied);
            if (!world.workers[rank]->mismatched) Check(world, rank);
            MUST(world.workers[rank]->messages.held_bytes() <= (kWorkers - 1) * kCredit);
        }
    }
    // all that was sent and received ends
    for (bool moves = true; fine && !world.lied && moves;) {
        moves = false;
        for (uint32_t self = 0; self < kWorkers; ++self) {
            for (uint32_t other = 0; other < kWorkers; ++other) {
                if (self == other || !HasMore(world, self, other)) continue;
                moves = true;
                const bool taken = Move(world, self, other);
                MUST(taken || !one_size);
                fine = fine && taken;
            }
        }
    }
    if (one_size && !world.lied) {
        for (uint32_t rank = 0; rank < kWorkers; ++rank) {
            Check(world, rank);
            for (const auto& heard : world.heard[rank]) {
                if (heard->transfer->over) continue;
                for (const auto& said : world.said[rank]) {
                    if (MayBeHeldUp(world, said->from, rank)) continue;
                    MUST(said->received || said->tag != heard->tag || (heard->from != kAnyone && static_cast<int32_t>(said->from) != heard->from));
                }
            }
        }
    }
    return 0;
}
