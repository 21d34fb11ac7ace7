// One step of an optimizer on some parameters: the operations of torch.optim's plain loops on a
// CPU, in their order, in f32, each a + b * c fused as torch's vector loops fuse it. So, where
// torch has FMA:
// - SGD gives torch's bits, with every option;
// - so do both moments of Adam and AdamW. Their parameters may differ by the rounding of one square
//   root a step: here it is rounded as IEEE 754 says, torch takes it from a library that may be off
//   by one place.
//
// Nothing here allocates, fails or keeps memory. The instruction set is chosen once and does not
// change a result.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "update/rule.h"

namespace gradlane {

// parameters, gradient and as many of first and second as StatesOf(rule.kind) says: n values each, not overlapping.
// step: the number of this step, from 1. At the first one the states' contents are zeros.
void Update(const Rule& rule, uint64_t step, float* parameters, const float* gradient, float* first, float* second, size_t n);

// The loops compiled for one instruction set each, the best last; for tests.
using UpdateLoop = void (*)(const Rule&, uint64_t, float*, const float*, float*, float*, size_t);
std::span<const UpdateLoop> RunnableUpdates();

}  // namespace gradlane
