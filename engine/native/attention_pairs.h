// Attention to blocks whose K and V lie in pairs.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cache.h"
#include "numbers.h"
#include "pieces.h"
#include "products.h"
#include "tiles.h"

namespace quire {

// What one thread needs to attend: the rows of one tile.
struct Scratch {
  alignas(64) float scores[kRows * kChunk];
  alignas(64) bf16 weights[kRows * kChunk];
  alignas(64) bf16 query[kRows * 256];
  alignas(64) float sums[kRows * 256];
  alignas(64) float piece[kRows * 256];
  alignas(64) bf16 tail[kSlots * 256];
  float largest[kRows];
  float total[kRows];
};

#ifdef QUIRE_BF16
inline void scores_of_slots(const bf16* query, int rows, int size, const bf16* keys, float* scores) {
#ifdef QUIRE_AMX
  if (use_amx && size % 32 == 0) {
    _tile_zero(0);
    for (int d = 0; d < size; d += 32) {
      _tile_loadd(4, query + d, size * 2);
      _tile_loadd(5, keys + d * kSlots, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, scores, kChunk * 4);
    return;
  }
#endif
  for (int row = 0; row < rows; ++row) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int d = 0; d < size; d += 4) {
      const bf16* q = query + row * size + d;
      even = _mm512_dpbf16_ps(even, (__m512bh)_mm512_loadu_si512(keys + d * kSlots), pair(q));
      odd = _mm512_dpbf16_ps(odd, (__m512bh)_mm512_loadu_si512(keys + d * kSlots + 32), pair(q + 2));
    }
    _mm512_storeu_ps(scores + row * kChunk, _mm512_add_ps(even, odd));
  }
}

// Adds the weighted values of `slots`, a multiple of 16; values of each 16 slots are at `values[i]`.
inline void add_values(const bf16* weights, int rows, int size, const bf16* const* values, int slots, float* sums) {
#ifdef QUIRE_AMX
  if (use_amx) {
    for (int d = 0; d < size; d += 64) {
      const int blocks = std::min(4, (size - d) / 16);
      _tile_loadd(0, sums + d, size * 4);
      if (blocks > 1) _tile_loadd(1, sums + d + 16, size * 4);
      if (blocks > 2) _tile_loadd(2, sums + d + 32, size * 4);
      if (blocks > 3) _tile_loadd(3, sums + d + 48, size * 4);
      for (int slot = 0; slot < slots; slot += kSlots) {
        const bf16* v = values[slot / kSlots] + d * 2;
        _tile_loadd(6, weights + slot, kChunk * 2);
        _tile_loadd(7, v, size * 4);
        _tile_dpbf16ps(0, 6, 7);
        if (blocks > 1) {
          _tile_loadd(7, v + 32, size * 4);
          _tile_dpbf16ps(1, 6, 7);
        }
        if (blocks > 2) {
          _tile_loadd(7, v + 64, size * 4);
          _tile_dpbf16ps(2, 6, 7);
        }
        if (blocks > 3) {
          _tile_loadd(7, v + 96, size * 4);
          _tile_dpbf16ps(3, 6, 7);
        }
      }
      _tile_stored(0, sums + d, size * 4);
      if (blocks > 1) _tile_stored(1, sums + d + 16, size * 4);
      if (blocks > 2) _tile_stored(2, sums + d + 32, size * 4);
      if (blocks > 3) _tile_stored(3, sums + d + 48, size * 4);
    }
    return;
  }
#endif
  for (int row = 0; row < rows; ++row) {
    for (int d = 0; d < size; d += 16) {
      __m512 sum = _mm512_loadu_ps(sums + row * size + d);
      for (int slot = 0; slot < slots; slot += 2) {
        const bf16* v = values[slot / kSlots] + (slot % kSlots) * size + d * 2;
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(v), pair(weights + row * kChunk + slot));
      }
      _mm512_storeu_ps(sums + row * size + d, sum);
    }
  }
}

// Softmax of a chunk: turns scores into weights, and corrects what was summed before.
inline void weigh(Scratch& s, int rows, int size, int slots) {
  for (int row = 0; row < rows; ++row) {
    float* scores = s.scores + row * kChunk;
    __m512 most = _mm512_set1_ps(s.largest[row]);
    for (int slot = 0; slot < slots; slot += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + slot));
    const float largest = _mm512_reduce_max_ps(most);
    bf16* weights = s.weights + row * kChunk;
    if (largest == kMinusInfinity) {  // nothing is seen yet
      std::memset(weights, 0, kChunk * 2);
      continue;
    }
    const float correction = s.largest[row] == kMinusInfinity ? 0.0f : std::exp(s.largest[row] - largest);
    __m512 total = _mm512_setzero_ps();
    for (int slot = 0; slot < slots; slot += 16) {
      const __m512 p = exp_negative(_mm512_sub_ps(_mm512_loadu_ps(scores + slot), _mm512_set1_ps(largest)));
      total = _mm512_add_ps(total, p);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + slot), (__m256i)_mm512_cvtneps_pbh(p));
    }
    if (correction != 1.0f) {
      const __m512 factor = _mm512_set1_ps(correction);
      for (int d = 0; d < size; d += 16) {
        float* sum = s.sums + row * size + d;
        _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), factor));
      }
    }
    s.total[row] = s.total[row] * correction + _mm512_reduce_add_ps(total);
    s.largest[row] = largest;
  }
}

