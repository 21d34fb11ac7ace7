#include "node/aggregator.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "testing/check.h"

using namespace gradlane;

namespace {

constexpr uint32_t kPacket = 64;
constexpr DType kTypes[] = {DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI8, DType::kU8, DType::kI32, DType::kI64};
constexpr Op kOps[] = {Op::kSum, Op::kMin, Op::kMax, Op::kProduct};

using Bytes = std::vector<uint8_t>;

template <typename T>
void Store(Bytes& into, size_t at, T value) {
    std::memcpy(into.data() + at * sizeof value, &value, sizeof value);
}

void Put(DType dtype, Bytes& into, size_t at, int64_t value) {
    switch (dtype) {
        case DType::kF32: return Store(into, at, static_cast<float>(value));
        case DType::kF64: return Store(into, at, static_cast<double>(value));
        case DType::kF16:
        case DType::kBF16: {
            const auto wide = static_cast<float>(value);
            return Narrow(dtype, into.data() + 2 * at, &wide, 1);
        }
        case DType::kI8: return Store(into, at, static_cast<int8_t>(value));
        case DType::kU8: return Store(into, at, static_cast<uint8_t>(value));
        case DType::kI32: return Store(into, at, static_cast<int32_t>(value));
        case DType::kI64: return Store(into, at, value);
    }
}

int64_t Combine(Op op, int64_t a, int64_t b) {
    switch (op) {
        case Op::kSum: return a + b;
        case Op::kMin: return std::min(a, b);
        case Op::kMax: return std::max(a, b);
        case Op::kProduct: return a * b;
    }
    return 0;
}

// Small whole numbers: exact in every type, whatever the order.
int64_t ValueOf(uint32_t rank, size_t at, uint32_t iteration) { return static_cast<int64_t>((rank * 7 + at * 3 + iteration) % 4); }

Bytes Contribution(const Spec& spec, uint32_t rank, uint32_t iteration) {
    Bytes bytes(spec.bytes);
    for (size_t at = 0; at < spec.bytes / ElementBytes(spec.dtype); ++at) Put(spec.dtype, bytes, at, ValueOf(rank, at, iteration));
    return bytes;
}

Bytes Expected(const Spec& spec, uint32_t world, uint32_t iteration) {
    if (spec.from != kAll) return Contribution(spec, static_cast<uint32_t>(spec.from), iteration);
    Bytes bytes(spec.bytes);
    for (size_t at = 0; at < spec.bytes / ElementBytes(spec.dtype); ++at) {
        int64_t value = ValueOf(0, at, iteration);
        for (uint32_t rank = 1; rank < world; ++rank) value = Combine(spec.op, value, ValueOf(rank, at, iteration));
        Put(spec.dtype, bytes, at, value);
    }
    return bytes;
}

struct Collected : Outbox {
    struct Result {
        Piece piece;
        uint32_t iteration;
        BufferRef sum;
    };
    std::vector<Result> returned;
    uint32_t delivered = 0, consumed = 0;
    std::vector<uint32_t> over;

    void Return(uint32_t, const Spec&, const std::shared_ptr<const Layout>& layout, uint32_t place, uint32_t iteration,
                BufferRef sum) override {
        returned.push_back({layout->by_server[0][place], iteration, std::move(sum)});
    }
    void ReturnTo(uint32_t, uint32_t, const Spec&, const std::shared_ptr<const Layout>&, uint32_t, uint32_t, BufferRef) override {}
    void Disagree(uint32_t, const std::string&) override {}
    void Delivered(uint32_t, uint32_t packets) override { delivered += packets; }
    void Consumed(uint32_t, uint32_t packets) override { consumed += packets; }
    void Over(uint32_t tensor) override { over.push_back(tensor); }

