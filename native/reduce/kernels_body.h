// The loops. Each kernels_*.cc includes this once, is compiled for its own instruction set, and
// sets
//     GRADLANE_F16C       where the CPU converts f16 itself.
// Plain loops: compilers vectorise them, given -O3. Everything has internal linkage: a function
// compiled for AVX2 must never be the copy that the linker keeps for a CPU without it; so nothing
// inline of std is called.

#pragma once

#include <cstring>
#include <type_traits>

#if defined(GRADLANE_F16C)
#include <immintrin.h>
#endif

#include "reduce/half.h"
#include "reduce/kernels.h"

namespace gradlane {
namespace {

template <class T>
T Load(const void* from, size_t i) {
    T value;
    std::memcpy(&value, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
    return value;
}

template <class T>
void Store(void* into, size_t i, T value) {
    std::memcpy(static_cast<char*>(into) + i * sizeof(T), &value, sizeof(T));
}

template <Op op, class T>
T Apply(T a, T b) {
    if constexpr (op == Op::kMin || op == Op::kMax) {
        const bool a_wins = op == Op::kMin ? a < b : a > b;
        return (a_wins | (a != a)) ? a : b;  // a != a: a is NaN; where b is, no comparison holds
    } else if constexpr (std::is_integral_v<T>) {
        using Unsigned = std::make_unsigned_t<T>;  // wraps where a signed sum would be undefined
        const auto x = static_cast<Unsigned>(a), y = static_cast<Unsigned>(b);
        return static_cast<T>(op == Op::kSum ? x + y : x * y);
    } else {
        return op == Op::kSum ? a + b : a * b;
    }
}

template <Op op, class T>
void ReduceLoop(void* into, const void* from, size_t n) {
    for (size_t i = 0; i < n; ++i) Store(into, i, Apply<op>(Load<T>(into, i), Load<T>(from, i)));
}

template <Op op, class T>
void ReduceBothLoop(void* a, void* b, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        const T result = Apply<op>(Load<T>(a, i), Load<T>(b, i));
        Store(a, i, result);
        Store(b, i, result);
    }
}

struct BF16 {
    static void Widen(float* into, const void* from, size_t n) {
        for (size_t i = 0; i < n; ++i) Store(into, i, WidenBF16(Load<uint16_t>(from, i)));
    }
    static void Narrow(void* into, const float* from, size_t n) {
        for (size_t i = 0; i < n; ++i) Store(into, i, NarrowBF16(Load<float>(from, i)));
    }
};

struct F16 {
    static void Widen(float* into, const void* from, size_t n) {
        size_t i = 0;
#if defined(GRADLANE_F16C)
        for (; i + 8 <= n; i += 8) {
            const __m128i halves =
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + 2 * i));
            _mm256_storeu_ps(into + i, _mm256_cvtph_ps(halves));
        }
#endif
        for (; i < n; ++i) Store(into, i, WidenF16(Load<uint16_t>(from, i)));
    }
    static void Narrow(void* into, const float* from, size_t n) {
        size_t i = 0;
#if defined(GRADLANE_F16C)
        for (; i + 8 <= n; i += 8) {
            const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<char*>(into) + 2 * i), halves);
        }
#endif
        for (; i < n; ++i) Store(into, i, NarrowF16(Load<float>(from, i)));
    }
};

// Halves go through blocks of f32 that stay in the first-level cache.
constexpr size_t kBlock = 256;

template <Op op, class Half>
void ReduceHalves(void* into, const void* from, size_t n, void* also_into) {
    float a[kBlock], b[kBlock];
    for (size_t i = 0; i < n; i += kBlock) {
        const size_t count = n - i < kBlock ? n - i : kBlock;
        char* const at = static_cast<char*>(into) + 2 * i;
        Half::Widen(a, at, count);
        Half::Widen(b, static_cast<const char*>(from) + 2 * i, count);
        ReduceLoop<op, float>(a, b, count);
        Half::Narrow(at, a, count);
        if (also_into != nullptr) std::memcpy(static_cast<char*>(also_into) + 2 * i, at, 2 * count);
    }
}

template <Op op, class Half>
void WidenReduceLoop(float* into, const void* from, size_t n) {
    float wide[kBlock];
    for (size_t i = 0; i < n; i += kBlock) {
        const size_t count = n - i < kBlock ? n - i : kBlock;
        Half::Widen(wide, static_cast<const char*>(from) + 2 * i, count);
        ReduceLoop<op, float>(into + i, wide, count);
    }
}

// From here on, types and operations become template arguments.
template <class Call>
void WithOp(Op op, Call call) {
    switch (op) {
        case Op::kSum: return call.template operator()<Op::kSum>();
        case Op::kMin: return call.template operator()<Op::kMin>();
        case Op::kMax: return call.template operator()<Op::kMax>();
        case Op::kProduct: return call.template operator()<Op::kProduct>();
    }
}

template <class Call>
void WithType(DType dtype, Call call) {
    switch (dtype) {
        case DType::kF32: return call.template operator()<float>();
        case DType::kF64: return call.template operator()<double>();
        case DType::kF16: return call.template operator()<F16>();
        case DType::kBF16: return call.template operator()<BF16>();
        case DType::kI8: return call.template operator()<int8_t>();
        case DType::kU8: return call.template operator()<uint8_t>();
        case DType::kI32: return call.template operator()<int32_t>();
        case DType::kI64: return call.template operator()<int64_t>();
    }
}

template <class Call>
void WithHalf(DType half, Call call) {
    return half == DType::kF16 ? call.template operator()<F16>() : call.template operator()<BF16>();
}

void ReduceAny(DType dtype, Op op, void* into, const void* from, size_t n) {
    WithOp(op, [&]<Op kOp>() {
        WithType(dtype, [&]<class T>() {
            if constexpr (std::is_arithmetic_v<T>) {
                ReduceLoop<kOp, T>(into, from, n);
            } else {
                ReduceHalves<kOp, T>(into, from, n, nullptr);
            }
        });
    });
}

void ReduceBothAny(DType dtype, Op op, void* a, void* b, size_t n) {
    WithOp(op, [&]<Op kOp>() {
        WithType(dtype, [&]<class T>() {
            if constexpr (std::is_arithmetic_v<T>) {
                ReduceBothLoop<kOp, T>(a, b, n);
            } else {
                ReduceHalves<kOp, T>(a, b, n, b);
            }
        });
    });
}

void WidenAny(DType half, float* into, const void* from, size_t n) {
    WithHalf(half, [&]<class Half>() { Half::Widen(into, from, n); });
}

void WidenReduceAny(DType half, Op op, float* into, const void* from, size_t n) {
    WithOp(op, [&]<Op kOp>() {
        WithHalf(half, [&]<class Half>() { WidenReduceLoop<kOp, Half>(into, from, n); });
    });
}

void NarrowAny(DType half, void* into, const float* from, size_t n) {
    WithHalf(half, [&]<class Half>() { Half::Narrow(into, from, n); });
}

constexpr Kernels KernelsFor(const char* isa) {
    return {isa, ReduceAny, ReduceBothAny, WidenAny, WidenReduceAny, NarrowAny};
}

}  // namespace
}  // namespace gradlane
