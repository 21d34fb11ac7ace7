#include "node/mailboxes.h"

#include "node/messages.h"

#include <algorithm>
#include <bit>

namespace gradlane {

namespace {

// Twice the largest message that leaves without being asked for: none stops its sender halfway.
constexpr uint64_t kMostRingBytes = 512 << 10;
constexpr uint64_t kRankBytes = 1 << 20;  // of all rings to one rank, at most
static_assert(kRankBytes / kMaxHostRanks >= kHeaderBytes);

uint64_t RingBytesFor(uint32_t ranks) { return std::min(kMostRingBytes, std::bit_floor(kRankBytes / std::max(1u, ranks - 1))); }

}  // namespace

size_t Mailboxes::BytesFor(uint32_t ranks) {
    return ranks * sizeof(Bell::Word) + ranks * (ranks - 1) * (sizeof(RingMarks) + RingBytesFor(ranks));
}

// In the segment: the words of all bells, the marks of all rings, and the rings, of each rank those to all others.
Mailboxes::Mailboxes(std::shared_ptr<const HostRoom> room, size_t offset, Owner* owner)
    : room_(std::move(room)),
      owner_(owner),
      bell_(reinterpret_cast<Bell::Word*>(room_->segment.data() + offset) + room_->rank, room_->wakes[room_->rank].get()) {
    const uint32_t self = room_->rank, ranks = room_->ranks;
    const uint64_t ring_bytes = RingBytesFor(ranks);
    auto* words = reinterpret_cast<Bell::Word*>(room_->segment.data() + offset);
    auto* marks = reinterpret_cast<RingMarks*>(words + ranks);
    auto* rings = reinterpret_cast<uint8_t*>(marks + ranks * (ranks - 1));
    const auto ring = [ranks](uint32_t from, uint32_t to) { return from * (ranks - 1) + to - (to > from); };
    for (uint32_t rank = 0; rank < ranks; ++rank) {
        if (rank == self) {
            peers_.push_back(nullptr);
            continue;
        }
        const uint32_t in = ring(rank, self), out = ring(self, rank);
        peers_.push_back(std::make_unique<Peer>(RingReader(marks + in, rings + in * ring_bytes, ring_bytes), marks + out,
                                                rings + out * ring_bytes, ring_bytes,
                                                Bell(words + rank, room_->wakes[rank].get())));
    }
}

void Mailboxes::QueueControl(uint32_t rank, const std::vector<uint8_t>& frame) {
    std::vector<uint8_t>& control = peers_[rank]->control;
    control.insert(control.end(), frame.begin(), frame.end());
}

bool Mailboxes::HasOutput(uint32_t rank) const { return peers_[rank] != nullptr && !peers_[rank]->is_closed && peers_[rank]->HasOutput(); }

bool Mailboxes::IsReady() const {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const auto& peer) { return peer != nullptr && (peer->in.IsReadable() || peer->out.HasRoom()); });
}

bool Mailboxes::IsInsisted() const {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const auto& peer) { return peer != nullptr && (peer->in.IsInsisted() || peer->out.HasRoom()); });
}

void Mailboxes::Close() noexcept {
    for (const auto& peer : peers_) {
        if (peer != nullptr) peer->is_closed = true;
    }
}

bool Mailboxes::Fault(uint32_t rank, Code code, const char* why) {
    peers_[rank]->is_closed = true;
    owner_->OnMailFault(rank, code, why);
    return false;
}

// -- to others ----------------------------------------------------------------------------------------------

bool Mailboxes::BeginNext(Peer& peer) {
    if (!peer.control.empty()) {
        peer.sending_control.swap(peer.control);
        peer.control.clear();
        peer.sending = peer.sending_control.data();
        peer.unsent_head = peer.sending_control.size();
        peer.is_packet = false;
        peer.insists = true;
        return true;
    }
    if (peer.queue.empty()) return false;
    peer.packet = peer.queue.Next();
    const Header& header = peer.packet.header;
    Encode(header, peer.sending_head.data());
    peer.sending = peer.sending_head.data();
    peer.unsent_head = kHeaderBytes;
    peer.unsent = header.length;
    peer.is_packet = true;
    // not a small message, nor one of an exchange, whose waiters look at no mailbox
    peer.insists = header.type != FrameType::kMessage || header.length != header.offset || header.iteration >= kExchangeTags;
    return true;
}

