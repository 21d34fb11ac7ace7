#include "node/messages.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "testing/check.h"

using namespace gradlane;

namespace {

// The outside of a worker's Messages: notes what it is asked to send.
struct Outside final : Messages::Post {
    struct Answer {
        FrameType type;
        uint32_t number;
        bool operator==(const Answer&) const = default;
    };
    void PostRun(uint32_t, uint32_t priority, Run run) override {
        priorities.push_back(priority);
        runs.push_back(std::move(run));
    }
    void PostAnswer(uint32_t, FrameType type, uint32_t number) override { answers.push_back({type, number}); }
    void Ended(Transfer& transfer, int32_t rank) override {
        transfer.over = true;
        transfer.rank = rank;
    }
    void Mismatch(uint32_t, const std::string& text) override { mismatch = text; }

    std::vector<Run> runs;
    std::vector<uint32_t> priorities;
    std::vector<Answer> answers;
    std::string mismatch;
};

struct Both {
    Outside outside;
    Messages messages{2, 1 << 10, &outside};  // so that a message of more than a KiB is offered

    std::shared_ptr<Transfer> Send(uint32_t tag, const std::vector<uint8_t>& bytes, uint32_t priority = 0) {
        auto transfer = std::make_shared<Transfer>();
        messages.Send(transfer, 1, tag, priority, bytes.data(), bytes.size());
        return transfer;
    }
    std::shared_ptr<Transfer> Receive(uint32_t tag, std::vector<uint8_t>& into, int32_t from = 1) {
        auto transfer = std::make_shared<Transfer>();
        messages.Receive(transfer, from, tag, into.data(), into.size());
        return transfer;
    }
    const char* Hear(FrameType type, uint32_t number, uint64_t offset, uint32_t tag, const std::vector<uint8_t>& payload) {
        Header header;
        header.type = type;
        header.tensor = number;
        header.offset = offset;
        header.iteration = tag;
        header.length = static_cast<uint32_t>(payload.size());
        const Connection::Sink sink = messages.OnHeader(1, header);
        if (sink.kind == Connection::Sink::Kind::kFault) return sink.why;
        if (!payload.empty()) std::memcpy(sink.into, payload.data(), payload.size());
        messages.OnFrame(1, header);
        return "";
    }
};

std::vector<uint8_t> Bytes(size_t count, uint8_t first) {
    std::vector<uint8_t> bytes(count);
    std::iota(bytes.begin(), bytes.end(), first);
    return bytes;
}

}  // namespace

TEST(MessagesOfOneTagAreReceivedInOrderAndThoseOfAnotherPassThem) {
    Both both;
    for (const uint8_t first : {1, 2}) CHECK_EQ(std::string(both.Hear(FrameType::kMessage, first, 8, 5, Bytes(8, first))), "");
    CHECK_EQ(std::string(both.Hear(FrameType::kMessage, 3, 8, 6, Bytes(8, 3))), "");
    std::vector<uint8_t> six(8), five(8), next(8), last(8);
    CHECK_EQ(both.Receive(6, six)->over, true);
    CHECK_EQ(both.Receive(5, five, kAnyone)->rank, 1);
    CHECK_EQ(both.Receive(5, next)->over, true);
    const auto waits = both.Receive(5, last);
    CHECK_EQ(waits->over, false);
    CHECK_EQ(both.messages.held_bytes(), uint64_t{0});
    CHECK_EQ(std::string(both.Hear(FrameType::kMessage, 4, 8, 5, Bytes(8, 4))), "");
    CHECK_EQ(waits->over, true);
    CHECK_EQ(six, Bytes(8, 3));
    CHECK_EQ(five, Bytes(8, 1));
    CHECK_EQ(next, Bytes(8, 2));
    CHECK_EQ(last, Bytes(8, 4));
}

TEST(AnOfferIsAcceptedWhenItIsReceivedAndComesInParts) {
    Both both;
    CHECK_EQ(std::string(both.Hear(FrameType::kMessage, 7, 3000, 0, {})), "");
    CHECK_EQ(both.outside.answers.size(), size_t{0});
    std::vector<uint8_t> into(3000);
    const auto transfer = both.Receive(0, into);
    REQUIRE(both.outside.answers.size() == 1);
    CHECK(both.outside.answers[0] == (Outside::Answer{FrameType::kAccept, 7}));
    CHECK_EQ(std::string(both.Hear(FrameType::kPart, 7, 0, 0, Bytes(2000, 0))), "");
    CHECK_EQ(transfer->over, false);
    CHECK_EQ(std::string(both.Hear(FrameType::kPart, 7, 1999, 0, Bytes(1, 0))), "a part that is not the next of its message");
    CHECK_EQ(std::string(both.Hear(FrameType::kPart, 7, 2000, 0, Bytes(1001, 0))), "a part that is not the next of its message");
    CHECK_EQ(std::string(both.Hear(FrameType::kPart, 7, 2000, 0, Bytes(1000, 9))), "");
    CHECK_EQ(transfer->over, true);
    CHECK_EQ(into[2000], uint8_t{9});
    CHECK_EQ(std::string(both.Hear(FrameType::kPart, 7, 3000, 0, Bytes(1, 0))), "a part of a message that was not accepted");
}

