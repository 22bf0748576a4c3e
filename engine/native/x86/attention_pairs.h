// Attention to blocks whose K and V are stored in pairs.
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
#include "scratch.h"
#include "tiles.h"

namespace quire {

#ifdef QUIRE_BF16
constexpr int kValues = 32;  // slots whose V is multiplied at once: those of a tile

// Pointers to K of each 16 slots of a chunk, and to V of each 32.
struct Chunk {
  int first, slots;  // a multiple of 16
  const bf16* keys[kChunk / kSlots];
  const bf16* values[kChunk / kValues];
};

#ifdef QUIRE_AMX
template <int row_tiles, int column_tiles>
void score_tiles(const bf16* query, int size, const bf16* keys, const bf16* more_keys) {
  for (int d = 0; d < size; d += 32) {
    _tile_loadd(4, query + d, size * 2);
    _tile_loadd(6, keys + d * kSlots, 64);
    if constexpr (row_tiles > 1) _tile_loadd(5, query + 16 * size + d, size * 2);
    if constexpr (column_tiles > 1) _tile_loadd(7, more_keys + d * kSlots, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (row_tiles > 1) _tile_dpbf16ps(1, 5, 6);
    if constexpr (column_tiles > 1) _tile_dpbf16ps(2, 4, 7);
    if constexpr (row_tiles > 1 && column_tiles > 1) _tile_dpbf16ps(3, 5, 7);
  }
}

template <int row_tiles, int column_tiles>
void weigh_tiles(const bf16* weights, int size, const Chunk& chunk, int d) {
  for (int slot = 0; slot < chunk.slots; slot += kValues) {
    const bf16* v = chunk.values[slot / kValues] + d * 2;
    _tile_loadd(4, weights + slot, kChunk * 2);
    _tile_loadd(6, v, size * 4);
    if constexpr (row_tiles > 1) _tile_loadd(5, weights + 16 * kChunk + slot, kChunk * 2);
    if constexpr (column_tiles > 1) _tile_loadd(7, v + 32, size * 4);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (row_tiles > 1) _tile_dpbf16ps(1, 5, 6);
    if constexpr (column_tiles > 1) _tile_dpbf16ps(2, 4, 7);
    if constexpr (row_tiles > 1 && column_tiles > 1) _tile_dpbf16ps(3, 5, 7);
  }
}
#endif

// Scores of a chunk's slots: `scores` is [rows rounded up to 16][kChunk].
inline void score_slots(const bf16* query, int rows, int size, const Chunk& chunk, float* scores) {
#ifdef QUIRE_AMX
  if (use_amx && size % 32 == 0) {
    for (int slot = 0; slot < chunk.slots; slot += 2 * kSlots) {
      const bf16* const* keys = chunk.keys + slot / kSlots;
      for (int row = 0; row < rows; row += kPiece) {
        with_tiles(rows - row, chunk.slots - slot, [&](auto row_tiles, auto column_tiles) {
          zero_tiles();
          score_tiles<row_tiles, column_tiles>(query + row * size, size, keys[0], column_tiles > 1 ? keys[1] : nullptr);
          store_tiles<row_tiles, column_tiles>(scores + row * kChunk + slot, kChunk);
        });
      }
    }
    return;
  }
#endif
  for (int slot = 0; slot < chunk.slots; slot += kSlots) {
    const bf16* keys = chunk.keys[slot / kSlots];
    for (int row = 0; row < rows; ++row) {
      __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      for (int d = 0; d < size; d += 4) {
        const bf16* q = query + row * size + d;
        even = _mm512_dpbf16_ps(even, (__m512bh)_mm512_loadu_si512(keys + d * kSlots), pair(q));
        odd = _mm512_dpbf16_ps(odd, (__m512bh)_mm512_loadu_si512(keys + d * kSlots + 32), pair(q + 2));
      }
      _mm512_storeu_ps(scores + row * kChunk + slot, _mm512_add_ps(even, odd));
    }
  }
}

// Adds a chunk's weighted values: `sums` is [rows rounded up to 16][size].
inline void add_values(const bf16* weights, int rows, int size, const Chunk& chunk, float* sums) {
#ifdef QUIRE_AMX
  if (use_amx) {
    for (int d = 0; d < size; d += 32) {
      for (int row = 0; row < rows; row += kPiece) {
        with_tiles(rows - row, size - d, [&](auto row_tiles, auto column_tiles) {
          load_tiles<row_tiles, column_tiles>(sums + row * size + d, size);
          weigh_tiles<row_tiles, column_tiles>(weights + row * kChunk, size, chunk, d);
          store_tiles<row_tiles, column_tiles>(sums + row * size + d, size);
        });
      }
    }
    return;
  }
#endif
  for (int row = 0; row < rows; ++row) {
    for (int d = 0; d < size; d += 16) {
      __m512 sum = _mm512_loadu_ps(sums + row * size + d);
      for (int slot = 0; slot < chunk.slots; slot += 2) {
        const bf16* v = chunk.values[slot / kValues] + (slot % kValues) * size + d * 2;
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(v), pair(weights + row * kChunk + slot));
      }
      _mm512_storeu_ps(sums + row * size + d, sum);
    }
  }
}

// The largest score of a row, of `slots`, a multiple of 16.
inline float largest_of(const float* scores, int slots) {
  __m512 most = _mm512_load_ps(scores);
  for (int slot = 16; slot < slots; slot += 16) most = _mm512_max_ps(most, _mm512_load_ps(scores + slot));
  return _mm512_reduce_max_ps(most);
}

// Raises a row's largest score, and rescales its earlier sums.
inline void raise(Scratch& s, int row, int size, float largest) {
  const __m512 correction = exp2_of(_mm512_set1_ps(s.largest[row] - largest));
  for (int d = 0; d < size; d += 16) {
    float* sums = s.sums + row * size + d;
    _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), correction));
  }
  float* total = s.total + row * 16;
  _mm512_store_ps(total, _mm512_mul_ps(_mm512_load_ps(total), correction));
  s.largest[row] = largest;
}

