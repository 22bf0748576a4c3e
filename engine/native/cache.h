// The cache of K and V as a step sees it, and its writes.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace quire {

constexpr int kSlots = 16;  // slots of K that one row of a tile has

struct Cache {
  void* data;
  int64_t block_stride;  // elements from one block to the next
  int64_t value_offset;  // from a layer's K to its V
  int block_size;
  int heads;  // of K and V
  int head_size;
};

inline bool pairs_of(const Cache& cache) {
#ifdef QUIRE_BF16
  return cache.block_size % kSlots == 0 && cache.head_size % 16 == 0;
#else
  return false;
#endif
}

template <typename T>
void write_token(const Cache& cache, int type, int64_t slot, const T* key, const T* value) {
  const int size = cache.head_size, offset = static_cast<int>(slot % cache.block_size);
  const int64_t block = slot / cache.block_size * cache.block_stride;
  for (int head = 0; head < cache.heads; ++head) {
    const int64_t base = block + static_cast<int64_t>(head) * cache.block_size * size;
    const T *k = key + static_cast<int64_t>(head) * size, *v = value + static_cast<int64_t>(head) * size;
    if (type == 1 && pairs_of(cache)) {
      bf16* keys = static_cast<bf16*>(cache.data) + base + static_cast<int64_t>(offset / kSlots) * kSlots * size;
      bf16* values = static_cast<bf16*>(cache.data) + base + cache.value_offset + static_cast<int64_t>(offset / 2) * 2 * size;
      for (int d = 0; d < size; ++d) {
        keys[(d / 2 * kSlots + offset % kSlots) * 2 + d % 2] = narrowed(element(k + d));
        values[d * 2 + offset % 2] = narrowed(element(v + d));
      }
      continue;
    }
    const int64_t at = base + static_cast<int64_t>(offset) * size;
    for (int d = 0; d < size; ++d) {
      if (type == 0) {
        static_cast<float*>(cache.data)[at + d] = element(k + d);
        static_cast<float*>(cache.data)[at + cache.value_offset + d] = element(v + d);
      } else if (type == 1) {
        static_cast<bf16*>(cache.data)[at + d] = narrowed(element(k + d));
        static_cast<bf16*>(cache.data)[at + cache.value_offset + d] = narrowed(element(v + d));
      } else {
        static_cast<_Float16*>(cache.data)[at + d] = static_cast<_Float16>(element(k + d));
        static_cast<_Float16*>(cache.data)[at + cache.value_offset + d] = static_cast<_Float16>(element(v + d));
      }
    }
  }
}

}  // namespace quire
