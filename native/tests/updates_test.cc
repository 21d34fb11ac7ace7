#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "node/aggregator.h"
#include "testing/check.h"

using namespace gradlane;

namespace {

constexpr uint32_t kPacket = 64;  // 16 values: one a worker, and the last, which no gradient changes
constexpr size_t kValues = 16;

Rule Sgd(double lr) {
    Rule rule;
    rule.kind = RuleKind::kSgd;
    rule.lr = lr;
    return rule;
}

Spec Updated(uint64_t packets, uint32_t staleness, RuleKind kind = RuleKind::kSgd) {
    Spec spec;
    spec.bytes = packets * kPacket;
    spec.update = kind;
    spec.staleness = staleness;
    return spec;
}

using Values = std::vector<float>;

struct Answers : Outbox {
    struct Answer {
        uint32_t rank, place, iteration;
        Values values;
    };
    std::vector<Answer> sent;
    uint32_t delivered = 0;
    std::vector<std::string> disagreements;

    void Return(uint32_t, const Spec&, const std::shared_ptr<const Layout>&, uint32_t, uint32_t, BufferRef) override {
        CHECK(false);  // a sum
    }
    void ReturnTo(uint32_t rank, uint32_t, const Spec&, const std::shared_ptr<const Layout>& layout, uint32_t place, uint32_t iteration,
                  BufferRef parameters) override {
        const auto* values = reinterpret_cast<const float*>(parameters.data());
        sent.push_back({rank, place, iteration, Values(values, values + layout->by_server[0][place].length / sizeof(float))});
    }
    void Delivered(uint32_t, uint32_t packets) override { delivered += packets; }
    void Consumed(uint32_t, uint32_t) override { CHECK(false); }
    void Over(uint32_t) override { CHECK(false); }
    void Disagree(uint32_t, const std::string& text) override { disagreements.push_back(text); }
};

struct Server {
    Answers out;
    std::shared_ptr<const Layout> layout;
    Aggregator sums;

    Server(uint32_t world, int32_t local, Order order, const Spec& spec)
        : layout(Dealer(1).Cut(spec.bytes, kPacket)), sums(0, world, local, order, kPacket, &out) {
        sums.Define(0, spec, layout);
    }
    int64_t Admit(uint32_t rank, uint32_t place, uint32_t iteration, const char** why, uint16_t flags = 0) {
        Header header;
        header.type = FrameType::kPush;
        header.offset = layout->by_server[0][place].offset;
        header.length = layout->by_server[0][place].length;
        header.iteration = iteration;
        header.flags = flags;
        return sums.Admit(header, rank, why);
    }
    bool Push(uint32_t rank, uint32_t place, uint32_t iteration, const Values& values, uint16_t flags = 0) {
        const char* why = "";
        if (!CHECK_EQ(Admit(rank, place, iteration, &why, flags), place)) return false;
        BufferRef buffer = sums.Take();
        std::memcpy(buffer.data(), values.data(), values.size() * sizeof(float));
        sums.Arrive(0, place, rank, std::move(buffer), flags);
        return true;
    }
    std::string WhyNot(uint32_t rank, uint32_t place, uint32_t iteration) {
        const char* why = "";
        CHECK_EQ(Admit(rank, place, iteration, &why), -1);
        return why;
    }
};

// The document, for one packet: parameters count the gradients of each worker.
struct Model {
    uint32_t world, staleness;
    std::vector<uint64_t> pushes = std::vector<uint64_t>(world);
    std::vector<bool> waits = std::vector<bool>(world);
    std::vector<float> counted = std::vector<float>(world), coming = std::vector<float>(world);

