// Numbers of the three types, and what the CPU multiplies.
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
// exp for arguments that are not positive: 2^i * p(f), a polynomial of degree 5 (Cephes' expf); 0 below -87.
inline __m512 exp_negative(__m512 x) {
  const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(f, f), _mm512_add_ps(f, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(alive, p, whole);
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
