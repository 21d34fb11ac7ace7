#include "host/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace gradlane {

namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free,
              "the kernel reads the word, and locks are not shared between processes");

// Not FUTEX_PRIVATE_FLAG: the word is in the memory of several processes.
void Futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* timeout) {
    (void)syscall(SYS_futex, word, what, value, timeout, nullptr, 0);
}

}  // namespace

void Bell::Ring(bool insists) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    uint32_t state = word_->state.load(std::memory_order_relaxed);
    if (state == kLooks || (state == kAbsent && !insists)) return;
    state = word_->state.exchange(kLooks);  // of several rings one calls the kernel
    if (state == kSleeps) {
        Futex(&word_->state, FUTEX_WAKE, 1, nullptr);
    } else if (state == kAbsent) {
        const uint64_t one = 1;
        (void)!write(eventfd_, &one, sizeof one);
    }
}

void Bell::Rouse() {
    uint32_t asleep = kSleeps;
    if (word_->state.compare_exchange_strong(asleep, kLooks)) Futex(&word_->state, FUTEX_WAKE, 1, nullptr);
}

void Bell::Leave() {
    word_->state.store(kAbsent, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Bell::LeaveUnlessAsleep() {
    uint32_t looks = kLooks;
    word_->state.compare_exchange_strong(looks, kAbsent);
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Bell::Wait(int64_t timeout_ns) {
    const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    Futex(&word_->state, FUTEX_WAIT, kSleeps, &timeout);
}

}  // namespace gradlane
