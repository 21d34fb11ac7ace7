// Segment: anonymous memory that several processes map. It has no name, so that nothing of it is left
// when the last process that maps it is gone, however that ended. Its size is sealed: no process can
// shrink it under another, which would end that one with SIGBUS. A forked child does not inherit it.
//
// The last Segment of a mapping unmaps it when it is destroyed. Any thread may use the memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "net/socket.h"

namespace gradlane {

class Segment {
  public:
    Segment() = default;
    Segment(Segment&& other) noexcept { *this = std::move(other); }
    Segment& operator=(Segment&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(fd_, other.fd_);
        return *this;
    }

    // Makes `bytes` of zeros. All of them are taken from the system at once: memory that is missing is
    // missed here, and not at a later write. On failure: an empty Segment and `why`.
    static Segment Create(size_t bytes, std::string* why);
    // Maps what another process has made. It must have exactly `bytes` and be sealed.
    static Segment Map(Fd fd, size_t bytes, std::string* why);
    // The same mapping once more, for another rank of this process.
    Segment Again() const;

    uint8_t* data() const { return data_.get(); }
    size_t bytes() const { return bytes_; }
    const Fd& fd() const { return fd_; }  // to hand over
    explicit operator bool() const { return data_ != nullptr; }

  private:
    bool MapHere(std::string* why);

    std::shared_ptr<uint8_t> data_;
    size_t bytes_ = 0;
    Fd fd_;
};

}  // namespace gradlane
