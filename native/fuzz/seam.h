// NodeSeam: a node without its thread and without a clock, whose peers are the other ends of socket pairs in this
// process. What a peer says is read before the call returns, so that a run depends on its input alone.

#pragma once

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "fuzz/fuzz.h"
#include "node/node.h"

namespace gradlane {

constexpr uint32_t kWorld = 3, kServers = 2, kPacket = 64, kTensors = 12;
constexpr uint16_t kLanes = 2;
constexpr size_t kTensorBytes = 1024;

class NodeSeam {
  public:
    struct Peer {
        Connection* connection;
        Fd socket;
        std::vector<uint8_t> held;  // the rest of a frame
        bool open = true;
    };

    explicit NodeSeam(NodeOptions options) : node(new Node(std::move(options), Fd())) {
        const NodeOptions& given = node->options_;
        const uint32_t servers = given.membership.servers;
        AddPeer(false, 0, 0, Connection::State::kGreeting);
        for (uint16_t lane = 0; lane < kLanes; ++lane) {
            for (uint32_t rank = 0; rank < kWorld; ++rank) {
                if (static_cast<int32_t>(rank) != given.rank) AddPeer(false, rank, lane, Connection::State::kOpen);
            }
            for (uint32_t server = 0; given.rank >= 0 && server < servers; ++server) {
                if (static_cast<int32_t>(server) != given.server) AddPeer(true, server, lane, Connection::State::kOpen);
            }
        }
    }
    ~NodeSeam() {
        for (const auto& connection : node->connections_) connection->Drop();
        node->connections_.clear();  // before the pools that their buffers are of
    }

    void Say(Peer& peer, const std::vector<uint8_t>& bytes) {
        if (!peer.open || bytes.empty()) return;
        (void)!send(peer.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        Turn(peer, EPOLLIN);
    }
    void HangUp(Peer& peer) {
        peer.open = false;
        peer.socket = Fd();
        Turn(peer, EPOLLIN | EPOLLHUP);
    }
    void Read(Peer& peer) {
        uint8_t bytes[4096];
        while (peer.open && recv(peer.socket.get(), bytes, sizeof bytes, MSG_DONTWAIT) == sizeof bytes) {
        }
    }
    void Listen(Peer& peer) {
        Read(peer);
        Turn(peer, EPOLLOUT);
    }
    size_t held_bytes() const {
        return node->aggregator_->held_bytes() + node->early_buffers_.taken_bytes() + (node->messages_ ? node->messages_->held_bytes() : 0);
    }

    std::unique_ptr<Node> node;
    std::vector<Peer> peers;  // the first is the stranger

  private:
    void AddPeer(bool dialled, uint32_t index, uint16_t lane, Connection::State state) {
        int ends[2];
        MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
        auto connection = std::make_unique<Connection>(Fd(ends[0]), dialled, state);
        connection->peer = index;
        connection->lane = lane;
        connection->heard_ns = connection->sent_ns = connection->opened_ns = node->now_ns_;
        if (state == Connection::State::kGreeting) {
            connection->as_server = std::make_unique<ServerGreeting>(&node->options_.membership, 0, Nonce{});
        } else {
            (dialled ? node->to_server_ : node->to_worker_)[index][lane] = connection.get();
        }
        peers.push_back({connection.get(), Fd(ends[1]), {}, true});
        node->connections_.push_back(std::move(connection));
    }
    void Turn(const Peer& peer, uint32_t what) {
        // a poller tells nothing of what was closed
        for (const auto& connection : node->connections_) {
            if (connection.get() != peer.connection) continue;
            epoll_event event{};
            event.events = what;
            event.data.ptr = peer.connection;
            node->Turn(&event, 1);
            return;
        }
        node->Turn(nullptr, 0);
    }
};

}  // namespace gradlane
