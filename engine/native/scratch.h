// What one thread needs to attend with the rows of one piece.
#pragma once

#include "cache.h"
#include "numbers.h"
#include "pieces.h"

namespace quire {

constexpr int kLargestHead = 256;

struct Scratch {
  alignas(64) float scores[kRows * kChunk];
  alignas(64) bf16 weights[kRows * kChunk];
  alignas(64) bf16 query[kRows * kLargestHead];
  alignas(64) float plain_query[kRows * kLargestHead];
  alignas(64) float sums[kRows * kLargestHead];
  alignas(64) bf16 values[kChunk * kLargestHead];
  float largest[kRows];  // scores, logarithms to base 2
  float total[kRows];
};

}  // namespace quire
