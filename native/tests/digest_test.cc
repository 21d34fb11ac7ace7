#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "digest/crc32c.h"
#include "digest/sha256.h"
#include "testing/check.h"

using namespace gradlane;

namespace {

std::span<const uint8_t> Bytes(std::string_view text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::string Hex(std::span<const uint8_t> bytes) {
    std::string hex;
    for (const uint8_t byte : bytes) {
        hex += "0123456789abcdef"[byte >> 4];
        hex += "0123456789abcdef"[byte & 15];
    }
    return hex;
}

std::vector<uint8_t> RandomBytes(size_t n) {
    std::mt19937 random(20260101);
    std::vector<uint8_t> bytes(n);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
}

// The definition, a bit at a time.
uint32_t SlowCrc32c(std::span<const uint8_t> data) {
    uint32_t crc = 0xFFFFFFFF;
    for (const uint8_t byte : data) {
        crc ^= byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
    }
    return ~crc;
}

}  // namespace

// RFC 3720, B.4: there the bytes of the checksum stand in the order sent, lowest first.
TEST(Crc32cOfThePublishedVectors) {
    std::vector<uint8_t> data(32, 0x00);
    CHECK_EQ(Crc32c(data.data(), 32), 0x8A9136AAu);
    data.assign(32, 0xFF);
    CHECK_EQ(Crc32c(data.data(), 32), 0x62A8AB43u);
    for (size_t i = 0; i < 32; ++i) data[i] = static_cast<uint8_t>(i);
    CHECK_EQ(Crc32c(data.data(), 32), 0x46DD794Eu);
    for (size_t i = 0; i < 32; ++i) data[i] = static_cast<uint8_t>(31 - i);
    CHECK_EQ(Crc32c(data.data(), 32), 0x113FDB5Cu);
    const std::vector<uint8_t> read = {0x01, 0xC0, 0, 0, 0, 0, 0,    0, 0,    0, 0, 0,    0, 0, 0, 0,  //
                                       0x14, 0,    0, 0, 0, 0, 0x04, 0, 0,    0, 0, 0x14, 0, 0, 0, 0x18,
                                       0x28, 0,    0, 0, 0, 0, 0,    0, 0x02, 0, 0, 0,    0, 0, 0, 0};
    CHECK_EQ(Crc32c(read.data(), read.size()), 0xD9963A56u);
    CHECK_EQ(Crc32c("123456789", 9), 0xE3069283u);
    CHECK_EQ(Crc32c(nullptr, 0), 0u);
}

TEST(Crc32cOfEveryShortLengthAndAlignmentIsThatOfTheDefinition) {
    const std::vector<uint8_t> data = RandomBytes(1200);
    for (size_t n = 0; n <= 1100; ++n) {
        const size_t start = n % 9;
        const uint32_t expected = SlowCrc32c(std::span(data).subspan(start, n));
        for (const Crc32cKernel& kernel : RunnableCrc32c()) {
            if (!CHECK_EQ(~kernel.extend(~0u, &data[start], n), expected)) return;
        }
    }
}

TEST(Crc32cOfLongDataIsThatOfTheDefinition) {
    const std::vector<uint8_t> data = RandomBytes(100'001);
    for (const size_t n : {6143, 6144, 6145, 12'288, 30'000, 32'768, 99'991}) {
        const uint32_t expected = SlowCrc32c(std::span(data).subspan(3, n));
        for (const Crc32cKernel& kernel : RunnableCrc32c())
            CHECK_EQ(~kernel.extend(~0u, &data[3], n), expected);
    }
}

TEST(Crc32cExtends) {
    const std::vector<uint8_t> data = RandomBytes(20'000);
    const uint32_t whole = Crc32c(data.data(), data.size());
    for (size_t cut = 0; cut <= data.size(); cut += 97) {
        if (!CHECK_EQ(Crc32c(&data[cut], data.size() - cut, Crc32c(data.data(), cut)), whole)) return;
    }
}

// FIPS 180-4's examples, as published with the standard.
TEST(Sha256OfThePublishedVectors) {
    CHECK_EQ(Hex(Sha256(Bytes(""))), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK_EQ(Hex(Sha256(Bytes("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQ(Hex(Sha256(Bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
             "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK_EQ(Hex(Sha256(Bytes("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                              "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"))),
             "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
    CHECK_EQ(Hex(Sha256(Bytes(std::string(1'000'000, 'a')))),
             "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// RFC 4231, 4.2 to 4.8.
TEST(HmacSha256OfThePublishedVectors) {
    const auto hmac = [](const std::string& key, const std::string& data) {
        return Hex(HmacSha256(Bytes(key), Bytes(data)));
    };
    CHECK_EQ(hmac(std::string(20, '\x0b'), "Hi There"),
             "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    CHECK_EQ(hmac("Jefe", "what do ya want for nothing?"),
             "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK_EQ(hmac(std::string(20, '\xaa'), std::string(50, '\xdd')),
             "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    std::string counted;
    for (char byte = 1; byte <= 25; ++byte) counted += byte;
    CHECK_EQ(hmac(counted, std::string(50, '\xcd')),
             "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
    CHECK_EQ(hmac(std::string(20, '\x0c'), "Test With Truncation").substr(0, 32),
             "a3b6167473100ee06e0c796c2955552b");
    CHECK_EQ(hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
             "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    CHECK_EQ(hmac(std::string(131, '\xaa'),
                  "This is a test using a larger than block-size key and a larger than block-size data. "
                  "The key needs to be hashed before being used by the HMAC algorithm."),
             "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(EqualConstantTimeIsEquality) {
    const Digest digest = Sha256(Bytes("abc"));
    CHECK(EqualConstantTime(digest, Sha256(Bytes("abc"))));
    for (size_t i = 0; i < digest.size(); ++i) {
        Digest other = digest;
        other[i] ^= 0x80;
        CHECK(!EqualConstantTime(digest, other));
    }
    CHECK(!EqualConstantTime(digest, std::span(digest).first(31)));
    CHECK(EqualConstantTime({}, {}));
}

int main(int argc, char** argv) { return testing::RunTests(argc, argv); }
