// Engine: plans that nodes carry out by themselves, on loopback.

#include "node/engine.h"

#include <cstring>
#include <latch>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "node/node.h"
#include "testing/check.h"

using namespace gradlane;

namespace {

constexpr int64_t kPatience = 20'000;  // ms: how long anything here may take before it counts as hung
constexpr size_t kFloats = 500;        // of a tensor: more than a packet

NodeOptions Options(uint32_t rank) {
    NodeOptions options;
    options.rank = options.server = static_cast<int32_t>(rank);
    options.membership.world = options.membership.servers = 2;
    options.membership.job = 1;
    options.packet_bytes = 640;
    options.linger_ms = 500;
    return options;
}

// Messages of one tensor each, from `first` on.
std::vector<uint32_t> EachOne(uint32_t first, size_t messages) {
    std::vector<uint32_t> firsts(messages + 1);
    std::iota(firsts.begin(), firsts.end(), first);
    return firsts;
}

// One rank: its node and the memory of `tensors` tensors, one after another.
struct Rank {
    std::unique_ptr<Node> node;
    std::vector<float> memory;
    std::vector<float> staged;  // of a message that is two tensors which are not neighbours
    std::shared_ptr<Engine> engine;

    float* tensor(size_t index) { return memory.data() + index * kFloats; }
    uint8_t* bytes(size_t index) { return reinterpret_cast<uint8_t*>(tensor(index)); }
};

struct Pair {
    std::vector<Rank> ranks{2};

    explicit Pair(size_t tensors) {
        Failure why;
        for (uint32_t rank = 0; rank < 2; ++rank) {
            ranks[rank].node = Node::Start(Options(rank), &why);
            REQUIRE(ranks[rank].node != nullptr);
            ranks[rank].memory.resize(tensors * kFloats);
        }
        for (uint32_t rank = 0; rank < 2; ++rank) ranks[rank].node->Dial(1 - rank, "127.0.0.1", ranks[1 - rank].node->port());
        std::string missing;
        for (Rank& rank : ranks) REQUIRE(rank.node->Join(kPatience, &missing));
    }
    ~Pair() {
        std::thread other([this] { ranks[1].node->Close(); });
        ranks[0].node->Close();
        other.join();
    }

    // A message a tensor, except that the last message is the first and the last tensor; these
    // two travel as f16 if `halves`.
    void CarryOut(Schedule schedule, bool merges_ends, bool keeps_log = false, bool halves = false) {
        for (Rank& rank : ranks) {
            std::vector<std::vector<uint32_t>> carried;
            std::vector<MessageMemory> memory;
            for (uint32_t message = 0; message < schedule.messages.size(); ++message) {
                carried.push_back(schedule.messages[message].needs);
                Spec spec;
                if (merges_ends && message + 1 == schedule.messages.size()) {
                    rank.staged.resize(2 * kFloats);
                    auto* at = reinterpret_cast<uint8_t*>(rank.staged.data());
                    const uint32_t last = schedule.tensors - 1;
                    const std::optional<DType> half = halves ? std::optional(DType::kF16) : std::nullopt;
                    memory.push_back({at, {{rank.bytes(0), kFloats * 4, half}, {rank.bytes(last), kFloats * 4, half}}});
                    spec.dtype = half.value_or(DType::kF32);
                    spec.bytes = 2 * kFloats * ElementBytes(spec.dtype);
                } else {
                    memory.push_back({rank.bytes(carried.back()[0]), {}});
                    spec.bytes = kFloats * sizeof(float);
                }
                rank.node->Define(message, spec, memory.back().message, memory.back().message);
            }
            rank.engine = std::make_shared<Engine>(schedule, carried, std::move(memory), EachOne(0, schedule.messages.size()), false, keeps_log);
            rank.node->CarryOut(rank.engine);
        }
    }

    void Fill(int iteration) {
        for (uint32_t rank = 0; rank < 2; ++rank) {
            auto& memory = ranks[rank].memory;
            for (size_t at = 0; at < memory.size(); ++at) memory[at] = static_cast<float>((rank + 1) * (at % 97 + static_cast<size_t>(iteration)));
        }
    }

