#include "node/packet_queue.h"

#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "node/layout.h"
#include "node/spec.h"
#include "testing/check.h"

using namespace gradlane;

namespace {

// The vectors' file: tests/unit/wire_vectors.py has its format and makes it.
constexpr const char* kVectors = GRADLANE_GOLDEN "/wire_order.txt";
constexpr uint32_t kPacket = 64;

struct Step {
    enum { kEnqueue, kSums, kTake } what;
    uint32_t first, second;  // a run and its packet; or a priority and a number of packets
};

struct Vector {
    std::string name;
    bool by_priority, mixed;  // mixed: what workers send, and sums that are ordered among themselves
    std::vector<Step> steps;
};

std::vector<Vector> ReadVectors(bool mixed) {
    std::ifstream file(kVectors);
    REQUIRE(file.is_open());
    std::vector<Vector> vectors;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string what;
        words >> what;
        if (what == "vector") {
            std::string name, wire;
            words >> name >> wire;
            REQUIRE(wire == "packet-priority" || wire == "packet-fifo" || wire == "pull-priority");
            vectors.push_back({name + " " + wire, wire == "packet-priority", wire == "pull-priority", {}});
        } else if (what == "enqueue" || what == "sums" || what == "take") {
            Step step{what == "enqueue" ? Step::kEnqueue : what == "sums" ? Step::kSums : Step::kTake, 0, 0};
            REQUIRE(!vectors.empty() && words >> step.first >> step.second);
            vectors.back().steps.push_back(step);
        } else {
            REQUIRE(what.empty() || what[0] == '#');
        }
    }
    std::erase_if(vectors, [mixed](const Vector& vector) { return vector.mixed != mixed; });
    return vectors;
}

std::shared_ptr<const Layout> LayoutOf(uint32_t packets) { return Dealer(1).Cut(uint64_t{packets} * kPacket, kPacket); }

uint32_t PriorityOf(const Vector& vector, uint32_t priority) {
    Spec spec;
    spec.urgent_first = vector.by_priority;
    spec.priority = priority;
    return QueuePriority(spec);
}

}  // namespace

TEST(PushesLeaveAsTheVectorsSay) {
    const std::vector<uint8_t> memory(64 * kPacket);
    const auto vectors = ReadVectors(false);
    REQUIRE(vectors.size() > 20);
    for (const Vector& vector : vectors) {
        PacketQueue queue;
        uint32_t runs = 0;
        for (const Step& step : vector.steps) {
            if (step.what != Step::kTake) {
                Run run;
                run.tensor = runs++;
                run.memory = memory.data();
                run.layout = LayoutOf(step.second);
                run.end = step.second;
                queue.Put(PriorityOf(vector, step.first), std::move(run));
                continue;
            }
            REQUIRE(!queue.empty());
            const Packet packet = queue.Next();
            if (!CHECK_EQ(packet.header.tensor, step.first) || !CHECK_EQ(packet.header.offset, uint64_t{step.second} * kPacket)) {
                std::fprintf(stderr, "in vector %s\n", vector.name.c_str());
                return;
            }
            CHECK(packet.payload == memory.data() + packet.header.offset);
        }
        CHECK(queue.empty());
    }
}

// A result's packets are queued one by one, each with a buffer of its own: as many runs of one priority.
TEST(ResultsLeaveAsTheVectorsSay) {
    BufferPool pool(kPacket, 64);
    for (const Vector& vector : ReadVectors(false)) {
        PacketQueue queue;
        uint32_t runs = 0;
        for (const Step& step : vector.steps) {
            if (step.what != Step::kTake) {
                for (uint32_t place = 0; place < step.second; ++place) {
                    Run run;
                    run.type = FrameType::kResult;
                    run.tensor = runs;
                    run.layout = LayoutOf(step.second);
                    run.next = place;
                    run.end = place + 1;
                    run.buffer = pool.Take();
                    queue.Put(PriorityOf(vector, step.first), std::move(run));
                }
                ++runs;
                continue;
            }
            REQUIRE(!queue.empty());
            const Packet packet = queue.Next();
            CHECK(packet.buffer && packet.payload == packet.buffer.data());
            if (!CHECK_EQ(packet.header.tensor, step.first) || !CHECK_EQ(packet.header.offset, uint64_t{step.second} * kPacket)) {
                std::fprintf(stderr, "in vector %s\n", vector.name.c_str());
                return;
            }
        }
        CHECK(queue.empty());
    }
    CHECK_EQ(pool.taken_bytes(), 0);  // whoever sends a packet lets go of its buffer
}

