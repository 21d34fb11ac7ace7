// Frames between ranks of one host, from the bytes of a ring up to what a rank that lies can do.

#include "node/mailboxes.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "testing/check.h"
#include "testing/rooms.h"

using namespace gradlane;

namespace {

constexpr int64_t kLongNs = 20'000'000'000;

struct SmallRing {
    static constexpr uint64_t kBytes = 64;
    RingMarks marks;
    std::vector<uint8_t> memory = std::vector<uint8_t>(kBytes);
    RingWriter writer{&marks, memory.data(), kBytes};
    RingReader reader{&marks, memory.data(), kBytes};

    uint64_t Write(const std::vector<uint8_t>& bytes) {
        writer.Room();
        const uint64_t put = writer.Put(bytes.data(), bytes.size());
        writer.Publish();
        return put;
    }
    std::vector<uint8_t> Read(uint64_t length) {
        std::vector<uint8_t> bytes(length);
        reader.Available();
        bytes.resize(reader.Take(bytes.data(), length));
        return bytes;
    }
};

std::vector<uint8_t> Noise(size_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<uint8_t> bytes(count);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
}

uint64_t CountOf(int eventfd) {
    uint64_t count = 0;
    return read(eventfd, &count, sizeof count) == sizeof count ? count : 0;
}

// One rank's mailboxes, with what was heard of them.
struct Rank final : Mailboxes::Owner {
    struct Frame {
        uint32_t from;
        Header header;
        std::vector<uint8_t> payload;
    };

    explicit Rank(HostRoom given)
        : room(std::make_shared<const HostRoom>(std::move(given))),
          offset(SharedSums::BytesFor(room->ranks)),
          mail(room, offset, this) {}

    Connection::Sink OnMailHeader(uint32_t rank, const Header& header) override {
        if (header.type == FrameType::kPing) return Connection::Sink::Fault(Code::kProtocol, "not here");
        Frame& frame = coming[rank] = {rank, header, std::vector<uint8_t>(header.length)};
        return Connection::Sink::Take(frame.payload.data());
    }
    const char* OnMailFrame(uint32_t rank, const Header&) override {
        frames.push_back(std::move(coming[rank]));
        return nullptr;
    }
    void OnMailSent(uint32_t, const Header& header) override { sent.push_back(header.tensor); }
    void OnMailFault(uint32_t rank, Code, const char* why) override { faults.push_back(std::to_string(rank) + ": " + why); }

    void Send(uint32_t to, uint32_t number, const std::vector<uint8_t>& bytes, uint32_t priority = 0, FrameType type = FrameType::kMessage) {
        auto layout = std::make_shared<Layout>();
        layout->by_server = {{Piece{type == FrameType::kMessage ? bytes.size() : 0, static_cast<uint32_t>(bytes.size())}}};
        Run run;
        run.type = type;
        run.tensor = number;
        run.memory = bytes.data();
        run.layout = std::move(layout);
        run.end = 1;
        mail.Queue(to, priority, std::move(run));
    }
    RingMarks& MarksOf(uint32_t ring) const {
        auto* words = reinterpret_cast<Bell::Word*>(room->segment.data() + offset);
        return reinterpret_cast<RingMarks*>(words + room->ranks)[ring];
    }

    std::shared_ptr<const HostRoom> room;
    size_t offset;
    Mailboxes mail;
    std::map<uint32_t, Frame> coming;
    std::deque<Frame> frames;
    std::vector<uint32_t> sent;
    std::vector<std::string> faults;
};

std::vector<std::unique_ptr<Rank>> Ranks(uint32_t count) {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (HostRoom& room : RoomsOf(NumbersUpTo(count))) ranks.push_back(std::make_unique<Rank>(std::move(room)));
    return ranks;
}

}  // namespace

TEST(BytesComeOutOfARingAsTheyWentInHoweverTheyAreCut) {
    SmallRing ring;
    const std::vector<uint8_t> given = Noise(5000, 1);
    std::vector<uint8_t> got;
    std::mt19937 random(2);
    for (size_t at = 0; got.size() != given.size();) {
        const size_t length = std::min<size_t>(random() % 90, given.size() - at);
        at += ring.Write({given.begin() + static_cast<ptrdiff_t>(at), given.begin() + static_cast<ptrdiff_t>(at + length)});
        const std::vector<uint8_t> piece = ring.Read(random() % 90);
        got.insert(got.end(), piece.begin(), piece.end());
    }
    CHECK_EQ(got, given);
    CHECK(!ring.reader.IsReadable());
}