    void Check(int iteration) {
        for (Rank& rank : ranks) {
            for (size_t at = 0; at < rank.memory.size(); ++at) {
                if (!CHECK_EQ(rank.memory[at], static_cast<float>(3 * (at % 97 + static_cast<size_t>(iteration))))) return;
            }
        }
    }
};

Schedule MessageEach(uint32_t tensors, std::optional<uint64_t> window) {
    Schedule schedule;
    schedule.tensors = tensors;
    for (uint32_t tensor = 0; tensor < tensors; ++tensor) schedule.messages.push_back({kFloats * 4, tensor, 0, false, {tensor}});
    schedule.windows = {window};
    return schedule;
}

// Every rank has its gradients in an order of its own; `iterations` times.
void Iterate(Pair& pair, int iterations) {
    const uint32_t tensors = pair.ranks[0].engine->tensors();
    for (int iteration = 0; iteration < iterations; ++iteration) {
        pair.Fill(iteration);
        for (Rank& rank : pair.ranks) rank.node->Begin(iteration);
        for (uint32_t place = 0; place < tensors; ++place) {
            pair.ranks[0].node->Ready(place);
            pair.ranks[1].node->Ready(tensors - 1 - place);
        }
        if (iteration % 2 == 0) pair.ranks[1].node->Flush();
        for (Rank& rank : pair.ranks) {
            REQUIRE(rank.node->WaitArrived(Engine::kAll, rank.engine->interruptions(), kPatience));
            for (uint32_t tensor = 0; tensor < tensors; ++tensor) CHECK(rank.engine->HasArrived(tensor));
            CHECK(rank.engine->AllArrived());
        }
        pair.Check(iteration);
    }
    for (Rank& rank : pair.ranks) CHECK(rank.node->failure().code == Code::kNone);
}

}  // namespace

TEST(SumsComeOfWhatIsReadyInAnyOrderAndWindow) {
    for (const std::optional<uint64_t> window : {std::optional<uint64_t>{}, {1}, {3 * kFloats * 4}}) {
        Pair pair(20);
        pair.CarryOut(MessageEach(20, window), false);
        Iterate(pair, 5);
    }
}

TEST(AMessageOfSeveralRangesIsCopiedThereAndBack) {
    Schedule schedule = MessageEach(6, {2 * kFloats * 4});
    schedule.messages.erase(schedule.messages.begin());
    schedule.messages.back() = {2 * kFloats * 4, 0, 0, false, {0, 5}};
    Pair pair(6);
    pair.CarryOut(schedule, true);
    Iterate(pair, 3);
}

TEST(AMessageOfHalvesIsNarrowedAndWidened) {
    Schedule schedule = MessageEach(6, {2 * kFloats * 4});
    schedule.messages.erase(schedule.messages.begin());
    schedule.messages.back() = {2 * kFloats * 2, 0, 0, false, {0, 5}};
    Pair pair(6);
    pair.CarryOut(schedule, true, false, true);
    Iterate(pair, 3);  // integers up to 297, which f16 has exactly
}

TEST(ARangeIsRoundedOnceAndMayStandBesideOneThatIsCopied) {
    float wide[3] = {1.0f + 0x1p-9f, -70000.0f, 0x1p-30f};
    uint16_t half = 0x3F80;
    uint16_t message[4] = {};
    const MessageMemory memory{reinterpret_cast<uint8_t*>(message),
                               {{reinterpret_cast<uint8_t*>(wide), sizeof wide, DType::kBF16},
                                {reinterpret_cast<uint8_t*>(&half), sizeof half}}};
    memory.Gather();
    CHECK_EQ(message[0], 0x3F80);  // 1
    CHECK_EQ(message[1], 0xC789);  // -70144
    CHECK_EQ(message[2], 0x3080);  // 2^-30
    CHECK_EQ(message[3], 0x3F80);
    half = 0;
    memory.Scatter();
    CHECK_EQ(wide[0], 1.0f);
    CHECK_EQ(wide[1], -70144.0f);
    CHECK_EQ(wide[2], 0x1p-30f);
    CHECK_EQ(half, 0x3F80);
}

TEST(SecondPhasesAreReleasedWhenAllIsReduced) {
    Schedule schedule = MessageEach(8, {2 * kFloats * 4});
    for (uint32_t message = 0; message < 8; ++message) {
        if (message == 3) continue;
        schedule.messages[message].two_phase = true;
        schedule.second_phases.push_back(message);
    }
    Pair pair(8);
    pair.CarryOut(schedule, false);
    Iterate(pair, 3);
}

TEST(TheLogHasEveryFactAndItsAnswer) {
    Pair pair(4);
    pair.CarryOut(MessageEach(4, {1}), false, true);
    Iterate(pair, 3);
    const std::vector<Engine::Fact> facts = pair.ranks[0].node->Facts();
    REQUIRE(facts.size() == 3 * (1 + 4 + 4));
    Dispatcher fresh(MessageEach(4, {1}));
    for (const Engine::Fact& fact : facts) {
        Dispatcher::Starts starts;
        switch (fact.what) {
            case Engine::What::kBegin: fresh.Begin(); break;
            case Engine::What::kReady: fresh.Ready(fact.subject, &starts); break;
            case Engine::What::kFinished: fresh.Finished(fact.subject, &starts); break;
        }
        CHECK_EQ(starts, fact.starts);
    }
}

