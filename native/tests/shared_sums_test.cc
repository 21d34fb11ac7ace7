#include "node/shared_sums.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "testing/check.h"
#include "testing/rooms.h"

using namespace gradlane;

namespace {

using Bytes = std::vector<uint8_t>;
using Ends = std::vector<SharedSums::End>;

std::vector<uint32_t> TensorsOf(const Ends& ends) {
    std::vector<uint32_t> tensors;
    for (const SharedSums::End& end : ends) tensors.push_back(end.tensor);
    return tensors;
}

// The ranks of a host in this process, each with its own mapping of the segment.
struct Host {
    std::vector<std::unique_ptr<SharedSums>> ranks;

    explicit Host(uint32_t world) {
        for (HostRoom& room : RoomsOf(NumbersUpTo(world))) {
            ranks.push_back(std::make_unique<SharedSums>(std::make_shared<const HostRoom>(std::move(room))));
        }
    }

    // In a random order, a little at a time, until all tensors have ended on all ranks; returns the ends by rank.
    std::vector<std::vector<uint32_t>> Run(std::mt19937& random) {
        std::vector<std::vector<uint32_t>> tensors;
        for (const Ends& ended : RunWays(random)) tensors.push_back(TensorsOf(ended));
        return tensors;
    }

    std::vector<Ends> RunWays(std::mt19937& random) {
        std::vector<Ends> ended(ranks.size());
        for (int idle = 0; idle < 1000;) {
            const size_t rank = random() % ranks.size();
            const size_t before = ended[rank].size();
            const bool more = ranks[rank]->Progress(1 + random() % (400 << 10), &ended[rank]);
            idle = more || ended[rank].size() != before ? 0 : idle + 1;
        }
        return ended;
    }
};

Bytes Noise(std::mt19937& random, DType dtype, size_t n) {
    Bytes bytes(n * ElementBytes(dtype));
    for (size_t i = 0; i < n; ++i) {
        const float value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 37.0f;
        uint8_t* at = bytes.data() + i * ElementBytes(dtype);
        switch (dtype) {
            case DType::kF32: std::memcpy(at, &value, 4); break;
            case DType::kF64: {
                const double wide = value / 3.0;
                std::memcpy(at, &wide, 8);
                break;
            }
            case DType::kF16:
            case DType::kBF16: Narrow(dtype, at, &value, 1); break;
            default:
                for (size_t byte = 0; byte < ElementBytes(dtype); ++byte) at[byte] = static_cast<uint8_t>(random());
        }
    }
    return bytes;
}

// What Order::kRank gives.
Bytes InRankOrder(const Spec& spec, const std::vector<Bytes>& parts) {
    const size_t n = spec.bytes / ElementBytes(spec.dtype);
    Bytes sum = parts[0];
    if (!IsHalf(spec.dtype) || parts.size() <= 2) {
        for (size_t rank = 1; rank < parts.size(); ++rank) Reduce(spec.dtype, spec.op, sum.data(), parts[rank].data(), n);
        return sum;
    }
    std::vector<float> wide(n);
    Widen(spec.dtype, wide.data(), parts[0].data(), n);
    for (size_t rank = 1; rank < parts.size(); ++rank) WidenReduce(spec.dtype, spec.op, wide.data(), parts[rank].data(), n);
    Narrow(spec.dtype, sum.data(), wide.data(), n);
    return sum;
}

// One way, as a tensor of one host goes.
void Start(SharedSums& sums, uint32_t tensor, const Spec& spec, const uint8_t* from, uint8_t* into) {
    sums.Start(tensor, spec, {{{spec.from, spec.to, spec.at}, from, into}});
}

Spec Of(DType dtype, Op op, size_t n) {
    Spec spec;
    spec.bytes = n * ElementBytes(dtype);
    spec.dtype = dtype;
    spec.op = op;
    spec.once = true;
    return spec;
}

bool IsReadable(int fd) {
    pollfd polled{fd, POLLIN, 0};
    return poll(&polled, 1, 0) == 1;
}

}  // namespace