    Bytes Whole(size_t bytes) const {
        Bytes whole(bytes, 0xEE);
        for (const Result& result : returned) std::memcpy(whole.data() + result.piece.offset, result.sum.data(), result.piece.length);
        return whole;
    }
};

Header PushOf(const Piece& piece, uint32_t iteration) {
    Header header;
    header.type = FrameType::kPush;
    header.offset = piece.offset;
    header.length = piece.length;
    header.iteration = iteration;
    return header;
}

// A server with everything dealt to it.
struct Server {
    Collected out;
    uint32_t world;
    int32_t local;
    Spec spec;
    std::shared_ptr<const Layout> layout;
    Aggregator sums;

    Server(uint32_t world, int32_t local, Order order, const Spec& spec)
        : world(world), local(local), spec(spec), layout(Dealer(1).Cut(spec.bytes, kPacket)),
          sums(0, world, local, order, kPacket, &out) {
        sums.Define(0, spec, layout);
    }
    ~Server() { out.returned.clear(); }  // before the pool that its buffers are of
    bool Contributes(uint32_t rank) const { return spec.from == kAll || spec.from == static_cast<int32_t>(rank); }

    bool Push(uint32_t rank, size_t place, uint32_t iteration) {
        const Piece& piece = layout->by_server[0][place];
        const char* why = "";
        const int64_t admitted = sums.Admit(PushOf(piece, iteration), rank, &why);
        if (!CHECK_EQ(admitted, place)) return false;
        BufferRef buffer = sums.Take();
        const Bytes from = Contribution(spec, rank, iteration);
        std::memcpy(buffer.data(), from.data() + piece.offset, piece.length);
        sums.Arrive(0, static_cast<uint32_t>(place), rank, std::move(buffer));
        return true;
    }
    const char* WhyNot(Header header, uint32_t rank, int64_t expected = -1) {
        const char* why = "";
        CHECK_EQ(sums.Admit(header, rank, &why), expected);
        return why;
    }
};

// Contributions in an order drawn from `random`, the local one among them; what everybody ends up with.
void CheckIteration(Server& server, uint32_t iteration, std::mt19937& random) {
    struct Event {
        int64_t rank;  // -1: the local hand-over
        size_t place;
    };
    std::vector<Event> events;
    for (uint32_t rank = 0; rank < server.world; ++rank) {
        if (static_cast<int32_t>(rank) == server.local || !server.Contributes(rank)) continue;
        for (size_t place = 0; place < server.layout->packets; ++place) events.push_back({rank, place});
    }
    if (server.local >= 0) events.push_back({-1, 0});
    std::shuffle(events.begin(), events.end(), random);
    const bool contributes = server.local >= 0 && server.Contributes(static_cast<uint32_t>(server.local));
    Bytes memory(server.spec.bytes);
    if (contributes) memory = Contribution(server.spec, static_cast<uint32_t>(server.local), iteration);
    for (const Event& event : events) {
        if (event.rank < 0) {
            server.sums.ArriveLocally(0, iteration, memory.data(), memory.data());
            while (server.sums.Work(kPacket)) {
            }
        } else if (!server.Push(static_cast<uint32_t>(event.rank), event.place, iteration)) {
            return;
        }
    }
    const Spec& spec = server.spec;
    const Bytes expected = Expected(spec, server.world, iteration);
    uint32_t remote_receivers = 0;
    for (int32_t rank = 0; rank < static_cast<int32_t>(server.world); ++rank) {
        if (rank != server.local && (spec.to == kAll ? spec.from != rank : spec.to == rank)) ++remote_receivers;
    }
    const bool delivers = server.local >= 0 && (spec.to == kAll ? spec.from != server.local : spec.to == server.local);
    CHECK_EQ(server.out.returned.size(), remote_receivers != 0 ? server.layout->packets : 0);
    if (remote_receivers != 0) CHECK(server.out.Whole(spec.bytes) == expected);
    CHECK_EQ(server.out.delivered, delivers ? server.layout->packets : 0);
    CHECK_EQ(server.out.consumed, contributes && !delivers ? server.layout->packets : 0);
    if (delivers) CHECK(memory == expected);
    for (const auto& result : server.out.returned) CHECK_EQ(result.iteration, iteration);
    if (spec.whole && remote_receivers != 0) {
        CHECK(std::is_sorted(server.out.returned.begin(), server.out.returned.end(),
                             [](const auto& a, const auto& b) { return a.piece.offset < b.piece.offset; }));
    }
    server.out.returned.clear();
    server.out.delivered = server.out.consumed = 0;
    CHECK_EQ(server.sums.held_bytes(), 0);
    CHECK_EQ(server.out.over.size(), spec.once ? 1 : 0);
}

Spec SpecOf(DType dtype, Op op, size_t n) {
    Spec spec;
    spec.dtype = dtype;
    spec.op = op;
    spec.bytes = n * ElementBytes(dtype);
    return spec;
}

}  // namespace

