#include "host/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3; some hosts demand it, and older kernels do not know it
#endif

namespace gradlane {

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string Failure(const char* call, size_t bytes, int error) {
    return std::string(call) + " of " + std::to_string(bytes) + " bytes of shared memory: " + std::strerror(error);
}

int Reserve(int fd, size_t bytes) {
    while (true) {
        const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
        if (error != EINTR) return error;
    }
}

}  // namespace

Segment Segment::Create(size_t bytes, std::string* why) {
    constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    int fd = memfd_create("gradlane", kFlags | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) fd = memfd_create("gradlane", kFlags);
    Segment segment;
    segment.fd_ = Fd(fd);
    segment.bytes_ = bytes;
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
        *why = Failure("memfd_create", bytes, errno);
        return Segment();
    }
    // mapped first: a size that does not fit in a process is refused before the system looks for the memory
    if (!segment.MapHere(why)) return Segment();
    if (const int error = Reserve(fd, bytes); error != 0) {
        *why = Failure("fallocate", bytes, error);
        return Segment();
    }
    if (fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
        *why = Failure("sealing", bytes, errno);
        return Segment();
    }
    return segment;
}

Segment Segment::Map(Fd fd, size_t bytes, std::string* why) {
    struct stat found{};
    const int seals = fcntl(fd.get(), F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd.get(), &found) != 0 || static_cast<size_t>(found.st_size) != bytes) {
        *why = "got memory that is not sealed or not of " + std::to_string(bytes) + " bytes";
        return Segment();
    }
    Segment segment;
    segment.fd_ = std::move(fd);
    segment.bytes_ = bytes;
    return segment.MapHere(why) ? std::move(segment) : Segment();
}

Segment Segment::Again() const {
    Segment segment;
    segment.data_ = data_;
    segment.bytes_ = bytes_;
    return segment;
}

bool Segment::MapHere(std::string* why) {
    void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (mapped == MAP_FAILED) {
        *why = Failure("mmap", bytes_, errno);
        return false;
    }
    data_ = {static_cast<uint8_t*>(mapped), [bytes = bytes_](uint8_t* data) { munmap(data, bytes); }};
    if (madvise(mapped, bytes_, MADV_DONTFORK) != 0) {
        *why = Failure("madvise", bytes_, errno);
        return false;
    }
    return true;
}

}  // namespace gradlane
