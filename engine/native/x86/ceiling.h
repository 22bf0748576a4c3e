// The machine's own speed, as an upper bound for any kernel: of reads, and of products, instructions without loads.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "numbers.h"
#include "tiles.h"

namespace quire {

// Independent chains of additions, more than the latency of one instruction has.
constexpr int kChains = kLanes == 16 ? 24 : 12;

// Reads `bytes`, a multiple of 256, and returns the exclusive or of all numbers. The sums are named vectors, because the
// compiler keeps an array of them in memory, and then the stores bound the reads.
inline int64_t exclusive_or(const char* data, int64_t bytes) {
  const __m256i* read = reinterpret_cast<const __m256i*>(data);
  __m256i a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{};
  for (int64_t i = 0; i < bytes / 32; i += 8) {
    a = _mm256_xor_si256(a, _mm256_loadu_si256(read + i));
    b = _mm256_xor_si256(b, _mm256_loadu_si256(read + i + 1));
    c = _mm256_xor_si256(c, _mm256_loadu_si256(read + i + 2));
    d = _mm256_xor_si256(d, _mm256_loadu_si256(read + i + 3));
    e = _mm256_xor_si256(e, _mm256_loadu_si256(read + i + 4));
    f = _mm256_xor_si256(f, _mm256_loadu_si256(read + i + 5));
    g = _mm256_xor_si256(g, _mm256_loadu_si256(read + i + 6));
    h = _mm256_xor_si256(h, _mm256_loadu_si256(read + i + 7));
  }
  int64_t lanes[4], sum = 0;
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)),
                                       _mm256_xor_si256(_mm256_xor_si256(e, f), _mm256_xor_si256(g, h)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), all);
  for (int64_t lane : lanes) sum ^= lane;
  return sum;
}

// Products that are added to one vector of sums: of numbers, and of 8-bit integers, summed in 32 bits. Assembly, because the
// compiler computes one product for all equal chains.
#ifdef QUIRE_BF16
constexpr int kOperations = 2 * 32;
inline void add_product(Vector& sums, Vector factor) { asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sums) : "v"(factor)); }
#else
constexpr int kOperations = 2 * kLanes;
inline void add_product(Vector& sums, Vector factor) { asm volatile("vfmadd231ps %1, %1, %0" : "+v"(sums) : "v"(factor)); }
#endif
#ifdef __AVX512VNNI__
constexpr int kInt8Operations = 2 * 64;
inline void add_product(__m512i& sums, __m512i factor) { asm volatile("vpdpbusd %1, %1, %0" : "+v"(sums) : "v"(factor)); }
#else
// Sums of pairs in 16 bits, then of fours: three instructions for 32 products.
constexpr int kInt8Operations = 2 * 32;
inline void add_product(__m256i& sums, __m256i factor) {
  __m256i pairs;
  asm volatile("vpmaddubsw %2, %2, %1\n\tvpmaddwd %3, %1, %1\n\tvpaddd %1, %0, %0"
               : "+x"(sums), "=&x"(pairs) : "x"(factor), "x"(_mm256_set1_epi16(1)));
}
#endif

// Adds `rounds` products to each of the chains, and stores one vector that depends on all. Every loop over them is unrolled:
// otherwise the compiler keeps the sums in memory, and loads and stores take longer than the products.
template <typename Register>
void multiply_chains(int64_t rounds, Register factor, void* result) {
  Register sums[kChains];
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) sums[i] = factor;
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) add_product(sums[i], factor);
  }
#pragma GCC unroll 24
  for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
  std::memcpy(result, &sums[0], sizeof(Register));
}

// Multiplies and adds `rounds` times; returns the number of operations.
inline int64_t multiply_registers(int64_t rounds, float* result) {
#ifdef QUIRE_AMX
  if (use_amx) {
    for (int64_t round = 0; round < rounds; ++round) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    return rounds * 4 * 2 * 16 * 16 * 32;
  }
#endif
  multiply_chains(rounds, filled(static_cast<float>(rounds & 1)), result);
  return rounds * kChains * kOperations;
}

// The same with products of 8-bit integers.
inline int64_t multiply_int8_registers(int64_t rounds, int32_t* result) {
#if defined(QUIRE_AMX) && defined(__AMX_INT8__)
  if (use_amx) {
    for (int64_t round = 0; round < rounds; ++round) {
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 5, 6);
      _tile_dpbusd(2, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
    return rounds * 4 * 2 * 16 * 16 * 64;
  }
#endif
#ifdef __AVX512VNNI__
  multiply_chains(rounds, _mm512_set1_epi32(static_cast<int32_t>(rounds & 1)), result);
#else
  multiply_chains(rounds, _mm256_set1_epi32(static_cast<int32_t>(rounds & 1)), result);
#endif
  return rounds * kChains * kInt8Operations;
}

}  // namespace quire
