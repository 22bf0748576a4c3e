// Attention to blocks whose slots lie one after the other, of any type.
#pragma once

#include <cmath>
#include <cstdint>

#include "cache.h"
#include "numbers.h"
#include "pieces.h"
#include "scratch.h"

namespace quire {

// Does what attend_pairs does for blocks whose slots lie one after the other.
template <typename T>
void attend_slots(const Cache& cache, const int32_t* table, const Piece& piece, int rows, int group, int position,
                  const Scores& how, const float* query, Scratch& s) {
  const int size = cache.head_size;
  const T* data = static_cast<const T*>(cache.data);
  const int64_t head = static_cast<int64_t>(piece.head) * cache.block_size * size;
  float line[256];
  for (int slot = piece.from; slot < piece.to; ++slot) {
    const T* key = data + table[slot / cache.block_size] * cache.block_stride + head +
                   static_cast<int64_t>(slot % cache.block_size) * size;
    const T* value = key + cache.value_offset;
    for (int d = 0; d < size; ++d) line[d] = element(key + d);
    for (int row = 0; row < rows; ++row) {
      const int here = position + row / group;
      if (slot > here || (how.window && slot <= here - how.window)) continue;
      float score = 0.0f;
      const float* q = query + row * size;
      for (int d = 0; d < size; ++d) score += q[d] * line[d];
      score *= how.scaling;
      if (how.softcap != 0.0f) score = how.softcap * std::tanh(score / how.softcap);
      score *= kLog2OfE;
      float* sums = s.sums + row * size;
      if (score > s.largest[row]) {
        const float correction = std::exp2(s.largest[row] - score);
        for (int d = 0; d < size; ++d) sums[d] *= correction;
        s.total[row * 16] *= correction;
        s.largest[row] = score;
      }
      const float weight = std::exp2(score - s.largest[row]);
      s.total[row * 16] += weight;
      for (int d = 0; d < size; ++d) sums[d] += weight * element(value + d);
    }
  }
}

}  // namespace quire