TEST(EveryTypeOperationWorldAndOrderAddsUp) {
    std::mt19937 random(1);
    for (const DType dtype : kTypes) {
        for (const Op op : kOps) {
            for (uint32_t world = 1; world <= 5; ++world) {
                for (const Order order : {Order::kArrival, Order::kRank}) {
                    for (const int32_t local : {-1, 0, static_cast<int32_t>(world) - 1}) {
                        Server server(world, local, order, SpecOf(dtype, op, 75));
                        for (uint32_t iteration = 0; iteration < 3; ++iteration) CheckIteration(server, iteration, random);
                    }
                }
            }
        }
    }
}

TEST(AllAtOnceReturnsWhatAServerHasTogether) {
    std::mt19937 random(2);
    for (const int32_t local : {-1, 1}) {
        Spec spec = SpecOf(DType::kF16, Op::kSum, 200);
        spec.whole = true;
        Server server(3, local, Order::kArrival, spec);
        for (uint32_t iteration = 0; iteration < 3; ++iteration) CheckIteration(server, iteration, random);
    }
    Spec spec = SpecOf(DType::kF32, Op::kSum, 40);
    spec.whole = true;
    Server server(2, -1, Order::kArrival, spec);
    for (const size_t place : {0, 1, 2}) server.Push(0, place, 0);
    for (const size_t place : {2, 0}) server.Push(1, place, 0);
    CHECK_EQ(server.out.returned.size(), 0);
    server.Push(1, 1, 0);
    CHECK_EQ(server.out.returned.size(), 3);
}

TEST(OneContributesOrOneReceives) {
    std::mt19937 random(3);
    for (uint32_t world = 1; world <= 4; ++world) {
        for (int32_t local = -1; local < static_cast<int32_t>(world); ++local) {
            for (int32_t one = 0; one < static_cast<int32_t>(world); ++one) {
                for (const bool sends : {true, false}) {
                    for (const Order order : {Order::kArrival, Order::kRank}) {
                        Spec spec = SpecOf(DType::kI32, Op::kSum, 40);
                        (sends ? spec.from : spec.to) = one;
                        spec.once = true;
                        if (sends && world == 1 && local < 0) continue;  // nobody would hear of it
                        Server server(world, local, order, spec);
                        CheckIteration(server, OnlyIteration(spec), random);
                    }
                }
            }
        }
    }
}

TEST(ASumLeavesWhenItsLastContributionHasComeAndNotBefore) {
    Server server(3, 1, Order::kArrival, SpecOf(DType::kF32, Op::kSum, 32));
    Bytes memory = Contribution(server.spec, 1, 0);
    server.Push(0, 1, 0);
    server.sums.ArriveLocally(0, 0, memory.data(), memory.data());
    while (server.sums.Work(1)) {
    }
    server.Push(2, 0, 0);
    CHECK_EQ(server.out.returned.size(), 0);
    server.Push(2, 1, 0);
    REQUIRE(server.out.returned.size() == 1);
    CHECK_EQ(server.out.returned[0].piece.offset, kPacket);
    CHECK_EQ(server.out.delivered, 1);
}

