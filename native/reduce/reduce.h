// Element-wise reduction of gradients: what a server does to every packet that arrives.
//
// Nothing here allocates, fails, keeps or owns memory: the caller's buffers are read and written
// during the call and no longer. Any thread; two calls may run at once unless one writes what the
// other touches.
//
// Buffers hold n elements at any alignment. `into` and `from` (`a` and `b`) do not overlap, unless
// they are the same pointer. The instruction set is chosen once, by what the CPU has, and does not
// change a result:
// - floating point is computed in the order written, one rounding an operation, never contracted;
// - halves (f16, bf16) are computed in f32 and rounded once, to nearest even, overflow to infinity;
// - kMin and kMax give NaN where either side is NaN, as torch does; which NaN (its payload) is not
//   defined;
// - integers wrap.

#pragma once

#include <cstddef>
#include <cstdint>

namespace gradlane {

// The values are those on the wire. Booleans travel as kU8 under kMin (and) or kMax (or).
enum class DType : uint8_t { kF32 = 0, kF64 = 1, kF16 = 2, kBF16 = 3, kI8 = 4, kU8 = 5, kI32 = 6, kI64 = 7 };
enum class Op : uint8_t { kSum = 0, kMin = 1, kMax = 2, kProduct = 3 };

// For bytes from the wire, before they are cast.
constexpr bool IsValidDType(uint8_t byte) { return byte <= static_cast<uint8_t>(DType::kI64); }
constexpr bool IsValidOp(uint8_t byte) { return byte <= static_cast<uint8_t>(Op::kProduct); }

constexpr size_t ElementBytes(DType dtype) {
    constexpr uint8_t kBytes[] = {4, 8, 2, 2, 1, 1, 4, 8};
    return kBytes[static_cast<uint8_t>(dtype)];
}

// The types that Widen(), WidenReduce() and Narrow() take.
constexpr bool IsHalf(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

// into = into op from.
void Reduce(DType dtype, Op op, void* into, const void* from, size_t n);

// a = b = a op b in one pass, for when the last part to come lies where its result is wanted.
void ReduceBoth(DType dtype, Op op, void* a, void* b, size_t n);

// into = f32(from), exactly.
void Widen(DType half, float* into, const void* from, size_t n);

// into = into op f32(from): a sum of many halves is rounded once, by Narrow(), when it is whole.
void WidenReduce(DType half, Op op, float* into, const void* from, size_t n);

// into = half(from).
void Narrow(DType half, void* into, const float* from, size_t n);

// What was chosen: "avx2", or what the portable code was compiled for: "sse2", "neon", "scalar".
const char* ReduceIsa();

}  // namespace gradlane
