// The first parser that a stranger's bytes meet.

#include <cstring>

#include "digest/crc32c.h"
#include "fuzz/fuzz.h"
#include "wire/frame.h"

using namespace gradlane;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    fuzz::Input input(data, size);
    const bool mend = input.Byte() % 2 == 0;  // or no mutation would come past the checksum
    uint8_t bytes[kHeaderBytes] = {}, again[kHeaderBytes];
    const auto rest = input.Bytes(kHeaderBytes);
    std::copy(rest.begin(), rest.end(), bytes);
    if (mend) {
        const uint32_t crc = Crc32c(bytes, kHeaderBytes - 4);
        for (size_t i = 0; i < 4; ++i) bytes[kHeaderBytes - 4 + i] = static_cast<uint8_t>(crc >> (8 * i));
    }
    Header header;
    header.tensor = 77;
    const Header before = header;
    const HeaderFault fault = Decode(bytes, &header);
    MUST(std::strlen(Describe(fault)) > 1);
    if (fault != HeaderFault::kNone) {
        MUST(header == before);
        return 0;
    }
    // every bit of a header that passes means something, and its length is one that its type may have
    Encode(header, again);
    MUST(std::memcmp(bytes, again, kHeaderBytes) == 0);
    MUST(header.length <= (IsData(header.type) ? kMaxPacketBytes : kMaxControlBytes));
    if (const auto expected = ControlBytes(header.type)) MUST(header.length == *expected);

    uint8_t payload[kMaxControlBytes] = {}, back[kMaxControlBytes] = {};
    const auto said = input.Bytes(kMaxControlBytes);
    std::copy(said.begin(), said.end(), payload);
    EncodeHello(DecodeHello(payload), back);
    std::memset(payload + 22, 0, 2);  // reserved
    MUST(std::memcmp(payload, back, Hello::kBytes) == 0);
    EncodeDefinition(DecodeDefinition(payload), back);
    MUST(std::memcmp(payload, back, Definition::kBytes) == 0);

    Rule rule, same;
    if (const char* why = DecodeRule(payload, &rule)) {
        MUST(std::strlen(why) > 1 && rule == Rule{});
    } else {
        MUST(WhyNot(rule) == nullptr);
        EncodeRule(rule, back);
        MUST(DecodeRule(back, &same) == nullptr && rule == same);
    }
    return 0;
}
