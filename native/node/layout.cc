#include "node/layout.h"

#include <algorithm>

namespace gradlane {

int64_t Layout::Find(uint32_t server, uint64_t offset, uint32_t length) const {
    if (server >= by_server.size()) return -1;
    const auto& pieces = by_server[server];
    const auto found = std::lower_bound(pieces.begin(), pieces.end(), offset,
                                        [](const Piece& piece, uint64_t at) { return piece.offset < at; });
    if (found == pieces.end() || found->offset != offset || found->length != length) return -1;
    return found - pieces.begin();
}

std::shared_ptr<const Layout> Dealer::Cut(uint64_t bytes, uint32_t packet_bytes, int32_t at) {
    auto layout = std::make_shared<Layout>();
    layout->by_server.resize(dealt_.size());
    for (uint64_t offset = 0; offset < bytes; offset += packet_bytes) {
        const auto length = static_cast<uint32_t>(std::min<uint64_t>(packet_bytes, bytes - offset));
        const size_t server = at != kDealt ? static_cast<size_t>(at)
                                           : static_cast<size_t>(std::min_element(dealt_.begin(), dealt_.end()) - dealt_.begin());
        if (at == kDealt) dealt_[server] += length;
        layout->by_server[server].push_back({offset, length});
    }
    for (const auto& pieces : layout->by_server) {
        layout->first.push_back(layout->packets);
        layout->packets += static_cast<uint32_t>(pieces.size());
    }
    return layout;
}

std::shared_ptr<const Layout> Dealer::CutEvenly(uint64_t bytes, uint32_t packet_bytes, uint32_t servers) {
    const uint64_t share = (bytes + servers - 1) / servers;
    const uint64_t packets = std::max<uint64_t>(1, (share + packet_bytes - 1) / packet_bytes);  // of a server
    return Dealer(servers).Cut(bytes, static_cast<uint32_t>(((share + packets - 1) / packets + 63) / 64 * 64));
}

}  // namespace gradlane