TEST(InRankOrderTheBitsDoNotDependOnArrival) {
    std::mt19937 random(4);
    constexpr uint32_t kWorld = 5;
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        const Spec spec = SpecOf(dtype, Op::kSum, 32);
        std::vector<Bytes> parts(kWorld, Bytes(spec.bytes));
        for (Bytes& part : parts) {
            for (size_t at = 0; at < 32; ++at) {
                const float value = static_cast<float>(static_cast<int64_t>(random() % 20001) - 10000) * 1.1f;
                if (dtype == DType::kF32) Store(part, at, value);
                else Narrow(dtype, part.data() + 2 * at, &value, 1);
            }
        }
        Bytes first;
        for (int round = 0; round < 20; ++round) {
            const int32_t local = round % 6 - 1;
            Server server(kWorld, local, Order::kRank, spec);
            std::vector<uint32_t> ranks(kWorld);
            std::iota(ranks.begin(), ranks.end(), 0);
            std::shuffle(ranks.begin(), ranks.end(), random);
            Bytes memory = local >= 0 ? parts[static_cast<size_t>(local)] : Bytes();
            for (const uint32_t rank : ranks) {
                if (static_cast<int32_t>(rank) == local) {
                    server.sums.ArriveLocally(0, 0, memory.data(), memory.data());
                    while (server.sums.Work(1)) {
                    }
                    continue;
                }
                for (uint32_t place = 0; place < server.layout->packets; ++place) {
                    const Piece& piece = server.layout->by_server[0][place];
                    BufferRef buffer = server.sums.Take();
                    std::memcpy(buffer.data(), parts[rank].data() + piece.offset, piece.length);
                    server.sums.Arrive(0, place, rank, std::move(buffer));
                }
            }
            const Bytes bits = server.out.Whole(spec.bytes);
            if (first.empty()) first = bits;
            CHECK(bits == first);
            if (local >= 0) CHECK(memory == first);
        }
    }
}

TEST(WhatIsNotWaitedForIsRefused) {
    Server server(3, 2, Order::kArrival, SpecOf(DType::kF32, Op::kSum, 32));
    const Piece first = server.layout->by_server[0][0];
    const Header good = PushOf(first, 0);
    const std::string another = "a packet that is not one of its tensor's";
    Header bad = good;
    bad.tensor = 1;
    CHECK_EQ(std::string(server.WhyNot(bad, 0)), std::string("a tensor that nobody registered"));
    bad = good;
    bad.iteration = 1;
    CHECK_EQ(std::string(server.WhyNot(bad, 0)), std::string("a packet of another iteration"));
    for (const uint64_t offset : {uint64_t{1}, uint64_t{kPacket + 4}, uint64_t{128}, ~uint64_t{0}, ~uint64_t{63}}) {
        bad = good;
        bad.offset = offset;
        CHECK_EQ(std::string(server.WhyNot(bad, 0)), another);
    }
    for (const uint32_t length : {0u, 60u, 68u, 128u, ~0u}) {
        bad = good;
        bad.length = length;
        CHECK_EQ(std::string(server.WhyNot(bad, 0)), another);
    }
    server.Push(0, 0, 0);
    CHECK_EQ(std::string(server.WhyNot(good, 0)), std::string("the same packet a second time"));
    CHECK_EQ(server.sums.held_bytes(), kPacket);

    // what is defined once has its definition's digest for an iteration
    Spec once = SpecOf(DType::kF32, Op::kSum, 32), other = SpecOf(DType::kI32, Op::kSum, 32);
    once.once = other.once = true;
    Server single(2, -1, Order::kArrival, once);
    CHECK_EQ(std::string(single.WhyNot(PushOf(first, OnlyIteration(other)), 0, Aggregator::kDisagrees)),
             std::string(Aggregator::kAnotherMeaning));
    CHECK(single.Push(0, 0, OnlyIteration(once)));

    Spec spec = SpecOf(DType::kF32, Op::kSum, 32);
    spec.from = 1;
    Server broadcast(3, -1, Order::kArrival, spec);
    CHECK_EQ(std::string(broadcast.WhyNot(PushOf(first, 0), 0)),
             std::string("a contribution from a worker that has none to make"));
}

