// Layout: which packets a tensor is cut into, and which server gets each. Worker and server compute
// it from the same few numbers, so that both know every packet's place before it is sent, and check
// what a frame says against it. A Layout is immutable once made; any thread may read it.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace gradlane {

inline constexpr int32_t kAll = -1;    // of Spec::from and Spec::to: every worker
inline constexpr int32_t kDealt = -1;  // of Spec::at: packets are dealt to all servers

struct Piece {
    uint64_t offset;
    uint32_t length;
};

struct Layout {
    std::vector<std::vector<Piece>> by_server;  // each in order of offset
    std::vector<uint32_t> first;                // by server: the number of packets of the servers before it
    uint32_t packets = 0;

    // The place in by_server[server] of the packet [offset, offset + length); -1 if there is none.
    int64_t Find(uint32_t server, uint64_t offset, uint32_t length) const;
};

// Deals packets so that all servers get about the same number of bytes: a packet goes to the server
// with the fewest so far, and among equals to the lowest index. `gradlane.sim` has the same rule.
class Dealer {
  public:
    explicit Dealer(uint32_t servers) : dealt_(servers, 0) {}

    // Cuts a tensor of `bytes` into packets of at most `packet_bytes`. at: the server that gets all
    // of them, or kDealt.
    std::shared_ptr<const Layout> Cut(uint64_t bytes, uint32_t packet_bytes, int32_t at = kDealt);

    // Cuts a tensor that is dealt alone: all servers get equally many packets of equal length, but for what the last of
    // the tensor lack, so that no host's card carries more than another's.
    static std::shared_ptr<const Layout> CutEvenly(uint64_t bytes, uint32_t packet_bytes, uint32_t servers);

  private:
    std::vector<uint64_t> dealt_;
};

}  // namespace gradlane