TEST(AWriterThatIsOutOfRoomIsRungOnceWhenHalfOfItIsFree) {
    SmallRing ring;
    CHECK_EQ(ring.Write(Noise(100, 3)), SmallRing::kBytes);
    CHECK_EQ(ring.Write(Noise(1, 3)), uint64_t{0});
    CHECK(ring.writer.AwaitRoom());
    ring.Read(31);
    CHECK(!ring.reader.OwesRing());
    CHECK(!ring.writer.HasRoom());
    ring.Read(1);
    CHECK(ring.reader.OwesRing());
    CHECK(!ring.reader.OwesRing());
    CHECK(ring.writer.HasRoom());
    CHECK_EQ(ring.writer.Room(), SmallRing::kBytes / 2);
    CHECK(!ring.writer.HasRoom());
    CHECK(!ring.writer.AwaitRoom());
    CHECK_EQ(ring.Write(Noise(100, 3)), SmallRing::kBytes / 2);
}

TEST(NumbersThatCannotBeEndARing) {
    SmallRing reading, writing;
    reading.marks.written = SmallRing::kBytes + 1;
    CHECK_EQ(reading.Read(10).size(), size_t{0});
    CHECK(reading.reader.is_broken());
    reading.marks.written = 0;
    CHECK_EQ(reading.Read(10).size(), size_t{0});
    writing.Write(Noise(10, 4));
    writing.marks.read = 11;
    CHECK_EQ(writing.Write(Noise(10, 4)), uint64_t{0});
    CHECK(writing.writer.is_broken());
    CHECK(!writing.writer.AwaitRoom());
}