TEST(EveryTypeAndOperationGivesTheBitsOfRankOrder) {
    std::mt19937 random(1);
    for (const uint32_t world : {2u, 3u, 4u}) {
        Host host(world);
        uint32_t tensor = 0;
        for (int dtype = 0; dtype < 8; ++dtype) {
            for (int op = 0; op < 4; ++op) {
                const size_t n = std::vector<size_t>{1, 100, 70'001, 300'007}[random() % 4];
                const Spec spec = Of(static_cast<DType>(dtype), static_cast<Op>(op), n);
                std::vector<Bytes> parts, results(world, Bytes(spec.bytes));
                for (uint32_t rank = 0; rank < world; ++rank) parts.push_back(Noise(random, spec.dtype, n));
                const Bytes expected = InRankOrder(spec, parts);
                const bool in_place = random() % 2 == 0;
                if (in_place) results = parts;
                for (uint32_t rank = 0; rank < world; ++rank) {
                    Start(*host.ranks[rank], tensor, spec, (in_place ? results : parts)[rank].data(), results[rank].data());
                }
                for (const auto& ended : host.Run(random)) CHECK_EQ(ended, std::vector<uint32_t>{tensor});
                for (uint32_t rank = 0; rank < world; ++rank) CHECK(results[rank] == expected);
                ++tensor;
            }
        }
        for (const auto& rank : host.ranks) CHECK(!rank->IsUnderWay());
    }
}

