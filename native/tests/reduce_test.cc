#include "reduce/reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "reduce/kernels.h"
#include "testing/check.h"

using namespace gradlane;

namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF64, DType::kF16, DType::kBF16,
                            DType::kI8,  DType::kU8,  DType::kI32, DType::kI64};
constexpr Op kOps[] = {Op::kSum, Op::kMin, Op::kMax, Op::kProduct};
constexpr DType kHalves[] = {DType::kF16, DType::kBF16};

struct Format {
    int exponent_bits;
    int fraction_bits;
};
constexpr Format FormatOf(DType half) { return half == DType::kF16 ? Format{5, 10} : Format{8, 7}; }

// A half's value by IEEE 754's definition, 3.4.
double SlowWiden(DType half, uint16_t bits) {
    const auto [exponent_bits, fraction_bits] = FormatOf(half);
    const int most = (1 << exponent_bits) - 1, bias = most / 2;
    const int exponent = (bits >> fraction_bits) & most;
    const double fraction = bits & ((1 << fraction_bits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1 : 1;
    if (exponent == most) {
        return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                             : sign * std::numeric_limits<double>::infinity();
    }
    const double digits = exponent == 0 ? fraction : fraction + std::ldexp(1, fraction_bits);
    return sign * std::ldexp(digits, (exponent == 0 ? 1 : exponent) - bias - fraction_bits);
}

// The half nearest to a value that is not NaN: by bisection among all of one sign, which are in order.
uint16_t SlowNarrow(DType half, double value) {
    const int exponent_bits = FormatOf(half).exponent_bits, fraction_bits = FormatOf(half).fraction_bits;
    const uint16_t infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << fraction_bits);
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::abs(value);
    // Infinity stands where the next value would, so that what rounds to it is found like the rest.
    const auto at = [&](uint16_t bits) {
        return bits == infinity ? std::ldexp(1, 1 << (exponent_bits - 1)) : SlowWiden(half, bits);
    };
    if (magnitude >= at(infinity)) return sign | infinity;
    uint16_t below = 0, above = infinity;
    while (above - below > 1) {
        const uint16_t middle = static_cast<uint16_t>((below + above) / 2);
        (at(middle) <= magnitude ? below : above) = middle;
    }
    const double down = magnitude - at(below), up = at(above) - magnitude;
    const bool even_is_below = below % 2 == 0;
    return sign | (down < up || (down == up && even_is_below) ? below : above);
}

template <class T>
T SlowApply(Op op, T a, T b) {
    if (a != a || b != b) return a != a ? a : b;
    switch (op) {
        case Op::kSum: return a + b;
        case Op::kMin: return b > a ? a : b;
        case Op::kMax: return b < a ? a : b;
        case Op::kProduct: return a * b;
    }
    return {};
}

// Random bits are every kind of value, NaN, infinities and subnormals among them; in wide formats they are
// rare, so one value in eight is made of a few bits.
std::vector<uint8_t> RandomElements(DType dtype, size_t n, uint32_t seed) {
    std::mt19937_64 random(seed);
    const size_t bytes = ElementBytes(dtype);
    std::vector<uint8_t> data(n * bytes);
    for (size_t i = 0; i < n; ++i) {
        uint64_t bits = random();
        if (bits % 8 == 0) {
            const uint64_t special[] = {0x0000'0000'0000'0000, 0x8000'8000'8000'8000, 0x7F80'7F80'7F80'7F80,
                                        0xFF80'FF80'FF80'FF80, 0x7C00'7C00'7C00'7C00, 0x7FF0'0000'7FC0'0000,
                                        0x0001'0001'0001'0001, 0xFFF0'0000'0000'0001};
            bits = special[random() % 8];
        }
        std::memcpy(&data[i * bytes], &bits, bytes);
    }
    return data;
}

template <class T>
bool IsNan(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value != value;
}

bool IsNanAt(DType dtype, const uint8_t* at) {
    if (dtype == DType::kF32) return IsNan<float>(at);
    if (dtype == DType::kF64) return IsNan<double>(at);
    if (!IsHalf(dtype)) return false;
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return std::isnan(SlowWiden(dtype, bits));
}

// Bit for bit, but for which NaN it is.
bool Same(DType dtype, std::span<const uint8_t> a, std::span<const uint8_t> b) {
    if (a.size() != b.size()) return false;
    const size_t bytes = ElementBytes(dtype);
    for (size_t i = 0; i < a.size(); i += bytes) {
        if (std::memcmp(&a[i], &b[i], bytes) != 0 && !(IsNanAt(dtype, &a[i]) && IsNanAt(dtype, &b[i])))
            return false;
    }
    return true;
}

template <class T>
std::vector<T> Reduced(DType dtype, Op op, std::vector<T> into, const std::vector<T>& from) {
    Reduce(dtype, op, into.data(), from.data(), into.size());
    return into;
}

}  // namespace