TEST(ARingOfTheBellWakesWhoeverLooks) {
    Bell::Word word;
    const Fd wake(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    Bell bell(&word, wake.get());
    bell.Ring(true);
    CHECK_EQ(CountOf(wake.get()), uint64_t{0});  // a thread looks by itself
    bell.Leave();
    bell.Ring(false);
    CHECK_EQ(CountOf(wake.get()), uint64_t{0});
    bell.Ring(true);
    bell.Ring(true);
    CHECK_EQ(CountOf(wake.get()), uint64_t{1});
    bell.Sleep(kLongNs, [] { return true; });  // there already
    std::atomic<bool> is_there{false};
    std::thread other([&] {
        while (word.state != 1) std::this_thread::yield();
        is_there = true;
        bell.Ring(false);
    });
    bell.Sleep(kLongNs, [&] { return is_there.load(); });
    CHECK(is_there);
    other.join();
    bell.LeaveUnlessAsleep();
    bell.Ring(true);
    CHECK_EQ(CountOf(wake.get()), uint64_t{1});
}

TEST(FramesOfAllSizesArriveInOrderAndByPriority) {
    auto ranks = Ranks(3);
    const std::vector<uint8_t> small = Noise(7, 5), none, large = Noise(1'000'003, 6);
    ranks[0]->Send(2, 1, large, 5, FrameType::kPart);
    ranks[0]->Send(2, 2, small, 5);
    ranks[0]->Send(2, 3, none, 4);
    ranks[0]->mail.QueueControl(2, ControlFrame(FrameType::kAccept, 0, 9, nullptr, 0));
    ranks[1]->Send(2, 4, small);
    for (int turn = 0; turn < 100 && ranks[2]->frames.size() != 5; ++turn) {
        for (auto& rank : ranks) rank->mail.Pump(100'000);
    }
    REQUIRE(ranks[2]->frames.size() == 5);
    std::vector<uint32_t> of_0;
    for (const Rank::Frame& frame : ranks[2]->frames) {
        if (frame.from == 0) of_0.push_back(frame.header.tensor);
        if (frame.header.tensor == 1) CHECK(frame.payload == large);
        if (frame.header.tensor == 2) CHECK(frame.payload == small);
        if (frame.from == 1) CHECK(frame.payload == small);
    }
    CHECK_EQ(of_0, (std::vector<uint32_t>{9, 3, 1, 2}));
    CHECK_EQ(ranks[0]->sent, (std::vector<uint32_t>{3, 1, 2}));
    for (uint32_t rank = 0; rank < 3; ++rank) {
        CHECK(!ranks[rank]->mail.IsReady());
        CHECK(!ranks[0]->mail.HasOutput(rank));
    }
}

TEST(OnlyWhatAnotherRankWaitsForIsInsistedOn) {
    auto ranks = Ranks(2);
    const int wake = ranks[1]->room->wakes[1].get();
    ranks[1]->mail.bell().Leave();
    const std::vector<uint8_t> small = Noise(7, 7), large = Noise(1'000'000, 8);
    ranks[0]->Send(1, 0, small);
    CHECK(!ranks[0]->mail.Write(UINT64_MAX));
    CHECK(ranks[1]->mail.IsReady());
    CHECK(!ranks[1]->mail.IsInsisted());
    CHECK_EQ(CountOf(wake), uint64_t{0});
    ranks[0]->Send(1, 1, large);  // more than the ring holds
    CHECK(!ranks[0]->mail.Write(UINT64_MAX));
    CHECK(ranks[0]->mail.HasOutput(1));
    CHECK(!ranks[0]->mail.IsReady());
    CHECK(ranks[1]->mail.IsInsisted());
    CHECK_EQ(CountOf(wake), uint64_t{1});
    ranks[0]->mail.bell().Leave();
    ranks[1]->mail.Pump(UINT64_MAX);
    CHECK(ranks[0]->mail.IsInsisted());
    CHECK_EQ(CountOf(ranks[0]->room->wakes[0].get()), uint64_t{1});
    while (ranks[1]->frames.size() != 2) {
        for (auto& rank : ranks) rank->mail.Pump(UINT64_MAX);
    }
    for (auto& rank : ranks) CHECK(!rank->mail.IsReady() && !rank->mail.IsInsisted());
}

TEST(ALiarIsNamedOnceAndNothingMoreIsTakenFromIt) {
    const auto header = [](FrameType type) {
        Header ping;
        ping.type = type;
        std::vector<uint8_t> bytes(kHeaderBytes);
        Encode(ping, bytes.data());
        return bytes;
    };
    std::vector<uint8_t> damaged = header(FrameType::kAccept);
    damaged[5] ^= 1;
    const std::vector<std::pair<std::vector<uint8_t>, std::string>> lies = {
        {std::vector<uint8_t>(kHeaderBytes, 7), "0: it does not begin with gradlane's mark"},
        {damaged, "0: the checksum of a header does not match: damaged on the way"},
        {header(FrameType::kPing), "0: not here"},
    };
    for (const auto& [lie, said] : lies) {
        auto ranks = Ranks(3);
        ranks[0]->mail.QueueControl(1, lie);
        ranks[0]->mail.QueueControl(1, header(FrameType::kAccept));
        ranks[0]->mail.Write(UINT64_MAX);
        for (int turn = 0; turn < 2; ++turn) ranks[1]->mail.Pump(UINT64_MAX);
        CHECK_EQ(ranks[1]->faults, std::vector<std::string>{said});
        CHECK_EQ(ranks[1]->frames.size(), size_t{0});
        ranks[2]->mail.QueueControl(1, header(FrameType::kAccept));
        ranks[2]->mail.Write(UINT64_MAX);
        ranks[1]->mail.Pump(UINT64_MAX);
        CHECK_EQ(ranks[1]->frames.size(), size_t{1});
    }
    auto ranks = Ranks(2);
    ranks[0]->MarksOf(0).written = UINT64_MAX;  // the ring from 0 to 1
    ranks[1]->mail.Pump(UINT64_MAX);
    CHECK_EQ(ranks[1]->faults, std::vector<std::string>{"0: it has written more than there was room for"});
    auto others = Ranks(2);
    const std::vector<uint8_t> small = Noise(7, 9);
    others[1]->MarksOf(0).read = 1;
    others[0]->Send(1, 0, small);
    others[0]->mail.Write(UINT64_MAX);
    CHECK_EQ(others[0]->faults, std::vector<std::string>{"1: it has read what was not written"});
    CHECK(!others[0]->mail.HasOutput(1));
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
