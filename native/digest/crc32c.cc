#include "digest/crc32c.h"

#include <array>
#include <cstring>

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

#ifdef __clang__
#define GRADLANE_CRC32 ",crc32"  // for Clang not a part of sse4.2
#else
#define GRADLANE_CRC32 ""
#endif
#define GRADLANE_SSE42 __attribute__((target("sse4.2,pclmul" GRADLANE_CRC32)))

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

#define GRADLANE_VPCLMUL __attribute__((target("avx512f,vpclmulqdq,sse4.2,pclmul" GRADLANE_CRC32)))

// Factors that move 16 bytes `bytes` further on: one for their first eight, one for the others. The product comes out
// one power low, and a factor of 32 bits stands 32 powers too high: hence 33.
template <size_t bytes>
constexpr uint32_t kFirst = PowerOfX(8 * bytes + 64 - 33);
template <size_t bytes>
constexpr uint32_t kOthers = PowerOfX(8 * bytes - 33);

// Those of each 16 bytes of a register.
template <size_t bytes>
GRADLANE_VPCLMUL inline __m512i Factors() {
    constexpr uint32_t f = kFirst<bytes>, o = kOthers<bytes>;
    return _mm512_set_epi64(o, f, o, f, o, f, o, f);
}

GRADLANE_VPCLMUL inline __m512i Moved(__m512i from, __m512i factors, __m512i onto) {
    const __m512i first = _mm512_clmulepi64_epi128(from, factors, 0x00);
    const __m512i others = _mm512_clmulepi64_epi128(from, factors, 0x11);
    return _mm512_ternarylogic_epi64(first, others, onto, 0x96);  // the sum of the three
}

GRADLANE_VPCLMUL inline __m128i Moved(__m128i from, __m128i factors, __m128i onto) {
    const __m128i first = _mm_clmulepi64_si128(from, factors, 0x00);
    const __m128i others = _mm_clmulepi64_si128(from, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, others), onto);
}

// Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009), with four
// registers of 64 bytes: each is moved onto the bytes 256 further on, until less than that is left.
GRADLANE_VPCLMUL uint32_t ExtendByVpclmul(uint32_t crc, const uint8_t* data, size_t n) {
    constexpr size_t kBlock = 256;
    if (n >= 2 * kBlock) {
        const auto load = [&](size_t i) GRADLANE_VPCLMUL { return _mm512_loadu_si512(data + 64 * i); };
        __m512i a = _mm512_xor_si512(load(0), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
        __m512i b = load(1), c = load(2), d = load(3);
        const __m512i by_block = Factors<kBlock>();
        for (data += kBlock, n -= kBlock; n >= kBlock; data += kBlock, n -= kBlock) {
            a = Moved(a, by_block, load(0));
            b = Moved(b, by_block, load(1));
            c = Moved(c, by_block, load(2));
            d = Moved(d, by_block, load(3));
        }
        const __m512i by_register = Factors<64>();
        d = Moved(Moved(Moved(a, by_register, b), by_register, c), by_register, d);
        alignas(64) __m128i parts[4];
        _mm512_store_si512(parts, d);
        const __m128i by_part = _mm_set_epi64x(kOthers<16>, kFirst<16>);
        __m128i last = parts[0];
        for (size_t i = 1; i < 4; ++i) last = Moved(last, by_part, parts[i]);
        const uint64_t first = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(last)));
        crc = static_cast<uint32_t>(_mm_crc32_u64(first, static_cast<uint64_t>(_mm_extract_epi64(last, 1))));
    }
    return ExtendBySse42(crc, data, n);
}

#elif defined(__aarch64__)

__attribute__((target("+crc"))) uint32_t ExtendByArm(uint32_t crc, const uint8_t* data, size_t n) {
    for (; n >= 8; data += 8, n -= 8) crc = __crc32cd(crc, LoadWord(data));
    for (; n > 0; ++data, --n) crc = __crc32cb(crc, *data);
    return crc;
}

#endif

// How many of the kernels below this CPU has the instructions for.
size_t Runnable() {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) return 1;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") ? 3 : 2;
#elif defined(__aarch64__)
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0 ? 2 : 1;
#else
    return 1;
#endif
}

}  // namespace

std::span<const Crc32cKernel> RunnableCrc32c() {
    static constexpr Crc32cKernel kKernels[] = {
        {"table", ExtendByTable},
#if defined(__x86_64__)
        {"sse4.2", ExtendBySse42},
        {"vpclmulqdq", ExtendByVpclmul},
#elif defined(__aarch64__)
        {"armv8", ExtendByArm},
#endif
    };
    static const size_t runnable = Runnable();
    return std::span(kKernels).first(runnable);
}

uint32_t Crc32c(const void* data, size_t n, uint32_t seed) {
    return ~RunnableCrc32c().back().extend(~seed, static_cast<const uint8_t*>(data), n);
}

}  // namespace gradlane
