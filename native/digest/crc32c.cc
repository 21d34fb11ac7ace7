#include "digest/crc32c.h"

#include <array>
#include <cstring>
#include <iterator>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace gradlane {

namespace {

// Castagnoli's polynomial, its lowest power in the highest bit.
constexpr uint32_t kPolynomial = 0x82F63B78;

constexpr uint32_t TimesX(uint32_t value) { return (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0); }

// kTables[k][byte]: what a byte does to the register, k bytes further on.
constexpr auto kTables = [] {
    std::array<std::array<uint32_t, 256>, 8> tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = TimesX(value);
        tables[0][byte] = value;
    }
    for (size_t k = 1; k < 8; ++k) {
        for (size_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
        }
    }
    return tables;
}();

uint32_t ExtendByTable(uint32_t crc, const uint8_t* data, size_t n) {
    for (; n >= 8; data += 8, n -= 8) {
        uint32_t next = 0;
        for (size_t i = 0; i < 4; ++i) next ^= kTables[7 - i][data[i] ^ ((crc >> (8 * i)) & 0xFF)];
        for (size_t i = 4; i < 8; ++i) next ^= kTables[7 - i][data[i]];
        crc = next;
    }
    for (; n > 0; ++data, --n) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xFF];
    return crc;
}

[[maybe_unused]] uint64_t LoadWord(const uint8_t* from) {
    uint64_t word;
    std::memcpy(&word, from, sizeof(word));
    return word;
}

#if defined(__x86_64__)

#define GRADLANE_SSE42 __attribute__((target("sse4.2,pclmul")))

// x to the n, modulo the polynomial.
constexpr uint32_t PowerOfX(size_t n) {
    uint32_t value = 0x80000000;
    while (n-- > 0) value = TimesX(value);
    return value;
}

// The register after `bytes` zeros. The product of two reflected polynomials comes out one power low, and
// _mm_crc32_u64 multiplies by x^32 as it reduces: hence 33.
template <size_t bytes>
GRADLANE_SSE42 inline uint64_t Shift(uint64_t crc) {
    constexpr uint32_t kPower = PowerOfX(8 * bytes - 33);
    const __m128i product =
        _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)), _mm_cvtsi64_si128(kPower), 0);
    return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
}

constexpr size_t kLine = 64;  // bytes of a cache line

// The instruction takes three cycles, but one may start each cycle: three thirds side by side. The processor's own
// prefetching begins anew in each third, so that memory outside the caches is asked for here: 16 GB/s instead of 6.
template <size_t third>
GRADLANE_SSE42 inline void ExtendByThirds(uint64_t& crc, const uint8_t*& data, size_t& n) {
    for (; n >= 3 * third; data += 3 * third, n -= 3 * third) {
        const auto ahead = reinterpret_cast<uintptr_t>(data) + 6 * third;  // an address: it may be behind the end
        uint64_t second = 0, last = 0;
        for (size_t line = 0; line < third; line += kLine) {
            for (size_t i = 0; i < 3; ++i) {
                _mm_prefetch(reinterpret_cast<const char*>(ahead + 3 * line + i * kLine), _MM_HINT_T0);
            }
            for (size_t i = line; i < line + kLine; i += 8) {
                crc = _mm_crc32_u64(crc, LoadWord(data + i));
                second = _mm_crc32_u64(second, LoadWord(data + third + i));
                last = _mm_crc32_u64(last, LoadWord(data + 2 * third + i));
            }
        }
        crc = Shift<2 * third>(crc) ^ Shift<third>(second) ^ last;
    }
}

GRADLANE_SSE42 uint32_t ExtendBySse42(uint32_t start, const uint8_t* data, size_t n) {
    uint64_t crc = start;
    ExtendByThirds<2048>(crc, data, n);
    ExtendByThirds<128>(crc, data, n);
    for (; n >= 8; data += 8, n -= 8) crc = _mm_crc32_u64(crc, LoadWord(data));
    for (; n > 0; ++data, --n) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), *data);
    return static_cast<uint32_t>(crc);
}

#elif defined(__aarch64__)

__attribute__((target("+crc"))) uint32_t ExtendByArm(uint32_t crc, const uint8_t* data, size_t n) {
    for (; n >= 8; data += 8, n -= 8) crc = __crc32cd(crc, LoadWord(data));
    for (; n > 0; ++data, --n) crc = __crc32cb(crc, *data);
    return crc;
}

#endif

bool HasInstruction() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
    return false;
#endif
}

}  // namespace

std::span<const Crc32cKernel> RunnableCrc32c() {
    static constexpr Crc32cKernel kKernels[] = {
        {"table", ExtendByTable},
#if defined(__x86_64__)
        {"sse4.2", ExtendBySse42},
#elif defined(__aarch64__)
        {"armv8", ExtendByArm},
#endif
    };
    static const size_t runnable = HasInstruction() ? std::size(kKernels) : 1;
    return std::span(kKernels).first(runnable);
}

uint32_t Crc32c(const void* data, size_t n, uint32_t seed) {
    return ~RunnableCrc32c().back().extend(~seed, static_cast<const uint8_t*>(data), n);
}

}  // namespace gradlane