    // Who is answered.
    std::vector<uint32_t> Push(uint32_t rank, bool quiet) {
        if (pushes[rank]++ != 0 && !quiet) coming[rank] += 1;
        waits[rank] = true;
        const uint64_t least = *std::min_element(pushes.begin(), pushes.end());
        if (staleness != 0 || *std::max_element(pushes.begin(), pushes.end()) == least) counted = coming;
        std::vector<uint32_t> answered;
        for (uint32_t each = 0; each < world && pushes[0] != 0; ++each) {
            if (!waits[each] || (staleness != kUnbounded && pushes[each] > least + staleness)) continue;
            waits[each] = false;
            answered.push_back(each);
        }
        return answered;
    }
};

// Workers push in an order drawn from `random`; all that is answered must be what the model says, and when.
void CheckRun(uint32_t world, uint32_t staleness, int32_t local, Order order, std::mt19937& random) {
    constexpr uint32_t kPlaces = 3;
    Server server(world, local, order, Updated(kPlaces, staleness));
    for (uint32_t rank = 0; rank < world; ++rank) server.sums.SetRule(0, rank, Sgd(1));
    std::vector<Model> models(kPlaces, Model{world, staleness});
    std::vector<std::vector<uint32_t>> ahead(world);  // places whose push this worker has yet to make in its iteration
    std::vector<float> memory(kPlaces * kValues), into(kPlaces * kValues);
    std::vector<bool> local_waits(kPlaces);
    std::vector<uint32_t> due(kPlaces);
    const auto contribution = [&](uint32_t rank, uint32_t place) {
        Values values(kValues);
        if (models[place].pushes[rank] == 0) {
            values[kValues - 1] = rank == 0 ? 100.0f : -1.0f;
        } else {
            values[rank] = -1;
        }
        return values;
    };
    const auto expected = [&](uint32_t place) {
        Values values(kValues);
        std::copy(models[place].counted.begin(), models[place].counted.end(), values.begin());
        values[kValues - 1] = 100;
        return values;
    };
    for (int event = 0; event < 300; ++event) {
        const uint32_t rank = random() % world;
        const bool quiet = random() % 8 == 0;
        if (static_cast<int32_t>(rank) == local) {
            // it hands over all packets at once
            if (std::any_of(models.begin(), models.end(), [&](const Model& model) { return model.waits[rank]; })) continue;
            for (uint32_t place = 0; place < kPlaces; ++place) {
                const Values values = contribution(rank, place);
                std::copy(values.begin(), values.end(), memory.begin() + static_cast<ptrdiff_t>(place * kValues));
            }
            std::fill(into.begin(), into.end(), -7.0f);
            const auto before = server.out.delivered;
            server.sums.ArriveLocally(0, 0, reinterpret_cast<uint8_t*>(memory.data()), reinterpret_cast<uint8_t*>(into.data()), quiet ? kFlagQuiet : 0);
            while (server.sums.Work(kPacket)) {
            }
            uint32_t delivered = 0;
            for (uint32_t place = 0; place < kPlaces; ++place) {
                for (const uint32_t answered : models[place].Push(rank, quiet)) {
                    if (answered == rank) {
                        ++delivered;
                        CHECK(Values(into.begin() + static_cast<ptrdiff_t>(place * kValues), into.begin() + static_cast<ptrdiff_t>((place + 1) * kValues)) == expected(place));
                        continue;
                    }
                    const auto found = std::find_if(server.out.sent.begin(), server.out.sent.end(), [&](const auto& sent) { return sent.rank == answered && sent.place == place; });
                    REQUIRE(found != server.out.sent.end());
                    CHECK(found->values == expected(place));
                    server.out.sent.erase(found);
                }
            }
            CHECK_EQ(server.out.delivered - before, delivered);
        } else {
            const uint32_t place = random() % kPlaces;
            Model& model = models[place];
            if (model.waits[rank]) {
                CHECK_EQ(server.WhyNot(rank, place, static_cast<uint32_t>(model.pushes[rank])), "a packet before the last one was answered");
                continue;
            }
            const auto before = server.out.delivered;
            const Values values = contribution(rank, place);
            if (!server.Push(rank, place, static_cast<uint32_t>(model.pushes[rank]), values, quiet ? kFlagQuiet : 0)) return;
            for (const uint32_t answered : model.Push(rank, quiet)) {
                if (static_cast<int32_t>(answered) == local) {
                    CHECK_EQ(server.out.delivered - before, 1);
                    CHECK(Values(into.begin() + static_cast<ptrdiff_t>(place * kValues), into.begin() + static_cast<ptrdiff_t>((place + 1) * kValues)) == expected(place));
                    continue;
                }
                const auto found = std::find_if(server.out.sent.begin(), server.out.sent.end(), [&](const auto& sent) { return sent.rank == answered; });
                REQUIRE(found != server.out.sent.end());
                CHECK_EQ(found->iteration, model.pushes[answered] - 1);
                CHECK(found->values == expected(place));
                server.out.sent.erase(found);
            }
        }
        REQUIRE(server.out.sent.empty());  // nobody was answered who should not have been
    }
    for (const Model& model : models) {
        const auto [least, most] = std::minmax_element(model.pushes.begin(), model.pushes.end());
        if (staleness != kUnbounded) CHECK(*most - *least <= staleness + 1);
    }
}

}  // namespace