TEST(BytesFromTheWireAreTypesAndOperationsOrNot) {
    CHECK(IsValidDType(0) && IsValidDType(7) && !IsValidDType(8) && !IsValidDType(255));
    CHECK(IsValidOp(0) && IsValidOp(3) && !IsValidOp(4) && !IsValidOp(255));
    const size_t expected[] = {4, 8, 2, 2, 1, 1, 4, 8};
    for (size_t i = 0; i < 8; ++i) CHECK_EQ(ElementBytes(kTypes[i]), expected[i]);
    for (const DType dtype : kTypes) CHECK_EQ(IsHalf(dtype), dtype == DType::kF16 || dtype == DType::kBF16);
}

TEST(EachOperationOnLiterals) {
    const std::vector<float> a = {1.5f, -2.0f, 8.0f}, b = {2.0f, -3.0f, 0.25f};
    CHECK_EQ(Reduced(DType::kF32, Op::kSum, a, b), (std::vector<float>{3.5f, -5.0f, 8.25f}));
    CHECK_EQ(Reduced(DType::kF32, Op::kMin, a, b), (std::vector<float>{1.5f, -3.0f, 0.25f}));
    CHECK_EQ(Reduced(DType::kF32, Op::kMax, a, b), (std::vector<float>{2.0f, -2.0f, 8.0f}));
    CHECK_EQ(Reduced(DType::kF32, Op::kProduct, a, b), (std::vector<float>{3.0f, 6.0f, 2.0f}));
    const std::vector<uint16_t> one_f16 = {0x3C00}, two_f16 = {0x4000}, one_bf16 = {0x3F80},
                                two_bf16 = {0x4000};
    CHECK_EQ(Reduced(DType::kF16, Op::kSum, one_f16, two_f16), (std::vector<uint16_t>{0x4200}));
    CHECK_EQ(Reduced(DType::kBF16, Op::kSum, one_bf16, two_bf16), (std::vector<uint16_t>{0x4040}));
}

TEST(IntegersWrap) {
    CHECK_EQ(Reduced<int8_t>(DType::kI8, Op::kSum, {127, -128, -128}, {1, -1, -128}),
             (std::vector<int8_t>{-128, 127, 0}));
    CHECK_EQ(Reduced<int8_t>(DType::kI8, Op::kProduct, {-128, 16}, {-1, 16}), (std::vector<int8_t>{-128, 0}));
    CHECK_EQ(Reduced<uint8_t>(DType::kU8, Op::kSum, {255, 200}, {1, 100}), (std::vector<uint8_t>{0, 44}));
    CHECK_EQ(Reduced<uint8_t>(DType::kU8, Op::kProduct, {255}, {255}), (std::vector<uint8_t>{1}));
    CHECK_EQ(Reduced<int32_t>(DType::kI32, Op::kSum, {INT32_MAX}, {1}), (std::vector<int32_t>{INT32_MIN}));
    CHECK_EQ(Reduced<int32_t>(DType::kI32, Op::kProduct, {65536}, {65536}), (std::vector<int32_t>{0}));
    CHECK_EQ(Reduced<int64_t>(DType::kI64, Op::kSum, {INT64_MIN}, {-1}), (std::vector<int64_t>{INT64_MAX}));
    CHECK_EQ(Reduced<int64_t>(DType::kI64, Op::kMin, {INT64_MIN}, {-1}), (std::vector<int64_t>{INT64_MIN}));
}

