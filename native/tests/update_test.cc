#include "update/update.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "testing/check.h"

using namespace gradlane;

namespace {

Rule Sgd(double lr) {
    Rule rule;
    rule.kind = RuleKind::kSgd;
    rule.lr = lr;
    return rule;
}

Rule Momentum(double lr, double momentum) {
    Rule rule = Sgd(lr);
    rule.kind = RuleKind::kMomentum;
    rule.momentum = momentum;
    return rule;
}

Rule Adam(double lr, RuleKind kind = RuleKind::kAdam) {
    Rule rule;
    rule.kind = kind;
    rule.lr = lr;
    rule.beta1 = 0.9;
    rule.beta2 = 0.999;
    rule.epsilon = 1e-8;
    return rule;
}

// One parameter under the same gradient again and again.
struct One {
    float parameter, first = 0, second = 0;
    uint64_t steps = 0;
    float Step(const Rule& rule, float gradient) {
        Update(rule, ++steps, &parameter, &gradient, &first, &second, 1);
        return parameter;
    }
};

}  // namespace

TEST(SgdGoesDownTheGradientByTheRate) {
    One one{2};
    CHECK_EQ(one.Step(Sgd(0.5), 3), 0.5f);
    CHECK_EQ(one.Step(Sgd(0.25), 4), -0.5f);
}

TEST(SgdMaximizesAndDecays) {
    Rule rule = Sgd(0.5);
    rule.maximize = true;
    CHECK_EQ(One{2}.Step(rule, 3), 3.5f);
    rule.maximize = false;
    rule.weight_decay = 0.25;
    CHECK_EQ(One{2}.Step(rule, 3), 2 - 0.5f * (3 + 0.5f));
}

TEST(MomentumUnderAConstantGradientIsAGeometricSeries) {
    One one{0};
    CHECK_EQ(one.Step(Momentum(1, 0.5), 1), -1.0f);
    CHECK_EQ(one.Step(Momentum(1, 0.5), 1), -2.5f);
    CHECK_EQ(one.Step(Momentum(1, 0.5), 1), -4.25f);
    CHECK_EQ(one.first, 1.75f);
}

TEST(DampeningSparesTheFirstStep) {
    Rule rule = Momentum(1, 0.5);
    rule.dampening = 0.75;
    One one{0};
    CHECK_EQ(one.Step(rule, 4), -4.0f);
    CHECK_EQ(one.Step(rule, 4), -7.0f);
}

TEST(NesterovLooksAhead) {
    Rule rule = Momentum(1, 0.5);
    rule.nesterov = true;
    One one{0};
    CHECK_EQ(one.Step(rule, 1), -1.5f);
    CHECK_EQ(one.Step(rule, 1), -3.25f);
}

TEST(AdamsStepsUnderAConstantGradientAreAsLongAsTheRate) {
    for (const RuleKind kind : {RuleKind::kAdam, RuleKind::kAdamW}) {
        One one{1};
        for (int step = 1; step <= 100; ++step) CHECK(std::abs(one.Step(Adam(0.01, kind), 3) - (1 - 0.01f * static_cast<float>(step))) < 1e-5f);
        CHECK(std::abs(one.first - 3 * (1 - std::pow(0.9, 100))) < 1e-5);
        CHECK(std::abs(one.second - 9 * (1 - std::pow(0.999, 100))) < 1e-5);
    }
}

TEST(AdamWDecaysTheParameterAndAdamTheGradient) {
    Rule rule = Adam(0.5, RuleKind::kAdamW);
    rule.weight_decay = 0.5;
    CHECK_EQ(One{4}.Step(rule, 0), 3.0f);
    rule.kind = RuleKind::kAdam;
    CHECK(std::abs(One{4}.Step(rule, 0) - 3.5f) < 1e-6f);
}

TEST(EveryInstructionSetGivesTheSameBits) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (int trial = 0; trial < 200; ++trial) {
        Rule rule = trial % 4 == 0 ? Sgd(0.1) : trial % 4 == 1 ? Momentum(0.1, 0.9) : Adam(0.001, trial % 4 == 2 ? RuleKind::kAdam : RuleKind::kAdamW);
        rule.weight_decay = trial / 4 % 2 == 0 ? 0 : 0.01;
        rule.maximize = trial / 8 % 2 != 0;
        rule.nesterov = trial % 4 == 1 && trial / 16 % 2 != 0;
        const size_t n = 1 + random() % 70;
        const uint64_t step = 1 + random() % 3;
        std::vector<std::vector<float>> given(4, std::vector<float>(n));
        for (auto& array : given) {
            for (float& value : array) value = normal(random);
        }
        for (float& value : given[3]) value = std::abs(value);
        std::vector<std::vector<std::vector<float>>> found;
        for (const UpdateLoop loop : RunnableUpdates()) {
            auto arrays = given;
            loop(rule, step, arrays[0].data(), arrays[1].data(), arrays[2].data(), arrays[3].data(), n);
            CHECK(arrays[1] == given[1]);
            found.push_back(std::move(arrays));
        }
        for (const auto& arrays : found) {
            for (size_t array = 0; array < 4; ++array) {
                CHECK_EQ(std::memcmp(arrays[array].data(), found[0][array].data(), n * sizeof(float)), 0);
            }
        }
    }
}

TEST(NumbersThatNoOptimizerHasAreRefused) {
    const double nan = std::numeric_limits<double>::quiet_NaN(), infinite = std::numeric_limits<double>::infinity();
    CHECK(WhyNot(Sgd(0)) == nullptr);
    CHECK(WhyNot(Momentum(0.1, 0.9)) == nullptr);
    CHECK(WhyNot(Adam(0.1)) == nullptr);
    CHECK(WhyNot(Rule{}) != nullptr);
    for (const double bad : {nan, infinite, -0.1}) {
        CHECK(WhyNot(Sgd(bad)) != nullptr);
        CHECK(WhyNot(Momentum(0.1, bad)) != nullptr);
        Rule rule = Adam(0.1);
        rule.weight_decay = bad;
        CHECK(WhyNot(rule) != nullptr);
        rule = Adam(0.1);
        rule.epsilon = bad;
        CHECK(WhyNot(rule) != nullptr);
        rule = Adam(0.1);
        rule.beta1 = bad;
        CHECK(WhyNot(rule) != nullptr);
        rule.beta1 = 0.9;
        rule.beta2 = bad;
        CHECK(WhyNot(rule) != nullptr);
    }
    Rule rule = Adam(0.1);
    rule.beta2 = 1;
    CHECK(WhyNot(rule) != nullptr);
    rule = Sgd(0.1);
    rule.momentum = 0.5;  // a rule without room for it
    CHECK(WhyNot(rule) != nullptr);
    rule = Momentum(0.1, 0.9);
    rule.nesterov = true;
    CHECK(WhyNot(rule) == nullptr);
    rule.dampening = 0.5;
    CHECK(WhyNot(rule) != nullptr);
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