TEST(WhatNobodyReceivesIsBoundedAtBothEnds) {
    Both sender, receiver;
    const std::vector<uint8_t> bytes = Bytes(1 << 10, 0);
    const uint64_t fit = Messages::kCreditBytes / ((1 << 10) + Messages::kEnvelopeBytes);
    std::vector<std::shared_ptr<Transfer>> sends;
    for (uint64_t i = 0; i < 40'000; ++i) sends.push_back(sender.Send(0, bytes));
    const size_t launched = sender.outside.runs.size();
    CHECK(launched >= fit);
    CHECK(launched < 40'000);
    uint64_t taken = 0;
    const char* refused = "";
    for (; refused[0] == '\0'; ++taken) refused = receiver.Hear(FrameType::kMessage, static_cast<uint32_t>(taken), 1 << 10, 0, bytes);
    CHECK_EQ(std::string(refused), "more messages than it has credit for");
    CHECK_EQ(taken - 1, fit);
    CHECK(receiver.messages.held_bytes() <= Messages::kCreditBytes);
    // each message that is received makes room for another, told in lots
    std::vector<uint8_t> into(1 << 10);
    for (uint64_t i = 0; i < fit; ++i) CHECK_EQ(receiver.Receive(0, into)->over, true);
    CHECK_EQ(receiver.messages.held_bytes(), uint64_t{0});
    uint32_t returned = 0;
    for (const auto& answer : receiver.outside.answers) {
        CHECK(answer.type == FrameType::kTaken);
        CHECK(sender.messages.OnTaken(1, answer.number) == nullptr);
        returned += answer.number;
    }
    CHECK(returned > Messages::kCreditBytes / 2);
    CHECK(sender.outside.runs.size() > launched);
    CHECK(sender.messages.OnTaken(1, UINT32_MAX) != nullptr);
}

TEST(ALaterMessageOfATagIsNeverMoreUrgent) {
    Both both;
    const std::vector<uint8_t> bytes = Bytes(8, 0);
    both.Send(1, bytes, 5);
    both.Send(1, bytes, 2);
    both.Send(2, bytes, 2);
    CHECK_EQ(both.outside.priorities, (std::vector<uint32_t>{5, 5, 2}));
    for (const Run& run : both.outside.runs) {
        Header header;
        header.type = FrameType::kMessage;
        header.tensor = run.tensor;
        header.offset = header.length = 8;
        both.messages.OnSent(1, header);
    }
    both.Send(1, bytes, 2);
    CHECK_EQ(both.outside.priorities.back(), uint32_t{2});
}

TEST(LiesAreRefused) {
    Both both;
    CHECK_EQ(std::string(both.Hear(FrameType::kMessage, 0, 9, 0, Bytes(8, 0))), "a message that is neither whole nor an offer");
    CHECK_EQ(std::string(both.Hear(FrameType::kMessage, 0, 1025, 0, Bytes(1025, 0))), "a message that had to be offered");
    CHECK_EQ(std::string(both.Hear(FrameType::kMessage, 0, 5000, 0, {})), "");
    CHECK_EQ(std::string(both.Hear(FrameType::kMessage, 0, 5000, 0, {})), "a message offered twice");
    CHECK(both.messages.OnAccept(1, 0) != nullptr);
    const std::vector<uint8_t> large = Bytes(5000, 0);
    both.Send(0, large);
    CHECK(both.messages.OnAccept(1, 0) == nullptr);
    CHECK(both.messages.OnAccept(1, 0) != nullptr);
}

TEST(AMessageOfAnotherSizeIsAMismatch) {
    Both both;
    std::vector<uint8_t> into(9);
    both.Receive(3, into);
    CHECK(both.Hear(FrameType::kMessage, 0, 8, 3, Bytes(8, 0))[0] != '\0');
    CHECK_EQ(both.outside.mismatch, "rank 1 sends 8 bytes with tag 3, and 9 are received");
}

TEST(AWaitForOneThatHasLeftIsKnown) {
    Both both;
    std::vector<uint8_t> into(8);
    CHECK_EQ(both.messages.WaitsFor({false, true}, 0), false);
    both.Receive(0, into);
    CHECK_EQ(both.messages.WaitsFor({false, false}, 0), false);
    CHECK_EQ(both.messages.WaitsFor({false, true}, 0), true);
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
