// Copies of memory that is not read soon, with its checksum or without.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace quire {

// Copies bytes that are not read soon. Stores through the caches would first read the target: 50 % more traffic.
inline void copy_past_the_caches(char* target, const char* source, int64_t bytes) {
#ifdef __AVX512F__
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(target) & 63);
  std::memcpy(target, source, head);
  int64_t done = head;
  for (; done + 64 <= bytes; done += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + done), _mm512_loadu_si512(source + done));
  }
  std::memcpy(target + done, source + done, bytes - done);
  _mm_sfence();  // before another thread learns that the copy is done
#else
  std::memcpy(target, source, bytes);
#endif
}

// XXH3 with 64 bits of inputs above 240 bytes, seed 0 (specification: github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
constexpr int64_t kLeastChecked = 241;  // shorter inputs have other formulas

namespace xxh3 {

constexpr int kStripe = 64;
constexpr int kSecret = 192;
constexpr int kStripes = (kSecret - kStripe) / 8;  // of a round, after which the sums are scrambled
constexpr uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                 0x27D4EB2F165667C5};
alignas(64) constexpr uint8_t kSecretBytes[kSecret] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline uint64_t word(const void* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline uint64_t folded_product(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

#ifdef __AVX512F__

struct ChecksumLanes {
  __m512i lanes = _mm512_set_epi64(kPrime32[0], kPrime64[4], kPrime32[1], kPrime64[3], kPrime64[2], kPrime64[1],
                                   kPrime64[0], kPrime32[2]);

  void add(__m512i data, const uint8_t* secret) {
    const __m512i key = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    const __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
    lanes = _mm512_add_epi64(_mm512_add_epi64(lanes, swapped), product);
  }
  void scramble() {
    const __m512i key = _mm512_loadu_si512(kSecretBytes + kSecret - kStripe);
    lanes = _mm512_xor_si512(_mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47)), key);
    lanes = _mm512_mullo_epi64(lanes, _mm512_set1_epi64(kPrime32[0]));
  }
  void store(uint64_t* to) const { _mm512_storeu_si512(to, lanes); }
};

using Stripe = __m512i;
inline Stripe load(const char* at) { return _mm512_loadu_si512(at); }
inline void store(char* at, Stripe data) { _mm512_stream_si512(reinterpret_cast<__m512i*>(at), data); }

#else

struct Stripe {
  uint64_t words[8];
};
inline Stripe load(const char* at) {
  Stripe data;
  std::memcpy(&data, at, sizeof data);
  return data;
}
inline void store(char* at, const Stripe& data) { std::memcpy(at, &data, sizeof data); }

struct ChecksumLanes {
  uint64_t lanes[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                       kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};

  void add(const Stripe& data, const uint8_t* secret) {
    for (int lane = 0; lane < 8; ++lane) {
      const uint64_t key = data.words[lane] ^ word(secret + 8 * lane);
      lanes[lane ^ 1] += data.words[lane];
      lanes[lane] += (key & 0xFFFFFFFF) * (key >> 32);
    }
  }
  void scramble() {
    for (int lane = 0; lane < 8; ++lane) {
      lanes[lane] ^= lanes[lane] >> 47;
      lanes[lane] ^= word(kSecretBytes + kSecret - kStripe + 8 * lane);
      lanes[lane] *= kPrime32[0];
    }
  }
  void store(uint64_t* to) const { std::memcpy(to, lanes, sizeof lanes); }
};

#endif

inline uint64_t merged(const ChecksumLanes& from, int64_t bytes) {
  uint64_t lanes[8];
  from.store(lanes);
  uint64_t result = static_cast<uint64_t>(bytes) * kPrime64[0];
  for (int pair = 0; pair < 4; ++pair) {
    const uint8_t* secret = kSecretBytes + 11 + 16 * pair;
    result += folded_product(lanes[2 * pair] ^ word(secret), lanes[2 * pair + 1] ^ word(secret + 8));
  }
  result ^= result >> 37;
  result *= 0x165667919E3779F9;
  return result ^ (result >> 32);
}

}  // namespace xxh3

// Copies at least kLeastChecked bytes, past the caches where the target is aligned, and returns their checksum: each byte
// is read once for both.
inline uint64_t copy_checked(char* target, const char* source, int64_t bytes) {
  using xxh3::ChecksumLanes, xxh3::kSecret, xxh3::kSecretBytes, xxh3::kStripe, xxh3::kStripes;
  ChecksumLanes lanes;
  const bool aligned = reinterpret_cast<intptr_t>(target) % kStripe == 0;
  const int64_t whole = (bytes - 1) / kStripe;  // the last stripe ends with the input, whole or not
  for (int64_t stripe = 0; stripe < whole; ++stripe) {
    const xxh3::Stripe data = xxh3::load(source + stripe * kStripe);
    if (aligned) {
      xxh3::store(target + stripe * kStripe, data);
    } else {
      std::memcpy(target + stripe * kStripe, source + stripe * kStripe, kStripe);
    }
    lanes.add(data, kSecretBytes + 8 * (stripe % kStripes));
    if (stripe % kStripes == kStripes - 1) lanes.scramble();
  }
  std::memcpy(target + whole * kStripe, source + whole * kStripe, bytes - whole * kStripe);
  lanes.add(xxh3::load(source + bytes - kStripe), kSecretBytes + kSecret - kStripe - 7);
#ifdef __AVX512F__
  _mm_sfence();  // before another thread learns that the copy is done
#endif
  return xxh3::merged(lanes, bytes);
}

}  // namespace quire
