#include "host/meeting.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "testing/check.h"
#include "testing/rooms.h"

using namespace gradlane;

namespace {

constexpr int64_t kPatience = 20'000;  // ms
constexpr size_t kBytes = 64 << 10;
const std::vector<uint8_t> kSecret(32, 7);

// Brings meetings forward in turns, as processes would beside one another.
bool Advance(const std::vector<Meeting*>& all, Meeting::State wanted) {
    for (int64_t turn = 0; turn < kPatience; ++turn) {
        size_t there = 0;
        for (Meeting* meeting : all) there += meeting->Wait(1) == wanted;
        if (there == all.size()) return true;
    }
    return false;
}

std::unique_ptr<Meeting> Lead(uint32_t ranks) { return Meeting::Lead(NumbersUpTo(ranks), kBytes, kSecret); }

std::unique_ptr<Meeting> Join(const Meeting& first, uint32_t rank, uint32_t ranks, std::vector<uint8_t> secret = kSecret,
                              size_t bytes = kBytes) {
    return Meeting::Join(first.name(), rank, NumbersUpTo(ranks), bytes, std::move(secret));
}

// A caller that speaks for itself.
Fd Call(const std::string& name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    REQUIRE(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
    return socket;
}

// By its name: a sanitizer may map something else at an address that has become free.
bool IsMappedHere() {
    std::ifstream maps("/proc/self/maps");
    const std::string mapped((std::istreambuf_iterator<char>(maps)), std::istreambuf_iterator<char>());
    return mapped.empty() || mapped.find("memfd:gradlane") != std::string::npos;
}

}  // namespace

TEST(ASegmentIsOneMemoryForAllThatMapItAndKeepsItsSize) {
    std::string why;
    const Segment mine = Segment::Create(kBytes, &why);
    REQUIRE(mine);
    CHECK_EQ(mine.data()[kBytes - 1], 0);
    const Segment theirs = Segment::Map(Fd(dup(mine.fd().get())), kBytes, &why);
    REQUIRE(theirs);
    mine.data()[5] = 42;
    CHECK_EQ(theirs.data()[5], 42);
    CHECK(ftruncate(theirs.fd().get(), 1) != 0);
    CHECK(ftruncate(theirs.fd().get(), 2 * kBytes) != 0);
    CHECK(!Segment::Map(Fd(dup(mine.fd().get())), kBytes - 4096, &why));
}

TEST(MemoryThatCouldShrinkIsNotMapped) {
    Fd loose(memfd_create("loose", MFD_CLOEXEC));
    REQUIRE(ftruncate(loose.get(), kBytes) == 0);
    std::string why;
    CHECK(!Segment::Map(std::move(loose), kBytes, &why));
    CHECK(why.find("sealed") != std::string::npos);
}

TEST(AForkedChildDoesNotHaveIt) {
    std::string why;
    const Segment segment = Segment::Create(kBytes, &why);
    REQUIRE(segment);
    REQUIRE(IsMappedHere());
    const pid_t child = fork();
    if (child == 0) {
        _exit(fcntl(segment.fd().get(), F_GETFD) != -1 || IsMappedHere());
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
}

TEST(MemoryThatIsNotThereIsMissedAtOnceAndWithAReason) {
    std::string why;
    CHECK(!Segment::Create(size_t{1} << 60, &why));
    CHECK(why.find("bytes of shared memory") != std::string::npos);
}

TEST(RanksMeetAndWakeOneAnother) {
    const auto first = Lead(3);
    CHECK_EQ(first->missing(), "1, 2");
    const auto second = Join(*first, 1, 3), third = Join(*first, 2, 3);
    REQUIRE(Advance({first.get(), second.get(), third.get()}, Meeting::State::kMet));
    const HostRoom rooms[] = {first->Take(), second->Take(), third->Take()};
    rooms[0].segment.data()[9] = 1;
    for (const HostRoom& room : rooms) {
        CHECK_EQ(room.segment.data()[9], 1);
        REQUIRE(room.wakes.size() == 3);
        uint64_t count = 1;
        CHECK_EQ(write(room.wakes[1].get(), &count, sizeof count), 8);
    }
    uint64_t count = 0;
    CHECK_EQ(read(rooms[1].wakes[1].get(), &count, sizeof count), 8);
    CHECK_EQ(count, 3);
}

TEST(StrangersHoldUpNobody) {
    const auto first = Lead(2);
    const Fd silent = Call(first->name()), noisy = Call(first->name()), gone = Call(first->name());
    CHECK_EQ(send(noisy.get(), "\2nonsense", 9, 0), 9);
    shutdown(gone.get(), SHUT_RDWR);
    const auto second = Join(*first, 1, 2);
    CHECK(Advance({first.get(), second.get()}, Meeting::State::kMet));
}

TEST(AProcessOfAnotherUserIsHungUpOn) {
    if (geteuid() != 0) return;  // nobody else can become another user
    const auto first = Lead(2);
    const pid_t child = fork();
    if (child == 0) {
        if (setresuid(65534, 65534, 65534) != 0) _exit(2);
        const Fd socket = Call(first->name());
        pollfd polled{socket.get(), POLLIN, 0};
        char byte;
        _exit(poll(&polled, 1, static_cast<int>(kPatience)) == 1 && recv(socket.get(), &byte, 1, 0) <= 0 ? 0 : 1);
    }
    int status = -1;
    while (waitpid(child, &status, WNOHANG) == 0) first->Wait(1);
    CHECK_EQ(status, 0);
    const auto second = Join(*first, 1, 2);
    CHECK(Advance({first.get(), second.get()}, Meeting::State::kMet));
}

TEST(OneWhoDoesNotKnowTheSecretHearsNothingAndTheOthersMeet) {
    const auto first = Lead(2);
    const auto stranger = Join(*first, 1, 2, std::vector<uint8_t>(32, 8));
    while (stranger->Wait(1) == Meeting::State::kGoingOn) first->Wait(1);
    CHECK(!stranger->Take().segment);
    const auto second = Join(*first, 1, 2);
    CHECK(Advance({first.get(), second.get()}, Meeting::State::kMet));
}

TEST(ARankThatEndsEndsTheMeetingForAllByName) {
    const auto first = Lead(3);
    auto second = Join(*first, 1, 3);
    const auto third = Join(*first, 2, 3);
    // rank 1 has proved who it is, and is gone before the others come
    first->Wait(20), second->Wait(20), first->Wait(20);
    CHECK_EQ(first->missing(), "1, 2");
    third->Wait(20);
    second.reset();
    REQUIRE(Advance({first.get(), third.get()}, Meeting::State::kFailed));
    CHECK_EQ(first->blamed(), 1);
    CHECK_EQ(static_cast<int>(first->fault()), static_cast<int>(Meeting::Fault::kEnded));
    CHECK(third->why().find("rank") != std::string::npos);
}

TEST(ARankWithoutMemoryIsTheReasonThatAllHear) {
    const auto first = Lead(3);
    const auto second = Join(*first, 1, 3);
    const auto third = Join(*first, 2, 3, kSecret, 2 * kBytes);  // cannot map what it is given
    REQUIRE(Advance({first.get(), second.get(), third.get()}, Meeting::State::kFailed));
    for (const auto* meeting : {first.get(), second.get(), third.get()}) {
        CHECK_EQ(meeting->blamed(), 2);
        CHECK_EQ(static_cast<int>(meeting->fault()), static_cast<int>(Meeting::Fault::kLimit));
        CHECK(meeting->why().find("rank 2: got 65536 bytes") != std::string::npos);
    }
}

TEST(WhatCannotBeginHasFailed) {
    const auto many = Lead(kMaxHostRanks + 1);
    CHECK_EQ(static_cast<int>(many->Wait(0)), static_cast<int>(Meeting::State::kFailed));
    CHECK(many->why().find("33 ranks") != std::string::npos);
    const auto greedy = Meeting::Lead({4, 6}, size_t{1} << 60, kSecret);
    CHECK_EQ(static_cast<int>(greedy->fault()), static_cast<int>(Meeting::Fault::kLimit));
    CHECK(greedy->why().find("bytes of shared memory") != std::string::npos);
    CHECK_EQ(greedy->blamed(), 4);
    const auto late = Meeting::Join("gradlane-nobody", 1, {0, 1}, kBytes, kSecret);
    CHECK_EQ(static_cast<int>(late->fault()), static_cast<int>(Meeting::Fault::kEnded));
    CHECK_EQ(late->blamed(), 0);
}

TEST(ErrorsHaveTheNumbersOfTheJob) {
    const auto first = Meeting::Lead({4, 6}, kBytes, kSecret);
    CHECK_EQ(first->missing(), "6");
    const auto second = Meeting::Join(first->name(), 1, {4, 6}, 2 * kBytes, kSecret);
    REQUIRE(Advance({first.get(), second.get()}, Meeting::State::kFailed));
    CHECK_EQ(first->blamed(), 6);
    CHECK(second->why().find("rank 6: got") != std::string::npos);
    // a rank of another host that knows the secret is not one of these
    const auto third = Meeting::Lead({4, 6}, kBytes, kSecret);
    const auto stray = Meeting::Join(third->name(), 1, {5, 7}, kBytes, kSecret);
    for (int turn = 0; turn < 100 && stray->Wait(1) == Meeting::State::kGoingOn; ++turn) third->Wait(1);
    CHECK_EQ(static_cast<int>(stray->fault()), static_cast<int>(Meeting::Fault::kEnded));
    CHECK_EQ(third->missing(), "6");
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
