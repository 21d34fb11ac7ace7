// Nodes of one host: what goes through its memory, beside what goes over the connections.

#include <algorithm>
#include <memory>
#include <random>
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

    // dead_ms: after which a rank that has left is missed. By itself so long that no test sees it, nor a ping, whose bytes
    // would count: sanitizers on a busy machine make ranks silent for seconds.
    explicit Host(uint32_t world, uint32_t hosts = 1, uint32_t dead_ms = 3'600'000) {
        Failure why;
        for (uint32_t rank = 0; rank < world; ++rank) {
            NodeOptions options;
            options.rank = options.server = static_cast<int32_t>(rank);
            options.membership.world = options.membership.servers = world;
            options.membership.job = 1;
            options.deal_evenly = true;
            options.linger_ms = 500;
            options.ping_ms = dead_ms / 10;
            options.dead_ms = dead_ms;
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
        const uint32_t places = world / hosts;
        std::vector<uint32_t> host_of;
        for (uint32_t rank = 0; rank < world; ++rank) host_of.push_back(rank / places);
        for (uint32_t host = 0; host < hosts; ++host) {
            std::vector<uint32_t> numbers;
            for (uint32_t place = 0; place < places; ++place) numbers.push_back(host * places + place);
            auto rooms = RoomsOf(numbers);
            for (uint32_t place = 0; place < places; ++place) nodes[numbers[place]]->Share(std::move(rooms[place]), host_of);
        }
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

// On all ranks, each on a thread of its own: what `body(node, rank)` starts and waits for.
template <typename Body>
void OnAll(Host& host, Body body) {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < host.nodes.size(); ++rank) threads.emplace_back([&, rank] { body(*host.nodes[rank], rank); });
    for (std::thread& thread : threads) thread.join();
    for (const auto& node : host.nodes) CHECK(node->failure().code == Code::kNone);
}

}  // namespace