TEST(EachGradientIsAppliedOnceAndNobodyIsAnsweredEarly) {
    std::mt19937 random(1);
    for (const uint32_t staleness : {0u, 1u, 3u, kUnbounded}) {
        for (const uint32_t world : {1u, 2u, 3u, 5u}) {
            for (const Order order : {Order::kArrival, Order::kRank}) {
                for (int32_t local = -1; local < static_cast<int32_t>(world); ++local) CheckRun(world, staleness, local, order, random);
            }
        }
    }
}

TEST(MoreThanSixtyFourWorkersAreAnsweredEachOnce) {
    Server server(130, -1, Order::kArrival, Updated(1, 0));
    for (uint32_t iteration = 0; iteration < 2; ++iteration) {
        for (uint32_t rank = 0; rank < 130; ++rank) {
            CHECK(server.out.sent.empty());
            server.sums.SetRule(0, rank, Sgd(1));
            server.Push(rank, 0, iteration, Values(kValues, 1.0f));
        }
        CHECK_EQ(server.out.sent.size(), 130);
        for (uint32_t rank = 0; rank < server.out.sent.size(); ++rank) {
            CHECK_EQ(server.out.sent[rank].rank, rank);
            CHECK(server.out.sent[rank].values == Values(kValues, iteration == 0 ? 1.0f : -129.0f));
        }
        server.out.sent.clear();
        CHECK_EQ(server.sums.held_bytes(), 0);
    }
}

TEST(InRankOrderTheBitsDoNotDependOnWhoCameFirst) {
    const Values parts[] = {Values(kValues, 1e8f), Values(kValues, -1e8f), Values(kValues, 0.3f)};
    for (const std::vector<uint32_t>& came : {std::vector<uint32_t>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {2, 0, 1}}) {
        Server server(3, -1, Order::kRank, Updated(1, 0));
        for (const uint32_t rank : came) server.sums.SetRule(0, rank, Sgd(1));
        for (const uint32_t rank : came) server.Push(rank, 0, 0, Values(kValues));
        server.out.sent.clear();
        for (const uint32_t rank : came) server.Push(rank, 0, 1, parts[rank]);
        REQUIRE(server.out.sent.size() == 3);
        CHECK_EQ(server.out.sent[0].values[0], -0.3f);
    }
}

TEST(StatesAreOfEachPacket) {
    Rule rule = Sgd(1);
    rule.kind = RuleKind::kMomentum;
    rule.momentum = 0.5;
    Server server(1, -1, Order::kArrival, Updated(2, kUnbounded, RuleKind::kMomentum));
    server.sums.SetRule(0, 0, rule);
    for (uint32_t place = 0; place < 2; ++place) server.Push(0, place, 0, Values(kValues));
    server.Push(0, 0, 1, Values(kValues, 1.0f));
    server.Push(0, 0, 2, Values(kValues, 1.0f));
    server.Push(0, 1, 1, Values(kValues, 1.0f));
    REQUIRE(server.out.sent.size() == 5);
    CHECK(server.out.sent[3].values == Values(kValues, -2.5f));
    CHECK(server.out.sent[4].values == Values(kValues, -1.0f));
}

TEST(PartsAreFetchedAndPlacedAndBothLeaveTheRestAlone) {
    Rule rule = Sgd(1);
    rule.kind = RuleKind::kMomentum;
    rule.momentum = 0.5;
    for (const uint32_t staleness : {0u, kUnbounded}) {
        Server server(2, -1, Order::kArrival, Updated(1, staleness, RuleKind::kMomentum));
        uint32_t iteration = 0;
        const auto both = [&](float ofZero, float ofOne, uint16_t flags) {
            for (uint32_t rank = 0; rank < 2; ++rank) server.Push(rank, 0, iteration, Values(kValues, rank == 0 ? ofZero : ofOne), flags);
            ++iteration;
            REQUIRE(server.out.sent.size() == 2);
            const Values last = server.out.sent.back().values;
            CHECK(last == Values(kValues, last[0]));
            server.out.sent.clear();
            return last[0];
        };
        CHECK_EQ(both(7, -1, 0), 7.0f);
        CHECK_EQ(both(8, -1, kFlagPlace | FlagsOf(Part::kFirst)), 8.0f);
        CHECK_EQ(both(3, -1, kFlagPlace | FlagsOf(Part::kSteps)), 3.0f);
        CHECK_EQ(both(9, -1, kFlagQuiet), 7.0f);
        for (uint32_t rank = 0; rank < 2; ++rank) server.sums.SetRule(0, rank, rule);
        const bool in_step = staleness == 0;
        // the momentum of 8 goes on: halved, and 2 is added; or each of 1 by itself
        CHECK_EQ(both(1, 1, 0), in_step ? 1.0f : 7 - 5.0f - 3.5f);
        CHECK_EQ(both(0, 0, kFlagQuiet | FlagsOf(Part::kFirst)), in_step ? 6.0f : 3.5f);
        CHECK_EQ(both(0, 0, kFlagQuiet | FlagsOf(Part::kSteps)), in_step ? 4.0f : 5.0f);
    }
}