// Softmax of a chunk: turns scores, times `unit` logarithms to base 2, into weights. The scores and
// weights of these rows are the first, their sums come from row `begin` on.
inline void weigh(Scratch& s, int begin, int rows, int size, int slots, float unit) {
  for (int row = 0; row < rows; ++row) {
    const float largest = largest_of(s.scores + row * kChunk, slots) * unit;
    if (largest > s.largest[begin + row]) raise(s, begin + row, size, largest);
  }
  for (int row = 0; row < rows; ++row) {
    const float* scores = s.scores + row * kChunk;
    bf16* weights = s.weights + row * kChunk;
    const __m512 factor = _mm512_set1_ps(unit), largest = _mm512_set1_ps(s.largest[begin + row]);
    __m512 total = _mm512_load_ps(s.total + (begin + row) * 16);
    _mm256_store_si256(reinterpret_cast<__m256i*>(weights + padded(slots, kValues) - 16), _mm256_setzero_si256());
    for (int slot = 0; slot < slots; slot += 16) {
      const __m512 p = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(scores + slot), factor, largest));
      total = _mm512_add_ps(total, p);
      _mm256_store_si256(reinterpret_cast<__m256i*>(weights + slot), (__m256i)_mm512_cvtneps_pbh(p));
    }
    _mm512_store_ps(s.total + (begin + row) * 16, total);
  }
}

// Applies the softcap to scores, which become logarithms to base 2.
inline void cap(float* scores, int rows, int slots, const Scores& how) {
  for (int row = 0; row < rows; ++row) {
    float* line = scores + row * kChunk;
    for (int slot = 0; slot < slots; ++slot) {
      line[slot] = kLog2OfE * how.softcap * std::tanh(line[slot] * how.scaling / how.softcap);
    }
  }
}

// Masks the slots that a row does not see: later ones, those outside the window, and those of other pieces.
inline void hide(float* scores, int rows, int group, const Chunk& chunk, const Piece& piece, int position, int window) {
  for (int row = 0; row < rows; ++row) {
    const int here = position + row / group;
    const int begin = std::max(piece.from, window ? here - window + 1 : 0) - chunk.first;
    const int end = std::min(piece.to, here + 1) - chunk.first;
    float* line = scores + row * kChunk;
    for (int slot = 0; slot < std::min(begin, chunk.slots); ++slot) line[slot] = kMinusInfinity;
    for (int slot = std::max(0, end); slot < chunk.slots; ++slot) line[slot] = kMinusInfinity;
  }
}

