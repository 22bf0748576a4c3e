// A step's view of the KV cache, and writes to it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "numbers.h"

namespace quire {

constexpr int kSlots = 16;  // slots of K in one row of a tile

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

#ifdef QUIRE_BF16
// Writes one head of one token to a block whose K is stored in pairs: elements of a pair together, pairs 16 slots apart.
inline void write_key_pairs(const Cache& cache, bf16* block, int offset, const bf16* key) {
  bf16* slots = block + static_cast<int64_t>(offset / kSlots) * kSlots * cache.head_size;
  int32_t* to = reinterpret_cast<int32_t*>(slots) + offset % kSlots;
  const __m512i lanes = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  for (int d = 0; d < cache.head_size; d += 32) {
    const __mmask16 there = d + 32 <= cache.head_size ? 0xffff : 0x00ff;  // heads are multiples of 16
    _mm512_mask_i32scatter_epi32(to + d / 2 * kSlots, there, lanes, _mm512_maskz_loadu_epi32(there, key + d), 4);
  }
}

// The same for V: elements of two slots alternate.
inline void write_value_pairs(const Cache& cache, bf16* block, int offset, const bf16* value) {
  bf16* to = block + cache.value_offset + static_cast<int64_t>(offset / 2) * 2 * cache.head_size;
  const __mmask32 half = offset % 2 ? 0xaaaaaaaa : 0x55555555;
  for (int d = 0; d < cache.head_size; d += 16) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + d)));
    _mm512_mask_storeu_epi16(to + d * 2, half, offset % 2 ? _mm512_slli_epi32(wide, 16) : wide);
  }
}
#endif

// Writes the K or V of one head and token, of any type, to a slot-major block.
template <typename T>
void write_plain(const Cache& cache, int type, int64_t at, const T* from) {
  for (int d = 0; d < cache.head_size; ++d) {
    if (type == 0) {
      static_cast<float*>(cache.data)[at + d] = element(from + d);
    } else if (type == 1) {
      static_cast<bf16*>(cache.data)[at + d] = narrowed(element(from + d));
    } else {
      static_cast<_Float16*>(cache.data)[at + d] = static_cast<_Float16>(element(from + d));
    }
  }
}

// Offset (elements) of the slots of one head in the block of a slot.
inline int64_t block_of(const Cache& cache, int64_t slot, int head) {
  return slot / cache.block_size * cache.block_stride + static_cast<int64_t>(head) * cache.block_size * cache.head_size;
}

// Writes one head of a token's K, or of its V.
template <typename T>
void write_head(const Cache& cache, int type, int64_t slot, int head, bool values, const T* from) {
  const int offset = static_cast<int>(slot % cache.block_size);
  const int64_t block = block_of(cache, slot, head);
#ifdef QUIRE_BF16
  if (type == 1 && pairs_of(cache)) {
    bf16 line[256];
    if constexpr (std::is_same_v<T, float>) {
      narrow(from, cache.head_size, line);
    } else {
      for (int d = 0; d < cache.head_size; ++d) line[d] = narrowed(element(from + d));
    }
    (values ? write_value_pairs : write_key_pairs)(cache, static_cast<bf16*>(cache.data) + block, offset, line);
    return;
  }
#endif
  write_plain(cache, type, block + (values ? cache.value_offset : 0) + static_cast<int64_t>(offset) * cache.head_size, from);
}

template <typename T>
void write_token(const Cache& cache, int type, int64_t slot, const T* key, const T* value) {
  for (int head = 0; head < cache.heads; ++head) {
    write_head(cache, type, slot, head, false, key + static_cast<int64_t>(head) * cache.head_size);
    write_head(cache, type, slot, head, true, value + static_cast<int64_t>(head) * cache.head_size);
  }
}

}  // namespace quire