TEST(AFetchIsOfNoIteration) {
    Rule rule = Sgd(1);
    rule.kind = RuleKind::kMomentum;
    rule.momentum = 0.5;
    for (const uint32_t staleness : {0u, 1u}) {
        Server server(2, -1, Order::kArrival, Updated(1, staleness, RuleKind::kMomentum));
        const auto answer_to = [&](uint32_t rank, uint32_t push, float of, uint16_t flags = 0) {
            server.Push(rank, 0, push, Values(kValues, of), flags);
            if (server.out.sent.empty()) return std::numeric_limits<float>::quiet_NaN();
            const float value = server.out.sent.back().values[0];
            server.out.sent.clear();
            return value;
        };
        for (uint32_t rank = 0; rank < 2; ++rank) server.sums.SetRule(0, rank, rule);
        for (uint32_t rank = 0; rank < 2; ++rank) answer_to(rank, 0, 0);
        for (uint32_t rank = 0; rank < 2; ++rank) answer_to(rank, 1, 1);
        const float momentum = staleness == 0 ? 2.0f : 1.5f;
        // one worker fetches, while the other's gradient of the next iteration is there or waits
        const float before = answer_to(1, 2, 1);
        CHECK(std::isnan(before) == (staleness == 0));
        const float seen = staleness == 0 ? momentum : momentum / 2 + 1;
        for (uint32_t push = 2; push < 5; ++push) CHECK_EQ(answer_to(0, push, 0, kFlagQuiet | FlagsOf(Part::kFirst)), seen);
        CHECK_EQ(answer_to(0, 5, 1), staleness == 0 ? -5.0f : -2.5f - 1.75f - 1.875f);
        // with staleness 1 the other one is ahead by no more than it was
        CHECK(!std::isnan(answer_to(1, 3, 1)) == (staleness != 0));
        if (staleness != 0) CHECK(std::isnan(answer_to(1, 4, 1)));
    }
}

