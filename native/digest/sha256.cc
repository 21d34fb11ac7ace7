#include "digest/sha256.h"

#include <algorithm>
#include <bit>
#include <cstddef>

namespace gradlane {

namespace {

constexpr size_t kBlockBytes = 64;

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Hasher {
  public:
    void Add(std::span<const uint8_t> data) {
        bytes_ += data.size();
        while (!data.empty()) {
            const size_t taken = std::min(data.size(), kBlockBytes - filled_);
            std::copy_n(data.begin(), taken, block_.begin() + static_cast<ptrdiff_t>(filled_));
            data = data.subspan(taken);
            filled_ += taken;
            if (filled_ == kBlockBytes) Compress();
        }
    }

    // Once, and last.
    Digest Finish() {
        const uint64_t bits = bytes_ * 8;
        block_[filled_++] = 0x80;
        if (filled_ > kBlockBytes - 8) {
            std::fill(block_.begin() + static_cast<ptrdiff_t>(filled_), block_.end(), uint8_t{0});
            Compress();
        }
        std::fill(block_.begin() + static_cast<ptrdiff_t>(filled_), block_.end() - 8, uint8_t{0});
        for (size_t i = 0; i < 8; ++i) block_[kBlockBytes - 1 - i] = static_cast<uint8_t>(bits >> (8 * i));
        Compress();
        Digest digest;
        for (size_t i = 0; i < digest.size(); ++i) {
            digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
        }
        return digest;
    }

  private:
    // FIPS 180-4, 6.2.2.
    void Compress() {
        std::array<uint32_t, 64> w;
        for (size_t t = 0; t < 16; ++t) {
            const uint8_t* const at = &block_[4 * t];
            w[t] = uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
        }
        for (size_t t = 16; t < 64; ++t) {
            const uint32_t x = w[t - 15], y = w[t - 2];
            w[t] = w[t - 16] + w[t - 7] + (std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3)) +
                   (std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10));
        }
        auto [a, b, c, d, e, f, g, h] = state_;
        for (size_t t = 0; t < 64; ++t) {
            const uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                 ((e & f) ^ (~e & g)) + kRound[t] + w[t];
            const uint32_t two =
                (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
        }
        const std::array<uint32_t, 8> change = {a, b, c, d, e, f, g, h};
        for (size_t i = 0; i < 8; ++i) state_[i] += change[i];
        filled_ = 0;
    }

    // FIPS 180-4, 5.3.3.
    std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<uint8_t, kBlockBytes> block_;
    size_t filled_ = 0;
    uint64_t bytes_ = 0;
};

}  // namespace

Digest Sha256(std::span<const uint8_t> data) {
    Hasher hasher;
    hasher.Add(data);
    return hasher.Finish();
}

Digest HmacSha256(std::span<const uint8_t> key, std::span<const uint8_t> data) {
    std::array<uint8_t, kBlockBytes> padded{};
    if (key.size() > kBlockBytes) {
        std::ranges::copy(Sha256(key), padded.begin());
    } else {
        std::ranges::copy(key, padded.begin());
    }
    std::array<uint8_t, kBlockBytes> inner_key, outer_key;
    for (size_t i = 0; i < kBlockBytes; ++i) {
        inner_key[i] = padded[i] ^ 0x36;
        outer_key[i] = padded[i] ^ 0x5c;
    }
    Hasher inner, outer;
    inner.Add(inner_key);
    inner.Add(data);
    outer.Add(outer_key);
    outer.Add(inner.Finish());
    return outer.Finish();
}

bool EqualConstantTime(std::span<const uint8_t> a, std::span<const uint8_t> b) {
    if (a.size() != b.size()) return false;
    volatile uint8_t difference = 0;  // volatile: no compiler may stop at the first one
    for (size_t i = 0; i < a.size(); ++i) difference = difference | (a[i] ^ b[i]);
    return difference == 0;
}

}  // namespace gradlane
