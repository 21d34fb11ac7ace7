#include "node/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "digest/crc32c.h"

namespace gradlane {

Connection::Io Connection::Fault(Code code, std::string why) {
    code_ = code;
    why_ = std::move(why);
    return Io::kFault;
}

namespace {

// The kernel's word on a connection: the peer's process has closed it, or its host is out of reach.
Code Broken(int error) {
    switch (error) {
        case ETIMEDOUT:
        case EHOSTUNREACH:
        case EHOSTDOWN:
        case ENETUNREACH:
        case ENETDOWN: return Code::kStalled;
        default: return Code::kDied;
    }
}

}  // namespace

// Takes whole frames out of what has been read. kDone: more bytes are needed.
Connection::Io Connection::Parse(Owner& owner) {
    while (true) {
        if (in_payload_) {
            const size_t taken = std::min(stage_end_ - stage_begin_, remaining_);
            if (taken != 0 && !drops_) std::memcpy(into_, stage_.data() + stage_begin_, taken);
            stage_begin_ += taken;
            Received(taken);
            if (remaining_ != 0) return Io::kDone;
            in_payload_ = false;
            if (drops_) {
                drops_ = false;
                continue;
            }
            if ((header_.flags & kFlagChecksum) != 0 && crc_ != header_.payload_crc) {
                return Fault(Code::kCorrupt, "the checksum of a payload does not match: damaged on the way");
            }
            ++received_packets;
            if (!owner.OnFrame(*this, header_)) return Io::kEnd;
            continue;
        }
        if (stage_end_ - stage_begin_ < kHeaderBytes) {
            std::memmove(stage_.data(), stage_.data() + stage_begin_, stage_end_ - stage_begin_);
            stage_end_ -= stage_begin_;
            stage_begin_ = 0;
            return Io::kDone;
        }
        const HeaderFault fault = Decode(stage_.data() + stage_begin_, &header_);
        if (fault != HeaderFault::kNone) {
            return Fault(fault == HeaderFault::kChecksum ? Code::kCorrupt : Code::kProtocol, Describe(fault));
        }
        const Sink sink = owner.OnHeader(*this, header_);
        if (sink.kind == Sink::Kind::kFault) return Fault(sink.code, sink.why);
        if (sink.kind == Sink::Kind::kPark) {
            parked_ = true;
            return Io::kParked;
        }
        stage_begin_ += kHeaderBytes;
        in_payload_ = true;
        into_ = sink.into;
        drops_ = sink.kind == Sink::Kind::kDrop;
        remaining_ = header_.length;
        crc_ = 0;
    }
}

// Bytes of the payload have come to `into_`. Their checksum is taken now, while they are in the cache.
void Connection::Received(size_t bytes) {
    remaining_ -= bytes;
    if (drops_) return;
    if ((header_.flags & kFlagChecksum) != 0) crc_ = Crc32c(into_, bytes, crc_);
    into_ += bytes;
}

// Before this side waits for the poller: it has taken what the kernel had, or leaves the rest for later.
void Connection::AwaitRest() {
    const size_t bytes = in_payload_ ? std::min(remaining_, kMostAwaited) : 1;
    if (bytes == awaited_) return;
    awaited_ = bytes;
    AwaitBytes(socket_, bytes);
}

Connection::Io Connection::Read(Owner& owner, size_t budget, int64_t now_ns) {
    bool drained = false;  // the kernel had less than there was room for
    for (size_t taken = 0; taken < budget && !drained;) {
        const Io parsed = Parse(owner);
        if (parsed != Io::kDone) return parsed;
        // the rest of a payload goes where it belongs; what follows it, to the stage, which is empty then
        iovec iov[2];
        int parts = 0;
        size_t direct = 0;
        if (in_payload_) stage_begin_ = stage_end_ = 0;
        if (in_payload_ && !drops_) {
            direct = remaining_;
            iov[parts++] = {into_, remaining_};
        }
        const size_t room = kStageBytes - stage_end_;
        iov[parts++] = {stage_.data() + stage_end_, room};
        const ssize_t n = readv(socket_.get(), iov, parts);
        if (n == 0) return Io::kEnd;
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                AwaitRest();
                return Io::kDone;
            }
            return Fault(Broken(errno), std::string("its connection broke: ") + std::strerror(errno));
        }
        const auto got = static_cast<size_t>(n);
        heard_ns = now_ns;
        taken += got;
        received_bytes += got;
        drained = got < direct + room;
        const size_t straight = std::min(got, direct);
        if (direct != 0) Received(straight);
        stage_end_ += got - straight;
    }
    const Io parsed = Parse(owner);
    if (parsed != Io::kDone) return parsed;
    AwaitRest();
    return drained ? Io::kDone : Io::kMore;
}