TEST(SumsGoThroughMemoryAndTheRestOverConnections) {
    constexpr uint32_t kWorld = 3, kRounds = 50;
    Host host(kWorld);
    std::vector<uint64_t> sent;
    for (const auto& node : host.nodes) sent.push_back(node->stats().sent_bytes);
    OnAll(host, [&](Node& node, uint32_t rank) {
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
        Host host(3, 1, 1000);
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

namespace {

struct Shape {
    uint32_t hosts, places;
};
constexpr Shape kShapes[] = {{2, 2}, {3, 2}, {2, 3}};

std::vector<float> Floats(size_t n, uint32_t rank, uint32_t tensor) {
    std::vector<float> floats(n);
    for (size_t i = 0; i < n; ++i) floats[i] = static_cast<float>((i + tensor) % 100 + 1000 * rank);
    return floats;
}

std::vector<float> SumOf(size_t n, uint32_t world, uint32_t tensor) {
    std::vector<float> sum(n);
    for (uint32_t rank = 0; rank < world; ++rank) {
        const std::vector<float> part = Floats(n, rank, tensor);
        for (size_t i = 0; i < n; ++i) sum[i] += part[i];  // whole numbers: in any order
    }
    return sum;
}

}  // namespace

TEST(HostsSumOverTheirRailsWhatTheirRanksHaveSummed) {
    for (const Shape& shape : kShapes) {
        const uint32_t world = shape.hosts * shape.places;
        Host host(world, shape.hosts);
        const std::vector<size_t> sizes = {1, 0, 77, 5000, 100'003, 3, 600'001};
        OnAll(host, [&](Node& node, uint32_t rank) {
            std::vector<std::vector<float>> data;
            for (uint32_t tensor = 0; tensor < sizes.size(); ++tensor) {
                data.push_back(Floats(sizes[tensor], rank, tensor));
                Spec spec = Floats(sizes[tensor]);
                spec.urgent_first = true;
                spec.priority = 10 - tensor;
                node.Start(tensor, spec, data.back().data(), data.back().data(), true);
            }
            for (uint32_t tensor = 0; tensor < sizes.size(); ++tensor) {
                if (!CHECK(node.Wait(tensor, kPatience))) return;
                CHECK(data[tensor] == SumOf(sizes[tensor], world, tensor));
            }
        });
    }
}

// As sessions do: each rank pushes in an order of its own, and holds some until it releases them.
TEST(TensorsArePushedAgainInAnyOrderAndSomeInTwoPhases) {
    for (const Shape& shape : {Shape{1, 3}, Shape{2, 2}}) {
        const uint32_t world = shape.hosts * shape.places;
        Host host(world, shape.hosts);
        const std::vector<size_t> sizes = {1, 77, 5000, 100'003, 3, 600'001};
        OnAll(host, [&](Node& node, uint32_t rank) {
            std::vector<std::vector<float>> data;
            std::vector<uint32_t> order;
            for (uint32_t tensor = 0; tensor < sizes.size(); ++tensor) {
                data.emplace_back(sizes[tensor]);
                order.push_back(tensor);
                Spec spec = Floats(sizes[tensor]);
                spec.once = false;
                spec.whole = tensor % 3 == 0;
                node.Define(tensor, spec, data.back().data(), data.back().data());
            }
            std::mt19937 random(rank);
            for (uint32_t round = 0; round < 4; ++round) {
                std::shuffle(order.begin(), order.end(), random);
                for (const uint32_t tensor : order) {
                    const std::vector<float> part = Floats(sizes[tensor], rank, tensor + round);
                    std::copy(part.begin(), part.end(), data[tensor].begin());
                    node.Push(tensor, true, true, 0, tensor % 2 == 1);
                }
                size_t sent = 0;
                while (sent < sizes.size()) {
                    const auto taken = node.Take(kPatience);
                    if (!CHECK(!taken.empty())) return;
                    for (const int64_t each : taken) sent += each < 0;
                }
                for (uint32_t tensor = 1; tensor < sizes.size(); tensor += 2) node.Release(tensor);
                for (uint32_t tensor = 0; tensor < sizes.size(); ++tensor) {
                    if (!CHECK(node.Wait(tensor, kPatience))) return;
                    CHECK(data[tensor] == SumOf(sizes[tensor], world, tensor + round));
                }
            }
        });
    }
}

TEST(WhatOthersHaveNotHandedOverIsSentAllTheSame) {
    Host host(2);
    std::vector<std::vector<float>> data(4, std::vector<float>(1000, 1.0f));
    for (uint32_t rank = 0; rank < 2; ++rank) {
        for (uint32_t tensor = 0; tensor < 2; ++tensor) {
            Spec spec = Floats(1000);
            spec.once = false;
            auto& own = data[rank * 2 + tensor];
            host.nodes[rank]->Define(tensor, spec, own.data(), own.data());
        }
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
        host.nodes[rank]->Push(rank, true, true);
        CHECK_EQ(host.nodes[rank]->Take(kPatience), std::vector<int64_t>{~static_cast<int64_t>(rank)});
    }
    for (uint32_t rank = 0; rank < 2; ++rank) host.nodes[rank]->Push(1 - rank, true, true);
    for (uint32_t rank = 0; rank < 2; ++rank) {
        for (uint32_t tensor = 0; tensor < 2; ++tensor) CHECK(host.nodes[rank]->Wait(tensor, kPatience));
    }
    for (const auto& each : data) CHECK(each == std::vector<float>(1000, 2.0f));
}

TEST(AHostSendsWhatItWouldSendAsOneRank) {
    constexpr size_t kFloats = 1'000'000;
    for (const Shape& shape : kShapes) {
        Host host(shape.hosts * shape.places, shape.hosts);
        const auto sent = [&] {
            std::vector<uint64_t> bytes(shape.hosts);
            for (uint32_t rank = 0; rank < host.nodes.size(); ++rank) bytes[rank / shape.places] += host.nodes[rank]->stats().sent_bytes;
            return bytes;
        };
        const std::vector<uint64_t> before = sent();
        OnAll(host, [&](Node& node, uint32_t rank) {
            std::vector<float> data(kFloats, static_cast<float>(rank));
            node.Start(0, Floats(kFloats), data.data(), data.data(), true);
            CHECK(node.Wait(0, kPatience));
        });
        const std::vector<uint64_t> after = sent();
        const double least = 2.0 * (shape.hosts - 1) / shape.hosts * kFloats * sizeof(float);
        for (uint32_t each = 0; each < shape.hosts; ++each) {
            const auto bytes = static_cast<double>(after[each] - before[each]);
            CHECK(bytes >= least * 0.999 && bytes < least * 1.01);
        }
    }
}

TEST(OneSenderOrOneReceiverAcrossHosts) {
    for (const Shape& shape : kShapes) {
        const uint32_t world = shape.hosts * shape.places;
        Host host(world, shape.hosts);
        const std::vector<size_t> sizes = {1, 0, 3001, 200'003};
        OnAll(host, [&](Node& node, uint32_t rank) {
            uint32_t tensor = 0;
            for (const size_t n : sizes) {
                for (uint32_t one = 0; one < world; ++one) {
                    for (const bool sends : {false, true}) {
                        for (const bool dealt : {false, true}) {
                            const auto number = static_cast<int32_t>(one);
                            Spec spec = Floats(n);
                            (sends ? spec.from : spec.to) = number;
                            if (!dealt) spec.at = number;
                            const bool is_one = one == rank;
                            std::vector<float> given = Floats(n, rank, tensor), got(n, -1.0f);
                            // a receiver may sum in place, and others may name memory that they get nothing in
                            const bool in_place = !sends && dealt;
                            float* into = in_place ? given.data() : sends != is_one ? got.data() : nullptr;
                            node.Start(tensor, spec, !sends || is_one ? given.data() : nullptr, into, false);
                            if (!CHECK(node.Wait(tensor, kPatience))) return;
                            if (sends && !is_one) CHECK(got == Floats(n, one, tensor));
                            if (!sends && is_one) CHECK((in_place ? given : got) == SumOf(n, world, tensor));
                            if (!sends && !is_one) CHECK(given == Floats(n, rank, tensor));
                            ++tensor;
                        }
                    }
                }
            }
        });
    }
}

TEST(HostsThatMeanDifferentThingsSumNothing) {
    Host host(4, 2);
    std::vector<std::vector<float>> data(4, std::vector<float>(100'000, 1.0f));
    for (uint32_t rank = 0; rank < 4; ++rank) {
        // alike on each host
        host.nodes[rank]->Start(0, Floats(rank < 2 ? 100'000 : 99'999), data[rank].data(), data[rank].data(), false);
    }
    for (const auto& node : host.nodes) {
        CHECK(!node->Wait(0, kPatience));
        while (node->failure().code == Code::kNone) std::this_thread::yield();
        CHECK(node->failure().code == Code::kMismatch);
    }
}

TEST(ARankOfAnotherHostThatFailsEndsTheWaits) {
    Host host(4, 2);
    std::vector<std::vector<float>> data(4, std::vector<float>(1'000'000, 1.0f));
    for (uint32_t rank = 0; rank < 3; ++rank) {
        host.nodes[rank]->Start(0, Floats(1'000'000), data[rank].data(), data[rank].data(), false);
    }
    host.nodes[3]->Abort("no more");
    for (uint32_t rank = 0; rank < 3; ++rank) {
        CHECK(!host.nodes[rank]->Wait(0, kPatience));
        CHECK(host.nodes[rank]->failure().code == Code::kAborted);
    }
}

TEST(MessagesGoThroughMemoryByWhoeverWaits) {
    constexpr uint32_t kWorld = 3;
    Host host(kWorld);
    std::vector<uint64_t> sent;
    for (const auto& node : host.nodes) sent.push_back(node->stats().sent_bytes);
    OnAll(host, [&](Node& node, uint32_t rank) {
        const uint32_t next = (rank + 1) % kWorld, before = (rank + 2) % kWorld;
        for (uint32_t round = 0; round < 60; ++round) {
            // none, small, as much as a ring holds, more than that, and more than leaves without being asked for
            const size_t size = std::vector<size_t>{0, 100, 200'000, Messages::kEagerBytes, 1'000'000}[round % 5];
            std::vector<uint8_t> data(size, static_cast<uint8_t>(rank + round)), into(size);
            const auto out = node.Send(next, round, 0, data.data(), size);
            const auto in = node.Receive(round % 2 == 0 ? kAnyone : static_cast<int32_t>(before), round, into.data(), size);
            bool over = false;
            while (round % 3 == 0 && !over) node.IsOver(*in, &over);
            if (!CHECK(node.WaitFor(*in, kPatience) && node.WaitFor(*out, kPatience))) return;
            CHECK_EQ(node.IsOver(*in, &over), static_cast<int32_t>(before));
            CHECK(into == std::vector<uint8_t>(size, static_cast<uint8_t>(before + round)));
        }
    });
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
        CHECK(host.nodes[rank]->failure().code == Code::kNone);
        CHECK(host.nodes[rank]->stats().sent_bytes - sent[rank] < 20'000);
    }
}

TEST(ALargeMessageThatNobodyWaitsForIsCarriedAllTheSame) {
    Host host(2);
    std::vector<uint8_t> data(5'000'000, 3), into(data.size()), token(1, 9), heard(1);
    const auto in = host.nodes[1]->Receive(0, 0, into.data(), into.size());
    const auto out = host.nodes[0]->Send(1, 0, 0, data.data(), data.size());
    bool over = false;
    while (!over) host.nodes[0]->IsOver(*out, &over);
    CHECK(host.nodes[1]->WaitFor(*in, kPatience));
    CHECK(into == data);
    // and two threads may wait, of which one attends the mailboxes for both
    std::thread other([&] { CHECK(host.nodes[1]->WaitFor(*host.nodes[1]->Receive(0, 1, heard.data(), 1), kPatience)); });
    const auto second = host.nodes[1]->Receive(0, 2, into.data(), into.size());
    const auto large = host.nodes[0]->Send(1, 2, 0, data.data(), data.size());
    CHECK(host.nodes[1]->WaitFor(*second, kPatience));
    const auto small = host.nodes[0]->Send(1, 1, 0, token.data(), 1);
    other.join();
    CHECK_EQ(heard, token);
    CHECK(host.nodes[0]->WaitFor(*large, kPatience) && host.nodes[0]->WaitFor(*small, kPatience));
}

TEST(ExchangesGoThroughMemoryThoughNobodyLooksAtAMailbox) {
    constexpr uint32_t kWorld = 3;
    Host host(kWorld);
    std::vector<uint64_t> sent;
    for (const auto& node : host.nodes) sent.push_back(node->stats().sent_bytes);
    OnAll(host, [&](Node& node, uint32_t rank) {
        for (uint32_t round = 0; round < 40; ++round) {
            const size_t size = std::vector<size_t>{0, 100, Messages::kEagerBytes, 1'000'000}[round % 4];
            std::vector<std::vector<uint8_t>> given(kWorld), got(kWorld);
            std::vector<Node::ExchangePart> parts;
            for (uint32_t other = 0; other < kWorld; ++other) {
                given[other].assign(size, static_cast<uint8_t>(rank + 10 * other + round));
                got[other].resize(size);
                if (other != rank) parts.push_back({other, DType::kF32, DType::kF32, given[other].data(), size, got[other].data(), size});
            }
            node.Exchange(round, 0, std::move(parts));
            if (!CHECK(node.Wait(round, kPatience))) return;
            for (uint32_t other = 0; other < kWorld; ++other) {
                const std::vector<uint8_t> expected(size, static_cast<uint8_t>(other + 10 * rank + round));
                if (other != rank) CHECK(got[other] == expected);
            }
        }
    });
    for (uint32_t rank = 0; rank < kWorld; ++rank) CHECK(host.nodes[rank]->stats().sent_bytes - sent[rank] < 20'000);
}

TEST(WhatNobodyReceivesIsBoundedAndStopsOnlyItsSender) {
    Host host(2);
    constexpr uint32_t kMessages = 200;
    std::vector<uint8_t> data(60'000, 1), into(data.size()), back(8, 5), heard(8);
    std::vector<std::shared_ptr<Transfer>> sends;
    for (uint32_t i = 0; i < kMessages; ++i) sends.push_back(host.nodes[0]->Send(1, 0, 0, data.data(), data.size()));
    host.nodes[1]->Send(0, 0, 0, back.data(), back.size());
    CHECK(host.nodes[0]->WaitFor(*host.nodes[0]->Receive(1, 0, heard.data(), heard.size()), kPatience));
    CHECK_EQ(heard, back);
    bool over = true;
    host.nodes[0]->IsOver(*sends.back(), &over);
    CHECK(!over);
    for (uint32_t i = 0; i < kMessages; ++i) {
        if (!CHECK(host.nodes[1]->WaitFor(*host.nodes[1]->Receive(0, 0, into.data(), into.size()), kPatience))) return;
    }
    CHECK(host.nodes[0]->WaitFor(*sends.back(), kPatience));
}

TEST(WhoeverLeavesOrFailsEndsTheWaitsForItsMessages) {
    for (const bool fails : {false, true}) {
        Host host(3, 1, 1000);
        std::vector<uint8_t> last(10, 7), into(10), more(10);
        host.nodes[2]->Send(0, 0, 0, last.data(), last.size());
        if (fails) host.nodes[2]->Abort("no more");
        host.nodes[2]->Close();
        if (!fails) {  // what it has said before stays
            CHECK(host.nodes[0]->WaitFor(*host.nodes[0]->Receive(2, 0, into.data(), into.size()), kPatience));
            CHECK_EQ(into, last);
        }
        CHECK(!host.nodes[0]->WaitFor(*host.nodes[0]->Receive(2, 1, more.data(), more.size()), kPatience));
        CHECK(host.nodes[0]->failure().code == (fails ? Code::kAborted : Code::kLeft));
        CHECK_EQ(host.nodes[0]->failure().rank >= 0 ? host.nodes[0]->failure().rank : host.nodes[0]->failure().server, 2);
    }
}

TEST(WhoeverHearsOfAFailureHasItsMemoryBack) {
    for (const bool messages : {false, true}) {
        for (int time = 0; time < 4; ++time) {
            std::vector<float> data[2], then[2];
            {
                Host host(2);
                const uint32_t wakeups = static_cast<uint32_t>(host.nodes[0]->stats().wakeups);
                for (uint32_t rank = 0; rank < 2; ++rank) {
                    std::vector<float>& own = data[rank];
                    own.assign(2 << 20, 1.0f);
                    Node& node = *host.nodes[rank];
                    const size_t half = own.size() / 2;
                    if (messages) {
                        node.Receive(static_cast<int32_t>(1 - rank), 0, own.data(), half * sizeof(float));
                        node.Send(1 - rank, 0, 0, own.data() + half, half * sizeof(float));
                    } else {
                        node.Start(0, Floats(own.size()), own.data(), own.data(), false);
                    }
                }
                while (host.nodes[0]->stats().wakeups - wakeups < 4) std::this_thread::yield();
                host.nodes[0]->Abort("enough");
                then[0] = data[0];
                while (host.nodes[1]->failure().code == Code::kNone) std::this_thread::yield();
                then[1] = data[1];
            }
            for (int rank = 0; rank < 2; ++rank) CHECK(data[rank] == then[rank]);
        }
    }
}

TEST(AWaitForAMessageEndsWithTheNode) {
    Host host(2);
    std::vector<uint8_t> into(10);
    const auto in = host.nodes[0]->Receive(1, 0, into.data(), into.size());
    std::thread waits([&] { CHECK(!host.nodes[0]->WaitFor(*in, kPatience)); });
    std::thread closes([&] { host.nodes[1]->Close(); });
    host.nodes[0]->Close();
    waits.join();
    closes.join();
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }

// In every iteration each owner has its sum first, and sends it when all have theirs; over one host and over two.
TEST(OwnersHaveTheirSumsAndSendThemLater) {
    constexpr uint32_t kWorld = 4, kIterations = 5;
    for (const uint32_t hosts : {1u, 2u}) {
        for (const size_t n : {size_t{7}, size_t{50'000}}) {
            Host host(kWorld, hosts);
            OnAll(host, [&](Node& node, uint32_t rank) {
                std::vector<std::vector<float>> memory(kWorld, std::vector<float>(n));
                float all = 0;
                for (uint32_t owner = 0; owner < kWorld; ++owner) {
                    Spec sum = Floats(n), send = sum;
                    sum.once = send.once = false;
                    sum.to = sum.at = send.from = send.at = static_cast<int32_t>(owner);
                    node.Define(2 * owner, sum, memory[owner].data(), memory[owner].data());
                    node.Define(2 * owner + 1, send, memory[owner].data(), memory[owner].data());
                }
                Spec exchanged = Floats(1);
                exchanged.once = false;
                node.Define(2 * kWorld, exchanged, &all, &all);
                for (uint32_t iteration = 0; iteration < kIterations; ++iteration) {
                    for (uint32_t owner = 0; owner < kWorld; ++owner) {
                        if (owner != rank) node.Push(2 * owner + 1, false);
                    }
                    for (uint32_t each = 0; each < kWorld; ++each) {  // each rank in an order of its own
                        const uint32_t owner = (each + rank) % kWorld;
                        memory[owner].assign(n, static_cast<float>(rank + 1 + owner + iteration));
                        node.Push(2 * owner, false);
                    }
                    const auto sum_of = [&](uint32_t owner) { return static_cast<float>(10 + kWorld * (owner + iteration)); };
                    if (!CHECK(node.Wait(2 * rank, kPatience))) return;
                    CHECK(memory[rank] == std::vector<float>(n, sum_of(rank)));
                    all = memory[rank][0];
                    node.Push(2 * kWorld, false);
                    if (!CHECK(node.Wait(2 * kWorld, kPatience))) return;
                    CHECK_EQ(all, sum_of(0) + sum_of(1) + sum_of(2) + sum_of(3));
                    node.Push(2 * rank + 1, false);
                    for (uint32_t tensor = 0; tensor < 2 * kWorld; ++tensor) {
                        if (!CHECK(node.Wait(tensor, kPatience))) return;
                    }
                    for (uint32_t owner = 0; owner < kWorld; ++owner) CHECK(memory[owner] == std::vector<float>(n, sum_of(owner)));
                }
            });
        }
    }
}
