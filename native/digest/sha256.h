// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104): a peer proves with it that it knows the job's secret.
// For short messages at the greeting, so plain code; nothing here keeps a byte after it returns, fails or
// allocates. Any thread.

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
