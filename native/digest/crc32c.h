// CRC32C (Castagnoli, as in iSCSI: RFC 3720). It finds bytes that the network or a memory error
// changed, not those that an adversary did. It reads the given bytes and nothing else, and never
// fails or allocates. Any thread may call.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradlane {

// Extends: Crc32c(b, n, Crc32c(a, m)) is the checksum of a's m bytes followed by b's n.
uint32_t Crc32c(const void* data, size_t n, uint32_t seed = 0);

// The ways of computing it that this CPU has, the best last, which Crc32c() takes: "table", "sse4.2",
// "vpclmulqdq", "armv8". For tests, which compare them. `extend` takes and gives the register, the complement of a
// checksum.
struct Crc32cKernel {
    const char* isa;
    uint32_t (*extend)(uint32_t crc, const uint8_t* data, size_t n);
};
std::span<const Crc32cKernel> RunnableCrc32c();

}  // namespace gradlane