TEST(BooleansAsBytesAreAndAndOr) {
    CHECK_EQ(Reduced<uint8_t>(DType::kU8, Op::kMin, {0, 0, 1, 1}, {0, 1, 0, 1}),
             (std::vector<uint8_t>{0, 0, 0, 1}));
    CHECK_EQ(Reduced<uint8_t>(DType::kU8, Op::kMax, {0, 0, 1, 1}, {0, 1, 0, 1}),
             (std::vector<uint8_t>{0, 1, 1, 1}));
}

TEST(NanOnEitherSideIsNanUnderEveryOperation) {
    const float nan = std::numeric_limits<float>::quiet_NaN(),
                infinity = std::numeric_limits<float>::infinity();
    for (const Op op : kOps) {
        for (const float other : {0.0f, -1.0f, infinity, -infinity, nan}) {
            const std::vector<float> sum =
                Reduced<float>(DType::kF32, op, std::vector(17, nan), std::vector(17, other));
            const std::vector<float> mus =
                Reduced<float>(DType::kF32, op, std::vector(17, other), std::vector(17, nan));
            for (size_t i = 0; i < 17; ++i) CHECK(std::isnan(sum[i]) && std::isnan(mus[i]));
        }
    }
}

TEST(EveryHalfWidensToItsValueAndBackUnderEveryInstructionSet) {
    for (const Kernels* kernels : RunnableKernels()) {
        for (const DType half : kHalves) {
            std::vector<uint16_t> all(65536), back(65536);
            for (size_t bits = 0; bits < 65536; ++bits) all[bits] = static_cast<uint16_t>(bits);
            std::vector<float> wide(65536);
            kernels->widen(half, wide.data(), all.data(), all.size());
            kernels->narrow(half, back.data(), wide.data(), wide.size());
            for (size_t bits = 0; bits < 65536; ++bits) {
                const double expected = SlowWiden(half, all[bits]);
                if (std::isnan(expected)) {
                    REQUIRE(std::isnan(wide[bits]) && std::isnan(SlowWiden(half, back[bits])));
                } else {
                    REQUIRE(CHECK_EQ(wide[bits], expected) &&
                            CHECK_EQ(std::signbit(wide[bits]), bits >= 0x8000));
                    REQUIRE(CHECK_EQ(back[bits], all[bits]));
                }
            }
        }
    }
}

// Around every value of the half and every midpoint, where rounding turns, and random bits between.
TEST(NarrowingRoundsToNearestEvenUnderEveryInstructionSet) {
    for (const DType half : kHalves) {
        const int unseen = half == DType::kF16 ? 13 : 16;  // digits of f32 that the half lacks
        std::mt19937 random(20260102);
        std::vector<float> values;
        for (uint32_t bits = 0; bits < 65536; ++bits) {
            const double exact = SlowWiden(half, static_cast<uint16_t>(bits));
            if (std::isnan(exact)) continue;
            const uint32_t low = std::bit_cast<uint32_t>(static_cast<float>(exact));
            for (const uint32_t step :
                 {0u, 1u, (1u << (unseen - 1)) - 1, 1u << (unseen - 1), (1u << (unseen - 1)) + 1,
                  static_cast<uint32_t>(random()) >> (32 - unseen)}) {
                const float value = std::bit_cast<float>(low + step);
                if (!std::isnan(value)) values.push_back(value);
            }
            const float anything = std::bit_cast<float>(static_cast<uint32_t>(random()));
            if (!std::isnan(anything)) values.push_back(anything);
        }
        std::vector<uint16_t> expected;
        for (const float value : values) expected.push_back(SlowNarrow(half, value));
        for (const Kernels* kernels : RunnableKernels()) {
            std::vector<uint16_t> narrow(values.size());
            kernels->narrow(half, narrow.data(), values.data(), values.size());
            for (size_t i = 0; i < values.size(); ++i) REQUIRE(CHECK_EQ(narrow[i], expected[i]));
        }
    }
}

