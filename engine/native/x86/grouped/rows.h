// Rows quantized to 8 bits in groups of 32, as llama.cpp quantizes activations (its Q8_1): scale = largest / 127.
//
// Inputs that need more precision are quantized twice: what rounding left of them is quantized, too, 16 bits in all.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "../lanes.h"
#include "../numbers.h"
#include "format.h"

namespace quire {

// 16 rows' codes of one tile of inputs.
struct alignas(64) RowGroup {
  int8_t codes[16][kTile];
  float scale[16];
  float scaled_sum[16];      // scale * the sum of the codes
  int32_t minus_sum[16];     // of the codes
  int32_t minus_first[16];   // of the first 16 codes
};

// The left operand of a product with strips: [rows rounded up to 16 / 16][inputs / 32].
struct QuantizedRows {
  RowGroup* data;
  int tiles;
  int first_row = 0;  // first row of `data`, a multiple of 16

  RowGroup* at(int row, int tile = 0) const { return data + static_cast<size_t>((row - first_row) / 16) * tiles + tile; }
};

inline size_t row_groups(int rows, int inputs) { return static_cast<size_t>(padded(rows, 16) / 16) * (padded(inputs, 32) / 32); }

// The largest magnitude of 32 numbers; NaN if one is NaN, because its bits are larger than those of infinity.
#if defined(__AVX512F__)
inline float largest_magnitude(const float* x) {
  const __m512i bits = _mm512_set1_epi32(0x7fffffff);
  const __m512i first = _mm512_and_si512(_mm512_loadu_si512(x), bits), last = _mm512_and_si512(_mm512_loadu_si512(x + 16), bits);
  return std::bit_cast<float>(_mm512_reduce_max_epi32(_mm512_max_epi32(first, last)));
}
#else
inline float largest_magnitude(const float* x) {
  int32_t most = 0;
  for (int i = 0; i < kTile; ++i) {
    const int32_t bits = std::bit_cast<int32_t>(x[i]) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return std::bit_cast<float>(most);
}
#endif

// The sum of 16 codes, as one of unsigned bytes.
inline int32_t sum_of_16(const int8_t* codes) {
  const __m128i raised = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), _mm_set1_epi8(-128));
  const __m128i halves = _mm_sad_epu8(raised, _mm_setzero_si128());
  return _mm_cvtsi128_si32(_mm_add_epi32(halves, _mm_unpackhi_epi64(halves, halves))) - 16 * 128;
}

// Stores round(x * factor) of 32 numbers.
inline void round_to_codes(const float* x, float factor, int8_t* codes) {
#if defined(__AVX512F__)
  for (int i = 0; i < kTile; i += 16) {
    const __m512i rounded = _mm512_cvtps_epi32(times(load(x + i), filled(factor)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtsepi32_epi8(rounded));
  }
#else
  __m256i rounded[4];
  for (int i = 0; i < 4; ++i) rounded[i] = _mm256_cvtps_epi32(times(load(x + i * 8), filled(factor)));
  const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(mixed, order));
#endif
}

// Quantizes one row's 32 inputs of a tile, and returns the scale. NaN and infinities become a scale that is NaN or infinite.
inline float quantize(const float* x, RowGroup* group, int row) {
  constexpr float kSmallest = 1e-30f;  // smaller groups become 0: the quotient must be finite
  const float most = largest_magnitude(x);
  round_to_codes(x, most > kSmallest ? 127.0f / most : 0.0f, group->codes[row]);
  const float scale = most * (1.0f / 127.0f);
  const int32_t first = sum_of_16(group->codes[row]), sum = first + sum_of_16(group->codes[row] + 16);
  group->scale[row] = scale;
  group->scaled_sum[row] = scale * static_cast<float>(sum);
  group->minus_sum[row] = -sum;
  group->minus_first[row] = -first;
  return scale;
}

// Quantizes one row's 32 inputs, and then what rounding left of them.
inline void quantize_twice(float* x, RowGroup* group, RowGroup* rest, int row) {
  const float scale = quantize(x, group, row);
  for (int i = 0; i < kTile; ++i) x[i] -= scale * static_cast<float>(group->codes[row][i]);
  quantize(x, rest, row);
}

// Quantizes a row of `inputs` numbers; inputs are padded with zeros to a multiple of 32. `order`: null, or the input that
// each number is taken from.
inline void quantize_row(const float* x, int inputs, const QuantizedRows& to, int row, const int32_t* order = nullptr) {
  RowGroup* group = to.at(row);
  int k = 0;
  for (; k + kTile <= inputs && !order; k += kTile) quantize(x + k, group++, row % 16);
  for (; k < inputs; k += kTile) {
    alignas(64) float line[kTile] = {};
    for (int i = 0, count = std::min(kTile, inputs - k); i < count; ++i) line[i] = x[order ? order[k + i] : k + i];
    quantize(line, group++, row % 16);
  }
}

}  // namespace quire
