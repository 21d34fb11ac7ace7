// What a server's update of one packet takes, by rule and by instruction set:
//     update_bench

#include <chrono>
#include <cstdio>
#include <vector>

#include "update/update.h"

using namespace gradlane;

int main() {
    constexpr size_t kValues = (30 << 10) / sizeof(float);
    constexpr int kRounds = 2000;
    std::vector<float> parameters(kValues, 1), gradient(kValues, 0.5f), first(kValues), second(kValues);
    Rule rule;
    rule.lr = 1e-3;
    rule.weight_decay = 0.01;
    rule.beta1 = 0.9;
    rule.beta2 = 0.999;
    rule.epsilon = 1e-8;
    constexpr const char* kNames[] = {"", "SGD", "SGD with momentum", "Adam", "AdamW"};
    for (const UpdateLoop loop : RunnableUpdates()) {
        std::printf("%s\n", loop == RunnableUpdates().front() ? "portable" : "best here");
        for (const RuleKind kind : {RuleKind::kSgd, RuleKind::kMomentum, RuleKind::kAdam, RuleKind::kAdamW}) {
            rule.kind = kind;
            rule.momentum = kind == RuleKind::kMomentum ? 0.9 : 0;
            const auto start = std::chrono::steady_clock::now();
            for (int round = 0; round < kRounds; ++round) {
                loop(rule, static_cast<uint64_t>(round) + 2, parameters.data(), gradient.data(), first.data(), second.data(), kValues);
            }
            const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
            std::printf("  %-18s %6.1f us a packet of 30 KiB\n", kNames[static_cast<uint8_t>(kind)], took.count() / kRounds);
        }
    }
    return 0;
}
