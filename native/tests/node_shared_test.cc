// Nodes of one host: what goes through its memory, beside what goes over the connections.

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "node/node.h"
#include "testing/check.h"
#include "testing/rooms.h"

using namespace gradlane;

namespace {

constexpr int64_t kPatience = 20'000;  // ms

struct Host {
    std::vector<std::unique_ptr<Node>> nodes;

    explicit Host(uint32_t world) {
        Failure why;
        for (uint32_t rank = 0; rank < world; ++rank) {
            NodeOptions options;
            options.rank = options.server = static_cast<int32_t>(rank);
            options.membership.world = options.membership.servers = world;
            options.membership.job = 1;
            options.deal_evenly = true;
            options.linger_ms = 500;
            options.ping_ms = 100;
            options.dead_ms = 1000;  // after which a rank that has left is missed
            nodes.push_back(Node::Start(options, &why));
            REQUIRE(nodes.back() != nullptr);
        }
        for (uint32_t rank = 0; rank < world; ++rank) {
            for (uint32_t server = 0; server < world; ++server) {
                if (rank != server) nodes[rank]->Dial(server, "127.0.0.1", nodes[server]->port());
            }
        }
        std::string missing;
        for (const auto& node : nodes) REQUIRE(node->Join(kPatience, &missing));
        auto rooms = RoomsOf(world);
        for (uint32_t rank = 0; rank < world; ++rank) nodes[rank]->Share(std::move(rooms[rank]));
    }
    ~Host() {
        std::vector<std::thread> closing;
        for (auto& node : nodes) closing.emplace_back([raw = node.get()] { raw->Close(); });
        for (std::thread& thread : closing) thread.join();
    }
};

Spec Floats(size_t n) {
    Spec spec;
    spec.bytes = n * sizeof(float);
    spec.once = true;
    return spec;
}

Spec FromTo(int32_t from, int32_t to, size_t n) {
    Spec spec = Floats(n);
    spec.from = from;
    spec.to = spec.at = to;
    return spec;
}

}  // namespace

TEST(SumsGoThroughMemoryAndTheRestOverConnections) {
    constexpr uint32_t kWorld = 3, kRounds = 50;
    Host host(kWorld);
    std::vector<uint64_t> sent;
    for (const auto& node : host.nodes) sent.push_back(node->stats().sent_bytes);
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
        threads.emplace_back([&, rank] {
            Node& node = *host.nodes[rank];
            const auto me = static_cast<int32_t>(rank);
            uint32_t tensor = 0;
            for (uint32_t round = 0; round < kRounds; ++round) {
                std::vector<float> sum(round * 3001, static_cast<float>(rank + 1)), gift(10, static_cast<float>(rank + 1));
                node.Start(tensor, Floats(sum.size()), sum.data(), sum.data(), true);
                node.Start(tensor + 1, FromTo(1, 2, 10), me == 1 ? gift.data() : nullptr, me == 2 ? gift.data() : nullptr, false);
                if (!CHECK(node.Wait(tensor, kPatience) && node.Wait(tensor + 1, kPatience))) return;
                CHECK(sum == std::vector<float>(sum.size(), 6.0f));
                CHECK_EQ(gift[9], static_cast<float>(rank == 2 ? 2 : rank + 1));
                tensor += 2;
            }
            CHECK_EQ(node.Take(kPatience).size(), kRounds);
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
        CHECK(host.nodes[rank]->failure().code == Code::kNone);
        CHECK(host.nodes[rank]->stats().sent_bytes - sent[rank] < 20'000);
    }
}

TEST(ASumOfOneRankThatIsAPacketOfAnotherIsAMismatchForAll) {
    for (const bool early : {false, true}) {
        Host host(2);
        std::vector<float> a(10, 1.0f), b(10, 1.0f);
        const auto sum = [&] { host.nodes[0]->Start(0, Floats(10), a.data(), a.data(), false); };
        if (!early) sum();
        host.nodes[1]->Start(0, FromTo(1, 0, 10), b.data(), nullptr, false);
        while (early && host.nodes[0]->stats().received_packets == 0) std::this_thread::yield();
        if (early) sum();
        CHECK(!host.nodes[0]->Wait(0, kPatience));
        CHECK(host.nodes[0]->failure().code == Code::kMismatch);
        while (host.nodes[1]->failure().code == Code::kNone) std::this_thread::yield();
        CHECK(host.nodes[1]->failure().code == Code::kMismatch);
        CHECK(a == std::vector<float>(10, 1.0f));
    }
}

TEST(WhoeverLeavesOrFailsEndsTheWaitsOfTheOthers) {
    for (const bool fails : {false, true}) {
        Host host(3);
        std::vector<float> a(1'000'000, 1.0f), b = a;
        host.nodes[0]->Start(0, Floats(a.size()), a.data(), a.data(), false);
        host.nodes[1]->Start(0, Floats(b.size()), b.data(), b.data(), false);
        if (fails) host.nodes[2]->Abort("no more");
        host.nodes[2]->Close();
        CHECK(!host.nodes[0]->Wait(0, kPatience));
        CHECK(!host.nodes[1]->Wait(0, kPatience));
        CHECK(host.nodes[0]->failure().code == (fails ? Code::kAborted : Code::kLeft));
        CHECK_EQ(host.nodes[1]->failure().rank >= 0 ? host.nodes[1]->failure().rank : host.nodes[1]->failure().server, 2);
    }
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