// As they come to a connection between processes that both have a worker and a server.
TEST(SumsAloneByPriorityLeaveAsTheVectorsSay) {
    const std::vector<uint8_t> memory(64 * kPacket);
    BufferPool pool(kPacket, 64);
    const auto vectors = ReadVectors(true);
    REQUIRE(vectors.size() > 10);
    for (const Vector& vector : vectors) {
        PacketQueue queue;
        uint32_t runs = 0;
        for (const Step& step : vector.steps) {
            if (step.what == Step::kTake) {
                REQUIRE(!queue.empty());
                const Packet packet = queue.Next();
                if (!CHECK_EQ(packet.header.tensor, step.first) || !CHECK_EQ(packet.header.offset, uint64_t{step.second} * kPacket)) {
                    std::fprintf(stderr, "in vector %s\n", vector.name.c_str());
                    return;
                }
                continue;
            }
            Run run;
            run.tensor = runs++;
            run.layout = LayoutOf(step.second);
            run.end = step.second;
            if (step.what == Step::kEnqueue) {
                run.memory = memory.data();
                queue.Put(0, std::move(run));
                continue;
            }
            for (uint32_t place = 0; place < step.second; ++place) {
                Run packet = run;
                packet.type = FrameType::kResult;
                packet.next = place;
                packet.end = place + 1;
                packet.buffer = pool.Take();
                queue.PutSums(step.first, std::move(packet));
            }
        }
        CHECK(queue.empty());
        CHECK_EQ(queue.packets(), size_t{0});
    }
    CHECK_EQ(pool.taken_bytes(), 0);
}

TEST(ATensorThatIsNotUrgentFirstCountsAsPriority0) {
    Spec spec;
    spec.priority = 7;
    CHECK_EQ(QueuePriority(spec), 0);
    spec.urgent_first = true;
    CHECK_EQ(QueuePriority(spec), 7);
}

TEST(ThousandsOfPrioritiesAreServedEachInItsTurn) {
    // one queue a priority, as many as there are tensors: nothing has to share one
    constexpr uint32_t kTensors = 5000;
    Dealer dealer(1);
    const auto layout = dealer.Cut(64, 64);
    std::vector<uint8_t> memory(64);
    PacketQueue queue;
    for (uint32_t i = 0; i < kTensors; ++i) {
        Run run;
        run.priority = run.tensor = i * 1237 % kTensors;  // each once, in no order
        run.memory = memory.data();
        run.layout = layout;
        run.end = 1;
        queue.Put(run.priority, std::move(run));
    }
    for (uint32_t i = 0; i < kTensors; ++i) {
        const Packet packet = queue.Next();
        if (!CHECK_EQ(packet.header.tensor, i) || !CHECK_EQ(packet.header.priority, i)) return;
    }
    CHECK(queue.empty());
}

TEST(WhatIsClearedIsNotSent) {
    BufferPool pool(kPacket, 1);
    PacketQueue queue;
    Run run;
    run.type = FrameType::kResult;
    run.layout = LayoutOf(1);
    run.end = 1;
    run.buffer = pool.Take();
    queue.Put(3, std::move(run));
    queue.Clear();
    CHECK(queue.empty());
    CHECK_EQ(pool.taken_bytes(), 0);
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
