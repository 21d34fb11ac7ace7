// Heartbeats and frames on socket pairs. Beats come every millisecond here, among whatever else is sent.

#include "net/heartbeat.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "net/socket.h"
#include "testing/check.h"

using namespace gradlane;

namespace {

constexpr std::chrono::milliseconds kOften{1};
constexpr int kLimitMs = 30'000;  // for what comes at once
const std::string kBeat = "B";

struct Pair {
    Fd ours, theirs;
    Pair() {
        int ends[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
        ours = Fd(ends[0]);
        theirs = Fd(ends[1]);
    }
};

// Reads exactly `n` bytes; fewer where the peer has closed or nothing comes.
std::string Read(const Fd& socket, size_t n) {
    std::string bytes;
    while (bytes.size() < n) {
        pollfd poller{socket.get(), POLLIN, 0};
        std::array<char, 4096> part;
        if (poll(&poller, 1, kLimitMs) != 1) break;
        const ssize_t got = read(socket.get(), part.data(), std::min(part.size(), n - bytes.size()));
        if (got <= 0) break;
        bytes.append(part.data(), static_cast<size_t>(got));
    }
    return bytes;
}

uint32_t NumberIn(const std::string& bytes) {
    uint32_t number = 0;
    if (CHECK_EQ(bytes.size(), sizeof number)) std::memcpy(&number, bytes.data(), sizeof number);
    return number;
}

// "F", a sender and a number, and bytes that follow from the number, of a length that does too.
std::string FrameOf(char sender, uint32_t number) {
    std::string frame = {'F', sender};
    frame.append(reinterpret_cast<const char*>(&number), sizeof number);
    return frame + std::string(number % 1500, static_cast<char>('a' + number % 26));
}

// Either a beat, whose number it returns, or the next frame of its sender, counted in `next`.
struct Reader {
    const Fd& socket;
    std::array<uint32_t, 2> next = {0, 0};
    uint32_t beats = 0, silent_ms = 0;

    bool ReadOne() {
        const std::string kind = Read(socket, 1);
        if (kind == kBeat) {
            ++beats;
            silent_ms = NumberIn(Read(socket, 4));
            return true;
        }
        if (!CHECK_EQ(kind, "F")) return false;
        const std::string sender = Read(socket, 1);
        uint32_t& number = next.at(sender == "1");
        const std::string expected = FrameOf(sender == "1" ? '1' : '0', number);
        if (!CHECK_EQ(sender + Read(socket, expected.size() - 2), expected.substr(1))) return false;
        ++number;
        return true;
    }
};

}  // namespace

TEST(FramesOfSeveralThreadsAndBeatsAreNeverMixed) {
    constexpr uint32_t kFrames = 500;  // of both together fewer bytes than are kept for a peer
    Pair pair;
    Heartbeat heartbeat(kBeat, kOften);
    heartbeat.Add(pair.ours.get());
    std::vector<std::thread> senders;
    for (const char sender : {'0', '1'}) {
        senders.emplace_back([&heartbeat, &pair, sender] {
            for (uint32_t i = 0; i < kFrames; ++i) heartbeat.Send(pair.ours.get(), FrameOf(sender, i));
        });
    }
    Reader reader{pair.theirs};
    while ((reader.next[0] < kFrames || reader.next[1] < kFrames || reader.beats < 10) && reader.ReadOne()) {
    }
    for (std::thread& sender : senders) sender.join();
    CHECK_EQ(reader.next[0], kFrames);
    CHECK_EQ(reader.next[1], kFrames);
}

TEST(APeerThatDoesNotReadHoldsUpNobodyAndMissesNothing) {
    Pair deaf, well;
    Heartbeat heartbeat(kBeat, kOften);
    heartbeat.Add(deaf.ours.get());
    heartbeat.Add(well.ours.get());
    constexpr uint32_t kFrames = 1000;  // more than the kernel takes, fewer than are kept
    for (uint32_t i = 0; i < kFrames; ++i) heartbeat.Send(deaf.ours.get(), FrameOf('0', i));
    pollfd poller{deaf.ours.get(), POLLOUT, 0};
    CHECK_EQ(poll(&poller, 1, 0), 0);
    Reader others{well.theirs};
    while (others.beats < 10 && others.ReadOne()) {
    }
    Reader late{deaf.theirs};
    while ((late.next[0] < kFrames || late.beats < 10) && late.ReadOne()) {
    }
    CHECK_EQ(late.next[0], kFrames);
}

TEST(APeerThatNeverReadsIsGivenUp) {
    Pair pair;
    Heartbeat heartbeat(kBeat, kOften);
    heartbeat.Add(pair.ours.get());
    const std::string frame(16 << 10, 'x');
    for (int i = 0; i < 200; ++i) heartbeat.Send(pair.ours.get(), frame);
    pollfd poller{pair.ours.get(), POLLIN, 0};
    CHECK_EQ(poll(&poller, 1, 0), 1);  // the end, for whoever reads from it
    char byte;
    CHECK_EQ(read(pair.ours.get(), &byte, 1), 0);
}

TEST(ABeatTellsForHowLongNobodyHasCalled) {
    Pair pair;
    Heartbeat heartbeat(kBeat, kOften);
    heartbeat.Add(pair.ours.get());
    Reader reader{pair.theirs};
    while (reader.silent_ms < 20 && reader.ReadOne()) {
    }
    CHECK(reader.silent_ms >= 20);
    do {
        heartbeat.Lives();
    } while (reader.ReadOne() && reader.silent_ms >= 20);
    CHECK(reader.silent_ms < 20);
}

TEST(NothingIsSentOnARemovedConnectionNorAfterTheEnd) {
    Pair removed, kept;
    Heartbeat heartbeat(kBeat, kOften);
    heartbeat.Add(removed.ours.get());
    heartbeat.Add(kept.ours.get());
    heartbeat.Remove(removed.ours.get());
    heartbeat.Send(removed.ours.get(), FrameOf('0', 0));
    Fd watched = std::move(removed.theirs);
    removed.ours = Fd();
    while (Read(watched, 5).size() == 5) {
    }
    Reader reader{kept.theirs};
    while (reader.beats < 10 && reader.ReadOne()) {
    }
    heartbeat.Close();
    heartbeat.Send(kept.ours.get(), FrameOf('0', 0));
    kept.ours = Fd();
    while (true) {
        const std::string beat = Read(kept.theirs, 5);
        if (beat.empty()) break;
        if (!CHECK_EQ(beat.substr(0, 1), kBeat)) break;
    }
}

TEST(AConnectionThatBreaksEndsNothingElse) {
    Pair broken, kept;
    Heartbeat heartbeat(kBeat, kOften);
    heartbeat.Add(broken.ours.get());
    heartbeat.Add(kept.ours.get());
    broken.theirs = Fd();
    heartbeat.Send(broken.ours.get(), FrameOf('0', 0));
    Reader reader{kept.theirs};
    while (reader.beats < 10 && reader.ReadOne()) {
    }
    CHECK(reader.beats >= 10);
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
