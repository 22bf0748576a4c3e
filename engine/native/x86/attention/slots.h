// Attention to slot-major blocks of any type.
#pragma once

#include <cmath>
#include <cstdint>

#include "../cache.h"
#include "../numbers.h"
#include "pieces.h"
#include "scratch.h"

namespace quire {

// Like attend_packed, for slot-major blocks.
template <typename T>
void attend_slots(const Attention& attention, const Piece& piece, int rows, int group, int position, Scratch& s) {
  const Cache& cache = attention.cache;
  const Scores& how = attention.how;
  const int size = cache.head_size;
  const int32_t* table = attention.sequences.table(piece.sequence);
  float line[kLargestHead];
  for (int slot = piece.from; slot < piece.to; ++slot) {
    const T* block = static_cast<const T*>(cache.data) + table[slot / cache.block_size] * cache.block_stride;
    for (int head = 0; head < piece.heads; ++head) {
      const int64_t within = static_cast<int64_t>(piece.head + head) * cache.block_size + slot % cache.block_size;
      const T *key = block + within * size, *value = key + cache.value_offset;
      for (int d = 0; d < size; ++d) line[d] = element(key + d);
      for (int row = 0; row < rows; ++row) {
        const int here = position + row / group, at = head * 16 + row;
        if (slot > here || (how.window && slot <= here - how.window)) continue;
        float score = 0.0f;
        const float* q = s.query + at * size;
        for (int d = 0; d < size; ++d) score += q[d] * line[d];
        score *= how.scaling;
        if (how.softcap != 0.0f) score = how.softcap * std::tanh(score / how.softcap);
        score *= kLog2OfE;
        float* sums = s.sums + at * size;
        if (score > s.largest[at]) {
          const float correction = std::exp2(s.largest[at] - score);
          for (int d = 0; d < size; ++d) sums[d] *= correction;
          s.total[at * 16] *= correction;
          s.largest[at] = score;
        }
        const float weight = std::exp2(score - s.largest[at]);
        s.total[at * 16] += weight;
        for (int d = 0; d < size; ++d) sums[d] += weight * element(value + d);
      }
    }
  }
}

}  // namespace quire
