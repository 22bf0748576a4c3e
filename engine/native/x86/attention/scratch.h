// Buffers of one thread for the attention of one piece.
#pragma once

#include "../cache.h"
#include "../numbers.h"
#include "pieces.h"

namespace quire {

constexpr float kNothingSeen = -1e30f;  // initial largest score of a row: finite, so that no difference is NaN

struct Scratch {
  alignas(64) float scores[kRows * kChunk];
  alignas(64) float weights[kRows * kChunk];      // left operands of either type
  alignas(64) float query[kRows * kLargestHead];  // the same
  alignas(64) float sums[kRows * kLargestHead];
  alignas(64) bf16 values[kChunk * kLargestHead];       // of tiles
  alignas(64) float last_values[kSlots * kLargestHead];  // of any type
  alignas(64) float numbers[kChunk * kLargestHead];      // K or V of a chunk of codes, of any type
  alignas(64) float scales[kChunk];                      // of these codes
  float largest[kRows];  // scores, logarithms to base 2
  alignas(64) float total[kRows * 16];  // of each row's weights, in 16 parts

  // The same of earlier segments together.
  alignas(64) float earlier_sums[kRows * kLargestHead];
  float earlier_largest[kRows];
  float earlier_total[kRows];
};

}  // namespace quire
