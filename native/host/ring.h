// A ring of bytes from one process to another in memory that both map. Both numbers only rise: how many bytes were
// written and how many were read. Each side keeps its own number and believes nothing of the other's: it is read once a
// step, and one that cannot be ends the ring.
//
// One thread at a time uses a side. IsReadable, IsInsisted and HasRoom, which only compare the numbers, are any thread's.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gradlane {

// In the segment; zeros at first.
struct RingMarks {
    alignas(64) std::atomic<uint64_t> written{0};
    std::atomic<uint64_t> insisted{0};  // of what was written: what is to be read even where no thread waits for it
    alignas(64) std::atomic<uint64_t> read{0};
    alignas(64) std::atomic<uint32_t> awaits_room{0};  // the writer has more than there is room for
};

class RingWriter {
  public:
    // bytes: a power of two.
    RingWriter(RingMarks* marks, uint8_t* memory, uint64_t bytes) : marks_(marks), memory_(memory), bytes_(bytes) {}

    // Free bytes; 0 once the reader's number cannot be.
    uint64_t Room();
    // Copies up to `length` bytes, as many as there was room for at the last call of Room. Returns how many. The reader
    // sees them after Publish.
    uint64_t Put(const uint8_t* from, uint64_t length);
    void Publish() { marks_->written.store(written_, std::memory_order_release); }
    // All that was published is to be read even where no thread waits for it.
    void Insist() { marks_->insisted.store(written_, std::memory_order_release); }
    // Asks the reader to ring when half of the ring is free. False: it is, or the reader's number cannot be.
    bool AwaitRoom();
    // Whether AwaitRoom has asked since the last call of Room, and half of the ring is free now.
    bool HasRoom() const {
        return awaits_room_.load(std::memory_order_relaxed) &&
               marks_->written.load(std::memory_order_relaxed) - marks_->read.load(std::memory_order_acquire) <= bytes_ / 2;
    }
    bool is_broken() const { return is_broken_; }

  private:
    RingMarks* marks_;
    uint8_t* memory_;
    uint64_t bytes_;
    uint64_t written_ = 0, room_ = 0;
    std::atomic<bool> awaits_room_{false};
    bool is_broken_ = false;
};

class RingReader {
  public:
    RingReader(RingMarks* marks, const uint8_t* memory, uint64_t bytes) : marks_(marks), memory_(memory), bytes_(bytes) {}

    // Bytes to read; 0 once the writer's number cannot be.
    uint64_t Available();
    // Copies up to `length` bytes of those that Available has told of, and gives their room back. Returns how many.
    uint64_t Take(uint8_t* into, uint64_t length);
    // Whether the writer wants to be rung now. True once for each time that it has asked.
    bool OwesRing();
    bool IsReadable() const {
        return marks_->written.load(std::memory_order_acquire) != marks_->read.load(std::memory_order_relaxed);
    }
    bool IsInsisted() const {
        return marks_->insisted.load(std::memory_order_acquire) > marks_->read.load(std::memory_order_relaxed);
    }
    bool is_broken() const { return is_broken_; }

  private:
    RingMarks* marks_;
    const uint8_t* memory_;
    uint64_t bytes_;
    uint64_t read_ = 0, available_ = 0;
    bool is_broken_ = false;
};

}  // namespace gradlane
