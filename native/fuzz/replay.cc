// Runs a fuzz target where libFuzzer is not: each file of the corpus, then mutations of them for some seconds.
//
//     frame_fuzz [seconds [corpus [runs]]]
//
// runs: mutations at most. The n-th mutation is the same in every run, so a crash comes back; the input that crashed is
// left in crash.bin.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

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

// What the process that runs the target leaves to its parent, which is there when that one has crashed.
struct Current {
    size_t runs, size;
    uint8_t bytes[kLongest];
};

void Try(const Bytes& bytes, Current* current) {
    ++current->runs;
    current->size = std::min(bytes.size(), kLongest);
    std::copy_n(bytes.begin(), current->size, current->bytes);
    LLVMFuzzerTestOneInput(current->bytes, current->size);
}

// One that the target makes goes further in one run than mutations of bytes do: up to 32 of them, one on the other.
Bytes Mutated(const std::vector<Bytes>& inputs, std::mt19937& random) {
    Bytes bytes = inputs[random() % inputs.size()];
    auto* volatile mutate = LLVMFuzzerCustomMutator;  // volatile, or g++ warns where the target has one
    if (mutate == nullptr) {
        Mutate(bytes, inputs[random() % inputs.size()], random);
        return bytes;
    }
    size_t size = std::min(bytes.size(), kLongest);
    bytes.resize(kLongest);
    for (size_t times = size_t{1} << random() % 6; times > 0; --times) {
        size = mutate(bytes.data(), size, kLongest, static_cast<unsigned int>(random()));
    }
    bytes.resize(size);
    return bytes;
}

void RunAll(const std::vector<Bytes>& inputs, double seconds, size_t runs, Current* current) {
    for (const Bytes& input : inputs) Try(input, current);
    std::mt19937 random(1);
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (; runs > 0 && std::chrono::steady_clock::now() < until; --runs) Try(Mutated(inputs, random), current);
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::stod(argv[1]) : 2;
    const std::filesystem::path corpus = argc > 2 ? argv[2] : GRADLANE_CORPUS;
    const size_t runs = argc > 3 ? std::stoul(argv[3]) : SIZE_MAX;
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(corpus)) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    std::vector<Bytes> inputs;
    for (const auto& file : files) {
        std::ifstream in(file, std::ios::binary);
        inputs.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    }
    if (inputs.empty()) {
        std::fprintf(stderr, "no corpus in %s\n", corpus.c_str());
        return 1;
    }
    void* shared = mmap(nullptr, sizeof(Current), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 1;
    auto* current = static_cast<Current*>(shared);
    const auto began = std::chrono::steady_clock::now();
    const pid_t child = fork();
    if (child == 0) {
        RunAll(inputs, seconds, runs, current);
        std::exit(0);  // not _exit: what watches for leaks looks at the end
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return 1;
    if (status != 0) {
        std::ofstream("crash.bin", std::ios::binary).write(reinterpret_cast<const char*>(current->bytes), static_cast<std::streamsize>(current->size));
        std::fprintf(stderr, "run %zu crashed (wait status %#x): its input is in crash.bin\n", current->runs, static_cast<unsigned>(status));
        return 1;
    }
    std::fprintf(stderr, "%zu of the corpus and %zu mutations of them in %.1f s\n", inputs.size(), current->runs - inputs.size(),
                 std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
}
