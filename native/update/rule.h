// Rule: how a gradient changes parameters. A rule is one of the kinds listed here and its numbers;
// it is never code. Rules come from workers over the network, so a server checks a rule before it
// uses it. A Rule is a value; any thread may use its own.

#pragma once

#include <cstddef>
#include <cstdint>

namespace gradlane {

// The values are those on the wire. kNone: a tensor is summed, and nothing is updated.
enum class RuleKind : uint8_t { kNone = 0, kSgd = 1, kMomentum = 2, kAdam = 3, kAdamW = 4 };

constexpr bool IsValidRuleKind(uint8_t byte) { return byte <= static_cast<uint8_t>(RuleKind::kAdamW); }

// Arrays of a tensor's size that are kept beside its parameters: the momentum; or both moments.
constexpr uint32_t StatesOf(RuleKind kind) {
    constexpr uint32_t kStates[] = {0, 0, 1, 2, 2};
    return kStates[static_cast<uint8_t>(kind)];
}

// The names and the meaning are those of torch.optim.
struct Rule {
    RuleKind kind = RuleKind::kNone;
    bool nesterov = false, maximize = false;
    double lr = 0, weight_decay = 0;
    double momentum = 0, dampening = 0;      // of kMomentum
    double beta1 = 0, beta2 = 0, epsilon = 0;  // of kAdam, kAdamW
    bool operator==(const Rule&) const = default;
};

// Null, or what is wrong with its numbers.
const char* WhyNot(const Rule& rule);

}  // namespace gradlane
