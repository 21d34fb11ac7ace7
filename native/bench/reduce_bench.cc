// Bytes per second of the reduction and the checksum, memcpy beside them. Each line: the median of rounds, in
// which all take turns, and the spread from the fastest to the slowest. Bytes are those of one operand (what
// a packet brings), so a sum that reads two and writes one moves three times as many.
//
//     reduce_bench [milliseconds a measurement, 20 without]

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "digest/crc32c.h"
#include "reduce/reduce.h"

using namespace gradlane;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int kRounds = 15;

struct Contest {
    std::string name;
    std::function<void()> run;
    std::vector<double> gigabytes_per_second;
};

double Measure(const std::function<void()>& run, size_t bytes, std::chrono::nanoseconds at_least) {
    size_t calls = 0;
    const auto start = Clock::now();
    auto took = Clock::duration::zero();
    while (took < at_least) {
        run();
        ++calls;
        took = Clock::now() - start;
    }
    return static_cast<double>(calls * bytes) / static_cast<double>(std::chrono::nanoseconds(took).count());
}

void Compare(size_t bytes, std::chrono::milliseconds at_least) {
    // Zeros: sums stay as they are, however often they are added.
    std::vector<uint8_t> into(bytes), from(bytes);
    std::vector<float> wide(bytes / 2);
    volatile uint32_t crc = 0;
    const auto reduce = [&](DType dtype) {
        return [&, dtype] { Reduce(dtype, Op::kSum, into.data(), from.data(), bytes / ElementBytes(dtype)); };
    };
    const auto widen = [&](DType dtype) {
        return [&, dtype] { WidenReduce(dtype, Op::kSum, wide.data(), from.data(), bytes / 2); };
    };
    const auto narrow = [&](DType dtype) {
        return [&, dtype] { Narrow(dtype, into.data(), wide.data(), bytes / 2); };
    };
    std::vector<Contest> contests = {
        {"memcpy", [&] { std::memcpy(into.data(), from.data(), bytes); }, {}},
        {"reduce f32", reduce(DType::kF32), {}},
        {"reduce both f32",
         [&] { ReduceBoth(DType::kF32, Op::kSum, into.data(), from.data(), bytes / 4); },
         {}},
        {"reduce f16", reduce(DType::kF16), {}},
        {"reduce bf16", reduce(DType::kBF16), {}},
        {"widen and reduce f16", widen(DType::kF16), {}},
        {"widen and reduce bf16", widen(DType::kBF16), {}},
        {"narrow f16", narrow(DType::kF16), {}},
        {"narrow bf16", narrow(DType::kBF16), {}},
    };
    for (const Crc32cKernel& kernel : RunnableCrc32c()) {
        contests.push_back({std::string("crc32c ") + kernel.isa, [&] { crc = kernel.extend(crc, from.data(), bytes); }, {}});
    }
    for (int round = 0; round < kRounds; ++round) {
        for (Contest& contest : contests) {
            contest.gigabytes_per_second.push_back(Measure(contest.run, bytes, at_least));
        }
    }
    std::printf("%zu bytes\n", bytes);
    for (Contest& contest : contests) {
        std::vector<double>& rates = contest.gigabytes_per_second;
        std::sort(rates.begin(), rates.end());
        std::printf("  %-22s %7.2f GB/s  (%.2f to %.2f)\n", contest.name.c_str(), rates[kRounds / 2],
                    rates.front(), rates.back());
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::chrono::milliseconds at_least(argc > 1 ? std::max(1, std::atoi(argv[1])) : 20);
    std::printf("reduction by %s, crc32c by %s\n", ReduceIsa(), RunnableCrc32c().back().isa);
    Compare(30'000, at_least);      // a packet, in the cache
    Compare(64'000'000, at_least);  // beyond every cache
    return 0;
}