TEST(ACountThatIsNoneIsPlacedAsNone) {
    Server server(1, -1, Order::kArrival, Updated(1, 0));
    server.Push(0, 0, 0, Values(kValues));
    uint32_t iteration = 1;
    for (const float said : {-1.0f, 1e30f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        server.Push(0, 0, iteration++, Values(kValues, said), kFlagPlace | FlagsOf(Part::kSteps));
        CHECK_EQ(server.out.sent.back().values[0], 0.0f);
    }
}

TEST(WorkersThatUpdateOneIterationByDifferentRulesAreFound) {
    Server server(2, -1, Order::kArrival, Updated(1, 0));
    for (uint32_t rank = 0; rank < 2; ++rank) server.Push(rank, 0, 0, Values(kValues));
    server.out.sent.clear();
    server.sums.SetRule(0, 0, Sgd(0.5));
    server.sums.SetRule(0, 1, Sgd(0.25));
    server.Push(1, 0, 1, Values(kValues, 1.0f));
    CHECK(server.out.disagreements.empty());
    server.Push(0, 0, 1, Values(kValues, 1.0f));
    REQUIRE(server.out.disagreements.size() == 1);
    CHECK_EQ(server.out.disagreements[0], "parameter group 0: got lr 0.25 on rank 1 and 0.5 on rank 0, expected the same on all ranks");
    CHECK(server.out.sent.empty());
}

TEST(EachWorkersOwnRuleGovernsWhereUpdatesAreItsOwn) {
    Server server(2, -1, Order::kArrival, Updated(1, kUnbounded));
    for (uint32_t rank = 0; rank < 2; ++rank) server.Push(rank, 0, 0, Values(kValues));
    server.sums.SetRule(0, 0, Sgd(0.5));
    server.sums.SetRule(0, 1, Sgd(0.25));
    server.Push(0, 0, 1, Values(kValues, 1.0f));
    server.Push(1, 0, 1, Values(kValues, 1.0f));
    CHECK(server.out.disagreements.empty());
    CHECK(server.out.sent.back().values == Values(kValues, -0.75f));
}

TEST(WhatMayNotComeIsNotAdmitted) {
    Server server(2, -1, Order::kArrival, Updated(2, 1, RuleKind::kMomentum));
    server.Push(0, 0, 0, Values(kValues));
    CHECK_EQ(server.WhyNot(0, 0, 0), "a packet of another iteration");
    CHECK_EQ(server.WhyNot(0, 0, 2), "a packet of another iteration");
    CHECK_EQ(server.WhyNot(1, 0, 1), "a packet of another iteration");
    CHECK_EQ(server.WhyNot(0, 0, 1), "a gradient without a rule of its tensor's kind");
    server.sums.SetRule(0, 0, Sgd(1));
    CHECK_EQ(server.WhyNot(0, 0, 1), "a gradient without a rule of its tensor's kind");
    Rule rule = Sgd(1);
    rule.kind = RuleKind::kMomentum;
    rule.momentum = 0.5;
    server.sums.SetRule(0, 0, rule);
    server.Push(0, 0, 1, Values(kValues));  // may be one ahead, and waits now
    CHECK_EQ(server.WhyNot(0, 0, 2), "a packet before the last one was answered");
    Header header;
    header.type = FrameType::kPush;
    header.offset = 4;
    header.length = kPacket;
    const char* why = "";
    CHECK_EQ(server.sums.Admit(header, 1, &why), -1);
    CHECK_EQ(std::string(why), "a packet that is not one of its tensor's");
    header.offset = 0;
    header.flags = kFlagQuiet | FlagsOf(Part::kSecond);
    CHECK_EQ(server.sums.Admit(header, 1, &why), -1);
    CHECK_EQ(std::string(why), "a part that its tensor does not have");
    header.flags = kFlagQuiet | FlagsOf(Part::kFirst);
    CHECK_EQ(server.sums.Admit(header, 1, &why), -1);
    CHECK_EQ(std::string(why), "a part beside a gradient or before the first values");
    header.tensor = 1;
    CHECK_EQ(server.sums.Admit(header, 1, &why), -1);
    CHECK_EQ(std::string(why), "a tensor that nobody registered");
}

TEST(DefinitionsThatNobodyCanUpdateAreRefused) {
    CHECK(WhyNot(Updated(1, 0)) == nullptr);
    const auto refused = [](auto change) {
        Spec spec = Updated(1, 0);
        change(spec);
        CHECK(WhyNot(spec) != nullptr);
    };
    refused([](Spec& spec) { spec.dtype = DType::kF16; });
    refused([](Spec& spec) { spec.op = Op::kMax; });
    refused([](Spec& spec) { spec.from = 0; });
    refused([](Spec& spec) { spec.to = 0; });
    refused([](Spec& spec) { spec.once = true; });
    refused([](Spec& spec) { spec.whole = true; });
    refused([](Spec& spec) { spec.lane = 1; });
    refused([](Spec& spec) { spec.group = kMaxGroups; });
    refused([](Spec& spec) { spec.bytes = 6; });
}

TEST(MemoryIsCommittedToBeforeTheFirstStep) {
    // two packets of 64 bytes: parameters and states, and buffers of packets in flight
    const auto needed = [](uint32_t staleness, RuleKind kind, Order order) {
        const Spec spec = Updated(2, staleness, kind);
        const auto layout = Dealer(1).Cut(spec.bytes, 64);
        return Aggregator(0, 3, -1, order, 64, nullptr).NeededBytes(spec, *layout);
    };
    CHECK_EQ(needed(0, RuleKind::kSgd, Order::kArrival), (1 + 2) * 128);
    CHECK_EQ(needed(0, RuleKind::kMomentum, Order::kArrival), (2 + 2) * 128);
    CHECK_EQ(needed(0, RuleKind::kAdam, Order::kRank), (3 + 4) * 128);
    CHECK_EQ(needed(1, RuleKind::kAdam, Order::kArrival), (3 + 3) * 128);
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