// f16's subnormals lie apart by more than one f32 step more: all midpoints of them, by their value.
TEST(NarrowingToSubnormalsRoundsToNearestEven) {
    std::vector<float> values;
    std::vector<uint16_t> expected;
    for (int k = 0; k < 1024; ++k) {
        const float middle = std::ldexp(static_cast<float>(2 * k + 1), -25);  // between k and k + 1 of 2^-24
        for (const float value : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 1.0f)}) {
            values.push_back(value);
            expected.push_back(SlowNarrow(DType::kF16, value));
        }
    }
    for (const Kernels* kernels : RunnableKernels()) {
        std::vector<uint16_t> narrow(values.size());
        kernels->narrow(DType::kF16, narrow.data(), values.data(), values.size());
        CHECK_EQ(narrow, expected);
    }
}

TEST(NarrowingOverflowsToInfinity) {
    const std::vector<float> values = {65504.0f,  65519.996f, 65520.0f,
                                       -65520.0f, 1e30f,      std::numeric_limits<float>::infinity()};
    std::vector<uint16_t> f16(values.size());
    Narrow(DType::kF16, f16.data(), values.data(), values.size());
    CHECK_EQ(f16, (std::vector<uint16_t>{0x7BFF, 0x7BFF, 0x7C00, 0xFC00, 0x7C00, 0x7C00}));
    const std::vector<float> huge = {3.3895314e38f, 3.4028235e38f};  // the largest bf16, the largest f32
    std::vector<uint16_t> bf16(2);
    Narrow(DType::kBF16, bf16.data(), huge.data(), 2);
    CHECK_EQ(bf16, (std::vector<uint16_t>{0x7F7F, 0x7F80}));
}

TEST(ReductionOfHalvesIsThatOfF32RoundedOnce) {
    for (const DType half : kHalves) {
        for (const Op op : kOps) {
            const size_t n = 4099;
            std::vector<uint16_t> a(n), b(n);
            std::memcpy(a.data(), RandomElements(half, n, 1).data(), 2 * n);
            std::memcpy(b.data(), RandomElements(half, n, 2).data(), 2 * n);
            const std::vector<uint16_t> got = Reduced(half, op, a, b);
            for (size_t i = 0; i < n; ++i) {
                const auto x = static_cast<float>(SlowWiden(half, a[i])),
                           y = static_cast<float>(SlowWiden(half, b[i]));
                const float expected = SlowApply(op, x, y);
                if (std::isnan(expected)) {
                    REQUIRE(std::isnan(SlowWiden(half, got[i])));
                } else {
                    REQUIRE(CHECK_EQ(got[i], SlowNarrow(half, expected)));
                }
            }
        }
    }
}

TEST(ReductionOfFloatsIsThatOfTheLanguage) {
    const size_t n = 4099;
    for (const Op op : kOps) {
        std::vector<float> a(n), b(n);
        std::memcpy(a.data(), RandomElements(DType::kF32, n, 3).data(), 4 * n);
        std::memcpy(b.data(), RandomElements(DType::kF32, n, 4).data(), 4 * n);
        std::vector<float> expected(n);
        for (size_t i = 0; i < n; ++i) expected[i] = SlowApply(op, a[i], b[i]);
        const std::vector<float> got = Reduced(DType::kF32, op, a, b);
        const auto bytes = [](const std::vector<float>& of) {
            return std::span(reinterpret_cast<const uint8_t*>(of.data()), 4 * of.size());
        };
        CHECK(Same(DType::kF32, bytes(got), bytes(expected)));
    }
}