TEST(SpansSayWhatHappenedInTheLastIterations) {
    Pair pair(3);
    pair.CarryOut(MessageEach(3, {}), false);
    Iterate(pair, 4);
    CHECK_EQ(pair.ranks[0].node->Spans(false).size(), size_t{4 * 3 * 3});
    int of_each[3] = {0, 0, 0};
    for (const Engine::Span& span : pair.ranks[0].node->Spans(true)) {
        CHECK_EQ(span.iteration, 3);
        CHECK(span.start_ns <= span.end_ns);
        ++of_each[static_cast<int>(span.kind)];
    }
    for (const int count : of_each) CHECK_EQ(count, 3);
}

TEST(AnotherPlanTakesThePlaceOfTheOneBefore) {
    Pair pair(5);
    pair.CarryOut(MessageEach(5, {1}), false);
    Iterate(pair, 2);
    for (Rank& rank : pair.ranks) {
        std::vector<std::vector<uint32_t>> carried;
        std::vector<MessageMemory> memory;
        rank.node->ForgetBelow(5);
        for (uint32_t tensor = 0; tensor < 5; ++tensor) {
            Spec spec;
            spec.bytes = kFloats * 4;
            rank.node->Define(5 + tensor, spec, rank.bytes(tensor), rank.bytes(tensor));
            carried.push_back({tensor});
            memory.push_back({rank.bytes(tensor), {}});
        }
        rank.engine = std::make_shared<Engine>(MessageEach(5, {}), carried, std::move(memory), EachOne(5, 5), true, false);
        rank.node->CarryOut(rank.engine);
    }
    Iterate(pair, 2);
}

// Each waits for a tensor of its own, or for all. Whoever is not woken waits longer than a test may take.
TEST(SeveralThreadsAtATimeWaitEachForItsOwn) {
    constexpr uint32_t kTensors = 4;
    constexpr int64_t kForever = 3'600'000;  // ms
    Pair pair(kTensors);
    pair.CarryOut(MessageEach(kTensors, {}), false);
    Rank &waits = pair.ranks[0], &comes = pair.ranks[1];
    for (int iteration = 0; iteration < 50; ++iteration) {
        pair.Fill(iteration);
        for (Rank& rank : pair.ranks) rank.node->Begin(iteration);
        for (uint32_t tensor = 0; tensor < kTensors; ++tensor) waits.node->Ready(tensor);
        waits.node->Flush();
        std::latch begun(kTensors + 1);
        std::vector<std::thread> threads;
        for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
            threads.emplace_back([&, tensor] {
                const uint64_t interruptions = waits.engine->interruptions();
                begun.arrive_and_wait();
                if (!CHECK(waits.engine->Wait(tensor + 1 == kTensors ? Engine::kAll : tensor, interruptions, kForever))) return;
                const size_t last = (tensor + 1) * kFloats - 1;
                CHECK_EQ(waits.memory[last], static_cast<float>(3 * (last % 97 + static_cast<size_t>(iteration))));
            });
        }
        begun.arrive_and_wait();
        for (uint32_t place = 0; place < kTensors; ++place) {
            comes.node->Ready((static_cast<uint32_t>(iteration) + place) % kTensors);
            comes.node->Flush();
        }
        for (std::thread& thread : threads) thread.join();
        REQUIRE(comes.node->WaitArrived(Engine::kAll, comes.engine->interruptions(), kPatience));
        pair.Check(iteration);
    }
}

TEST(AWaitEndsWithAFailureOrAnInterruption) {
    Pair pair(1);
    pair.CarryOut(MessageEach(1, {}), false);
    Engine& engine = *pair.ranks[0].engine;
    for (Rank& rank : pair.ranks) rank.node->Begin(0);
    pair.ranks[0].node->Ready(0);
    CHECK(!engine.Wait(0, engine.interruptions(), 1));
    const uint64_t before = engine.interruptions();
    engine.Interrupt();
    CHECK(!engine.Wait(0, before, kPatience));
    const uint64_t now = engine.interruptions();
    pair.ranks[1].node->Abort("enough");
    CHECK(!engine.Wait(0, now, kPatience));
    CHECK(engine.interruptions() != now);
    CHECK(pair.ranks[0].node->failure().code == Code::kAborted);
}

TEST(AGradientThatIsReadyTwiceOrIsNoneFailsTheNode) {
    for (const uint32_t second : {0, 7}) {
        Pair pair(1);
        pair.CarryOut(MessageEach(1, {}), false);
        pair.ranks[0].node->Begin(0);
        pair.ranks[0].node->Ready(0);
        pair.ranks[0].node->Ready(second);
        CHECK(!pair.ranks[0].node->WaitArrived(0, 0, kPatience));
        CHECK(pair.ranks[0].node->failure().code == Code::kProtocol);
    }
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