inline void cap(float* scores, int rows, int slots, const Scores& how) {
  for (int row = 0; row < rows; ++row) {
    float* line = scores + row * kChunk;
    if (how.softcap == 0.0f) {
      for (int slot = 0; slot < slots; ++slot) line[slot] *= how.scaling;
    } else {
      for (int slot = 0; slot < slots; ++slot) {
        line[slot] = how.softcap * std::tanh(line[slot] * how.scaling / how.softcap);
      }
    }
  }
}

// Hides from each row what it does not see: later slots, those beyond the window, those that do not exist.
inline void hide(float* scores, int rows, int group, int first, int slots, int position, const Scores& how) {
  for (int row = 0; row < rows; ++row) {
    const int here = position + row / group;
    const int last = here - first;  // the last slot that is seen, and the first that is not hidden by the window
    const int begin = how.window ? std::max(0, here - how.window + 1 - first) : 0;
    float* line = scores + row * kChunk;
    for (int slot = 0; slot < std::min(begin, slots); ++slot) line[slot] = kMinusInfinity;
    for (int slot = std::max(0, last + 1); slot < slots; ++slot) line[slot] = kMinusInfinity;
  }
}

// Asks for the K and V of a chunk before they are needed: blocks lie anywhere, which no prefetcher of the CPU foresees.
inline void fetch(const Cache& cache, const int32_t* table, int64_t head, int first, int to) {
  const bf16* data = static_cast<const bf16*>(cache.data);
  for (int at = first; at < std::min(first + kChunk, to); at += kSlots) {
    const bf16* block = data + table[at / cache.block_size] * cache.block_stride + head;
    const bf16* keys = block + static_cast<int64_t>(at % cache.block_size) * cache.head_size;
    for (int line = 0; line < kSlots * cache.head_size; line += 32) {
      _mm_prefetch(keys + line, _MM_HINT_T0);
      _mm_prefetch(keys + cache.value_offset + line, _MM_HINT_T0);
    }
  }
}

inline void attend_pairs(const Cache& cache, const int32_t* table, const Piece& piece, int rows, int group, int position,
                  const Scores& how, Scratch& s) {
  const int size = cache.head_size;
  const bf16* data = static_cast<const bf16*>(cache.data);
  const int64_t head = static_cast<int64_t>(piece.head) * cache.block_size * size;
  for (int first = piece.from / kSlots * kSlots; first < piece.to; first += kChunk) {
    const int slots = std::min(kChunk, padded(piece.to - first, kSlots));
    fetch(cache, table, head, first + kChunk, piece.to);
    const bf16* values[kChunk / kSlots];
    for (int slot = 0; slot < slots; slot += kSlots) {
      const int at = first + slot;
      const bf16* block = data + table[at / cache.block_size] * cache.block_stride + head;
      const int64_t offset = static_cast<int64_t>(at % cache.block_size) * size;
      scores_of_slots(s.query, rows, size, block + offset, s.scores + slot);
      values[slot / kSlots] = block + cache.value_offset + offset;
    }
    cap(s.scores, rows, slots, how);
    hide(s.scores, rows, group, first, slots, position, how);
    if (first < piece.from || first + slots > piece.to) {  // slots of other pieces, or of nobody
      for (int row = 0; row < rows; ++row) {
        for (int slot = 0; slot < slots; ++slot) {
          if (first + slot < piece.from || first + slot >= piece.to) s.scores[row * kChunk + slot] = kMinusInfinity;
        }
      }
    }
    const int valid = piece.to - first;
    if (valid < slots) {
      // A weight of zero times what a former owner left, which may be infinite, would be no number.
      const int at = slots - kSlots;
      std::memcpy(s.tail, values[at / kSlots], sizeof(bf16) * kSlots * size);
      for (int slot = valid - at; slot < kSlots; ++slot) {
        for (int d = 0; d < size; ++d) s.tail[((slot / 2) * size + d) * 2 + slot % 2] = 0;
      }
      values[at / kSlots] = s.tail;
    }
    weigh(s, rows, size, slots);
    add_values(s.weights, rows, size, values, slots, s.sums);
  }
}
#endif

}  // namespace quire
