#include "reduce/reduce.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "testing/check.h"

using namespace gradlane;

namespace {

// Halves the slow way: by value, from the fields of the format.
float FromHalf(uint16_t bits) {
    const int sign = bits >> 15, exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value;
    if (exponent == 31) {
        value = fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    } else if (exponent == 0) {
        value = std::ldexp(static_cast<float>(fraction), -24);
    } else {
        value = std::ldexp(static_cast<float>(fraction | 1024), exponent - 25);
    }
    return sign != 0 ? -value : value;
}

float FromBrain(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

bool Same(float a, float b) { return std::isnan(a) ? std::isnan(b) : std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

template <typename T>
std::vector<T> Numbers(size_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<T> numbers(n);
    for (T& number : numbers) {
        if constexpr (std::is_floating_point_v<T>) {
            number = static_cast<T>(static_cast<int32_t>(random())) / static_cast<T>(65536);
        } else {
            number = static_cast<T>(random());
        }
    }
    return numbers;
}

template <typename T>
T Expected(Op op, T a, T b) {
    using Wide = std::conditional_t<std::is_integral_v<T>, uint64_t, T>;
    switch (op) {
        case Op::kSum: return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
        case Op::kProduct: return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
        case Op::kMin: return a < b ? a : b;
        case Op::kMax: return a > b ? a : b;
    }
    return a;
}

// Every length around the width of a vector, at every misalignment of one element.
template <typename T>
void CheckType(DType dtype) {
    for (const Op op : {Op::kSum, Op::kMin, Op::kMax, Op::kProduct}) {
        for (size_t n = 0; n < 70; ++n) {
            const auto a = Numbers<T>(n + 1, 1), b = Numbers<T>(n + 1, 2);
            auto into = a, left = a, right = b;
            Reduce(dtype, op, into.data() + 1, b.data() + 1, n);
            ReduceBoth(dtype, op, left.data() + 1, right.data() + 1, n);
            for (size_t i = 1; i <= n; ++i) {
                const T expected = Expected(op, a[i], b[i]);
                if (!CHECK_EQ(into[i], expected) || !CHECK_EQ(left[i], expected) || !CHECK_EQ(right[i], expected)) return;
            }
            if (!CHECK_EQ(into[0], a[0]) || !CHECK_EQ(right[0], b[0])) return;
        }
    }
}

}  // namespace

TEST(EveryTypeAndOperationAtEveryLength) {
    CheckType<float>(DType::kF32);
    CheckType<double>(DType::kF64);
    CheckType<int8_t>(DType::kI8);
    CheckType<uint8_t>(DType::kU8);
    CheckType<int32_t>(DType::kI32);
    CheckType<int64_t>(DType::kI64);
}

TEST(WideningIsExactForEveryHalf) {
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    std::vector<float> wide(all.size());
    Widen(DType::kF16, wide.data(), all.data(), all.size());
    for (size_t i = 0; i < all.size(); ++i) {
        if (!CHECK(Same(wide[i], FromHalf(all[i])))) break;
    }
    Widen(DType::kBF16, wide.data(), all.data(), all.size());
    for (size_t i = 0; i < all.size(); ++i) {
        if (!CHECK(Same(wide[i], FromBrain(all[i])))) break;
    }
}

TEST(NarrowingRoundsToTheNearestHalfAndEvenBetweenTwo) {
    // between each two neighbouring halves: nearer the lower, the middle, nearer the upper
    for (const DType half : {DType::kF16, DType::kBF16}) {
        const auto value = [half](uint16_t bits) { return half == DType::kF16 ? FromHalf(bits) : FromBrain(bits); };
        const uint16_t last = half == DType::kF16 ? 0x7BFF : 0x7F7F;
        std::vector<float> wide;
        std::vector<uint16_t> expected;
        for (uint16_t bits = 0; bits < last; ++bits) {
            const float low = value(bits), high = value(static_cast<uint16_t>(bits + 1));
            const float middle = low + (high - low) / 2;
            wide.insert(wide.end(), {low, std::nextafterf(middle, low), middle, std::nextafterf(middle, high)});
            const auto even = static_cast<uint16_t>(bits % 2 == 0 ? bits : bits + 1);
            expected.insert(expected.end(), {bits, bits, even, static_cast<uint16_t>(bits + 1)});
        }
        std::vector<uint16_t> narrow(wide.size());
        Narrow(half, narrow.data(), wide.data(), wide.size());
        for (size_t i = 0; i < wide.size(); ++i) {
            // bf16's smallest steps are f32's own denormals: the middle of two may be one of them
            if (wide[i] == value(expected[i]) || narrow[i] == expected[i]) continue;
            CHECK_EQ(narrow[i], expected[i]);
            break;
        }
    }
}

TEST(NarrowingKeepsNanAndOverflowsToInfinity) {
    const float wide[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -1e30f, 65520.0f, 65519.0f};
    uint16_t narrow[5];
    Narrow(DType::kF16, narrow, wide, 5);
    CHECK(std::isnan(FromHalf(narrow[0])));
    CHECK_EQ(narrow[1], 0x7C00);
    CHECK_EQ(narrow[2], 0xFC00);
    CHECK_EQ(narrow[3], 0x7C00);
    CHECK_EQ(narrow[4], 0x7BFF);
}

TEST(ManyHalvesAreRoundedOnce) {
    // 2048 + 1 is not a half; 2048 + 1 + 1 is
    const uint16_t large = 0x6800, one = 0x3C00;
    float wide;
    uint16_t narrow;
    Widen(DType::kF16, &wide, &large, 1);
    WidenReduce(DType::kF16, Op::kSum, &wide, &one, 1);
    WidenReduce(DType::kF16, Op::kSum, &wide, &one, 1);
    Narrow(DType::kF16, &narrow, &wide, 1);
    CHECK_EQ(FromHalf(narrow), 2050.0f);
    uint16_t step = large;
    Reduce(DType::kF16, Op::kSum, &step, &one, 1);
    Reduce(DType::kF16, Op::kSum, &step, &one, 1);
    CHECK_EQ(FromHalf(step), 2048.0f);
}

TEST(LeastAndGreatestOfANanAreNan) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const Op op : {Op::kMin, Op::kMax}) {
        std::vector<float> a(20, 1.0f), b(20, nan);
        Reduce(DType::kF32, op, a.data(), b.data(), a.size());
        for (const float value : a) CHECK(std::isnan(value));
        Reduce(DType::kF32, op, b.data(), std::vector<float>(20, 1.0f).data(), b.size());
        for (const float value : b) CHECK(std::isnan(value));
    }
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
