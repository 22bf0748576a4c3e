// Numbers of the three types, and conversions to operands of products.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define QUIRE_AMX 1
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define QUIRE_BF16 1
#endif

namespace quire {

using bf16 = uint16_t;

constexpr float kLog2OfE = 1.44269504f;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline int padded(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

inline float widened(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline bf16 narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>(bits >> 16 | 0x40);
  return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float element(const float* p) { return *p; }
inline float element(const bf16* p) { return widened(*p); }
inline float element(const _Float16* p) { return static_cast<float>(*p); }
inline void put(float* p, float value) { *p = value; }
inline void put(bf16* p, float value) { *p = narrowed(value); }
inline void put(_Float16* p, float value) { *p = static_cast<_Float16>(value); }

#if defined(__AVX512F__)
// 2^x for x below 128: a polynomial of degree 4 on [-1/2, 1/2], least relative error 3e-6, a hundredth of bfloat16's. From
// -127 down it is 0.
inline __m512 exp2_of(__m512 x) {
  const __m512 magic = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: adding it rounds, with the integer in the last bits
  x = _mm512_max_ps(x, _mm512_set1_ps(-127.0f));
  const __m512 shifted = _mm512_add_round_ps(x, magic, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, _mm512_sub_round_ps(shifted, magic, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.009582853f), f, _mm512_set1_ps(0.055906426f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24024099f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69312408f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}
#endif

// Narrows `count` numbers.
inline void narrow(const float* from, int count, bf16* to) {
  int i = 0;
#ifdef QUIRE_BF16
  for (; i + 16 <= count; i += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
  }
#endif
  for (; i < count; ++i) to[i] = narrowed(from[i]);
}

}  // namespace quire
