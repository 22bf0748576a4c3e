// Exact integer products of a tile's codes and of quantized rows, in int32 sums for each output.
//
// With AVX512 by VNNI's products of unsigned and signed bytes. With AVX2 by products of bytes whose 16-bit pairs do not
// overflow: several steps of small numbers are added in 16 bits; large ones are signed, and the sign goes to the row.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../lanes.h"
#include "format.h"

namespace quire {

constexpr int kParts = kStrip / kLanes;  // vectors of a strip

// Calls work with each number as a constant.
template <typename Work, int... numbers>
[[gnu::always_inline]] inline void each_constant(std::integer_sequence<int, numbers...>, const Work& work) {
  (work(std::integral_constant<int, numbers>{}), ...);
}

#if defined(__AVX512F__)
using Integers = __m512i;
inline Integers repeated(int32_t value) { return _mm512_set1_epi32(value); }
inline Integers load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Integers looked_up(const uint8_t (&table)[16], Integers codes) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), codes);
}
template <int by>
Integers raised(Integers v) { return _mm512_slli_epi16(v, by); }
template <int by>
Integers lowered(Integers v) { return _mm512_srli_epi16(v, by); }
inline Integers masked(Integers v, uint8_t mask) { return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(mask))); }
inline Integers both(Integers a, Integers b) { return _mm512_or_si512(a, b); }
inline Integers increased(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
inline Integers sums_of_pairs(Integers a, Integers b) { return _mm512_madd_epi16(a, b); }
inline Integers widened_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vector to_floats(Integers v) { return _mm512_cvtepi32_ps(v); }
inline Vector lanes_of(const uint8_t* p) { return to_floats(widened_bytes(p)); }
inline Vector lanes_of(const int8_t* p) { return to_floats(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
#else
using Integers = __m256i;
inline Integers repeated(int32_t value) { return _mm256_set1_epi32(value); }
inline Integers load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Integers looked_up(const uint8_t (&table)[16], Integers codes) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), codes);
}
template <int by>
Integers raised(Integers v) { return _mm256_slli_epi16(v, by); }
template <int by>
Integers lowered(Integers v) { return _mm256_srli_epi16(v, by); }
inline Integers masked(Integers v, uint8_t mask) { return _mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>(mask))); }
inline Integers both(Integers a, Integers b) { return _mm256_or_si256(a, b); }
inline Integers increased(Integers a, Integers b) { return _mm256_add_epi32(a, b); }
inline Integers sums_of_pairs(Integers a, Integers b) { return _mm256_madd_epi16(a, b); }
inline Integers widened_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Vector to_floats(Integers v) { return _mm256_cvtepi32_ps(v); }
inline Vector lanes_of(const uint8_t* p) { return to_floats(widened_bytes(p)); }
inline Vector lanes_of(const int8_t* p) { return to_floats(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
#endif

// Bits `low` and above of a byte, moved to bit 4 and masked.
template <int low>
Integers moved_to_bit_4(Integers v, uint8_t mask) {
  if constexpr (low < 4) return masked(raised<4 - low>(v), mask);
  if constexpr (low == 4) return masked(v, mask);
  if constexpr (low > 4) return masked(lowered<low - 4>(v), mask);
}

// Codes of one step, of the outputs of one vector.
template <int bits, int step>
[[gnu::always_inline]] inline Integers codes_of(const uint8_t* tile, int part) {
  const uint8_t* from = tile + part * 4 * kLanes;
  if constexpr (bits == 8) return load_bytes(from + step * kStepBytes);
  const Integers pair = load_bytes(from + step % 4 * kStepBytes);
  const Integers low = masked(step < 4 ? pair : lowered<4>(pair), 0x0f);
  if constexpr (bits == 5) return both(low, moved_to_bit_4<step>(load_bytes(from + 4 * kStepBytes), 0x10));
  if constexpr (bits == 6) {
    return both(low, moved_to_bit_4<step % 4 * 2>(load_bytes(from + (4 + step / 4) * kStepBytes), 0x30));
  }
  return low;
}

// What the sums of a row begin with, so that numbers count from each output's zero on. Zeros are in the low 16 bits, others
// are 0. The sum of a tile's codes has 16 bits, too.
inline Integers initial_sum(int32_t minus_sum, Integers zeros) { return sums_of_pairs(repeated(minus_sum), zeros); }

// The numbers of a format's 16 codes, increased.
struct alignas(16) Numbers {
  uint8_t of_code[16];

  constexpr Numbers(const Format& format, int by) : of_code{} {
    for (int code = 0; code < 16; ++code) of_code[code] = static_cast<uint8_t>(format.number_of(code) + by);
  }
};
template <Format format, int by>
inline constexpr Numbers kNumbers{format, by};

// What is multiplied in one step, of the outputs of one vector: unsigned, format.zero() more than the numbers.
template <Format format, int step>
[[gnu::always_inline]] inline Integers unsigned_of(const uint8_t* tile, int part) {
  const Integers codes = codes_of<format.bits, step>(tile, part);
  if constexpr (format.table != Table::kNone) return looked_up(kNumbers<format, format.zero()>.of_code, codes);
  return codes;
}

// Four adjacent codes of a row, for all outputs.
inline Integers four_inputs(const int8_t* codes) {
  int32_t bits;
  std::memcpy(&bits, codes, 4);
  return repeated(bits);
}

using AllSteps = std::integer_sequence<int, 0, 4, 1, 5, 2, 6, 3, 7>;  // steps that share bytes are adjacent
using FirstSteps = std::integer_sequence<int, 0, 1, 2, 3>;
using LastSteps = std::integer_sequence<int, 4, 5, 6, 7>;

// The place of a step among those of Steps.
template <int... steps>
constexpr int place_of(int step, std::integer_sequence<int, steps...>) {
  return sizeof...(steps) == kSteps ? step % 4 * 2 + step / 4 : step % 4;
}

#if defined(__AVX512F__)
// The same with one zero for all outputs.
template <Format format>
Integers initial_sum(int32_t minus_sum) {
  return repeated(minus_sum * format.zero());
}

template <Format format>
Integers zeros_of(const uint8_t* zeros) {
  return widened_bytes(zeros);
}

// Adds products of codes and rows, 32 bytes apart, to the sums of `rows` rows and `strips` strips.
template <Format format, int rows, int strips, typename Steps>
[[gnu::always_inline]] inline void add_steps(Integers (&sums)[rows][strips * kParts], const uint8_t* const (&tiles)[strips],
                                             const int8_t* codes, Steps steps) {
  each_constant(steps, [&](auto step) __attribute__((always_inline)) {
    Integers right[strips];
    for (int strip = 0; strip < strips; ++strip) right[strip] = unsigned_of<format, step>(tiles[strip], 0);
    for (int row = 0; row < rows; ++row) {
      const Integers left = four_inputs(codes + row * kTile + step * 4);
      for (int strip = 0; strip < strips; ++strip) sums[row][strip] = _mm512_dpbusd_epi32(sums[row][strip], right[strip], left);
    }
  });
}
#else
// Whether unsigned numbers are so large that two of their products overflow 16 bits.
template <Format format>
constexpr bool kSigned = format.bits == 8 || format.table == Table::kIq4nl;

template <Format format>
Integers initial_sum(int32_t minus_sum) {
  return repeated(kSigned<format> ? 0 : minus_sum * format.zero());
}

template <Format format>
Integers zeros_of(const uint8_t* zeros) {
  if constexpr (!kSigned<format>) return widened_bytes(zeros);
  const Integers less = _mm256_sub_epi16(widened_bytes(zeros), _mm256_set1_epi16(static_cast<int16_t>(format.zero())));
  return _mm256_and_si256(less, repeated(0xffff));
}

// What is multiplied in one step: signed, or unsigned.
template <Format format, int step>
[[gnu::always_inline]] inline Integers numbers_of(const uint8_t* tile, int part) {
  if constexpr (!kSigned<format>) return unsigned_of<format, step>(tile, part);
  const Integers codes = codes_of<format.bits, step>(tile, part);
  if constexpr (format.table != Table::kNone) return looked_up(kNumbers<format, 0>.of_code, codes);
  return _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
}

// Steps whose products can be added in 16 bits: 2 * 127 times the largest number each.
template <Format format>
constexpr int kRun = kSigned<format>                 ? 1
                     : format.table == Table::kE2m1  ? 4
                     : format.bits == 4              ? 8
                     : format.bits == 5              ? 4
                                                     : 2;

// Sums of two products of bytes.
template <Format format>
[[gnu::always_inline]] inline Integers pairs_of(Integers right, Integers left) {
  if constexpr (kSigned<format>) return _mm256_maddubs_epi16(_mm256_abs_epi8(right), _mm256_sign_epi8(left, right));
  return _mm256_maddubs_epi16(right, left);
}

template <Format format, int rows, int strips, int... all>
[[gnu::always_inline]] inline void add_steps(Integers (&sums)[rows][strips * kParts], const uint8_t* const (&tiles)[strips],
                                             const int8_t* codes, std::integer_sequence<int, all...> steps) {
  constexpr int run = std::min(kRun<format>, static_cast<int>(sizeof...(all)));
  Integers pairs[rows][strips * kParts];
  each_constant(steps, [&](auto step) __attribute__((always_inline)) {
    constexpr int place = place_of(step, std::integer_sequence<int, all...>{}) % run;
    Integers right[strips * kParts];
    for (int i = 0; i < strips * kParts; ++i) right[i] = numbers_of<format, step>(tiles[i / kParts], i % kParts);
    for (int row = 0; row < rows; ++row) {
      const Integers left = four_inputs(codes + row * kTile + step * 4);
      for (int i = 0; i < strips * kParts; ++i) {
        const Integers products = pairs_of<format>(right[i], left);
        pairs[row][i] = place ? _mm256_add_epi16(pairs[row][i], products) : products;
        if constexpr (place == run - 1) {
          sums[row][i] = increased(sums[row][i], sums_of_pairs(pairs[row][i], _mm256_set1_epi16(1)));
        }
      }
    }
  });
}
#endif

}  // namespace quire
