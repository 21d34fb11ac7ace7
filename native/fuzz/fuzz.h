// What the fuzz targets share: reading an input piece by piece, and a check that ends the program.
//
// A target is a file NAME_fuzz.cc with LLVMFuzzerTestOneInput(), and LLVMFuzzerCustomMutator() if
// its inputs have a structure that random bytes would rarely keep. Built with GRADLANE_FUZZ (clang),
// libFuzzer drives it; else replay.cc does, which runs corpus/NAME and then mutations of it,
// everywhere and for seconds.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace gradlane::fuzz {

// Zeros after its end.
class Input {
  public:
    Input(const uint8_t* data, size_t size) : data_(data), end_(data + size) {}
    bool empty() const { return data_ == end_; }
    uint8_t Byte() { return empty() ? 0 : *data_++; }
    uint64_t Word() {
        uint64_t word = 0;
        for (int i = 0; i < 8; ++i) word |= uint64_t{Byte()} << (8 * i);
        return word;
    }
    std::vector<uint8_t> Bytes(size_t most) {
        const size_t n = std::min(most, static_cast<size_t>(end_ - data_));
        std::vector<uint8_t> bytes(data_, data_ + n);
        data_ += n;
        return bytes;
    }

  private:
    const uint8_t* data_;
    const uint8_t* const end_;
};

}  // namespace gradlane::fuzz

#define MUST(condition)                                                                        \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);       \
            std::abort();                                                                      \
        }                                                                                      \
    } while (false)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// Changes data[0, size) in place, to at most max_size bytes; returns the new size.
extern "C" __attribute__((weak)) size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed);