// Copies V of at most 32 slots of a chunk, from `slot` on, to a buffer unless it is contiguous already. Slots of other
// pieces become zero, because a weight of zero times a stale infinity would be NaN.
inline const bf16* gather(const bf16* one, const bf16* other, int size, int valid, bf16* to) {
  const size_t half = static_cast<size_t>(kSlots) * size;
  if (valid >= kValues && other == one + half) return one;
  std::memcpy(to, one, half * sizeof(bf16));
  if (other) std::memcpy(to + half, other, half * sizeof(bf16));
  for (int slot = std::max(0, valid); slot < kValues; ++slot) {
    for (int d = 0; d < size; ++d) to[(slot / 2 * size + d) * 2 + slot % 2] = 0;
  }
  return to;
}

// Pointer to K of one head of 16 slots, the first a multiple of 16.
inline const bf16* keys_of(const Attention& attention, int sequence, int head, int slot) {
  const Cache& cache = attention.cache;
  const int32_t block = attention.sequences.table(sequence)[slot / cache.block_size];
  const int64_t within = static_cast<int64_t>(head) * cache.block_size + slot % cache.block_size;
  return static_cast<const bf16*>(cache.data) + block * cache.block_stride + within * cache.head_size;
}

// Finds the K and V of one head of a piece, of kChunk slots from `first` on or fewer.
inline Chunk find(const Attention& attention, const Piece& piece, int head, int first, Scratch& s) {
  const Cache& cache = attention.cache;
  Chunk chunk{first, std::min(kChunk, padded(piece.to - first, kSlots)), {}, {}};
  for (int slot = 0; slot < chunk.slots; slot += kSlots) {
    chunk.keys[slot / kSlots] = keys_of(attention, piece.sequence, head, first + slot);
  }
  for (int slot = 0; slot < chunk.slots; slot += kValues) {
    const bf16* const* keys = chunk.keys + slot / kSlots;
    const bf16* other = slot + kSlots < chunk.slots ? keys[1] + cache.value_offset : nullptr;
    bf16* copy = s.values + static_cast<size_t>(slot) * cache.head_size;
    chunk.values[slot / kValues] =
        gather(keys[0] + cache.value_offset, other, cache.head_size, piece.to - first - slot, copy);
  }
  return chunk;
}

// One head of a piece and its slots from `first` on: its rows' sums come from row `begin` on.
inline void attend_chunk(const Attention& attention, const Piece& piece, int head, int begin, int rows, int group,
                         int position, int first, Scratch& s) {
  const Scores& how = attention.how;
  const int size = attention.cache.head_size;
  const Chunk chunk = find(attention, piece, head, first, s);
  score_slots(s.query + begin * size, rows, size, chunk, s.scores);
  if (how.softcap != 0.0f) cap(s.scores, rows, chunk.slots, how);
  const int last = first + chunk.slots - 1;
  if (first < piece.from || last >= piece.to || last > position || how.window) {
    hide(s.scores, rows, group, chunk, piece, position, how.window);
  }
  weigh(s, begin, rows, size, chunk.slots, how.softcap != 0.0f ? 1.0f : how.scaling * kLog2OfE);
  add_values(s.weights, rows, size, chunk, s.sums + begin * size);
}

// Attends with the rows of a piece. There is no software prefetch: copies of V and long runs keep all load buffers busy,
// and prefetches only competed with them.
inline void attend_pairs(const Attention& attention, const Piece& piece, int rows, int group, int position, Scratch& s) {
  for (int first = piece.from / kSlots * kSlots; first < piece.to; first += kChunk) {
    for (int head = 0; head < piece.heads; ++head) {
      attend_chunk(attention, piece, piece.head + head, head * 16, rows, group, position, first, s);
    }
  }
}
#endif

}  // namespace quire
