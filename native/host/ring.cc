#include "host/ring.h"

#include <algorithm>
#include <cstring>

namespace gradlane {

uint64_t RingWriter::Room() {
    const uint64_t unread = written_ - marks_->read.load(std::memory_order_acquire);
    is_broken_ |= unread > bytes_;
    awaits_room_.store(false, std::memory_order_relaxed);
    return room_ = is_broken_ ? 0 : bytes_ - unread;
}

uint64_t RingWriter::Put(const uint8_t* from, uint64_t length) {
    length = std::min(length, room_);
    if (length == 0) return 0;
    const uint64_t at = written_ & (bytes_ - 1), first = std::min(length, bytes_ - at);
    std::memcpy(memory_ + at, from, first);
    if (first != length) std::memcpy(memory_, from + first, length - first);
    written_ += length;
    room_ -= length;
    return length;
}

bool RingWriter::AwaitRoom() {
    marks_->awaits_room.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool awaits = Room() < bytes_ / 2 && !is_broken_;
    if (!awaits) marks_->awaits_room.store(0, std::memory_order_relaxed);
    awaits_room_.store(awaits, std::memory_order_relaxed);
    return awaits;
}

uint64_t RingReader::Available() {
    const uint64_t unread = marks_->written.load(std::memory_order_acquire) - read_;
    is_broken_ |= unread > bytes_;
    return available_ = is_broken_ ? 0 : unread;
}

uint64_t RingReader::Take(uint8_t* into, uint64_t length) {
    length = std::min(length, available_);
    if (length == 0) return 0;
    const uint64_t at = read_ & (bytes_ - 1), first = std::min(length, bytes_ - at);
    std::memcpy(into, memory_ + at, first);
    if (first != length) std::memcpy(into + first, memory_, length - first);
    read_ += length;
    available_ -= length;
    marks_->read.store(read_, std::memory_order_release);
    return length;
}

bool RingReader::OwesRing() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (marks_->awaits_room.load(std::memory_order_relaxed) == 0) return false;
    const uint64_t unread = marks_->written.load(std::memory_order_relaxed) - read_;
    return unread <= bytes_ / 2 && marks_->awaits_room.exchange(0) != 0;
}

}  // namespace gradlane
