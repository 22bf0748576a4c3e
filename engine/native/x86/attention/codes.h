// K and V in 8 bits: an integer for each element, and a scale for each slot and head.
//
// A head of one token is x = scale * code, with scale = max |x| / 127 rounded to bfloat16, and code = x / scale rounded to
// the nearest integer: symmetric quantization of each token and head, so that a slot depends on its own token only.
// bfloat16 scales have the range of the elements, and integers up to 127 are exact in bfloat16. So products multiply the
// codes themselves, and scales are factors of scores and weights.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../lanes.h"
#include "../numbers.h"

namespace quire {

// The format of a cache whose codes are laid out as elements of type E, and are multiplied as such.
template <typename E>
struct Coded {};

// Formats of a cache: a type of elements, or codes. Number is what is multiplied, Stored what the cache has.
template <typename S>
struct FormatOf {
  using Number = S;
  using Stored = S;
  static constexpr bool coded = false;
};
template <typename E>
struct FormatOf<Coded<E>> {
  using Number = E;
  using Stored = int8_t;
  static constexpr bool coded = true;
};
template <typename S>
using NumberOf = typename FormatOf<S>::Number;
template <typename S>
using StoredOf = typename FormatOf<S>::Stored;
template <typename S>
constexpr bool kCoded = FormatOf<S>::coded;

constexpr int kLargestCode = 127;
constexpr int64_t kScaleBytes = sizeof(bf16);

inline float divided_exactly(float a, float b) {  // -ffast-math may compute a / b by an estimate
  return _mm_cvtss_f32(_mm_div_ss(_mm_set_ss(a), _mm_set_ss(b)));
}

// Stores codes of kLanes elements.
inline void put_codes(int8_t* to, Vector v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
#else
  const __m256i wide = _mm256_cvtps_epi32(v);
  const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(narrow, narrow));
#endif
}

// Encodes a head of `count` elements, a multiple of 16, and returns its scale. The scale is not finite if an element is
// not, and 0 if all elements are 0 or subnormal.
inline bf16 encode(const float* x, int count, int8_t* codes) {
  int32_t bits = 0;  // of the largest absolute value; NaN is above infinity
  for (int i = 0; i < count; ++i) {
    int32_t one;
    std::memcpy(&one, x + i, 4);
    bits = std::max(bits, one & 0x7fffffff);
  }
  float largest;
  std::memcpy(&largest, &bits, 4);
  bf16 scale = bits >= 0x7f800000 ? narrowed(largest) : narrowed(divided_exactly(largest, kLargestCode));
  if (scale < 0x0080) scale = 0;  // below the normal numbers, whose inverses are finite
  const Vector inverse = filled(scale ? divided_exactly(1.0f, widened(scale)) : 0.0f);
  for (int i = 0; i < count; i += kLanes) put_codes(codes + i, times(load(x + i), inverse));
  return scale;
}

// Widens `count` codes, a multiple of 16, in their order, and prefetches as many from `ahead` on, unless it is null.
inline void expand(const int8_t* codes, int count, const int8_t* ahead, float* to) {
  for (int i = 0; i < count; i += 16) {
    if (ahead && i % 64 == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T0);
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    store(to + i, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#else
    for (int part = 0; part < 16; part += 8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i + part));
      store(to + i + part, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
    }
#endif
  }
}

// The same to bfloat16, whose upper 16 bits of float32 are exact.
inline void expand(const int8_t* codes, int count, const int8_t* ahead, bf16* to) {
  for (int i = 0; i < count; i += 16) {
    if (ahead && i % 64 == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T0);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
#if defined(__AVX512F__)
    const __m512i wide = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(wide, 16)));
#else
    const __m256i low = _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
    const __m256i high = _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))));
    const __m256i both = _mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_permute4x64_epi64(both, 0xd8));
#endif
  }
}

// Loads the scales of `count` slots.
inline void load_scales(const int8_t* scales, int count, float* to) {
  for (int i = 0; i < count; ++i) {
    bf16 one;
    std::memcpy(&one, scales + i * kScaleBytes, kScaleBytes);
    to[i] = widened(one);
  }
}

// Writes the codes of one token's K to a group of 16 slots, laid out as elements of type E: see kernels.cpp.
template <typename E>
void write_key_codes(int8_t* group, int size, int slot, const int8_t* codes) {
  if constexpr (std::is_same_v<E, bf16>) {
    for (int d = 0; d < size; d += 2) std::memcpy(group + (d / 2 * 16 + slot) * 2, codes + d, 2);
  } else {
    for (int d = 0; d < size; ++d) group[d * 16 + slot] = codes[d];
  }
}

// The same for V.
template <typename E>
void write_value_codes(int8_t* group, int size, int slot, const int8_t* codes) {
  if constexpr (std::is_same_v<E, bf16>) {
    int8_t* to = group + slot / 2 * 2 * size + slot % 2;
    for (int d = 0; d < size; ++d) to[d * 2] = codes[d];
  } else {
    std::memcpy(group + slot * size, codes, size);
  }
}

}  // namespace quire