// Every function, type, operation and instruction set, at odd lengths and alignments, against the portable
// code on aligned memory, and that nothing beside the n elements is touched.
TEST(InstructionSetsAndAlignmentsGiveTheSameBits) {
    const Kernels& portable = *RunnableKernels().front();
    for (const size_t n : {0, 1, 3, 7, 8, 9, 31, 64, 255, 256, 257, 1000, 7501}) {
        for (const DType dtype : kTypes) {
            const size_t bytes = n * ElementBytes(dtype);
            const std::vector<uint8_t> a = RandomElements(dtype, n, 5), b = RandomElements(dtype, n, 6);
            for (const Op op : kOps) {
                std::vector<uint8_t> expected = a;
                portable.reduce(dtype, op, expected.data(), b.data(), n);
                for (const Kernels* kernels : RunnableKernels()) {
                    for (const size_t shift : {0, 1, 5}) {
                        std::vector<uint8_t> into(bytes + 16, 0xA5), from(bytes + 16, 0xA5);
                        const auto reset = [&] {
                            std::copy(a.begin(), a.end(), into.begin() + static_cast<ptrdiff_t>(shift));
                            std::copy(b.begin(), b.end(), from.begin() + static_cast<ptrdiff_t>(shift) + 2);
                        };
                        const auto result = [&] { return std::span(into).subspan(shift, bytes); };
                        const auto others_kept = [&] {
                            for (size_t i = 0; i < 16; ++i) {
                                const size_t at = i < shift ? i : bytes + i;
                                if (into[at] != 0xA5) return false;
                            }
                            return true;
                        };
                        reset();
                        kernels->reduce(dtype, op, into.data() + shift, from.data() + shift + 2, n);
                        REQUIRE(Same(dtype, result(), expected) && others_kept());
                        REQUIRE(Same(dtype, std::span(from).subspan(shift + 2, bytes), b));
                        reset();
                        kernels->reduce_both(dtype, op, into.data() + shift, from.data() + shift + 2, n);
                        REQUIRE(Same(dtype, result(), expected) && others_kept());
                        REQUIRE(std::memcmp(into.data() + shift, from.data() + shift + 2, bytes) == 0);
                    }
                }
            }
        }
    }
}

TEST(WideningReductionsAreThoseOfF32UnderEveryInstructionSet) {
    for (const Kernels* kernels : RunnableKernels()) {
        for (const DType half : kHalves) {
            for (const Op op : kOps) {
                for (const size_t n : {1, 7, 8, 255, 256, 257, 4099}) {
                    const std::vector<uint8_t> halves = RandomElements(half, n, 7);
                    std::vector<float> into(n), wide(n);
                    std::memcpy(into.data(), RandomElements(DType::kF32, n, 8).data(), 4 * n);
                    Widen(half, wide.data(), halves.data(), n);
                    std::vector<float> expected = Reduced(DType::kF32, op, into, wide);
                    kernels->widen_reduce(half, op, into.data(), halves.data(), n);
                    REQUIRE(Same(DType::kF32, std::span(reinterpret_cast<uint8_t*>(into.data()), 4 * n),
                                 std::span(reinterpret_cast<uint8_t*>(expected.data()), 4 * n)));
                }
            }
        }
    }
}

TEST(APointerMayBeReducedWithItself) {
    for (const Kernels* kernels : RunnableKernels()) {
        std::vector<float> both(1001);
        for (size_t i = 0; i < both.size(); ++i) both[i] = static_cast<float>(i);
        kernels->reduce(DType::kF32, Op::kSum, both.data(), both.data(), both.size());
        kernels->reduce_both(DType::kF32, Op::kSum, both.data(), both.data(), both.size());
        for (size_t i = 0; i < both.size(); ++i) REQUIRE(CHECK_EQ(both[i], 4.0f * static_cast<float>(i)));
        std::vector<uint16_t> ones(1001, 0x3C00);
        kernels->reduce(DType::kF16, Op::kSum, ones.data(), ones.data(), ones.size());
        CHECK_EQ(ones, std::vector<uint16_t>(1001, 0x4000));
    }
}

// 2048 + 1 is not an f16, 2048 + 1 + 1 is: in f32 it is reached, in f16 each step rounds back to 2048.
TEST(AWideSumOfManyHalvesIsRoundedOnce) {
    const uint16_t large = 0x6800, one = 0x3C00;
    float wide = 0;
    uint16_t once = 0, each_time = large;
    Widen(DType::kF16, &wide, &large, 1);
    for (int i = 0; i < 2; ++i) {
        WidenReduce(DType::kF16, Op::kSum, &wide, &one, 1);
        Reduce(DType::kF16, Op::kSum, &each_time, &one, 1);
    }
    Narrow(DType::kF16, &once, &wide, 1);
    CHECK_EQ(once, 0x6801);
    CHECK_EQ(each_time, 0x6800);
}

int main(int argc, char** argv) {
    std::fprintf(stderr, "reduction by %s\n", ReduceIsa());
    return testing::RunTests(argc, argv);
}