void Connection::FillBatch(Owner& owner) {
    batch_packets_ = iov_begin_ = iov_end_ = 0;
    awaits_turn_ = false;
    if (!control_.empty()) {
        control_sending_.swap(control_);
        control_.clear();
        iov_[iov_end_++] = {control_sending_.data(), control_sending_.size()};
        batch_left_ += control_sending_.size();
    }
    for (size_t bytes = 0; batch_packets_ < kBatch && bytes < kBatchBytes && !queue_.empty();) {
        awaits_turn_ = !owner.IsTurn(*this);
        if (awaits_turn_) break;
        Packet& packet = packets_[batch_packets_] = queue_.Next();
        packet.header.sender = sender;
        if (checksum) {
            packet.header.flags |= kFlagChecksum;
            // that of a result is there: several connections send it
            if (packet.header.type != FrameType::kResult) packet.header.payload_crc = Crc32c(packet.payload, packet.header.length);
        }
        uint8_t* header = headers_[batch_packets_].data();
        Encode(packet.header, header);
        iov_[iov_end_++] = {header, kHeaderBytes};
        iov_[iov_end_++] = {const_cast<uint8_t*>(packet.payload), packet.header.length};
        bytes += packet.header.length;
        taken_bytes_ += packet.header.length;
        batch_left_ += kHeaderBytes + packet.header.length;
        ++batch_packets_;
    }
}

Connection::Io Connection::Write(Owner& owner, size_t budget, int64_t now_ns) {
    touched = false;
    for (size_t written = 0; written < budget;) {
        if (batch_left_ == 0) FillBatch(owner);
        if (batch_left_ == 0) return Io::kDone;
        msghdr message{};
        message.msg_iov = iov_.data() + iov_begin_;
        message.msg_iovlen = iov_end_ - iov_begin_;
        const ssize_t n = sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) return Io::kBlocked;
            return Fault(Broken(errno), std::string("its connection broke: ") + std::strerror(errno));
        }
        sent_ns = now_ns;
        auto gone = static_cast<size_t>(n);
        written += gone;
        sent_bytes += gone;
        batch_left_ -= gone;
        while (gone != 0) {
            iovec& part = iov_[iov_begin_];
            const size_t taken = std::min(gone, part.iov_len);
            part.iov_base = static_cast<uint8_t*>(part.iov_base) + taken;
            part.iov_len -= taken;
            gone -= taken;
            if (part.iov_len == 0) ++iov_begin_;
        }
        if (batch_left_ != 0) return Io::kBlocked;  // the kernel took what it had room for
        sent_packets += batch_packets_;
        for (size_t i = 0; i < batch_packets_; ++i) {
            packets_[i].buffer.reset();
            if (packets_[i].header.type != FrameType::kResult) owner.OnSent(*this, packets_[i].header);
        }
        batch_packets_ = 0;
    }
    return has_output() ? Io::kMore : Io::kDone;
}

void Connection::LetGo() {
    queue_.Clear();
    if (in_payload_ && IsData(header_.type)) drops_ = true;
    early = false;
    receiving.reset();
    std::vector<uint8_t> kept;
    kept.reserve(batch_left_);
    for (; iov_begin_ != iov_end_; ++iov_begin_) {
        const iovec& part = iov_[iov_begin_];
        const auto* begin = static_cast<const uint8_t*>(part.iov_base);
        kept.insert(kept.end(), begin, begin + part.iov_len);
    }
    kept_ = std::move(kept);
    iov_begin_ = 0;
    iov_end_ = 1;
    iov_[0] = {kept_.data(), kept_.size()};
}

void Connection::Drop() {
    state = State::kClosed;
    socket_ = Fd();
    queue_.Clear();
    control_.clear();
    for (size_t i = 0; i < batch_packets_; ++i) packets_[i].buffer.reset();
    batch_packets_ = batch_left_ = 0;
    awaits_turn_ = false;
    receiving.reset();
}

}  // namespace gradlane