// Each packet waits for its own iteration alone: none is added to a sum that it is not of.
TEST(APacketOfTheNextIterationWaitsForItsOwnSum) {
    Server server(2, -1, Order::kArrival, SpecOf(DType::kF32, Op::kSum, 16));
    server.Push(0, 0, 0);
    server.WhyNot(PushOf(server.layout->by_server[0][0], 1), 0);
    server.Push(1, 0, 0);
    CHECK(server.Push(0, 0, 1));
    server.WhyNot(PushOf(server.layout->by_server[0][0], 0), 1);
}

// A sum that leaves whole waits for all of its packets: one of them may not be summed again before that.
TEST(NoPacketIsInTheSameWholeSumTwice) {
    for (const int32_t from : {kAll, 1}) {
        Spec spec = SpecOf(DType::kF32, Op::kSum, 32);
        spec.whole = true;
        spec.from = from;
        Server server(2, -1, Order::kArrival, spec);
        const auto push = [&](size_t place, uint32_t iteration) {
            if (from == kAll) server.Push(0, place, iteration);
            server.Push(1, place, iteration);
        };
        push(0, 0);
        CHECK_EQ(std::string(server.WhyNot(PushOf(server.layout->by_server[0][0], 1), 1)), std::string("a packet of another iteration"));
        CHECK_EQ(server.out.returned.size(), 0);
        push(1, 0);
        CHECK_EQ(server.out.returned.size(), 2);
        push(0, 1);
        push(1, 1);
        CHECK_EQ(server.out.returned.size(), 4);
        for (const auto& result : server.out.returned) CHECK(static_cast<bool>(result.sum));
    }
}

TEST(MemoryIsThatOfWhatIsInFlight) {
    for (const Order order : {Order::kArrival, Order::kRank}) {
        const Spec spec = SpecOf(DType::kF32, Op::kSum, 16 * 100);
        Server server(4, -1, order, spec);
        for (uint32_t rank = 0; rank < 4; ++rank) {
            for (size_t place = 0; place < 100; ++place) server.Push(rank, place, 0);
        }
        CHECK(server.sums.most_held_bytes() <= (order == Order::kRank ? 4 : 2) * spec.bytes + kPacket);
        CHECK(server.sums.most_held_bytes() <= server.sums.NeededBytes(spec, *server.layout));
        CHECK_EQ(server.sums.held_bytes(), spec.bytes);  // sums that nobody has sent yet
        server.out.returned.clear();
        CHECK_EQ(server.sums.held_bytes(), 0);
        // half an iteration, then forgotten
        for (size_t place = 0; place < 100; ++place) server.Push(0, place, 1);
        CHECK_EQ(server.sums.held_bytes(), spec.bytes);
        server.sums.Forget(0);
        CHECK_EQ(server.sums.held_bytes(), 0);
        CHECK(!server.sums.Has(0));
    }
}

TEST(LocalWorkGoesByUrgency) {
    struct Order1 : Collected {
        std::vector<uint32_t> tensors;
        void Delivered(uint32_t tensor, uint32_t) override { tensors.push_back(tensor); }
    } out;
    Aggregator sums(0, 1, 0, Order::kArrival, kPacket, &out);
    Dealer dealer(1);
    Bytes memory(128);
    for (uint32_t tensor = 0; tensor < 3; ++tensor) {
        Spec spec = SpecOf(DType::kF32, Op::kSum, 32);
        spec.urgent_first = true;
        spec.priority = 2 - tensor;
        sums.Define(tensor, spec, dealer.Cut(spec.bytes, kPacket));
        sums.ArriveLocally(tensor, 0, memory.data(), memory.data());
    }
    while (sums.Work(1)) {
    }
    CHECK_EQ(out.tensors, (std::vector<uint32_t>{2, 2, 1, 1, 0, 0}));
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