TEST(OneSenderOrOneReceiver) {
    std::mt19937 random(2);
    for (const uint32_t world : {2u, 3u}) {
        Host host(world);
        uint32_t tensor = 0;
        for (const size_t n : {7u, 200'003u}) {
            for (const bool sends : {false, true}) {
                for (const bool dealt : {false, true}) {
                    const auto one = static_cast<int32_t>(random() % world);
                    Spec spec = Of(DType::kF32, Op::kSum, n);
                    (sends ? spec.from : spec.to) = one;
                    if (!dealt) spec.at = one;
                    std::vector<Bytes> parts, results(world, Bytes(spec.bytes, 9));
                    for (uint32_t rank = 0; rank < world; ++rank) parts.push_back(Noise(random, spec.dtype, n));
                    const Bytes expected = sends ? parts[static_cast<size_t>(one)] : InRankOrder(spec, parts);
                    for (uint32_t rank = 0; rank < world; ++rank) {
                        const bool is_one = static_cast<int32_t>(rank) == one;
                        Start(*host.ranks[rank], tensor, spec, !sends || is_one ? parts[rank].data() : nullptr,
                                                sends != is_one ? results[rank].data() : nullptr);
                    }
                    host.Run(random);
                    for (uint32_t rank = 0; rank < world; ++rank) {
                        const bool gets = sends != (static_cast<int32_t>(rank) == one);
                        CHECK(results[rank] == (gets ? expected : Bytes(spec.bytes, 9)));
                    }
                    ++tensor;
                }
            }
        }
        for (const auto& rank : host.ranks) CHECK(!rank->IsUnderWay());
    }
}

TEST(TheMostUrgentOfWhatAllHaveHandedOverGoesFirst) {
    Host host(2);
    std::mt19937 random(3);
    std::vector<float> ones(200'000, 1.0f);
    std::vector<std::vector<float>> data(8, ones);
    for (uint32_t rank = 0; rank < 2; ++rank) {
        for (uint32_t tensor = 0; tensor < 4; ++tensor) {
            Spec spec = Of(DType::kF32, Op::kSum, ones.size());
            spec.urgent_first = true;
            spec.priority = std::vector<uint32_t>{5, 5, 1, 3}[tensor];
            auto* memory = reinterpret_cast<uint8_t*>(data[rank * 4 + tensor].data());
            Start(*host.ranks[rank], tensor, spec, memory, memory);
        }
    }
    for (const auto& ended : host.Run(random)) CHECK_EQ(ended, (std::vector<uint32_t>{2, 3, 0, 1}));
    for (const auto& each : data) CHECK(each.front() == 2.0f && each.back() == 2.0f);
}

TEST(ARankAheadOfTheOthersWaitsForNoCallThatTheyDoNotHave) {
    Host host(3);
    std::mt19937 random(4);
    std::vector<std::vector<float>> data(3 * 1000, std::vector<float>(3, 1.0f));
    // rank 0 is a thousand calls ahead, the later the more urgent; rank 2 makes each when the one before has ended
    const auto start = [&](uint32_t rank, uint32_t tensor) {
        Spec spec = Of(DType::kF32, Op::kSum, tensor % 7 == 0 ? 0 : 3);  // empty ones among them
        spec.urgent_first = true;
        spec.priority = 1000 - tensor;
        auto* memory = reinterpret_cast<uint8_t*>(data[rank * 1000 + tensor].data());
        Start(*host.ranks[rank], tensor, spec, memory, memory);
    };
    for (uint32_t tensor = 0; tensor < 1000; ++tensor) {
        start(0, tensor);
        if (tensor < 300) start(1, tensor);
    }
    for (uint32_t tensor = 0; tensor < 1000; ++tensor) {
        if (tensor >= 300) start(1, tensor);
        start(2, tensor);
        Ends ended, others;
        for (int turn = 0; turn < 6; ++turn) {
            for (uint32_t rank = 0; rank < 3; ++rank) host.ranks[rank]->Progress(1 << 20, rank == 2 ? &ended : &others);
        }
        if (tensor % 7 != 0 && !CHECK_EQ(TensorsOf(ended), std::vector<uint32_t>{tensor})) return;
    }
    for (const auto& rank : host.ranks) CHECK(!rank->IsUnderWay());
    CHECK_EQ(data[1].front(), 3.0f);
}

TEST(RanksThatMeanDifferentThingsSumNothing) {
    const auto differ = [](const Spec& a, const Spec& b, const char* expected) {
        Host host(2);
        std::mt19937 random(5);
        Bytes mine(4096, 1), theirs(4096, 1);
        Start(*host.ranks[0], 0, a, mine.data(), mine.data());
        Start(*host.ranks[1], 0, b, theirs.data(), theirs.data());
        for (const auto& ended : host.Run(random)) CHECK(ended.empty());
        REQUIRE(host.ranks[0]->fault().has_value());
        CHECK_EQ(host.ranks[0]->fault()->rank, 1);
        CHECK(host.ranks[0]->fault()->text.find(expected) != std::string::npos);
        CHECK(mine == Bytes(4096, 1) && theirs == Bytes(4096, 1));
    };
    const Spec spec = Of(DType::kF32, Op::kSum, 100);
    differ(spec, Of(DType::kF32, Op::kSum, 101), "another size");
    differ(spec, Of(DType::kI32, Op::kSum, 100), "another size, type");
    differ(spec, Of(DType::kF32, Op::kMax, 100), "another size, type, operation");
    differ(spec, Of(DType::kF32, Op::kSum, 0), "another size");
}

// Each rank adds to what it owns between the two ways, as the ranks of other hosts do.
TEST(AWayThatAwaitsOthersBeginsWhenAllRanksAreReady) {
    std::mt19937 random(6);
    for (const uint32_t world : {2u, 3u}) {
        for (const size_t n : {1u, 1000u, 300'007u}) {
            for (const bool one_owner : {false, true}) {
                Host host(world);
                Spec spec = Of(DType::kF32, Op::kSum, n);
                std::vector<std::vector<float>> data(world, std::vector<float>(n, 1.0f)), other = data;
                const auto at = [](std::vector<float>& floats) { return reinterpret_cast<uint8_t*>(floats.data()); };
                const int32_t owner = one_owner ? static_cast<int32_t>(world) - 1 : kDealt, own = one_owner ? owner : kOwn;
                for (uint32_t rank = 0; rank < world; ++rank) {
                    uint8_t* memory = at(data[rank]);
                    host.ranks[rank]->Start(0, spec, {{{kAll, own, owner}, memory, memory}, {{own, kAll}, memory, memory, true}});
                    Start(*host.ranks[rank], 1, spec, at(other[rank]), at(other[rank]));
                }
                // what comes later does not wait for it
                for (const Ends& ended : host.RunWays(random)) CHECK_EQ(ended, (Ends{{0, 1}, {1, 0}}));
                for (uint32_t rank = 0; rank < world; ++rank) {
                    const Range share = one_owner ? Range{0, static_cast<int32_t>(rank) == owner ? spec.bytes : 0}
                                                  : SharedSums::ShareOf(spec.bytes, world, rank);
                    for (uint64_t i = share.begin / 4; i < share.end / 4; ++i) {
                        if (!CHECK_EQ(data[rank][i], static_cast<float>(world))) return;
                        data[rank][i] += 100.0f;
                    }
                    for (const Ends& ended : host.RunWays(random)) CHECK(ended.empty());
                    host.ranks[rank]->Ready(0);
                }
                for (const Ends& ended : host.RunWays(random)) CHECK_EQ(ended, (Ends{{0, 0}}));
                const std::vector<float> expected(n, static_cast<float>(world) + 100.0f);
                for (const auto& each : data) CHECK(each == expected);
                for (const auto& rank : host.ranks) CHECK(!rank->IsUnderWay());
            }
        }
    }
}

// Again and again, as in training: each rank hands tensors over in an order of its own, and once more as soon as they ended.
TEST(TensorsAreHandedOverAgainInAnyOrderOnEachRank) {
    constexpr uint32_t kTensors = 60, kRounds = 5;
    std::mt19937 random(8);
    for (const uint32_t world : {2u, 3u}) {
        Host host(world);
        std::vector<std::vector<float>> data(world * kTensors);
        std::vector<std::vector<uint32_t>> rounds(world, std::vector<uint32_t>(kTensors));
        const auto start = [&](uint32_t rank, uint32_t tensor) {
            std::vector<float>& own = data[rank * kTensors + tensor];
            own.assign(1 + tensor * 977, static_cast<float>(rank + 1 + rounds[rank][tensor]++));
            auto* memory = reinterpret_cast<uint8_t*>(own.data());
            Start(*host.ranks[rank], tensor, Of(DType::kF32, Op::kSum, own.size()), memory, memory);
        };
        for (uint32_t rank = 0; rank < world; ++rank) {
            std::vector<uint32_t> order(kTensors);
            std::iota(order.begin(), order.end(), 0u);
            std::shuffle(order.begin(), order.end(), random);
            for (const uint32_t tensor : order) start(rank, tensor);
        }
        size_t ends = 0;
        while (ends < size_t{world} * kTensors * kRounds) {
            const auto rank = static_cast<uint32_t>(random() % world);
            Ends ended;
            host.ranks[rank]->Progress(1 + random() % (400 << 10), &ended);
            for (const SharedSums::End& end : ended) {
                ++ends;
                const uint32_t round = rounds[rank][end.tensor];
                const auto& own = data[rank * kTensors + end.tensor];
                const auto sum = static_cast<float>(world * (world + 1) / 2 + world * (round - 1));
                if (!CHECK_EQ(own.front(), sum) || !CHECK_EQ(own.back(), sum)) return;
                if (round < kRounds) start(rank, end.tensor);
            }
        }
        for (const auto& rank : host.ranks) CHECK(!rank->IsUnderWay());
    }
}

TEST(WhoWaitsForOthersSaysSoOnceAndWhoHasGivenAllSaysSo) {
    Host host(2);
    Ends ended;
    std::vector<float> data(6 * 400'000, 1.0f);
    const Spec spec = Of(DType::kF32, Op::kSum, 400'000);
    const auto start = [&](uint32_t rank, uint32_t tensor) {
        auto* memory = reinterpret_cast<uint8_t*>(data.data() + (rank * 3 + tensor) * 400'000);
        Start(*host.ranks[rank], tensor, spec, memory, memory);
    };
    SharedSums &first = *host.ranks[0], &second = *host.ranks[1];
    start(0, 0);
    start(1, 1);
    while (first.Progress(1 << 20, &ended) || second.Progress(1 << 20, &ended)) {}
    CHECK_EQ(first.TakeWaiting(), std::vector<uint32_t>{0});
    CHECK_EQ(first.TakeWaiting(), std::vector<uint32_t>());
    CHECK_EQ(second.TakeWaiting(), std::vector<uint32_t>{1});
    start(0, 1);
    first.Progress(1 << 10, &ended);  // a first chunk is on its way
    start(0, 2);
    CHECK_EQ(first.TakeWaiting(), std::vector<uint32_t>());
    CHECK(first.TakeGiven().empty());
    for (int turn = 0; turn < 100; ++turn) host.ranks[static_cast<size_t>(turn % 2)]->Progress(1 << 20, &ended);
    CHECK_EQ(first.TakeGiven(), std::vector<uint32_t>{1});
    CHECK_EQ(ended.size(), size_t{2});
    CHECK_EQ(first.TakeWaiting(), std::vector<uint32_t>{2});
}

// What one rank alone gives, once it has it: it is the first way, and may be ready before it is handed over.
TEST(CallsBecomeReadyInAnyOrderOnEachRank) {
    constexpr uint32_t kWorld = 3, kTensors = 400;
    Host host(kWorld);
    std::mt19937 random(7);
    std::vector<std::vector<uint8_t>> data(kWorld * kTensors, std::vector<uint8_t>(100));
    std::vector<std::vector<uint32_t>> unready(kWorld);
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
        for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
            auto& own = data[rank * kTensors + tensor];
            if (rank == 1) own.assign(100, static_cast<uint8_t>(tensor));
            Spec spec = Of(DType::kU8, Op::kSum, 100);
            spec.from = 1;
            host.ranks[rank]->Start(tensor, spec, {{{1, kAll}, own.data(), own.data(), true}});
            unready[rank].push_back(tensor);
        }
        std::shuffle(unready[rank].begin(), unready[rank].end(), random);
    }
    size_t ended = 0;
    while (!unready[0].empty() || !unready[1].empty() || !unready[2].empty()) {
        auto& some = unready[random() % kWorld];
        const auto rank = static_cast<size_t>(&some - unready.data());
        for (size_t i = 0; i < 20 && !some.empty(); ++i) {
            host.ranks[rank]->Ready(some.back());
            some.pop_back();
        }
        for (const Ends& each : host.RunWays(random)) ended += each.size();
    }
    CHECK_EQ(ended, size_t{kWorld} * kTensors);
    for (uint32_t i = 0; i < kWorld * kTensors; ++i) CHECK_EQ(data[i][99], static_cast<uint8_t>(i % kTensors));
}

// Rank 0's decisions lie at the beginning: how many chunks are decided, and of each which tensor and where in the slots.
TEST(ADecisionThatCannotBeIsRefused) {
    const auto lie = [](uint64_t decided, uint64_t tensor, uint64_t place) {
        std::vector<HostRoom> rooms = RoomsOf(NumbersUpTo(2));
        auto* decisions = reinterpret_cast<uint64_t*>(rooms[0].segment.data());
        SharedSums sums(std::make_shared<const HostRoom>(std::move(rooms[1])));
        std::vector<float> data(8192);  // each rank owns 16 KiB
        auto* memory = reinterpret_cast<uint8_t*>(data.data());
        sums.Start(0, Of(DType::kF32, Op::kSum, data.size()), {{{}, memory, memory}});
        Ends ended;
        sums.Progress(1 << 20, &ended);
        CHECK(!sums.fault());
        decisions[0] = decided;
        std::fill_n(decisions + 2, 4, tensor << 32 | place);
        sums.Progress(1 << 20, &ended);
        return sums.fault();
    };
    const uint64_t slots = 1 << 20;
    CHECK(!lie(1, 0, slots - 32768));  // as it may be, at the end of the slots
    for (const auto& fault : {
             lie(1, 1, 0),  // a tensor that was not handed over
             lie(1, 1 << 20, 0),
             lie(2, 0, 0),  // more chunks than it has
             lie(UINT64_MAX, 0, 0),
             lie(1, 0, slots - 64),  // past the end of the slots
             lie(1, 0, slots),
             lie(1, 0, UINT32_MAX - 63),
             lie(1, 0, 32),  // where no piece begins
         }) {
        REQUIRE(fault.has_value());
        CHECK(fault->code == Code::kProtocol);
        CHECK_EQ(fault->rank, -1);
    }
}

TEST(ARankThatTellsOfATensorTwiceIsRefused) {
    Host host(2);
    std::vector<float> data(8);
    auto* memory = reinterpret_cast<uint8_t*>(data.data());
    const Spec spec = Of(DType::kF32, Op::kSum, 4);
    Ends ended;
    for (int twice = 0; twice < 2; ++twice) {
        CHECK(!host.ranks[0]->fault());
        Start(*host.ranks[1], 0, spec, memory, memory);
        host.ranks[1]->Progress(1 << 20, &ended);
        Start(*host.ranks[0], static_cast<uint32_t>(1 + twice), spec, memory + 16, memory + 16);  // it hears while it has calls
        host.ranks[0]->Progress(1 << 20, &ended);
    }
    REQUIRE(host.ranks[0]->fault().has_value());
    CHECK(host.ranks[0]->fault()->code == Code::kProtocol);
}

// Rank 0 has the parts with what it is told, and the others are woken for the sum alone.
TEST(ASmallSumIsThereAsSoonAsRank0HasHeardOfIt) {
    std::mt19937 random(9);
    for (const uint32_t world : {2u, 4u}) {
        Host host(world);
        for (const size_t n : {1u, 1000u, 4096u}) {
            const Spec spec = Of(DType::kF32, Op::kSum, n);
            std::vector<Bytes> data;
            for (uint32_t rank = 0; rank < world; ++rank) data.push_back(Noise(random, spec.dtype, n));
            const Bytes expected = InRankOrder(spec, data);
            for (uint32_t back = 1; back <= world; ++back) {
                const uint32_t rank = world - back;
                Ends ended;
                Start(*host.ranks[rank], static_cast<uint32_t>(n), spec, data[rank].data(), data[rank].data());
                CHECK(!host.ranks[rank]->Progress(1 << 20, &ended));
                CHECK_EQ(ended.size(), size_t{rank == 0});
                if (rank == 0) continue;
                CHECK_EQ(host.ranks[rank]->TakeGiven(), std::vector<uint32_t>{static_cast<uint32_t>(n)});
                CHECK(host.ranks[rank]->Rest());
            }
            for (uint32_t rank = 1; rank < world; ++rank) {
                Ends ended;
                CHECK(IsReadable(host.ranks[rank]->wake_fd()));
                host.ranks[rank]->Woken();
                host.ranks[rank]->Progress(1 << 20, &ended);
                CHECK_EQ(ended.size(), size_t{1});
            }
            for (const Bytes& each : data) CHECK(each == expected);
            for (const auto& rank : host.ranks) CHECK(!IsReadable(rank->wake_fd()));
        }
    }
}

// More than there is room for, and among them sums that are not small, and those that rank 0 alone gets.
TEST(ManySmallSumsAtATimeInAnyOrder) {
    constexpr uint32_t kWorld = 3, kTensors = 300;
    std::mt19937 random(10);
    Host host(kWorld);
    std::vector<std::vector<Bytes>> data(kWorld, std::vector<Bytes>(kTensors));
    std::vector<Bytes> expected(kTensors);
    std::vector<Spec> specs;
    for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
        specs.push_back(Of(tensor % 2 == 0 ? DType::kF32 : DType::kBF16, Op::kSum, 1 + random() % (tensor % 10 == 0 ? 9000 : 500)));
        if (tensor % 3 == 0) specs[tensor].to = specs[tensor].at = 0;
        const DType dtype = specs[tensor].dtype;
        for (auto& own : data) own[tensor] = Noise(random, dtype, specs[tensor].bytes / ElementBytes(dtype));
        expected[tensor] = InRankOrder(specs[tensor], {data[0][tensor], data[1][tensor], data[2][tensor]});
    }
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
        std::vector<uint32_t> order(kTensors);
        std::iota(order.begin(), order.end(), 0u);
        std::shuffle(order.begin(), order.end(), random);
        for (const uint32_t tensor : order) Start(*host.ranks[rank], tensor, specs[tensor], data[rank][tensor].data(), data[rank][tensor].data());
    }
    for (const auto& ended : host.Run(random)) CHECK_EQ(ended.size(), size_t{kTensors});
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
        for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
            if (rank == 0 || tensor % 3 != 0) CHECK(data[rank][tensor] == expected[tensor]);
        }
    }
    for (const auto& rank : host.ranks) CHECK(!rank->IsUnderWay());
}

