// f16 and bf16 to f32 and back, one element at a time and without branches, so that compilers
// vectorise it.
//
// Nothing here depends on the thread's rounding of subnormals (flush-to-zero): no step has a
// subnormal f32 as operand or result that matters. `static`, and nothing of std called, because
// each instruction set compiles its own copy, which the linker must not merge with another's.

#pragma once

#include <cstdint>

namespace gradlane {

static inline uint32_t BitsOf(float value) { return __builtin_bit_cast(uint32_t, value); }
static inline float FloatOf(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Gives one of two values by masks: compilers turn that into a blend where a branch may stay one.
static inline uint32_t Select(bool condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - static_cast<uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

static inline float WidenBF16(uint16_t half) { return FloatOf(static_cast<uint32_t>(half) << 16); }

static inline uint16_t NarrowBF16(float value) {
    const uint32_t bits = BitsOf(value);
    // Half of the last place is added; a tie goes to even.
    const uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return static_cast<uint16_t>(Select(nan, bits | 0x00400000, rounded) >> 16);
}

static inline float WidenF16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t rest = static_cast<uint32_t>(half & 0x7FFF) << 13;
    const uint32_t normal = rest + (112u << 23);  // the exponent's bias grows from 15 to 127
    const uint32_t infinite = rest + (224u << 23);
    const uint32_t nan = infinite | 0x00400000;
    // A subnormal's digits as those of 2^-14 + subnormal, which is normal in f32; then 2^-14 is taken away.
    const float least = FloatOf(113u << 23);
    const uint32_t small = BitsOf(FloatOf(rest + (113u << 23)) - least);
    const uint32_t finite = Select(rest < (1u << 23), small, normal);
    const uint32_t special = Select(rest > (31u << 23), nan, infinite);
    return FloatOf(sign | Select(rest < (31u << 23), finite, special));
}

static inline uint16_t NarrowF16(float value) {
    const uint32_t bits = BitsOf(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t rest = bits & 0x7FFFFFFF;
    // Ties to even; what is beyond the largest carries to infinity.
    const uint32_t normal = (rest - (112u << 23) + 0xFFF + ((rest >> 13) & 1)) >> 13;
    // Added to 0.5, whose last place is the f16 subnormals' (2^-24), the adder itself rounds to even.
    const uint32_t small = BitsOf(FloatOf(rest) + 0.5f) - (126u << 23);
    const uint32_t finite = Select(rest < (113u << 23), small, normal);
    const uint32_t special = Select(rest > (255u << 23), 0x7E00 | ((rest >> 13) & 0x3FF), 0x7C00);
    return static_cast<uint16_t>(sign | Select(rest < (143u << 23), finite, special));
}

}  // namespace gradlane
