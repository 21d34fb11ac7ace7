// Turns between a node's connections: on socket pairs, by a clock that the test sets.

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <vector>

#include "node/node.h"
#include "testing/check.h"

using namespace gradlane;

namespace {

constexpr uint32_t kPacket = 64 << 10;
constexpr uint64_t kMostAhead = (128 << 10) + kPacket;  // of one connection: its last packet may pass the limit
constexpr uint32_t kBulk = 7;                           // a priority

}  // namespace

namespace gradlane {

// A node and two connections of it, which its thread knows nothing of.
class NodeSeam {
  public:
    NodeSeam() {
        NodeOptions options;
        options.rank = options.server = 0;
        options.membership.world = options.membership.servers = 1;
        options.deal_evenly = true;
        Failure why;
        node_ = Node::Start(options, &why);
        REQUIRE(node_ != nullptr);
        lock_ = std::unique_lock(node_->mutex_);
        for (Fd& far : far_) {
            int ends[2];
            REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
            node_->connections_.push_back(std::make_unique<Connection>(Fd(ends[0]), true, Connection::State::kOpen));
            far = Fd(ends[1]);
        }
    }
    ~NodeSeam() {
        node_->touched_.clear();
        node_->connections_.clear();
    }

    Connection& operator[](size_t i) { return i == 0 ? *node_->connections_.front() : *node_->connections_.back(); }
    void Queue(size_t i, uint32_t priority) {
        Run run;
        run.memory = memory_.data();
        run.layout = Dealer(1).Cut(memory_.size(), kPacket);
        run.end = run.layout->packets;
        node_->Queue((*this)[i], priority, std::move(run));
    }
    // Writes what connection `i` may write, while its peer reads everything.
    void Write(size_t i) {
        uint64_t before;
        do {
            before = (*this)[i].sent_bytes;
            node_->WriteTo((*this)[i], 1 << 20);
            while (read(far_[i].get(), heard_.data(), heard_.size()) > 0) {
            }
        } while ((*this)[i].sent_bytes != before);
    }
    // Both in turns, until neither has anything to send.
    void WriteAll() {
        for (int i = 0; ((*this)[0].has_output() || (*this)[1].has_output()) && i < 1000; ++i) Write(i % 2);
        CHECK(!(*this)[0].has_output() && !(*this)[1].has_output());
    }
    bool PassTurns() { return node_->PassTurns(); }
    void Later(int64_t ns) { node_->now_ns_ += ns; }

  private:
    std::unique_ptr<Node> node_;
    Fd far_[2];
    std::vector<uint8_t> memory_ = std::vector<uint8_t>(1 << 20), heard_ = std::vector<uint8_t>(1 << 20);
    std::unique_lock<std::mutex> lock_;  // the node's thread waits meanwhile
};

}  // namespace gradlane

TEST(NobodyGetsFarAheadOfOneThatHasPacketsToSend) {
    NodeSeam node;
    for (int again = 0; again < 3; ++again) {
        const uint64_t before = node[1].taken_bytes();
        node.Queue(0, kBulk);
        node.Queue(1, kBulk);
        node.Write(0);
        CHECK(node[0].awaits_turn());
        CHECK(node[0].taken_bytes() <= node[1].taken_bytes() + kMostAhead);
        CHECK(!node.PassTurns());
        node.Write(1);
        CHECK(node[1].taken_bytes() > before);
        CHECK(node.PassTurns());
        node.WriteAll();
        CHECK(!node.PassTurns());  // of nobody: what is queued next takes turns again
    }
}

TEST(WhoeverHadNothingToSendHasNothingToCatchUpWith) {
    NodeSeam node;
    node.Queue(0, kBulk);
    node.Write(0);
    CHECK(!node[0].has_output());  // it was alone
    node.Queue(1, kBulk);
    node.Queue(0, kBulk);
    node.Write(1);
    CHECK(node[1].awaits_turn());
}

TEST(WhatIsMoreUrgentWaitsForNoTurn) {
    NodeSeam node;
    node.Queue(1, kBulk);
    node.Queue(0, kBulk);
    node.Write(0);
    const uint64_t bulk = node[0].taken_bytes();
    CHECK(node[0].awaits_turn());
    node.Queue(0, 0);
    node.Write(0);
    CHECK_EQ(node[0].taken_bytes(), bulk + (1 << 20));
    CHECK(node[0].awaits_turn());
}

TEST(OneThatSendsNothingHoldsUpNobodyForLong) {
    NodeSeam node;
    node.Queue(1, kBulk);
    node.Queue(0, kBulk);
    node.Write(0);
    CHECK(node[0].awaits_turn());
    node.Later(60'000'000);
    CHECK(node.PassTurns());
    node.Write(0);
    CHECK(!node[0].has_output());
    node.Queue(0, kBulk);
    node.Write(1);  // what it did not send then is not made up for
    CHECK(node[1].awaits_turn());
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
