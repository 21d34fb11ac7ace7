// What Node does with the memory that it shares with the other ranks of its host. All of it under the lock.
//
// Where the job has several hosts of G ranks each, a tensor goes through that memory before and after it crosses the
// network, and crosses it once for each host instead of once for each rank:
//
//                  through the memory          between the ranks of a rail        through the memory
//     all -> all   each adds up its share      the sum of that share              all get all shares
//     all -> r     the rank of r's place adds  r's rail: the sum, to r
//     r -> all                                 r's rail: what r has               all get it from that rank
//
// A rail has the ranks of one place on all hosts. Between them the tensor is an ordinary one with Spec::rail; the other
// rails see no packet of it. A small tensor for all is one rank's to exchange: G small packets cost more than one.

#include "node/node.h"

namespace gradlane {

namespace {

// Up to here one rank of a host exchanges a tensor for all of them.
constexpr uint64_t kOneOwner = 16 << 10;

}  // namespace

// How a tensor goes.
struct Node::Route {
    std::vector<SharedSums::Way> ways;
    bool adds_first = false;        // the first way comes before the rail's exchange
    const uint8_t* from = nullptr;  // what this rank gives to its rail
    uint8_t* into = nullptr;        // where the rail's result goes
    std::unique_ptr<uint8_t[]> scratch;
};

void Node::Share(HostRoom room, const std::vector<uint32_t>& host_of) {
    std::lock_guard guard(mutex_);
    if (failed_ || broken_) return;
    auto hosts = std::make_unique<Hosts>(host_of, static_cast<uint32_t>(options_.rank));
    if (host_of.size() != options_.membership.world || options_.rank < 0 || options_.rank != options_.server || !hosts->AreEven() ||
        room.numbers != hosts->HostOf(static_cast<uint32_t>(options_.rank)) || room.rank != hosts->place || next_tensor_ != 0) {
        Fail({Code::kProtocol, options_.rank, -1, "the memory of a host was to be shared by other ranks than the job has, or too late"});
        return;
    }
    hosts_ = std::move(hosts);
    aggregator_->SetRail(hosts_->rail);
    const size_t offset = SharedSums::BytesFor(room.ranks);
    const auto memory = std::make_shared<const HostRoom>(std::move(room));
    shared_ = std::make_unique<SharedSums>(memory);
    if (messages_ && hosts_->ranks.size() == 1) {
        std::lock_guard done(done_mutex_);
        mail_ = std::make_shared<Mailboxes>(memory, offset, static_cast<Mailboxes::Owner*>(this));
    }
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &shared_;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, shared_->wake_fd(), &event);
    Wake();  // others may have sent already
}

bool Node::IsShared(uint32_t tensor) const {
    const auto found = tensors_.find(tensor);
    return found != tensors_.end() && found->second.shared;
}

// The place of the ranks that own all of a tensor which crosses hosts; kDealt: each owns a share.
int32_t Node::OwnerOf(uint32_t tensor, const Spec& spec) const {
    if (spec.from == kAll && spec.to == kAll && spec.at == kDealt) {
        return spec.bytes > kOneOwner ? kDealt : static_cast<int32_t>(tensor % hosts_->places());
    }
    const int32_t rank = spec.from != kAll ? spec.from : spec.to != kAll ? spec.to : spec.at;
    return static_cast<int32_t>(hosts_->PlaceOf(static_cast<uint32_t>(rank)));
}

Node::Route Node::RouteOf(const DefineCommand& define) const {
    const auto& [tensor, spec, from, into] = define;
    const int32_t owner = OwnerOf(tensor, spec);
    const bool exchanges = owner == kDealt || owner == static_cast<int32_t>(hosts_->place);
    Route route;
    route.adds_first = spec.from == kAll;
    if (spec.from == kAll && spec.to == kAll) {
        const int32_t owners = owner == kDealt ? kOwn : owner;
        route.from = route.into = into;
        route.ways.push_back({{kAll, owners, owner}, from, into});
        route.ways.push_back({{owners, kAll, kDealt}, into, into, true});
    } else if (spec.from == kAll) {
        route.into = spec.to == options_.rank ? into : nullptr;
        if (exchanges && route.into == nullptr) route.scratch.reset(new uint8_t[spec.bytes]);
        uint8_t* sum = route.into != nullptr ? route.into : route.scratch.get();
        route.from = sum;
        route.ways.push_back({{kAll, owner, owner}, from, sum});
    } else {
        route.from = from;
        route.into = into;
        route.ways.push_back({{owner, kAll, kDealt}, spec.from == options_.rank ? from : into, into, true});
    }
    return route;
}

// What this rank's rail exchanges of a tensor, cut over the rail's servers; nothing, where another rail exchanges it.
std::shared_ptr<const Layout> Node::CutForRail(uint32_t tensor, const Spec& spec) const {
    const std::vector<uint32_t>& rail = hosts_->rail;
    const auto hosts = static_cast<uint32_t>(rail.size());
    const int32_t owner = OwnerOf(tensor, spec);
    Range part{0, spec.bytes};
    if (owner == kDealt) {
        part = SharedSums::ShareOf(spec.bytes, hosts_->places(), hosts_->place);
    } else if (owner != static_cast<int32_t>(hosts_->place)) {
        part.end = 0;
    }
    int32_t at = kDealt;  // its host
    if (spec.at != kDealt) {
        at = static_cast<int32_t>(std::find(rail.begin(), rail.end(), static_cast<uint32_t>(spec.at)) - rail.begin());
    }
    const auto cut = CutAlone(tensor, part.end - part.begin, hosts, at);
    auto layout = std::make_shared<Layout>();
    layout->by_server.resize(options_.membership.servers);
    for (uint32_t host = 0; host < hosts; ++host) {
        for (const Piece& piece : cut->by_server[host]) {
            layout->by_server[rail[host]].push_back({part.begin + piece.offset, piece.length});
        }
    }
    for (const auto& pieces : layout->by_server) {
        layout->first.push_back(layout->packets);
        layout->packets += static_cast<uint32_t>(pieces.size());
    }
    return layout;
}

