// Vectors of float32: 16 lanes with AVX512, 8 with AVX2.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>

#include "numbers.h"

namespace quire {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
using Vector = __m512;

inline Vector zeros() { return _mm512_setzero_ps(); }
inline Vector filled(float value) { return _mm512_set1_ps(value); }
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline Vector load(const _Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vector load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
inline Vector plus(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector minus(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
inline Vector times(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector times_plus(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector times_minus(Vector a, Vector b, Vector c) { return _mm512_fmsub_ps(a, b, c); }
inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }
inline float largest_lane(Vector v) { return _mm512_reduce_max_ps(v); }
inline Vector nearest_integer(Vector v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// v * 2^n; 0 if v is 1 and n is -127.
inline Vector scaled(Vector v, Vector n) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), exponent));
}
inline Vector divided(Vector a, Vector b) { return _mm512_mul_ps(a, _mm512_rcp14_ps(b)); }  // of 14 bits
// The two numbers of each pair of bfloat16 numbers.
inline Vector first_of(const bf16* pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16)); }
inline Vector second_of(const bf16* pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(0xffff0000)));
}
// A bit for each of the unsigned numbers that is at most `width` above `low`.
inline uint32_t lanes_within(const uint32_t* p, uint32_t low, uint32_t width) {
  const __m512i above = _mm512_sub_epi32(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(low)));
  return _mm512_cmple_epu32_mask(above, _mm512_set1_epi32(static_cast<int>(width)));
}
// Writes the numbers whose bits are set, one after the other, and undefined ones up to a whole vector.
template <typename T>
void put_selected(T* to, const T* from, uint32_t selected) {
  static_assert(sizeof(T) == 4);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(selected), _mm512_loadu_si512(from)));
}
#else
constexpr int kLanes = 8;
using Vector = __m256;

inline Vector zeros() { return _mm256_setzero_ps(); }
inline Vector filled(float value) { return _mm256_set1_ps(value); }
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline Vector load(const _Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vector load(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector plus(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector minus(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline Vector times(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector times_plus(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector times_minus(Vector a, Vector b, Vector c) { return _mm256_fmsub_ps(a, b, c); }
inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector smaller(Vector a, Vector b) { return _mm256_min_ps(a, b); }
inline float largest_lane(Vector v) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}
inline Vector nearest_integer(Vector v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// v * 2^n; 0 if v is 1 and n is -127.
inline Vector scaled(Vector v, Vector n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), exponent));
}
inline Vector divided(Vector a, Vector b) { return _mm256_div_ps(a, b); }
// The two numbers of each pair of bfloat16 numbers.
inline Vector first_of(const bf16* pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)), 16));
}
inline Vector second_of(const bf16* pairs) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
  return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(0xffff0000)));
}
inline uint32_t lanes_within(const uint32_t* p, uint32_t low, uint32_t width) {
  const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i above = _mm256_sub_epi32(numbers, _mm256_set1_epi32(static_cast<int>(low)));
  const __m256i most = _mm256_min_epu32(above, _mm256_set1_epi32(static_cast<int>(width)));
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(above, most))));
}
template <typename T>
void put_selected(T* to, const T* from, uint32_t selected) {
  for (; selected; selected &= selected - 1) *to++ = from[std::countr_zero(selected)];
}
#endif

// 2^x for x below 128: a polynomial of degree 4 on [-1/2, 1/2], least relative error 3e-6, a hundredth of bfloat16's. From
// -127 down it is 0.
inline Vector exp2_of(Vector x) {
  x = larger(x, filled(-127.0f));
  const Vector n = nearest_integer(x), f = minus(x, n);
  Vector p = times_plus(filled(0.009582853f), f, filled(0.055906426f));
  p = times_plus(p, f, filled(0.24024099f));
  p = times_plus(p, f, filled(0.69312408f));
  return scaled(times_plus(p, f, filled(1.0f)), n);
}

// Stores the lanes as numbers of another type.
inline void put_lanes(float* to, Vector v) { store(to, v); }
inline void put_lanes(bf16* to, Vector v) {
#ifdef QUIRE_BF16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(v));
#else
  alignas(64) float lanes[kLanes];
  store(lanes, v);
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = narrowed(lanes[lane]);
#endif
}
inline void put_lanes(_Float16* to, Vector v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#endif
}

// Stores `count` numbers, a multiple of 16.
template <typename T>
void put_all(const float* from, int count, T* to) {
  for (int i = 0; i < count; i += kLanes) put_lanes(to + i, load(from + i));
}

}  // namespace quire
