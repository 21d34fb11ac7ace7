#include "update/rule.h"

#include <cmath>

namespace gradlane {

namespace {
bool IsSize(double value) { return std::isfinite(value) && value >= 0; }
bool IsBeta(double value) { return value >= 0 && value < 1; }
}

const char* WhyNot(const Rule& rule) {
    if (rule.kind == RuleKind::kNone || !IsValidRuleKind(static_cast<uint8_t>(rule.kind))) return "a rule that is not known";
    if (!IsSize(rule.lr)) return "a learning rate that is not a finite number of 0 or more";
    if (!IsSize(rule.weight_decay)) return "a weight decay that is not a finite number of 0 or more";
    if (rule.kind == RuleKind::kSgd || rule.kind == RuleKind::kMomentum) {
        if (!IsSize(rule.momentum) || (rule.momentum != 0) != (rule.kind == RuleKind::kMomentum)) return "a momentum that its kind does not allow";
        if (!std::isfinite(rule.dampening)) return "a dampening that is not finite";
        if (rule.nesterov && (rule.momentum == 0 || rule.dampening != 0)) return "Nesterov's momentum without momentum, or with dampening";
        return nullptr;
    }
    if (!IsBeta(rule.beta1) || !IsBeta(rule.beta2)) return "a beta that is not from 0 to below 1";
    if (!IsSize(rule.epsilon)) return "an epsilon that is not a finite number of 0 or more";
    return nullptr;
}

}  // namespace gradlane