// Whether a tensor cannot begin any more, since a rank that it takes has left; then the node has failed of it.
bool Node::Refuse(uint32_t tensor, const Spec& spec) {
    if (left_ns_ == 0) return false;
    const bool crosses = hosts_->ranks.size() > 1;
    const auto has_left = [this](uint32_t rank) { return left_[rank]; };
    const auto& neighbours = hosts_->HostOf(static_cast<uint32_t>(options_.rank));
    // a rank of another host may have done all its part in what is not of all for all
    const bool takes_all = !crosses || (spec.from == kAll && spec.to == kAll);
    if (!takes_all && std::none_of(neighbours.begin(), neighbours.end(), has_left)) return false;
    Fail({Code::kLeft, left_rank_, left_server_, left_name_ + " has left the job, and tensor " + std::to_string(tensor) + " was handed over"});
    return true;
}

bool Node::RegisterShared(const DefineCommand& define) {
    const auto& [tensor, spec, from, into] = define;
    if (failed_) return false;
    const std::string name = "tensor " + std::to_string(tensor);
    const auto world = static_cast<int64_t>(options_.membership.world);
    const char* why = WhyNot(spec);
    if (tensor != next_tensor_ || spec.at >= world || spec.from >= world || spec.to >= world) why = "not a definition that can be used";
    if (why != nullptr) {
        Fail({Code::kProtocol, options_.rank, -1, name + ": " + why});
        return false;
    }
    if (hosts_->ranks.size() == 1) {
        if (const auto early = early_.find(tensor); early != early_.end() && !early->second.empty()) {
            const auto rank = static_cast<int32_t>(early->second.front().peer);
            Fail({Code::kMismatch, rank, -1, "rank " + std::to_string(rank) + " has sent packets of " + name +
                                                 ", which is summed in this host's memory here"});
            return false;
        }
        if (spec.once && IsExchangedByOthers(tensor)) return false;
        ++next_tensor_;
        Tensor state;
        state.spec = spec;
        state.from = from;
        state.into = into;
        state.layout = std::make_shared<Layout>();
        state.shared = state.adds_first = true;
        state.ways = {{{spec.from, spec.to, spec.at}, from, into}};
        tensors_.insert_or_assign(tensor, std::move(state));
        return true;
    }
    Route route = RouteOf(define);
    DefineCommand exchange{tensor, spec, route.from, route.into};
    exchange.spec.rail = true;
    if (!Register(exchange, -1)) return false;
    Tensor& state = tensors_.at(tensor);
    state.shared = true;
    state.adds_first = route.adds_first;
    state.ways = std::move(route.ways);
    state.scratch = std::move(route.scratch);
    return true;
}

// The worker's part of the next iteration goes into this host's memory.
void Node::PushShared(uint32_t tensor, Tensor& state) {
    const bool crosses = hosts_->ranks.size() > 1;
    std::vector<SharedSums::Way> ways = state.ways;
    if (state.held && !crosses) {
        // in two phases: the sum of each share, and, once it is released, all shares for all
        ways[0].pass.to = kOwn;
        ways.push_back({{kOwn, kAll, kDealt}, state.into, state.into, true});
    }
    state.ways_left = state.spec.bytes == 0 ? 0 : static_cast<uint32_t>(ways.size());
    state.awaited = state.ways_left != 0 && ways.back().awaits;
    state.under_way = !crosses;
    state.given = state.ways_left == 0;
    shared_->Start(tensor, state.spec, std::move(ways));
    if (!crosses) {
        Settle(tensor, state);
    } else if (!state.adds_first || state.ways_left == 0) {
        Contribute(tensor, state, 0);
    }
}

// Returns whether there is more to do at once.
bool Node::RunShared(uint64_t bytes) {
    if (!shared_ || failed_) return false;
    std::vector<SharedSums::End> ended;
    const bool more = shared_->Progress(bytes, &ended);
    for (const uint32_t tensor : shared_->TakeGiven()) {
        Tensor& state = tensors_.at(tensor);
        if (!state.under_way) continue;  // it has yet to cross the network
        state.given = true;
        Settle(tensor, state);
    }
    for (const auto& [tensor, left] : ended) {
        if (failed_) break;
        Tensor& state = tensors_.at(tensor);
        state.ways_left = left;
        if (state.under_way) {
            Settle(tensor, state);
        } else {
            Contribute(tensor, state, 0);  // this host's sum is there
        }
    }
    if (const auto& fault = shared_->fault()) {
        Fail({fault->code, fault->rank, -1, fault->text});
    }
    return more;
}

// A tensor that other ranks have yet to hand over counts as sent while nothing else goes on, as over a connection, where
// their servers would keep it: if it held up its lane, ranks whose windows hold different messages would wait for one
// another for ever. Returns whether there is any.
bool Node::LetGoOfWaiting() {
    bool any = false;
    for (const uint32_t tensor : shared_->TakeWaiting()) {
        Tensor& state = tensors_.at(tensor);
        if (!state.notify_sent) continue;
        any = true;
        Sent(tensor, state);
    }
    return any;
}

// Before a thread leaves the rest to the I/O thread. Returns false if there is something to do after all.
bool Node::RestShared() {
    if (!shared_ || failed_ || !shared_->IsUnderWay()) return true;
    return shared_->Rest() && !LetGoOfWaiting();
}

}  // namespace gradlane
