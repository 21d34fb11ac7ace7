// Runs a fuzz target where libFuzzer is not: each file of the corpus, then mutations of them for some seconds.
//
//     frame_fuzz [seconds [corpus]]
//
// The n-th mutation is the same in every run, so a crash comes back; the input that crashed is left in crash.bin.

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "fuzz/fuzz.h"

namespace {

using Bytes = std::vector<uint8_t>;
constexpr size_t kLongest = 4096;

void Mutate(Bytes& bytes, const Bytes& other, std::mt19937& random) {
    const auto any = [&random](size_t below) { return below == 0 ? 0 : random() % below; };
    for (size_t times = 1 + any(4); times > 0; --times) {
        const auto at = bytes.begin() + static_cast<ptrdiff_t>(any(bytes.size()));
        const auto byte = static_cast<uint8_t>(random());
        switch (any(bytes.empty() ? 1 : 6)) {
            case 0: bytes.insert(at, byte); break;
            case 1: *at = byte; break;
            case 2: *at ^= static_cast<uint8_t>(1 << any(8)); break;
            case 3: bytes.erase(at, at + static_cast<ptrdiff_t>(std::min<size_t>(1 + any(8), static_cast<size_t>(bytes.end() - at)))); break;
            case 4: {  // a part of another input
                const size_t begin = any(other.size()), n = any(other.size() - begin + 1);
                const Bytes part(other.begin() + static_cast<ptrdiff_t>(begin), other.begin() + static_cast<ptrdiff_t>(begin + n));
                bytes.insert(at, part.begin(), part.end());
                break;
            }
            default: {  // a part of itself, again
                const Bytes part(at, at + static_cast<ptrdiff_t>(std::min<size_t>(1 + any(32), static_cast<size_t>(bytes.end() - at))));
                bytes.insert(bytes.end(), part.begin(), part.end());
            }
        }
    }
    if (bytes.size() > kLongest) bytes.resize(kLongest);
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::stod(argv[1]) : 2;
    const std::filesystem::path corpus = argc > 2 ? argv[2] : GRADLANE_CORPUS;
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(corpus)) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    std::vector<Bytes> inputs;
    for (const auto& file : files) {
        std::ifstream in(file, std::ios::binary);
        inputs.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
        LLVMFuzzerTestOneInput(inputs.back().data(), inputs.back().size());
    }
    if (inputs.empty()) {
        std::fprintf(stderr, "no corpus in %s\n", corpus.c_str());
        return 1;
    }
    std::mt19937 random(1);
    size_t runs = 0;
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    std::ofstream crash("crash.bin", std::ios::binary);
    while (std::chrono::steady_clock::now() < until) {
        Bytes bytes = inputs[random() % inputs.size()];
        Mutate(bytes, inputs[random() % inputs.size()], random);
        const auto length = static_cast<uint32_t>(bytes.size());
        crash.seekp(0);
        crash.write(reinterpret_cast<const char*>(bytes.data()), length).flush();
        std::filesystem::resize_file("crash.bin", length);
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
        ++runs;
    }
    crash.close();
    std::filesystem::remove("crash.bin");
    std::fprintf(stderr, "%zu of the corpus and %zu mutations of them\n", inputs.size(), runs);
}
