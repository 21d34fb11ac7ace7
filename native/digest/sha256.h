// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), with which a peer proves that it knows the
// job's secret. They digest the short messages of the greeting, so the code is plain rather than
// fast. Nothing here fails, allocates, or keeps a byte after it returns. Any thread may call.

#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace gradlane {

using Digest = std::array<uint8_t, 32>;

Digest Sha256(std::span<const uint8_t> data);
Digest HmacSha256(std::span<const uint8_t> key, std::span<const uint8_t> data);

// Takes as long wherever the first difference is. Spans of different length are unequal.
bool EqualConstantTime(std::span<const uint8_t> a, std::span<const uint8_t> b);

}  // namespace gradlane