bool Mailboxes::WriteTo(uint32_t rank, uint64_t bytes) {
    Peer& peer = *peers_[rank];
    while (!peer.is_closed) {
        if (peer.unsent_head == 0 && peer.unsent == 0 && !BeginNext(peer)) return false;
        if (bytes == 0) return true;
        if (peer.out.Room() == 0) {
            if (!peer.out.is_broken()) {
                peer.out.Insist();
                peer.bell.Ring(true);
                if (peer.out.AwaitRoom()) return false;
            }
            if (peer.out.is_broken()) return Fault(rank, Code::kProtocol, "it has read what was not written");
        }
        uint64_t put = peer.out.Put(peer.sending, peer.unsent_head);
        peer.sending += put;
        peer.unsent_head -= put;
        if (peer.unsent_head == 0 && peer.unsent != 0) {
            const uint8_t* from = peer.packet.payload + (peer.packet.header.length - peer.unsent);
            const uint64_t piece = peer.out.Put(from, std::min(peer.unsent, kPieceBytes));
            peer.unsent -= piece;
            put += piece;
        }
        peer.out.Publish();
        if (peer.insists) peer.out.Insist();
        peer.bell.Ring(peer.insists);
        bytes -= std::min(bytes, put);
        if (peer.unsent_head == 0 && peer.unsent == 0 && peer.is_packet) owner_->OnMailSent(rank, peer.packet.header);
    }
    return false;
}

bool Mailboxes::Write(uint64_t bytes) {
    bool more = false;
    for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
        if (HasOutput(rank)) more |= WriteTo(rank, bytes);
    }
    return more;
}

// -- from others --------------------------------------------------------------------------------------------

// False: the rest of it has yet to come, or it is refused.
bool Mailboxes::TakeHeader(uint32_t rank) {
    Peer& peer = *peers_[rank];
    peer.head_bytes += peer.in.Take(peer.head.data() + peer.head_bytes, kHeaderBytes - peer.head_bytes);
    if (peer.head_bytes != kHeaderBytes) return false;
    if (const HeaderFault fault = Decode(peer.head.data(), &peer.header); fault != HeaderFault::kNone) {
        return Fault(rank, fault == HeaderFault::kChecksum ? Code::kCorrupt : Code::kProtocol, Describe(fault));
    }
    const Connection::Sink sink = owner_->OnMailHeader(rank, peer.header);
    if (sink.kind != Connection::Sink::Kind::kTake) return Fault(rank, sink.code, sink.why);
    peer.into = sink.into;
    peer.awaited = peer.header.length;
    return true;
}

bool Mailboxes::ReadFrom(uint32_t rank, uint64_t bytes) {
    Peer& peer = *peers_[rank];
    while (!peer.is_closed && peer.in.Available() != 0) {
        if (bytes == 0) return true;
        if (peer.head_bytes != kHeaderBytes) {
            const bool is_whole = TakeHeader(rank);
            if (peer.is_closed) return false;
            bytes -= std::min<uint64_t>(bytes, kHeaderBytes);
            if (!is_whole) continue;
        }
        const uint64_t taken = peer.in.Take(peer.into, std::min(peer.awaited, kPieceBytes));
        peer.into += taken;
        peer.awaited -= taken;
        bytes -= std::min(bytes, taken);
        if (peer.in.OwesRing()) peer.bell.Ring(true);
        if (peer.awaited != 0) continue;
        peer.head_bytes = 0;
        if (const char* why = owner_->OnMailFrame(rank, peer.header)) return Fault(rank, Code::kProtocol, why);
    }
    return !peer.is_closed && peer.in.is_broken() && Fault(rank, Code::kProtocol, "it has written more than there was room for");
}

bool Mailboxes::Pump(uint64_t bytes) {
    if (is_pumping_) return false;
    is_pumping_ = true;
    bool more = false;
    for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
        if (peers_[rank] != nullptr && !peers_[rank]->is_closed) more |= ReadFrom(rank, bytes);
    }
    more |= Write(bytes);
    is_pumping_ = false;
    return more;
}

}  // namespace gradlane