// The other ranks are through with it before rank 0 has added it up.
TEST(WhatRank0AloneGetsIsNotLostToWhatComesNext) {
    Host host(2);
    Spec spec = Of(DType::kF32, Op::kSum, 100);
    spec.to = spec.at = 0;
    std::vector<std::vector<float>> sums(2, std::vector<float>(100, 1.0f)), parts = {std::vector<float>(100, 2.0f), std::vector<float>(100, 7.0f)};
    const auto start = [&](uint32_t rank, uint32_t tensor) {
        auto* memory = reinterpret_cast<uint8_t*>((rank == 0 ? sums : parts)[tensor].data());
        Start(*host.ranks[rank], tensor, spec, memory, memory);
    };
    SharedSums &first = *host.ranks[0], &second = *host.ranks[1];
    Ends ended;
    start(0, 0);
    start(1, 0);
    second.Progress(1 << 20, &ended);
    first.Progress(1, &ended);  // it decides, and has yet to add up
    CHECK(ended.empty());
    second.Progress(1 << 20, &ended);
    CHECK_EQ(TensorsOf(ended), std::vector<uint32_t>{0});
    start(1, 1);
    second.Progress(1 << 20, &ended);
    start(0, 1);
    for (int turn = 0; turn < 6; ++turn) host.ranks[static_cast<size_t>(turn % 2)]->Progress(1 << 20, &ended);
    CHECK_EQ(ended.size(), size_t{4});
    CHECK_EQ(sums[0][99], 3.0f);
    CHECK_EQ(sums[1][99], 8.0f);
}

