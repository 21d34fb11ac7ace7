// CRC32C (Castagnoli, as in iSCSI: RFC 3720): finds what the network or a memory error changed, not what an
// adversary did. Reads the given bytes and nothing else; never fails or allocates. Any thread.

#pragma once

#include <cstddef>
#include <cstdint>

namespace gradlane {

// Extends: Crc32c(b, n, Crc32c(a, m)) is the checksum of a's m bytes followed by b's n.
uint32_t Crc32c(const void* data, size_t n, uint32_t seed = 0);

// What was chosen by what the CPU has: "sse4.2", "armv8", "table".
const char* Crc32cIsa();

}  // namespace gradlane
