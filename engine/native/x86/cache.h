// A step's view of the KV cache, and writes to it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention/codes.h"
#include "lanes.h"
#include "numbers.h"

namespace quire {

constexpr int kSlots = 16;  // adjacent slots of K
constexpr int kLargestHead = 512;

// K or V of one layer in a block: elements, or bytes of codes.
struct Part {
  int64_t offset;       // from the layer's data
  int64_t head_stride;  // from one head to the next
  int size;             // elements of a head
};

struct Cache {
  void* data;            // of the layer, in block 0
  int64_t block_stride;  // elements, or bytes of codes, from one block to the next
  Part key, value;
  int block_size;
  int heads;  // of K and V
};

inline bool is_packed(const Cache& cache) {
  return cache.block_size % kSlots == 0 && cache.key.size % 16 == 0 && cache.value.size % 16 == 0;
}

// Writes one head of one token's K to a packed block of single numbers: elements are 16 slots apart.
template <typename E>
void write_key(E* block, int size, int offset, const E* key) {
  E* to = block + static_cast<int64_t>(offset / kSlots) * kSlots * size + offset % kSlots;
  for (int d = 0; d < size; ++d) to[d * kSlots] = key[d];
}

// The same for V, which is slot-major.
template <typename E>
void write_value(E* block, int size, int offset, const E* value) {
  std::memcpy(block + static_cast<int64_t>(offset) * size, value, sizeof(E) * size);
}

// Writes one head of one token's K to a packed block of pairs: elements of a pair together, pairs 16 slots apart.
inline void write_key(bf16* block, int size, int offset, const bf16* key) {
  bf16* slots = block + static_cast<int64_t>(offset / kSlots) * kSlots * size;
  int32_t* to = reinterpret_cast<int32_t*>(slots) + offset % kSlots;
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  for (int d = 0; d < size; d += 32) {
    const __mmask16 there = d + 32 <= size ? 0xffff : 0x00ff;  // heads are multiples of 16
    _mm512_mask_i32scatter_epi32(to + d / 2 * kSlots, there, lanes, _mm512_maskz_loadu_epi32(there, key + d), 4);
  }
#else
  for (int d = 0; d < size; d += 2) std::memcpy(to + d / 2 * kSlots, key + d, 4);
#endif
}

// The same for V: elements of two slots alternate.
inline void write_value(bf16* block, int size, int offset, const bf16* value) {
  bf16* to = block + static_cast<int64_t>(offset / 2) * 2 * size;
#if defined(__AVX512F__)
  const __mmask32 half = offset % 2 ? 0xaaaaaaaa : 0x55555555;
  for (int d = 0; d < size; d += 16) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + d)));
    _mm512_mask_storeu_epi16(to + d * 2, half, offset % 2 ? _mm512_slli_epi32(wide, 16) : wide);
  }
#else
  for (int d = 0; d < size; ++d) to[d * 2 + offset % 2] = value[d];
#endif
}

// Offset (elements, or bytes of codes) of the slots of one head of K or V in the block of a slot.
inline int64_t head_of(const Cache& cache, const Part& part, int64_t slot, int head) {
  return slot / cache.block_size * cache.block_stride + part.offset + head * part.head_stride;
}

// The scales of a head's slots follow their codes.
inline int64_t scales_of(const Cache& cache, const Part& part) { return static_cast<int64_t>(cache.block_size) * part.size; }

// Encodes one head of a token's K, or of its V, into a block of codes.
template <typename E, typename T>
void write_codes(const Cache& cache, int64_t slot, int head, bool values, const T* from) {
  const Part& part = values ? cache.value : cache.key;
  const int size = part.size, offset = static_cast<int>(slot % cache.block_size);
  int8_t* block = static_cast<int8_t*>(cache.data) + head_of(cache, part, slot, head);
  alignas(64) float line[kLargestHead];
  alignas(64) int8_t codes[kLargestHead];
  for (int d = 0; d < size; ++d) line[d] = element(from + d);
  for (int d = size; d < padded(size, 16); ++d) line[d] = 0.0f;
  const bf16 scale = encode(line, padded(size, 16), codes);
  std::memcpy(block + scales_of(cache, part) + offset * kScaleBytes, &scale, kScaleBytes);
  if (!is_packed(cache)) {
    std::memcpy(block + static_cast<int64_t>(offset) * size, codes, size);
    return;
  }
  int8_t* group = block + static_cast<int64_t>(offset / kSlots) * kSlots * size;
  values ? write_value_codes<E>(group, size, offset % kSlots, codes) : write_key_codes<E>(group, size, offset % kSlots, codes);
}

// Writes one head of a token's K, or of its V, to a block of format S.
template <typename S, typename T>
void write_head(const Cache& cache, int64_t slot, int head, bool values, const T* from) {
  using E = NumberOf<S>;
  if constexpr (kCoded<S>) return write_codes<E>(cache, slot, head, values, from);
  const Part& part = values ? cache.value : cache.key;
  const int size = part.size, offset = static_cast<int>(slot % cache.block_size);
  E* block = static_cast<E*>(cache.data) + head_of(cache, part, slot, head);
  alignas(64) E line[kLargestHead];
  if (!is_packed(cache)) {
    E* to = block + static_cast<int64_t>(offset) * size;
    for (int d = 0; d < size; ++d) put(to + d, element(from + d));
    return;
  }
  if constexpr (std::is_same_v<E, T>) {
    std::memcpy(line, from, sizeof(E) * size);
  } else if constexpr (std::is_same_v<T, float>) {
    put_all(from, size, line);
  } else {
    for (int d = 0; d < size; ++d) put(line + d, element(from + d));
  }
  values ? write_value(block, size, offset, line) : write_key(block, size, offset, line);
}

template <typename S, typename E>
void write_token(const Cache& cache, int64_t slot, const E* key, const E* value) {
  for (int head = 0; head < cache.heads; ++head) {
    write_head<S>(cache, slot, head, false, key + static_cast<int64_t>(head) * cache.key.size);
    write_head<S>(cache, slot, head, true, value + static_cast<int64_t>(head) * cache.value.size);
  }
}

}  // namespace quire
