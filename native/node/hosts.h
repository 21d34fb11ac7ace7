// Hosts: which ranks of a job share a host, where each host has the same number of them. A rank's place is its index
// among those of its host; the ranks of one place on all hosts are a rail. A value; any thread may use its own.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gradlane {

struct Hosts {
    std::vector<std::vector<uint32_t>> ranks;  // by host and place; in rising order on each
    std::vector<uint32_t> rail;                // of this rank, by host
    uint32_t place = 0;                        // of this rank

    // host_of: by rank, any number that is equal for those of one host.
    Hosts(const std::vector<uint32_t>& host_of, uint32_t rank) {
        std::vector<uint32_t> seen;
        for (uint32_t each = 0; each < host_of.size(); ++each) {
            const auto host = static_cast<size_t>(std::find(seen.begin(), seen.end(), host_of[each]) - seen.begin());
            if (host == seen.size()) {
                seen.push_back(host_of[each]);
                ranks.emplace_back();
            }
            ranks[host].push_back(each);
        }
        if (rank < host_of.size()) place = PlaceOf(rank);
        for (const auto& host : ranks) {
            if (place < host.size()) rail.push_back(host[place]);
        }
    }

    uint32_t PlaceOf(uint32_t rank) const {
        for (const auto& host : ranks) {
            const auto found = std::find(host.begin(), host.end(), rank);
            if (found != host.end()) return static_cast<uint32_t>(found - host.begin());
        }
        return UINT32_MAX;
    }
    const std::vector<uint32_t>& HostOf(uint32_t rank) const {
        return *std::find_if(ranks.begin(), ranks.end(),
                             [rank](const auto& host) { return std::find(host.begin(), host.end(), rank) != host.end(); });
    }
    uint32_t places() const { return static_cast<uint32_t>(ranks[0].size()); }
    bool AreEven() const {
        return std::all_of(ranks.begin(), ranks.end(), [this](const auto& host) { return host.size() == ranks[0].size(); });
    }
};

}  // namespace gradlane
