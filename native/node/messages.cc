#include "node/messages.h"

#include <algorithm>
#include <cstring>

namespace gradlane {

namespace {

using Sink = Connection::Sink;

Sink Fault(const char* why) { return Sink::Fault(Code::kProtocol, why); }

uint64_t CostOf(uint64_t eager_bytes) { return Messages::kEnvelopeBytes + eager_bytes; }

// What stands in a kMessage: `payload` bytes of a message of `bytes`.
std::shared_ptr<const Layout> Envelope(uint64_t bytes, uint64_t payload) {
    auto layout = std::make_shared<Layout>();
    layout->by_server = {{Piece{bytes, static_cast<uint32_t>(payload)}}};
    return layout;
}

}  // namespace

Messages::Messages(uint32_t world, uint32_t packet_bytes, Post* post, uint64_t credit_bytes)
    : eager_bytes_(std::min<uint64_t>(kEagerBytes, packet_bytes)),
      packet_bytes_(packet_bytes),
      credit_bytes_(credit_bytes),
      post_(post),
      peers_(world) {}

// -- to others --------------------------------------------------------------------------------------------

void Messages::Send(std::shared_ptr<Transfer> transfer, uint32_t rank, uint32_t tag, uint32_t priority, const uint8_t* from,
                    uint64_t bytes) {
    peers_[rank].backlog.push_back({std::move(transfer), tag, priority, from, bytes});
    Drain(rank);
}

// Sends what there is credit for.
void Messages::Drain(uint32_t rank) {
    Peer& peer = peers_[rank];
    while (!peer.backlog.empty() && peer.spent + kEnvelopeBytes <= credit_bytes_) {
        Outgoing message = std::move(peer.backlog.front());
        peer.backlog.pop_front();
        Launch(rank, std::move(message));
    }
}

void Messages::Launch(uint32_t rank, Outgoing message) {
    Peer& peer = peers_[rank];
    const bool eager = message.bytes <= eager_bytes_ && peer.spent + CostOf(message.bytes) <= credit_bytes_;
    const uint64_t payload = eager ? message.bytes : 0;
    peer.spent += CostOf(payload);
    Run run;
    run.type = FrameType::kMessage;
    run.tensor = peer.next_number++;
    run.iteration = message.tag;
    run.memory = message.from;
    run.layout = Envelope(message.bytes, payload);
    run.end = 1;
    // equal priorities go in order, so that messages of one tag arrive in the order of their sends
    Unsent& unsent = peer.unsent[message.tag];
    unsent.priority = run.priority = unsent.frames++ == 0 ? message.priority : std::max(unsent.priority, message.priority);
    peer.sending.emplace(run.tensor, std::move(message));
    post_->PostRun(rank, unsent.priority, std::move(run));
}

const char* Messages::OnAccept(uint32_t rank, uint32_t number) {
    Peer& peer = peers_[rank];
    const auto found = peer.sending.find(number);
    if (found == peer.sending.end() || found->second.accepted || found->second.bytes == 0) return "it accepts what was not offered";
    Outgoing& message = found->second;
    message.accepted = true;
    peer.spent -= std::min(peer.spent, kEnvelopeBytes);
    Run run;
    run.type = FrameType::kPart;
    run.tensor = number;
    run.priority = message.priority;
    run.memory = message.from;
    run.layout = Dealer(1).Cut(message.bytes, packet_bytes_);
    run.end = static_cast<uint32_t>(run.layout->by_server[0].size());
    post_->PostRun(rank, message.priority, std::move(run));
    Drain(rank);
    return nullptr;
}

const char* Messages::OnTaken(uint32_t rank, uint32_t bytes) {
    Peer& peer = peers_[rank];
    if (bytes > peer.spent) return "it has received more than was sent";
    peer.spent -= bytes;
    Drain(rank);
    return nullptr;
}

void Messages::OnSent(uint32_t rank, const Header& header) {
    Peer& peer = peers_[rank];
    const auto found = peer.sending.find(header.tensor);
    if (found == peer.sending.end()) return;
    if (header.type == FrameType::kMessage) {
        const auto unsent = peer.unsent.find(found->second.tag);
        if (--unsent->second.frames == 0) peer.unsent.erase(unsent);
        if (header.length != header.offset) return;  // an offer
    } else if (header.offset + header.length != found->second.bytes) {
        return;
    }
    const std::shared_ptr<Transfer> transfer = std::move(found->second.transfer);
    peer.sending.erase(found);
    post_->Ended(*transfer, static_cast<int32_t>(rank));
}

// -- from others ------------------------------------------------------------------------------------------

void Messages::Receive(std::shared_ptr<Transfer> transfer, int32_t from, uint32_t tag, uint8_t* into, uint64_t bytes) {
    Receipt receipt{std::move(transfer), from, into, bytes};
    const auto kept = arrivals_.find(tag);
    if (kept != arrivals_.end()) {
        std::list<Arrival>& arrivals = kept->second;
        const auto first = std::find_if(arrivals.begin(), arrivals.end(), [from](const Arrival& arrival) {
            return arrival.receipt.transfer == nullptr && (from == kAnyone || static_cast<uint32_t>(from) == arrival.rank);
        });
        if (first != arrivals.end()) {
            const uint32_t rank = first->rank;
            if (!Fits(rank, tag, first->bytes, receipt)) return;
            if (!first->is_offer && !first->is_whole) {  // its payload is on its way into the kept memory
                first->receipt = std::move(receipt);
                return;
            }
            if (first->is_offer) {
                Accept(rank, first->number, std::move(receipt));
            } else {
                if (bytes != 0) std::memcpy(into, first->kept.get(), bytes);
                held_bytes_ -= bytes;
                GiveBack(rank, CostOf(bytes));
                post_->Ended(*receipt.transfer, static_cast<int32_t>(rank));
            }
            arrivals.erase(first);
            if (arrivals.empty()) arrivals_.erase(kept);
            return;
        }
    }
    receipts_[tag].push_back(std::move(receipt));
}

bool Messages::Fits(uint32_t rank, uint32_t tag, uint64_t bytes, const Receipt& receipt) {
    if (bytes == receipt.bytes) return true;
    post_->Mismatch(rank, "rank " + std::to_string(rank) + " sends " + std::to_string(bytes) + " bytes with tag " + std::to_string(tag) +
                              ", and " + std::to_string(receipt.bytes) + " are received");
    return false;
}

// The first receive that waits for such a message, taken off the list.
bool Messages::Match(uint32_t rank, uint32_t tag, Receipt* receipt) {
    const auto waiting = receipts_.find(tag);
    if (waiting == receipts_.end()) return false;
    std::list<Receipt>& receipts = waiting->second;
    const auto first = std::find_if(receipts.begin(), receipts.end(), [rank](const Receipt& each) {
        return each.from == kAnyone || static_cast<uint32_t>(each.from) == rank;
    });
    if (first == receipts.end()) return false;
    *receipt = std::move(*first);
    receipts.erase(first);
    if (receipts.empty()) receipts_.erase(waiting);
    return true;
}

void Messages::Accept(uint32_t rank, uint32_t number, Receipt receipt) {
    Peer& peer = peers_[rank];
    peer.owed -= kEnvelopeBytes;
    peer.coming.emplace(number, std::pair(std::move(receipt), uint64_t{0}));
    post_->PostAnswer(rank, FrameType::kAccept, number);
}

// In lots: an answer to each message would cost as much as the message.
void Messages::GiveBack(uint32_t rank, uint64_t bytes) {
    Peer& peer = peers_[rank];
    peer.taken += bytes;
    if (peer.taken < credit_bytes_ / 4) return;
    post_->PostAnswer(rank, FrameType::kTaken, static_cast<uint32_t>(peer.taken));
    peer.owed -= peer.taken;
    peer.taken = 0;
}

Sink Messages::OnHeader(uint32_t rank, const Header& header) {
    Peer& peer = peers_[rank];
    if (header.type == FrameType::kPart) {
        const auto found = peer.coming.find(header.tensor);
        if (found == peer.coming.end()) return Fault("a part of a message that was not accepted");
        const auto& [receipt, come] = found->second;
        if (header.length == 0 || header.offset != come || header.length > receipt.bytes - come) {
            return Fault("a part that is not the next of its message");
        }
        return Sink::Take(receipt.into + come);
    }
    const bool is_offer = header.length == 0 && header.offset != 0;
    const uint64_t cost = CostOf(header.length);
    if (!is_offer && header.offset != header.length) return Fault("a message that is neither whole nor an offer");
    if (header.length > eager_bytes_) return Fault("a message that had to be offered");
    if (peer.owed + cost > credit_bytes_) return Fault("more messages than it has credit for");
    if (is_offer && !peer.offered.insert(header.tensor).second) return Fault("a message offered twice");
    peer.owed += cost;
    if (is_offer) return Sink::Take(nullptr);
    const uint32_t tag = header.iteration;
    if (Match(rank, tag, &peer.direct)) {
        if (!Fits(rank, tag, header.length, peer.direct)) return Sink::Fault(Code::kMismatch, "a message of another size");
        return Sink::Take(peer.direct.into);
    }
    std::list<Arrival>& arrivals = arrivals_[tag];
    Arrival& arrival = arrivals.emplace_back();
    arrival.rank = rank;
    arrival.bytes = header.length;
    arrival.kept.reset(new uint8_t[header.length]);
    held_bytes_ += header.length;
    peer.arriving_in = &arrivals;
    peer.arriving = std::prev(arrivals.end());
    return Sink::Take(arrival.kept.get());
}

void Messages::OnFrame(uint32_t rank, const Header& header) {
    Peer& peer = peers_[rank];
    const uint32_t tag = header.iteration;
    if (header.type == FrameType::kPart) {
        const auto found = peer.coming.find(header.tensor);
        auto& [receipt, come] = found->second;
        come += header.length;
        if (come != receipt.bytes) return;
        const std::shared_ptr<Transfer> transfer = std::move(receipt.transfer);
        peer.coming.erase(found);
        peer.offered.erase(header.tensor);
        post_->Ended(*transfer, static_cast<int32_t>(rank));
        return;
    }
    if (header.length == 0 && header.offset != 0) {
        Receipt receipt;
        if (!Match(rank, tag, &receipt)) {
            Arrival& arrival = arrivals_[tag].emplace_back();
            arrival.rank = rank;
            arrival.number = header.tensor;
            arrival.bytes = header.offset;
            arrival.is_offer = true;
        } else if (Fits(rank, tag, header.offset, receipt)) {
            Accept(rank, header.tensor, std::move(receipt));
        }
        return;
    }
    Receipt receipt = std::move(peer.direct);
    peer.direct = Receipt();
    if (peer.arriving_in != nullptr) {
        std::list<Arrival>& arrivals = *std::exchange(peer.arriving_in, nullptr);
        Arrival& arrival = *peer.arriving;
        arrival.is_whole = true;
        if (arrival.receipt.transfer == nullptr) return;
        receipt = std::move(arrival.receipt);
        if (header.length != 0) std::memcpy(receipt.into, arrival.kept.get(), header.length);
        held_bytes_ -= header.length;
        arrivals.erase(peer.arriving);
        if (arrivals.empty()) arrivals_.erase(tag);
    }
    GiveBack(rank, CostOf(header.length));
    post_->Ended(*receipt.transfer, static_cast<int32_t>(rank));
}

bool Messages::WaitsFor(const std::vector<bool>& left, uint32_t self) const {
    const size_t others = left.size() - 1, gone = static_cast<size_t>(std::count(left.begin(), left.end(), true));
    for (uint32_t rank = 0; rank < left.size(); ++rank) {
        const Peer& peer = peers_[rank];
        if (rank != self && left[rank] && (!peer.sending.empty() || !peer.backlog.empty() || !peer.coming.empty())) return true;
    }
    for (const auto& [tag, receipts] : receipts_) {
        for (const Receipt& each : receipts) {
            if (each.from == kAnyone ? gone == others : left[static_cast<size_t>(each.from)]) return true;
        }
    }
    return false;
}

}  // namespace gradlane
