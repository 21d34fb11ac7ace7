// Outbox: where a server's sums and parameters go. Aggregator and Updates call it under the node's
// lock.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "node/buffer.h"
#include "node/layout.h"
#include "node/spec.h"

namespace gradlane {

class Outbox {
  public:
    virtual ~Outbox() = default;
    // Send the sum of one packet to every receiving worker in another process.
    virtual void Return(uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place,
                        uint32_t iteration, BufferRef sum) = 0;
    // Send the parameters of one packet to worker `rank`, which is in another process.
    virtual void ReturnTo(uint32_t rank, uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout,
                          uint32_t place, uint32_t iteration, BufferRef parameters) = 0;
    // `packets` more sums are in the memory of the worker in this process.
    virtual void Delivered(uint32_t tensor, uint32_t packets) = 0;
    // `packets` more were read from the memory of the worker in this process, which gets no sum for
    // them.
    virtual void Consumed(uint32_t tensor, uint32_t packets) = 0;
    // Every packet of a tensor with `once` has been summed: Forget() it, but not within this call.
    virtual void Over(uint32_t tensor) = 0;
    // Worker `rank` has another rule in force than other workers have for the same update. The job
    // cannot go on.
    virtual void Disagree(uint32_t rank, const std::string& text) = 0;
};

}  // namespace gradlane
