#include "node/node.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "testing/check.h"

using namespace gradlane;

namespace {

constexpr int64_t kPatience = 60'000;  // ms: how long anything here may take before it counts as hung

struct Shape {
    uint32_t world = 2, servers = 2;
    bool apart = false;  // servers in nodes without a worker
    Order order = Order::kArrival;
    uint32_t packet_bytes = 640;
    bool evenly = false;
    std::vector<uint8_t> secret;
};

NodeOptions Options(const Shape& shape, int32_t rank, int32_t server) {
    NodeOptions options;
    options.rank = rank;
    options.server = server;
    options.membership.world = shape.world;
    options.membership.servers = shape.servers;
    options.membership.job = 1;
    options.membership.secret = shape.secret;
    options.packet_bytes = shape.packet_bytes;
    options.order = shape.order;
    options.deal_evenly = shape.evenly;
    options.tell_tables = shape.apart;
    options.linger_ms = 500;
    options.dead_ms = 20'000;  // on a busy machine a sanitizer makes workers silent for seconds
    return options;
}

// Several nodes in this process, connected over loopback.
struct Cluster {
    std::vector<std::unique_ptr<Node>> workers, servers;

    explicit Cluster(const Shape& shape) {
        Failure why;
        for (uint32_t rank = 0; rank < shape.world; ++rank) {
            const bool serves = !shape.apart && rank < shape.servers;
            workers.push_back(Node::Start(Options(shape, static_cast<int32_t>(rank), serves ? static_cast<int32_t>(rank) : -1), &why));
            REQUIRE(workers.back() != nullptr);
        }
        for (uint32_t server = 0; shape.apart && server < shape.servers; ++server) {
            servers.push_back(Node::Start(Options(shape, -1, static_cast<int32_t>(server)), &why));
            REQUIRE(servers.back() != nullptr);
        }
        for (uint32_t rank = 0; rank < shape.world; ++rank) {
            for (uint32_t server = 0; server < shape.servers; ++server) {
                if (!shape.apart && rank == server) continue;
                workers[rank]->Dial(server, "127.0.0.1", (shape.apart ? servers : workers)[server]->port());
            }
        }
        std::string missing;
        for (const auto& node : workers) REQUIRE(node->Join(kPatience, &missing));
        for (const auto& node : servers) REQUIRE(node->Join(kPatience, &missing));
    }
    ~Cluster() {
        // all at once: each waits for the others' goodbye
        std::vector<std::thread> closing;
        for (auto* nodes : {&workers, &servers}) {
            for (auto& node : *nodes) closing.emplace_back([raw = node.get()] { raw->Close(); });
        }
        for (std::thread& thread : closing) thread.join();
    }
};

Spec Floats(size_t n) {
    Spec spec;
    spec.bytes = n * sizeof(float);
    return spec;
}

void CheckSums(const Shape& shape, const std::vector<size_t>& lengths, bool whole, int iterations) {
    std::vector<std::vector<std::vector<float>>> memory(shape.world);
    Cluster cluster(shape);
    for (uint32_t rank = 0; rank < shape.world; ++rank) {
        for (size_t i = 0; i < lengths.size(); ++i) {
            memory[rank].emplace_back(lengths[i]);
            Spec spec = Floats(lengths[i]);
            spec.whole = whole;
            spec.urgent_first = i % 3 == 0;
            spec.urgent_sums = i % 3 == 1;
            spec.acknowledged = i % 2 == 1;
            spec.priority = static_cast<uint32_t>(lengths.size() - i);
            cluster.workers[rank]->Define(static_cast<uint32_t>(i), spec, memory[rank][i].data(), memory[rank][i].data());
        }
    }
    for (int iteration = 0; iteration < iterations; ++iteration) {
        for (uint32_t rank = 0; rank < shape.world; ++rank) {
            for (size_t i = 0; i < lengths.size(); ++i) {
                for (size_t at = 0; at < lengths[i]; ++at) memory[rank][i][at] = static_cast<float>(rank + 1) * static_cast<float>(at % 97);
                cluster.workers[rank]->Push(static_cast<uint32_t>(i), false);
            }
        }
        const auto ranks = static_cast<float>(shape.world * (shape.world + 1) / 2);
        for (uint32_t rank = 0; rank < shape.world; ++rank) {
            for (size_t i = 0; i < lengths.size(); ++i) {
                REQUIRE(cluster.workers[rank]->Wait(static_cast<uint32_t>(i), kPatience));
                for (size_t at = 0; at < lengths[i]; ++at) {
                    if (!CHECK_EQ(memory[rank][i][at], ranks * static_cast<float>(at % 97))) return;
                }
            }
        }
    }
    for (const auto& node : cluster.workers) {
        CHECK(node->failure().code == Code::kNone);
    }
}

// A socket that says whatever it is told to.
struct Stranger {
    int fd;
    explicit Stranger(uint16_t port) : fd(socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in at{};
        at.sin_family = AF_INET;
        at.sin_port = htons(port);
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        REQUIRE(connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0);
    }
    ~Stranger() { close(fd); }
    void Say(const std::vector<uint8_t>& bytes) { (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
    bool IsHungUpOn() {
        pollfd wait{fd, POLLIN, 0};
        char byte;
        while (poll(&wait, 1, static_cast<int>(kPatience)) > 0) {
            const ssize_t n = recv(fd, &byte, 1, 0);
            if (n <= 0) return true;
        }
        return false;
    }
};

}  // namespace

TEST(SumsOfEveryShape) {
    const std::vector<size_t> lengths = {1, 159, 160, 161, 5000, 20'000};
    for (uint32_t world = 1; world <= 4; ++world) {
        for (const bool whole : {false, true}) {
            for (const Order order : {Order::kArrival, Order::kRank}) {
                Shape shape;
                shape.world = shape.servers = world;
                shape.order = order;
                shape.evenly = whole;
                CheckSums(shape, lengths, whole, 3);
            }
        }
    }
}

TEST(ServersOfTheirOwnLearnTheTableAndSum) {
    Shape shape;
    shape.world = 3;
    shape.servers = 2;
    shape.apart = true;
    shape.secret = {1, 2, 3};
    CheckSums(shape, {7, 4000, 9000}, false, 3);
}

TEST(FewerServersThanWorkers) {
    Shape shape;
    shape.world = 3;
    shape.servers = 1;
    CheckSums(shape, {7, 4000, 9000}, true, 3);
}

TEST(HeldSumsComeWhenEveryServerReleasesThem) {
    Shape shape;
    shape.world = shape.servers = 3;
    std::vector<std::vector<float>> held(3, std::vector<float>(1000)), after = held;
    Cluster cluster(shape);
    for (uint32_t rank = 0; rank < 3; ++rank) {
        cluster.workers[rank]->Define(0, Floats(1000), held[rank].data(), held[rank].data());
        cluster.workers[rank]->Define(1, Floats(1000), after[rank].data(), after[rank].data());
    }
    for (int iteration = 0; iteration < 3; ++iteration) {
        for (uint32_t rank = 0; rank < 3; ++rank) {
            std::fill(held[rank].begin(), held[rank].end(), static_cast<float>(rank + 1));
            cluster.workers[rank]->Push(0, true, true, 0, true);
            cluster.workers[rank]->Push(1, false);
        }
        for (uint32_t rank = 0; rank < 3; ++rank) {
            CHECK(cluster.workers[rank]->Take(kPatience) == std::vector<int64_t>{~int64_t{0}});
            REQUIRE(cluster.workers[rank]->Wait(1, kPatience));  // so that all pushes before it have arrived
            CHECK(!cluster.workers[rank]->IsDone(0));
        }
        for (uint32_t rank = 0; rank < 3; ++rank) {
            CHECK(held[rank] == std::vector<float>(1000, static_cast<float>(rank + 1)));
        }
        for (const auto& node : cluster.workers) node->Release(0);
        for (uint32_t rank = 0; rank < 3; ++rank) {
            CHECK(cluster.workers[rank]->Take(kPatience) == std::vector<int64_t>{0});
            CHECK(held[rank] == std::vector<float>(1000, 6.0F));
        }
    }
}

TEST(WhatNoServerHereSumsCannotBeHeldNorReleased) {
    Shape shape;
    shape.servers = 1;
    shape.apart = true;
    std::vector<float> memory(100);
    for (const bool held : {false, true}) {
        Cluster cluster(shape);
        Node& worker = *cluster.workers[0];
        worker.Define(0, Floats(100), memory.data(), memory.data());
        worker.Push(0, false, false, 0, held);
        if (!held) worker.Release(0);
        CHECK(!worker.Wait(0, kPatience));
        CHECK(worker.failure().code == Code::kProtocol);
    }
}

TEST(OneForAllAllForOneAndOneToOne) {
    Shape shape;
    shape.world = shape.servers = 3;
    shape.evenly = true;
    std::vector<std::vector<float>> from, into;
    Cluster cluster(shape);
    uint32_t tensor = 0;
    for (const size_t n : {size_t{1}, size_t{3000}}) {
        for (int32_t root = 0; root < 3; ++root) {
            from.assign(3, std::vector<float>(n));
            into.assign(3, std::vector<float>(n, -1));
            for (size_t rank = 0; rank < 3; ++rank) std::fill(from[rank].begin(), from[rank].end(), static_cast<float>(rank + 1));
            Spec broadcast = Floats(n), reduce = Floats(n), part = Floats(n);
            broadcast.once = reduce.once = part.once = true;
            broadcast.from = root;
            reduce.to = root;
            part.to = part.at = root;
            for (size_t rank = 0; rank < 3; ++rank) {
                cluster.workers[rank]->Start(tensor, broadcast, from[rank].data(), from[rank].data(), false);
            }
            for (const auto& node : cluster.workers) REQUIRE(node->Wait(tensor, kPatience));
            for (size_t rank = 0; rank < 3; ++rank) CHECK_EQ(from[rank][n - 1], static_cast<float>(root + 1));
            ++tensor;
            for (const Spec& spec : {reduce, part}) {
                for (size_t rank = 0; rank < 3; ++rank) {
                    cluster.workers[rank]->Start(tensor, spec, from[rank].data(), into[rank].data(), false);
                }
                for (const auto& node : cluster.workers) REQUIRE(node->Wait(tensor, kPatience));
                for (int32_t rank = 0; rank < 3; ++rank) {
                    CHECK_EQ(into[static_cast<size_t>(rank)][n / 2], rank == root ? static_cast<float>(3 * (root + 1)) : -1.0f);
                }
                into[static_cast<size_t>(root)].assign(n, -1);
                ++tensor;
            }
        }
    }
    for (const auto& node : cluster.workers) {
        CHECK_EQ(node->stats().held_bytes, 0);
    }
}

// A sum that its owner has first, and the others when the owner sends it to them; in every iteration.
TEST(AnOwnerHasItsSumAndSendsItLater) {
    for (const Order order : {Order::kArrival, Order::kRank}) {
        Shape shape;
        shape.world = shape.servers = 3;
        shape.order = order;
        Cluster cluster(shape);
        std::vector<std::vector<float>> memory(3, std::vector<float>(20000));
        for (int32_t owner = 0; owner < 3; ++owner) {
            Spec sum = Floats(20000), send = sum;
            sum.to = sum.at = send.from = send.at = owner;
            for (uint32_t rank = 0; rank < 3; ++rank) {
                cluster.workers[rank]->Define(2 * static_cast<uint32_t>(owner), sum, memory[rank].data(), memory[rank].data());
                cluster.workers[rank]->Define(2 * static_cast<uint32_t>(owner) + 1, send, memory[rank].data(), memory[rank].data());
            }
        }
        for (uint32_t iteration = 0; iteration < 6; ++iteration) {
            const uint32_t owner = iteration % 3, tensor = 2 * owner;
            for (uint32_t rank = 0; rank < 3; ++rank) std::fill(memory[rank].begin(), memory[rank].end(), static_cast<float>(rank + 1));
            for (uint32_t rank = 0; rank < 3; ++rank) {
                if (rank != owner) cluster.workers[rank]->Push(tensor + 1, false);  // it says where to
            }
            for (uint32_t rank = 3; rank-- > 0;) cluster.workers[rank]->Push(tensor, false);
            for (const auto& node : cluster.workers) REQUIRE(node->Wait(tensor, kPatience));
            for (uint32_t rank = 0; rank < 3; ++rank) {
                CHECK(memory[rank] == std::vector<float>(20000, rank == owner ? 6.0F : static_cast<float>(rank + 1)));
                CHECK_EQ(cluster.workers[rank]->IsDone(tensor + 1), false || rank == owner);
            }
            cluster.workers[owner]->Push(tensor + 1, false);
            for (uint32_t rank = 0; rank < 3; ++rank) {
                REQUIRE(cluster.workers[rank]->Wait(tensor + 1, kPatience));
                CHECK(memory[rank] == std::vector<float>(20000, 6.0F));
            }
        }
        for (const auto& node : cluster.workers) CHECK_EQ(node->stats().held_bytes, 0);
    }
}

TEST(ATensorOfOneSenderIsUsedOnceUnlessTheServerBesideItHasAllOfIt) {
    for (const int32_t at : {kDealt, 1}) {
        Shape shape;
        Cluster cluster(shape);
        std::vector<float> memory(100);
        Spec spec = Floats(100);
        spec.from = 0;
        spec.at = at;
        cluster.workers[0]->Define(0, spec, memory.data(), memory.data());
        cluster.workers[0]->Push(0, false);
        CHECK(!cluster.workers[0]->Wait(0, kPatience));
        CHECK(cluster.workers[0]->failure().code == Code::kProtocol);
    }
}

TEST(WhoeverIsAheadWaitsAndHoldsUpNobody) {
    Shape shape;
    shape.evenly = true;
    std::vector<float> a(5000, 1), b(5000, 2);
    Cluster cluster(shape);
    Spec spec = Floats(5000);
    spec.once = true;
    cluster.workers[0]->Start(0, spec, a.data(), a.data(), false);
    CHECK(!cluster.workers[0]->Wait(0, 50));
    CHECK(cluster.workers[0]->failure().code == Code::kNone);
    cluster.workers[1]->Start(0, spec, b.data(), b.data(), false);
    CHECK(cluster.workers[0]->Wait(0, kPatience));
    CHECK(cluster.workers[1]->Wait(0, kPatience));
    CHECK_EQ(a[4999], 3.0f);
    CHECK_EQ(b[0], 3.0f);
}

// Rank 2 comes late. The others have begun a second tensor by then, and rank 2 reads no more of that: it has buffered
// what it may. It still gets the sums of the first, though connections take turns and some of them are stuck.
TEST(ConnectionsThatAreStuckKeepNoTurnFromOthers) {
    Shape shape;
    shape.world = shape.servers = 3;
    shape.evenly = true;
    shape.packet_bytes = 64 << 10;
    constexpr size_t kFirst = 6 << 20, kSecond = 32 << 20, kMostBuffered = 64 << 20;  // values, values, bytes
    std::vector<float> first[3], second(kSecond, 1), sum(kSecond);
    for (auto& each : first) each.assign(kFirst, 1);
    Cluster cluster(shape);
    Spec all = Floats(kFirst), to_last = Floats(kSecond);
    all.once = to_last.once = true;
    to_last.to = 2;
    for (uint32_t rank = 0; rank < 2; ++rank) {
        cluster.workers[rank]->Start(0, all, first[rank].data(), first[rank].data(), false);
        cluster.workers[rank]->Start(1, to_last, second.data(), nullptr, false);
    }
    while (cluster.workers[2]->stats().received_bytes < kMostBuffered) std::this_thread::yield();
    cluster.workers[2]->Start(0, all, first[2].data(), first[2].data(), false);
    for (const auto& node : cluster.workers) REQUIRE(node->Wait(0, kPatience));
    cluster.workers[2]->Start(1, to_last, second.data(), sum.data(), false);
    for (const auto& node : cluster.workers) REQUIRE(node->Wait(1, kPatience));
    CHECK_EQ(first[2][kFirst - 1], 3.0f);
    CHECK_EQ(sum[kSecond - 1], 3.0f);
}

TEST(TensorsOfUnlikeSizesEndInAnErrorOnBothSides) {
    Shape shape;
    shape.evenly = true;
    std::vector<float> a(5000, 1), b(4000, 2);
    Cluster cluster(shape);
    Spec large = Floats(5000), small = Floats(4000);
    large.once = small.once = true;
    cluster.workers[0]->Start(0, large, a.data(), a.data(), false);
    cluster.workers[1]->Start(0, small, b.data(), b.data(), false);
    CHECK(!cluster.workers[0]->Wait(0, kPatience));
    CHECK(!cluster.workers[1]->Wait(0, kPatience));
    CHECK(cluster.workers[0]->failure().code != Code::kNone);
    CHECK(cluster.workers[1]->failure().code != Code::kNone);
}

TEST(AFailureOfOneIsHeardByAll) {
    Shape shape;
    shape.world = shape.servers = 3;
    std::vector<float> memory(10);
    Cluster cluster(shape);
    cluster.workers[0]->Define(0, Floats(10), memory.data(), memory.data());
    cluster.workers[0]->Push(0, false);
    cluster.workers[1]->Abort("ValueError: bad batch");
    CHECK(!cluster.workers[0]->Wait(0, kPatience));
    const Failure failure = cluster.workers[0]->failure();
    CHECK(failure.code == Code::kAborted);
    CHECK_EQ(failure.rank, 1);
    CHECK_EQ(failure.text, std::string("rank 1 says: ValueError: bad batch"));
}

namespace {

// What a node does with the memory of what it has in flight when rank 0 aborts. begin(node, rank, memory) starts it.
template <typename Begin>
void CheckThatAFailureLetsGo(Begin begin) {
    for (int time = 0; time < 4; ++time) {
        std::vector<float> data[2], then[2];
        {
            Shape shape;
            shape.packet_bytes = 512 << 10;
            shape.evenly = true;
            Cluster cluster(shape);
            const uint64_t before = cluster.workers[0]->stats().received_bytes;
            for (uint32_t rank = 0; rank < 2; ++rank) {
                data[rank].assign(2 << 20, 1.0f);
                begin(*cluster.workers[rank], rank, data[rank]);
            }
            while (cluster.workers[0]->stats().received_bytes - before < 1 << 20) std::this_thread::yield();
            cluster.workers[0]->Abort("enough");
            then[0] = data[0];
            while (cluster.workers[1]->failure().code == Code::kNone) std::this_thread::yield();
            then[1] = data[1];
        }
        for (int rank = 0; rank < 2; ++rank) CHECK(data[rank] == then[rank]);
    }
}

}  // namespace

TEST(WhoeverHearsOfAFailureHasItsMemoryBack) {
    CheckThatAFailureLetsGo([](Node& node, uint32_t, std::vector<float>& memory) {
        Spec spec = Floats(memory.size());
        spec.once = true;
        node.Start(0, spec, memory.data(), memory.data(), false);
    });
    CheckThatAFailureLetsGo([](Node& node, uint32_t rank, std::vector<float>& memory) {
        const size_t half = memory.size() / 2;
        node.Receive(static_cast<int32_t>(1 - rank), 0, memory.data(), half * sizeof(float));
        node.Send(1 - rank, 0, 0, memory.data() + half, half * sizeof(float));
    });
}

namespace {

// Every worker sends the others parts of all sizes, some rounds of them at a time, between sums.
void CheckExchanges(const std::vector<Node*>& nodes) {
    const auto world = static_cast<uint32_t>(nodes.size());
    constexpr uint32_t kRounds = 6;
    const size_t sizes[] = {0, 1, 1000, 100'000, 700'001};
    const auto size = [&](uint32_t round, uint32_t from, uint32_t to) { return sizes[(round + 2 * from + 3 * to) % 5]; };
    const auto value = [](uint32_t round, uint32_t from, uint32_t to) { return static_cast<uint8_t>(1 + round + 10 * from + 40 * to); };
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < world; ++rank) {
        threads.emplace_back([&, rank] {
            Node& node = *nodes[rank];
            std::vector<std::vector<uint8_t>> given(kRounds * world), got(kRounds * world);
            std::vector<float> sums(kRounds, 1.0f);
            for (uint32_t round = 0; round < kRounds; ++round) {
                std::vector<Node::ExchangePart> parts;
                for (uint32_t other = 0; other < world; ++other) {
                    if (other == rank) continue;
                    std::vector<uint8_t>&from = given[round * world + other], &into = got[round * world + other];
                    from.assign(size(round, rank, other), value(round, rank, other));
                    into.resize(size(round, other, rank));
                    parts.push_back({other, DType::kU8, DType::kU8, from.data(), from.size(), into.data(), into.size()});
                }
                node.Exchange(2 * round, round % 2, std::move(parts));
                Spec spec = Floats(1);
                spec.once = true;
                node.Start(2 * round + 1, spec, &sums[round], &sums[round], false);
            }
            for (uint32_t round = 0; round < kRounds; ++round) {
                if (!CHECK(node.Wait(2 * round, kPatience) && node.Wait(2 * round + 1, kPatience))) return;
                CHECK_EQ(sums[round], static_cast<float>(world));
                for (uint32_t other = 0; other < world; ++other) {
                    if (other == rank) continue;
                    const std::vector<uint8_t> expected(size(round, other, rank), value(round, other, rank));
                    CHECK(got[round * world + other] == expected);
                }
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST(EveryWorkerExchangesPartsWithAllOthers) {
    for (const uint32_t world : {1u, 2u, 4u}) {
        Shape shape;
        shape.world = shape.servers = world;
        shape.evenly = true;
        shape.packet_bytes = 64 << 10;
        Cluster cluster(shape);
        std::vector<Node*> nodes;
        for (const auto& node : cluster.workers) nodes.push_back(node.get());
        CheckExchanges(nodes);
    }
}

TEST(ExchangesThatAreNotAlikeEndInAMismatch) {
    for (const bool first : {false, true}) {
        for (const int what : {0, 1, 2}) {  // another size, another dtype, a sum
            Shape shape;
            shape.evenly = true;
            Cluster cluster(shape);
            std::vector<float> memory[2] = {std::vector<float>(10), std::vector<float>(10)};
            const auto exchange = [&](uint32_t rank) {
                auto* bytes = reinterpret_cast<uint8_t*>(memory[rank].data());
                const DType dtype = rank == 1 && what == 1 ? DType::kI32 : DType::kF32;
                cluster.workers[rank]->Exchange(0, 0, {{1 - rank, dtype, dtype, bytes, 20, bytes + 20, rank == 1 && what == 0 ? 16u : 20u}});
            };
            const auto sum = [&] {
                Spec spec = Floats(10);
                spec.once = true;
                cluster.workers[1]->Start(0, spec, memory[1].data(), memory[1].data(), false);
            };
            if (first) exchange(0);
            what == 2 ? sum() : exchange(1);
            if (!first) exchange(0);
            CHECK(!cluster.workers[1]->Wait(0, kPatience));
            if (what != 0) CHECK(!cluster.workers[0]->Wait(0, kPatience));  // which gets what it expects where sizes differ
            for (const auto& node : cluster.workers) {
                while (node->failure().code == Code::kNone) std::this_thread::yield();
                CHECK(node->failure().code == Code::kMismatch);
            }
        }
    }
}

TEST(WhoeverLeavesIsMissedByThoseWhoStillWait) {
    Shape shape;
    std::vector<float> memory(10);
    Cluster cluster(shape);
    cluster.workers[0]->Define(0, Floats(10), memory.data(), memory.data());
    std::thread leaving([&cluster] { cluster.workers[1]->Close(); });
    cluster.workers[0]->Push(0, false);
    CHECK(!cluster.workers[0]->Wait(0, kPatience));
    leaving.join();
    CHECK(cluster.workers[0]->failure().code == Code::kLeft);
}

TEST(WhoeverHasLeftHasDoneItsPart) {
    Shape shape;
    std::vector<float> from(1000, 7), into(1000);
    Cluster cluster(shape);
    Spec broadcast = Floats(1000);
    broadcast.once = true;
    broadcast.from = 0;
    cluster.workers[0]->Start(0, broadcast, from.data(), nullptr, false);
    CHECK(cluster.workers[0]->Wait(0, kPatience));
    cluster.workers[0]->Close();
    cluster.workers[1]->Start(0, broadcast, nullptr, into.data(), false);
    CHECK(cluster.workers[1]->Wait(0, kPatience));
    CHECK(into == from);
}

TEST(StrangersAreHungUpOnAndDisturbNobody) {
    Shape shape;
    shape.secret = {7};
    std::vector<float> a(300, 1), b(300, 2);
    Cluster cluster(shape);
    std::mt19937 random(1);
    std::vector<uint8_t> noise(200);
    for (uint8_t& byte : noise) byte = static_cast<uint8_t>(random());
    const std::string http = "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n";
    Header push;
    push.type = FrameType::kPush;
    push.length = kMaxPacketBytes;
    std::vector<uint8_t> data(kHeaderBytes);
    Encode(push, data.data());
    for (const auto& said : {noise, std::vector<uint8_t>(http.begin(), http.end()), data}) {
        Stranger stranger(cluster.workers[0]->port());
        stranger.Say(said);
        CHECK(stranger.IsHungUpOn());
    }
    // a hello that is well-formed, and nothing that proves it
    Stranger pretender(cluster.workers[0]->port());
    Hello hello;
    hello.rank = 1;
    hello.world = hello.servers = 2;
    hello.lanes = 1;
    hello.job = 1;
    uint8_t payload[Hello::kBytes];
    EncodeHello(hello, payload);
    pretender.Say(ControlFrame(FrameType::kHello, 1, 0, payload, sizeof payload));
    const uint8_t guess[kProofBytes] = {};
    pretender.Say(ControlFrame(FrameType::kProof, 1, 0, guess, sizeof guess));
    CHECK(pretender.IsHungUpOn());
    cluster.workers[0]->Define(0, Floats(300), a.data(), a.data());
    cluster.workers[1]->Define(0, Floats(300), b.data(), b.data());
    cluster.workers[0]->Push(0, false);
    cluster.workers[1]->Push(0, false);
    CHECK(cluster.workers[0]->Wait(0, kPatience));
    CHECK(cluster.workers[1]->Wait(0, kPatience));
    CHECK_EQ(a[299], 3.0f);
    CHECK_EQ(cluster.workers[0]->stats().refused, 4);
}

TEST(ASecondProcessOfARankIsRefusedAndTheFirstGoesOn) {
    Shape shape;
    Cluster cluster(shape);
    Failure why;
    auto twin = Node::Start(Options(shape, 1, 1), &why);
    REQUIRE(twin != nullptr);
    twin->Dial(0, "127.0.0.1", cluster.workers[0]->port());
    std::string missing;
    CHECK(!twin->Join(kPatience, &missing));
    CHECK(twin->failure().code == Code::kDuplicate);
    CHECK(cluster.workers[0]->failure().code == Code::kNone);
}

TEST(OptionsThatCannotBeAreRefused) {
    Failure why;
    Shape shape;
    NodeOptions options = Options(shape, 0, 0);
    options.packet_bytes = 100;
    CHECK(Node::Start(options, &why) == nullptr);
    CHECK_EQ(why.text, std::string("packet_bytes: expected a multiple of 64 up to 512 KiB"));
    options = Options(shape, 0, 0);
    options.address = "0.0.0.0";
    CHECK(Node::Start(options, &why) == nullptr);
    CHECK_EQ(why.text, std::string("a server off loopback needs a secret"));
    options = Options(shape, 0, 0);
    options.address = "localhost";
    options.membership.secret = {1};
    CHECK(Node::Start(options, &why) == nullptr);
    auto first = Node::Start(Options(shape, 0, 0), &why);
    options = Options(shape, 1, 1);
    options.port = first->port();
    CHECK(Node::Start(options, &why) == nullptr);
    CHECK(why.code == Code::kSystem);
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
