// The loops of the updates. Each kernels_*.cc includes this file once and is compiled for its own
// instruction set. Everything has internal linkage, for the reason given in reduce/kernels_body.h.

#pragma once

#include <math.h>

#include "update/update.h"

namespace gradlane {
namespace {

// One rounding, whatever the CPU: where it has no such instruction, the C library computes it.
inline float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Each option is a template argument: a * 0 + c is not always c.
template <bool kDecays, bool kHasMomentum, bool kIsFirst, bool kNesterov>
void SgdLoop(const Rule& rule, float* parameters, const float* gradient, float* buffer, size_t n) {
    const float sign = rule.maximize ? -1.0f : 1.0f;
    const auto decay = static_cast<float>(rule.weight_decay), momentum = static_cast<float>(rule.momentum);
    const auto undamped = static_cast<float>(1 - rule.dampening), rate = static_cast<float>(-rule.lr);
    for (size_t i = 0; i < n; ++i) {
        float d = sign * gradient[i];
        if constexpr (kDecays) d = Fma(decay, parameters[i], d);
        if constexpr (kHasMomentum) {
            const float b = kIsFirst ? d : Fma(undamped, d, momentum * buffer[i]);
            buffer[i] = b;
            d = kNesterov ? Fma(momentum, b, d) : b;
        }
        parameters[i] = Fma(rate, d, parameters[i]);
    }
}

template <bool kDecays, bool kDecoupled>
void AdamLoop(const Rule& rule, uint64_t step, float* parameters, const float* gradient, float* mean, float* square, size_t n) {
    const auto count = static_cast<double>(step);
    const double correction1 = 1 - pow(rule.beta1, count), correction2 = 1 - pow(rule.beta2, count);
    const float sign = rule.maximize ? -1.0f : 1.0f;
    const auto decay = static_cast<float>(rule.weight_decay), kept = static_cast<float>(1 - rule.lr * rule.weight_decay);
    const auto weight = static_cast<float>(1 - rule.beta1);
    const auto beta2 = static_cast<float>(rule.beta2), share = static_cast<float>(1 - rule.beta2);
    const auto root = static_cast<float>(sqrt(correction2)), epsilon = static_cast<float>(rule.epsilon);
    const auto rate = static_cast<float>(-(rule.lr / correction1));
    // torch's lerp goes from the nearer end
    const bool from_mean = weight < 0.5f;
    const float towards = from_mean ? weight : weight - 1;
    for (size_t i = 0; i < n; ++i) {
        float p = parameters[i], d = sign * gradient[i];
        if constexpr (kDecays && kDecoupled) p *= kept;
        if constexpr (kDecays && !kDecoupled) d = Fma(decay, p, d);
        const float m = Fma(towards, d - mean[i], from_mean ? mean[i] : d);
        const float v = Fma(share * d, d, beta2 * square[i]);
        mean[i] = m;
        square[i] = v;
        const float denominator = __builtin_sqrtf(v) / root + epsilon;
        parameters[i] = p + rate * m / denominator;
    }
}

// Options become template arguments.
template <class Call>
void With(bool option, Call call) {
    option ? call.template operator()<true>() : call.template operator()<false>();
}

void UpdateAny(const Rule& rule, uint64_t step, float* parameters, const float* gradient, float* first, float* second, size_t n) {
    With(rule.weight_decay != 0, [&]<bool kDecays>() {
        switch (rule.kind) {
            case RuleKind::kNone: return;
            case RuleKind::kSgd: return SgdLoop<kDecays, false, false, false>(rule, parameters, gradient, nullptr, n);
            case RuleKind::kMomentum:
                return With(step == 1, [&]<bool kIsFirst>() {
                    With(rule.nesterov, [&]<bool kNesterov>() {
                        SgdLoop<kDecays, true, kIsFirst, kNesterov>(rule, parameters, gradient, first, n);
                    });
                });
            case RuleKind::kAdam: return AdamLoop<kDecays, false>(rule, step, parameters, gradient, first, second, n);
            case RuleKind::kAdamW: return AdamLoop<kDecays, true>(rule, step, parameters, gradient, first, second, n);
        }
    });
}

}  // namespace
}  // namespace gradlane
