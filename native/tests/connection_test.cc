#include "node/connection.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "digest/crc32c.h"
#include "testing/check.h"

using namespace gradlane;

namespace {

using Bytes = std::vector<uint8_t>;
constexpr size_t kPacket = 6000;  // more than the stage holds

struct Pair {
    Fd ours, theirs;
    Pair() {
        int ends[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
        ours = Fd(ends[0]);
        theirs = Fd(ends[1]);
    }
};

// Takes whatever comes, each payload into memory of its own.
struct Collector : Connection::Owner {
    std::vector<Header> headers, frames;
    std::vector<Bytes> payloads;
    std::vector<uint32_t> sent;
    int parks = 0;  // how many headers shall be parked first
    bool is_turn = true;

    Connection::Sink OnHeader(Connection&, const Header& header) override {
        if (parks > 0) {
            --parks;
            return Connection::Sink::Park();
        }
        if (header.tensor == 666) return Connection::Sink::Fault(Code::kMismatch, "not that one");
        headers.push_back(header);
        payloads.emplace_back(header.length);
        return Connection::Sink::Take(payloads.back().data());
    }
    bool OnFrame(Connection&, const Header& header) override {
        frames.push_back(header);
        return true;
    }
    void OnSent(Connection&, const Header& header) override { sent.push_back(header.tensor); }
    bool IsTurn(const Connection&) override { return is_turn; }
};

Bytes FrameOf(uint32_t tensor, size_t length) {
    Bytes frame(kHeaderBytes);
    for (size_t i = 0; i < length; ++i) frame.push_back(static_cast<uint8_t>(tensor * 31 + i * 7));
    Header header;
    header.type = FrameType::kPush;
    header.flags = kFlagChecksum;
    header.tensor = tensor;
    header.length = static_cast<uint32_t>(length);
    header.payload_crc = Crc32c(frame.data() + kHeaderBytes, length);
    Encode(header, frame.data());
    return frame;
}

void Say(const Fd& socket, const uint8_t* bytes, size_t n) {
    REQUIRE(write(socket.get(), bytes, n) == static_cast<ssize_t>(n));
}

Bytes Heard(const Fd& socket, size_t most = 1 << 20) {
    Bytes bytes(most);
    const ssize_t n = read(socket.get(), bytes.data(), most);
    bytes.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return bytes;
}

void Append(Bytes& into, const Bytes& more) { into.insert(into.end(), more.begin(), more.end()); }

Run RunOf(uint32_t tensor, const Bytes& memory, uint32_t packet_bytes) {
    Run run;
    run.tensor = tensor;
    run.memory = memory.data();
    run.layout = Dealer(1).Cut(memory.size(), packet_bytes);
    run.end = run.layout->packets;
    return run;
}

}  // namespace

TEST(FramesCutAnywhereAreReadWhole) {
    Bytes stream;
    for (const size_t length : {size_t{0}, size_t{1}, size_t{64}, kPacket}) Append(stream, FrameOf(static_cast<uint32_t>(length), length));
    for (size_t cut = 0; cut <= stream.size(); ++cut) {
        Pair pair;
        Collector got;
        Connection connection(std::move(pair.ours), false, Connection::State::kOpen);
        Say(pair.theirs, stream.data(), cut);
        CHECK(connection.Read(got, 1 << 20, 0) == Connection::Io::kDone);
        Say(pair.theirs, stream.data() + cut, stream.size() - cut);
        CHECK(connection.Read(got, 1 << 20, 0) == Connection::Io::kDone);
        if (!CHECK_EQ(got.frames.size(), 4)) return;
        for (size_t i = 0; i < 4; ++i) {
            const Bytes frame = FrameOf(got.frames[i].tensor, got.frames[i].length);
            CHECK(std::equal(got.payloads[i].begin(), got.payloads[i].end(), frame.begin() + kHeaderBytes));
        }
    }
}

TEST(AByteAtATimeAndASmallBudgetLoseNothing) {
    Bytes stream;
    for (uint32_t tensor = 0; tensor < 5; ++tensor) Append(stream, FrameOf(tensor, 50 * tensor));
    Pair pair;
    Collector got;
    Connection connection(std::move(pair.ours), false, Connection::State::kOpen);
    for (const uint8_t byte : stream) {
        Say(pair.theirs, &byte, 1);
        connection.Read(got, 1, 0);
    }
    CHECK_EQ(got.frames.size(), 5);
    CHECK_EQ(connection.received_bytes, stream.size());
    CHECK_EQ(connection.received_packets, 5);
}

TEST(ThePollerTellsWhenTheRestOfAPacketHasCome) {
    std::string why;
    const Fd listener = Listen("127.0.0.1", 0, &why);
    const Fd theirs = Connect("127.0.0.1", PortOf(listener), &why);
    pollfd poller{listener.get(), POLLIN, 0};
    REQUIRE(poll(&poller, 1, -1) == 1);
    Connection connection(Accept(listener), false, Connection::State::kOpen);
    poller.fd = theirs.get();
    poller.events = POLLOUT;
    REQUIRE(poll(&poller, 1, -1) == 1);
    poller = {connection.socket().get(), POLLIN, 0};
    Collector got;
    const Bytes frame = FrameOf(1, 3000);
    Say(theirs, frame.data(), 1000);
    REQUIRE(poll(&poller, 1, -1) == 1);
    CHECK(connection.Read(got, 1 << 20, 0) == Connection::Io::kDone);
    CHECK(connection.awaits_rest());
    CHECK(connection.Read(got, 1 << 20, 7) == Connection::Io::kDone);
    CHECK_EQ(connection.heard_ns, 0);  // to look is not to hear
    Say(theirs, frame.data() + 1000, 1000);
    CHECK_EQ(poll(&poller, 1, 0), 0);
    Say(theirs, frame.data() + 2000, frame.size() - 2000);
    REQUIRE(poll(&poller, 1, -1) == 1);
    CHECK(connection.Read(got, 1 << 20, 0) == Connection::Io::kDone);
    CHECK(!connection.awaits_rest());
    CHECK_EQ(got.frames.size(), 1);
    Say(theirs, frame.data(), 1);
    CHECK_EQ(poll(&poller, 1, -1), 1);
}

TEST(NoFlippedBitOfAFrameIsTaken) {
    const Bytes frame = FrameOf(3, 64);
    for (size_t bit = 0; bit < 8 * frame.size(); ++bit) {
        Bytes damaged = frame;
        damaged[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        Pair pair;
        Collector got;
        Connection connection(std::move(pair.ours), false, Connection::State::kOpen);
        Say(pair.theirs, damaged.data(), damaged.size());
        CHECK(connection.Read(got, 1 << 20, 0) == Connection::Io::kFault);
        const bool is_mark = bit < 16;
        CHECK(connection.code() == (is_mark ? Code::kProtocol : Code::kCorrupt));
        CHECK_EQ(got.headers.size(), bit < 8 * kHeaderBytes ? 0 : 1);  // no field of a damaged header is looked at
        if (!CHECK_EQ(got.frames.size(), 0)) return;
    }
}

TEST(AFrameWithoutAChecksumIsTakenAtItsWord) {
    Bytes frame = FrameOf(3, 64);
    Header header;
    REQUIRE(Decode(frame.data(), &header) == HeaderFault::kNone);
    header.flags = 0;
    header.payload_crc = 0;
    Encode(header, frame.data());
    Pair pair;
    Collector got;
    Connection connection(std::move(pair.ours), false, Connection::State::kOpen);
    Say(pair.theirs, frame.data(), frame.size());
    CHECK(connection.Read(got, 1 << 20, 0) == Connection::Io::kDone);
    CHECK_EQ(got.frames.size(), 1);
}

TEST(AParkedFrameWaitsAndIsAskedForAgain) {
    Pair pair;
    Collector got;
    got.parks = 1;
    Connection connection(std::move(pair.ours), false, Connection::State::kOpen);
    Bytes stream = FrameOf(1, 100);
    Append(stream, FrameOf(2, 100));
    Say(pair.theirs, stream.data(), stream.size());
    CHECK(connection.Read(got, 1 << 20, 0) == Connection::Io::kParked);
    CHECK(connection.parked());
    CHECK_EQ(got.frames.size(), 0);
    connection.Resume();
    CHECK(connection.Read(got, 1 << 20, 0) == Connection::Io::kDone);
    REQUIRE(got.frames.size() == 2);
    CHECK_EQ(got.frames[0].tensor, 1);
    CHECK_EQ(got.frames[1].tensor, 2);
}

TEST(TheOwnersRefusalAndThePeersEndAreTold) {
    Pair pair;
    Collector got;
    Connection connection(std::move(pair.ours), false, Connection::State::kOpen);
    const Bytes frame = FrameOf(666, 10);
    Say(pair.theirs, frame.data(), frame.size());
    CHECK(connection.Read(got, 1 << 20, 0) == Connection::Io::kFault);
    CHECK(connection.code() == Code::kMismatch);
    CHECK_EQ(connection.why(), std::string("not that one"));

    Pair other;
    Connection ended(std::move(other.ours), false, Connection::State::kOpen);
    const Bytes whole = FrameOf(1, 10);
    Say(other.theirs, whole.data(), whole.size() - 1);
    other.theirs = Fd();
    CHECK(ended.Read(got, 1 << 20, 0) == Connection::Io::kDone);
    CHECK(ended.Read(got, 1 << 20, 0) == Connection::Io::kEnd);
    CHECK_EQ(got.frames.size(), 0);
}

// Two connections, back to back: what one writes the other reads, whatever the socket takes at a time.
TEST(WhatIsWrittenIsRead) {
    Pair pair;
    Collector sender, receiver;
    Connection writes(std::move(pair.ours), true, Connection::State::kOpen);
    Connection reads(std::move(pair.theirs), false, Connection::State::kOpen);
    Bytes memory(1 << 20);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
    writes.sender = 7;
    writes.Queue(0, RunOf(1, memory, 30'720));
    writes.QueueControl(ControlFrame(FrameType::kPing, 7, 0, nullptr, 0));
    for (int turns = 0; writes.has_output() && turns < 1000; ++turns) {
        CHECK(writes.Write(sender, 64 << 10, 0) != Connection::Io::kFault);
        CHECK(reads.Read(receiver, 1 << 20, 0) != Connection::Io::kFault);
    }
    const size_t packets = (memory.size() + 30'719) / 30'720;
    REQUIRE(receiver.frames.size() == packets + 1);
    CHECK(receiver.frames[0].type == FrameType::kPing);  // control goes ahead of data
    Bytes back;
    for (size_t i = 1; i <= packets; ++i) {
        CHECK_EQ(receiver.frames[i].offset, back.size());
        CHECK_EQ(receiver.frames[i].sender, 7);
        Append(back, receiver.payloads[i]);
    }
    CHECK(back == memory);
    CHECK_EQ(sender.sent.size(), packets);
    CHECK_EQ(writes.sent_bytes, reads.received_bytes);
}

TEST(WhoeverAwaitsItsTurnSendsControlFramesOnly) {
    Pair pair;
    Collector sender, receiver;
    Connection writes(std::move(pair.ours), true, Connection::State::kOpen);
    Connection reads(std::move(pair.theirs), false, Connection::State::kOpen);
    const Bytes memory(1000, 1);
    writes.Queue(0, RunOf(1, memory, 640));
    sender.is_turn = false;
    CHECK(writes.Write(sender, 64 << 10, 0) == Connection::Io::kDone);
    CHECK(writes.awaits_turn() && writes.has_packets() && writes.can_ping());
    writes.QueueControl(ControlFrame(FrameType::kPing, 7, 0, nullptr, 0));
    CHECK(writes.Write(sender, 64 << 10, 0) == Connection::Io::kDone);
    CHECK(writes.awaits_turn());
    reads.Read(receiver, 1 << 20, 0);
    REQUIRE(receiver.frames.size() == 1);
    CHECK(receiver.frames[0].type == FrameType::kPing);
    sender.is_turn = true;
    CHECK(writes.Write(sender, 64 << 10, 0) == Connection::Io::kDone);
    CHECK(!writes.awaits_turn() && !writes.has_output());
    CHECK_EQ(writes.taken_bytes(), memory.size());
    reads.Read(receiver, 1 << 20, 0);
    CHECK_EQ(receiver.frames.size(), 3);
}

// While the socket is full nothing is chosen: what becomes urgent meanwhile goes next.
TEST(WhatBecomesUrgentOvertakesAllThatIsNotOnItsWay) {
    Pair pair;
    const int small = 8 << 10;
    setsockopt(pair.ours.get(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    Collector sender, receiver;
    Connection writes(std::move(pair.ours), true, Connection::State::kOpen);
    Connection reads(std::move(pair.theirs), false, Connection::State::kOpen);
    const Bytes bulk(4 << 20, 1), urgent(1000, 2);
    writes.Queue(9, RunOf(1, bulk, 30'720));
    CHECK(writes.Write(sender, 64 << 20, 0) == Connection::Io::kBlocked);
    writes.Queue(0, RunOf(2, urgent, 30'720));
    while (writes.has_output()) {
        reads.Read(receiver, 1 << 20, 0);
        CHECK(writes.Write(sender, 1 << 20, 0) != Connection::Io::kFault);
    }
    reads.Read(receiver, 64 << 20, 0);
    size_t before = 0;
    while (before < receiver.frames.size() && receiver.frames[before].tensor != 2) ++before;
    CHECK_EQ(receiver.frames.size(), (bulk.size() + 30'719) / 30'720 + 1);
    // those in the kernel's buffer and the one that had begun
    CHECK(before <= 3);
}

TEST(APushReadsTheMemoryThatIsThereWhenItIsSent) {
    Pair pair;
    Collector sender;
    Connection writes(std::move(pair.ours), true, Connection::State::kOpen);
    Bytes memory(10, 1);
    writes.Queue(0, RunOf(1, memory, 64));
    memory.assign(10, 2);
    CHECK(writes.Write(sender, 1 << 20, 0) == Connection::Io::kDone);
    const Bytes heard = Heard(pair.theirs);
    REQUIRE(heard.size() == kHeaderBytes + 10);
    CHECK_EQ(heard.back(), 2);
}

TEST(WhoeverHasLetGoWritesToNoMemoryAndSendsWhatWasThere) {
    Pair pair;
    Collector owner;
    Connection connection(std::move(pair.ours), true, Connection::State::kOpen);
    const Bytes push = FrameOf(1, kPacket), half(push.begin(), push.begin() + kHeaderBytes + kPacket / 2);
    Bytes rest(push.begin() + static_cast<std::ptrdiff_t>(half.size()), push.end());
    Say(pair.theirs, half.data(), half.size());
    CHECK(connection.Read(owner, 1 << 20, 0) == Connection::Io::kDone);
    Bytes memory(4 << 20, 1);  // more than the socket takes
    connection.Queue(0, RunOf(2, memory, 4 << 20));
    connection.Queue(0, RunOf(3, memory, 64));
    CHECK(connection.Write(owner, 16 << 20, 0) == Connection::Io::kBlocked);
    connection.LetGo();
    const Bytes before = owner.payloads.at(0);
    memory.assign(memory.size(), 2);
    Append(rest, FrameOf(4, 10));
    Say(pair.theirs, rest.data(), rest.size());
    CHECK(connection.Read(owner, 1 << 20, 0) == Connection::Io::kDone);
    CHECK(owner.payloads.at(0) == before);
    REQUIRE(owner.frames.size() == 1);
    CHECK_EQ(owner.frames[0].tensor, 4u);
    Bytes heard;
    do {
        Append(heard, Heard(pair.theirs, 8 << 20));
    } while (connection.Write(owner, 16 << 20, 0) == Connection::Io::kBlocked);
    Append(heard, Heard(pair.theirs, 8 << 20));
    REQUIRE(heard.size() == kHeaderBytes + memory.size());
    CHECK(std::all_of(heard.begin() + kHeaderBytes, heard.end(), [](uint8_t byte) { return byte == 1; }));
}

TEST(WhatIsDroppedGivesItsBuffersBack) {
    BufferPool pool(64, 4);
    {
        Pair pair;
        Connection connection(std::move(pair.ours), false, Connection::State::kOpen);
        for (int i = 0; i < 3; ++i) {
            Run run = RunOf(0, Bytes(64), 64);
            run.type = FrameType::kResult;
            run.buffer = pool.Take();
            connection.Queue(0, std::move(run));
        }
        connection.receiving = pool.Take();
        CHECK_EQ(pool.taken_bytes(), 4 * 64);
        connection.Drop();
        CHECK_EQ(pool.taken_bytes(), 0);
    }
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
