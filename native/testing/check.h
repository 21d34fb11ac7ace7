// The tests' harness. A file of tests is a program:
//
//     TEST(SumsWrap) { CHECK_EQ(Sum(127, 1), -128); }
//     int main(int argc, char** argv) { return RunTests(argc, argv); }
//
// A failed check prints both sides and where it stands, and the test goes on; a REQUIRE ends its
// test. The program runs every test whose name contains its argument (all without one) and exits 1
// if a check failed. Checks may be made by several threads at once; REQUIRE only by the one that
// runs the test.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradlane::testing {

struct Test {
    const char* name;
    void (*run)();
};

inline std::vector<Test>& Tests() {
    static std::vector<Test> tests;
    return tests;
}

inline std::atomic<int> failures{0};

// Thrown by REQUIRE, caught by RunTests().
struct Abandoned {};

struct Registration {
    Registration(const char* name, void (*run)()) { Tests().push_back({name, run}); }
};

template <class T>
std::string Show(const T& value) {
    if constexpr (requires(std::ostream& out) { out << value; }) {
        std::ostringstream out;
        if constexpr (std::same_as<T, uint8_t> || std::same_as<T, int8_t>) {
            out << static_cast<int>(value);
        } else {
            out << std::boolalpha << value;
        }
        return out.str();
    } else if constexpr (std::is_enum_v<T>) {
        return Show(static_cast<std::underlying_type_t<T>>(value));
    } else if constexpr (requires { value.begin() != value.end(); }) {
        std::string shown = "{";
        for (const auto& element : value) shown += (shown.size() > 1 ? ", " : "") + Show(element);
        return shown + "}";
    } else {
        return "(a value that cannot be shown)";
    }
}

inline void Fail(const char* file, int line, const std::string& what) {
    ++failures;
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

inline bool Check(bool holds, const char* text, const char* file, int line) {
    if (!holds) Fail(file, line, std::string("not so: ") + text);
    return holds;
}

template <class A, class B>
bool CheckEq(const A& got, const B& expected, const char* text, const char* file, int line) {
    bool equal;
    if constexpr (std::integral<A> && std::integral<B> && !std::same_as<A, bool> && !std::same_as<B, bool>) {
        // A literal need not be of the sign of what it is compared with.
        equal = std::cmp_equal(got, expected);
    } else {
        equal = got == expected;
    }
    if (!equal) {
        Fail(file, line, std::string(text) + "\n    got      " + Show(got) + "\n    expected " + Show(expected));
    }
    return equal;
}

inline int RunTests(int argc, char** argv) {
    // the tests whose names contain one of the arguments; without any, all
    const auto is_wanted = [&](std::string_view name) {
        return argc == 1 || std::any_of(argv + 1, argv + argc, [&](const char* part) { return name.find(part) != std::string_view::npos; });
    };
    int ran = 0, failed = 0;
    for (const Test& test : Tests()) {
        if (!is_wanted(test.name)) continue;
        const int before = failures;
        const auto start = std::chrono::steady_clock::now();
        try {
            test.run();
        } catch (const Abandoned&) {
        }
        const auto took =
            std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
        const bool passed = failures == before;
        std::fprintf(stderr, "%s %s (%lld ms)\n", passed ? "ok    " : "FAILED", test.name,
                     static_cast<long long>(took.count()));
        ++ran;
        failed += passed ? 0 : 1;
    }
    std::fprintf(stderr, "%d of %d passed\n", ran - failed, ran);
    return ran == 0 || failed != 0 ? 1 : 0;
}

}  // namespace gradlane::testing

#define TEST(name)                                                                       \
    static void Test##name();                                                            \
    static const ::gradlane::testing::Registration registered_##name(#name, Test##name); \
    static void Test##name()

// Each is an expression that says whether it held, so that a loop can stop at its first failure.
#define CHECK(condition) \
    ::gradlane::testing::Check(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
#define CHECK_EQ(got, expected) \
    ::gradlane::testing::CheckEq((got), (expected), #got " == " #expected, __FILE__, __LINE__)
#define REQUIRE(condition) (CHECK(condition) ? void() : throw ::gradlane::testing::Abandoned{})
