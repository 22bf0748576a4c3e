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

}  // namespace quire