TEST(WhoRestsIsWokenAndWhoHasSomethingToDoDoesNotRest) {
    Host host(2);
    Ends ended;
    std::vector<float> a(4, 1.0f), b(4, 2.0f);
    SharedSums &first = *host.ranks[0], &second = *host.ranks[1];
    CHECK(first.Rest());
    Start(first, 0, Of(DType::kF32, Op::kSum, 4), reinterpret_cast<uint8_t*>(a.data()), reinterpret_cast<uint8_t*>(a.data()));
    CHECK(!first.Progress(1 << 20, &ended));
    CHECK(first.Rest());
    CHECK(!IsReadable(first.wake_fd()));
    Start(second, 0, Of(DType::kF32, Op::kSum, 4), reinterpret_cast<uint8_t*>(b.data()), reinterpret_cast<uint8_t*>(b.data()));
    CHECK(!second.Rest());
    CHECK(!second.Progress(1 << 20, &ended));
    CHECK(IsReadable(first.wake_fd()));
    first.Woken();
    CHECK(!IsReadable(first.wake_fd()));
    CHECK(first.CanProgress());
    CHECK(second.Rest());
    first.Progress(1 << 20, &ended);
    CHECK(IsReadable(second.wake_fd()));
}

// Each rank on a thread of its own that sleeps as a node's does.
TEST(ThreadsSumAsFastAsTheyLike) {
    constexpr uint32_t kWorld = 3, kTensors = 200;
    Host host(kWorld);
    std::vector<std::vector<float>> data(kWorld * kTensors);
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
        threads.emplace_back([&, rank] {
            SharedSums& sums = *host.ranks[rank];
            std::mt19937 random(rank);
            Ends ended;
            for (uint32_t tensor = 0; tensor < kTensors || ended.size() < kTensors;) {
                if (tensor < kTensors) {
                    std::vector<float>& own = data[rank * kTensors + tensor];
                    own.assign(1 + tensor * 777 % 150'000, static_cast<float>(rank + 1));
                    auto* memory = reinterpret_cast<uint8_t*>(own.data());
                    Start(sums, tensor, Of(DType::kF32, Op::kSum, own.size()), memory, memory);
                    ++tensor;
                }
                while (sums.Progress(300'000, &ended)) {}
                if (tensor < kTensors && random() % 3 != 0) continue;
                if (!sums.IsUnderWay() || !sums.Rest()) continue;
                pollfd polled{sums.wake_fd(), POLLIN, 0};
                if (!CHECK_EQ(poll(&polled, 1, 20'000), 1)) return;
                sums.Woken();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& each : data) CHECK(each.front() == 6.0f && each.back() == 6.0f);
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
