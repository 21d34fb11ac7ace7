// Buffer: the memory of one packet on its way through a server, which receives into it, sums in it
// and sends from it. References are counted, because the same sum leaves on several connections. A
// pool hands out the buffer that came back last, because that one is most likely still in the
// cache.
//
// A pool and its buffers belong to one node and are used under its lock alone, so that the count
// need not be atomic.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace gradlane {

class BufferPool;

struct Buffer {
    BufferPool* pool;
    uint32_t refs;
    uint32_t capacity;
    uint8_t* data;
};

class BufferRef {
  public:
    BufferRef() = default;
    explicit BufferRef(Buffer* buffer) : buffer_(buffer) { ++buffer_->refs; }
    BufferRef(const BufferRef& other) : buffer_(other.buffer_) {
        if (buffer_ != nullptr) ++buffer_->refs;
    }
    BufferRef(BufferRef&& other) noexcept : buffer_(std::exchange(other.buffer_, nullptr)) {}
    BufferRef& operator=(BufferRef other) noexcept {
        std::swap(buffer_, other.buffer_);
        return *this;
    }
    ~BufferRef();

    uint8_t* data() const { return buffer_->data; }
    explicit operator bool() const { return buffer_ != nullptr; }
    void reset() { *this = BufferRef(); }

  private:
    Buffer* buffer_ = nullptr;
};

// Buffers of one size. The pool grows with the packets in flight, which Aggregator::NeededBytes
// bounds. Of the buffers that come back it keeps at most `keep` and frees the rest.
class BufferPool {
  public:
    BufferPool(uint32_t capacity, size_t keep) : capacity_(capacity), keep_(keep) {}
    BufferPool(const BufferPool&) = delete;
    BufferPool& operator=(const BufferPool&) = delete;
    ~BufferPool() {
        for (Buffer* buffer : free_) Destroy(buffer);
    }

    BufferRef Take() {
        Buffer* buffer;
        if (free_.empty()) {
            buffer = Create();
        } else {
            buffer = free_.back();
            free_.pop_back();
        }
        ++taken_;
        if (taken_ > most_taken_) most_taken_ = taken_;
        return BufferRef(buffer);
    }

    uint32_t capacity() const { return capacity_; }
    size_t taken_bytes() const { return taken_ * capacity_; }
    size_t most_taken_bytes() const { return most_taken_ * capacity_; }

  private:
    friend class BufferRef;

    void Return(Buffer* buffer) {
        --taken_;
        if (free_.size() < keep_) {
            free_.push_back(buffer);
        } else {
            Destroy(buffer);
        }
    }
    Buffer* Create() {
        const size_t rounded = (static_cast<size_t>(capacity_) + 63) / 64 * 64;
        auto* data = static_cast<uint8_t*>(::operator new(rounded, std::align_val_t{64}));
        return new Buffer{this, 0, capacity_, data};
    }
    static void Destroy(Buffer* buffer) {
        ::operator delete(buffer->data, std::align_val_t{64});
        delete buffer;
    }

    const uint32_t capacity_;
    const size_t keep_;
    std::vector<Buffer*> free_;
    size_t taken_ = 0, most_taken_ = 0;
};

inline BufferRef::~BufferRef() {
    if (buffer_ != nullptr && --buffer_->refs == 0) buffer_->pool->Return(buffer_);
}

}  // namespace gradlane
