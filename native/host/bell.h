// Bell: how the ranks of a host tell one of them that there is something for it in the memory that they share.
//
// Its owner says what a ring has to do: nothing, since a thread looks by itself; wake the thread that sleeps here
// (a futex in the shared memory, without a file between both threads); or, where no thread waits, wake the I/O thread by
// the rank's eventfd, if what has come cannot wait until a thread does.
//
// A ring is never missed: a rank writes and then rings, and the owner says what it does and then looks once more.
// Whatever another process writes into the word, a sleep ends in time.
//
// Any thread may ring. One thread of the owner's at a time sleeps.

#pragma once

#include <atomic>
#include <cstdint>

namespace gradlane {

class Bell {
  public:
    // In the segment; zeros at first.
    struct Word {
        alignas(64) std::atomic<uint32_t> state{0};
    };

    // eventfd: of the rank that owns the bell.
    Bell(Word* word, int eventfd) : word_(word), eventfd_(eventfd) {}

    // After something was written for the owner. insists: also where no thread waits for it.
    void Ring(bool insists);
    // The owner's own threads end its sleep.
    void Rouse();

    // The owner's: a thread looks from now on.
    void Look() { word_->state.store(kLooks, std::memory_order_relaxed); }
    // No thread does. Look once more after it.
    void Leave();
    // As Leave, for the I/O thread, which does not speak for a thread that sleeps.
    void LeaveUnlessAsleep();
    // Sleeps until a ring, or for timeout_ns at most, unless is_there() is true once a ring would end the sleep.
    template <typename IsThere>
    void Sleep(int64_t timeout_ns, IsThere is_there) {
        word_->state.store(kSleeps, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (!is_there()) Wait(timeout_ns);
        Look();
    }

  private:
    enum : uint32_t { kLooks = 0, kSleeps = 1, kAbsent = 2 };

    void Wait(int64_t timeout_ns);

    Word* word_;
    int eventfd_;
};

}  // namespace gradlane
