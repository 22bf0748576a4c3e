// Attention to slot-major blocks of any format.
#pragma once

#include <cmath>
#include <cstdint>

#include "../cache.h"
#include "../numbers.h"
#include "pieces.h"
#include "scratch.h"

namespace quire {

// Element `d` of a slot whose scale, if it has one, is `scale`.
template <typename T>
float scaled_element(const T* slot, int d, float) {
  return element(slot + d);
}
inline float scaled_element(const int8_t* slot, int d, float scale) { return static_cast<float>(slot[d]) * scale; }

// Like attend_packed, for slot-major blocks.
template <typename S>
void attend_slots(const Attention& attention, const Piece& piece, int rows, int group, int position, Scratch& s) {
  const Cache& cache = attention.cache;
  const Scores& how = attention.how;
  const int size = cache.key.size, width = cache.value.size;
  const int32_t* table = attention.sequences.table(piece.sequence);
  float line[kLargestHead];
  for (int slot = piece.from; slot < piece.to; ++slot) {
    const int offset = slot % cache.block_size;
    const auto* block = static_cast<const StoredOf<S>*>(cache.data) + table[slot / cache.block_size] * cache.block_stride;
    for (int head = 0; head < piece.heads; ++head) {
      const auto* keys = block + (piece.head + head) * cache.key.head_stride;
      const auto* values = block + cache.value.offset + (piece.head + head) * cache.value.head_stride;
      const auto *key = keys + static_cast<int64_t>(offset) * size, *value = values + static_cast<int64_t>(offset) * width;
      float scales[2] = {};
      if constexpr (kCoded<S>) {
        load_scales(keys + scales_of(cache, cache.key) + offset * kScaleBytes, 1, scales);
        load_scales(values + scales_of(cache, cache.value) + offset * kScaleBytes, 1, scales + 1);
      }
      for (int d = 0; d < size; ++d) line[d] = scaled_element(key, d, scales[0]);
      for (int row = 0; row < rows; ++row) {
        const int here = position + row / group, at = head * 16 + row;
        if (slot > here || (how.window && slot <= here - how.window)) continue;
        float score = 0.0f;
        const float* q = s.query + at * size;
        for (int d = 0; d < size; ++d) score += q[d] * line[d];
        score *= how.scaling;
        if (how.softcap != 0.0f) score = how.softcap * std::tanh(score / how.softcap);
        score *= kLog2OfE;
        float* sums = s.sums + at * width;
        if (score > s.largest[at]) {
          const float correction = std::exp2(s.largest[at] - score);
          for (int d = 0; d < width; ++d) sums[d] *= correction;
          s.total[at * 16] *= correction;
          s.largest[at] = score;
        }
        const float weight = std::exp2(score - s.largest[at]);
        s.total[at * 16] += weight;
        for (int d = 0; d < width; ++d) sums[d] += weight * scaled_element(value, d, scales[1]);
      }
    }
  }
}

}  // namespace quire
