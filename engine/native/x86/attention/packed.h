// Attention to packed blocks, whose K and V are right operands of products.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../cache.h"
#include "../lanes.h"
#include "../numbers.h"
#include "../panel.h"
#include "../products.h"
#include "../tiles.h"
#include "pieces.h"
#include "codes.h"
#include "scratch.h"

namespace quire {

// K and V of one head of a chunk, in groups of 16 slots. Without codes there are no scales.
template <typename S>
struct Chunk {
  int first, slots;  // a multiple of 16
  const StoredOf<S>* keys[kChunk / kSlots];
  const StoredOf<S>* values[kChunk / kSlots];
  const int8_t* key_scales[kChunk / kSlots];
  const int8_t* value_scales[kChunk / kSlots];
};

#ifdef QUIRE_AMX
constexpr int kValues = 32;  // slots whose V is multiplied at once: those of a tile

// Prefetches `count` parts of 256 elements, from number `place` on, of each of `groups` groups of 16 slots: into the L2
// cache, because tiles are loaded soon after.
inline void prefetch_groups(const bf16* const* keys_or_values, int groups, int place, int count) {
  for (int group = 0; group < groups; ++group) {
    const char* line = reinterpret_cast<const char*>(keys_or_values[group] + place * 256);
    for (int i = 0; i < count * 8; ++i) _mm_prefetch(line + i * 64, _MM_HINT_T1);
  }
}

template <int row_tiles, int column_tiles>
void score_tiles(const bf16* query, int size, const bf16* const* keys, const bf16* const* ahead) {
  for (int d = 0; d < size; d += 32) {
    if (ahead) prefetch_groups(ahead, column_tiles, d / kColumns, 2);
    _tile_loadd(4, query + d, size * 2);
    _tile_loadd(6, keys[0] + d * kSlots, 64);
    if constexpr (row_tiles > 1) _tile_loadd(5, query + 16 * size + d, size * 2);
    if constexpr (column_tiles > 1) _tile_loadd(7, keys[1] + d * kSlots, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (row_tiles > 1) _tile_dpbf16ps(1, 5, 6);
    if constexpr (column_tiles > 1) _tile_dpbf16ps(2, 4, 7);
    if constexpr (row_tiles > 1 && column_tiles > 1) _tile_dpbf16ps(3, 5, 7);
  }
}

inline void score_with_tiles(const bf16* query, int rows, int size, const Chunk<bf16>& chunk, const bf16* const* ahead,
                             float* scores) {
  for (int slot = 0; slot < chunk.slots; slot += 2 * kSlots) {
    const bf16* const* keys = chunk.keys + slot / kSlots;
    const bf16* const* values = ahead ? ahead + slot / kSlots : nullptr;
    for (int row = 0; row < rows; row += kPiece) {
      with_tiles(rows - row, chunk.slots - slot, [&](auto row_tiles, auto column_tiles) {
        zero_tiles();
        score_tiles<row_tiles, column_tiles>(query + row * size, size, keys, row ? nullptr : values);
        store_tiles<row_tiles, column_tiles>(scores + row * kChunk + slot, kChunk);
      });
    }
  }
}

// V of 32 slots from `slot` on, copied unless it is contiguous.
inline const bf16* tile_of_values(const Chunk<bf16>& chunk, int slot, int size, bf16* copy) {
  const bf16* const* groups = chunk.values + slot / kSlots;
  const size_t half = static_cast<size_t>(kSlots) * size;
  const bool both = slot + kSlots < chunk.slots;
  if (both && groups[1] == groups[0] + half) return groups[0];
  std::memcpy(copy, groups[0], half * sizeof(bf16));
  if (both) {
    std::memcpy(copy + half, groups[1], half * sizeof(bf16));
  } else {
    std::memset(copy + half, 0, half * sizeof(bf16));
  }
  return copy;
}

template <int row_tiles, int column_tiles>
void weigh_tiles(const bf16* weights, int size, const bf16* const* values, int slots, int d, const bf16* const* ahead) {
  for (int slot = 0; slot < slots; slot += kValues) {
    if (ahead) prefetch_groups(ahead + slot / kSlots, slot + kSlots < slots ? 2 : 1, d / kColumns, column_tiles);
    const bf16* v = values[slot / kValues] + d * 2;
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

inline void add_values_with_tiles(const bf16* weights, int rows, int size, const Chunk<bf16>& chunk,
                                  const bf16* const* ahead, Scratch& s, float* sums) {
  const bf16* values[kChunk / kValues];
  for (int slot = 0; slot < chunk.slots; slot += kValues) {
    bf16* copy = s.values + static_cast<size_t>(slot) * size;
    values[slot / kValues] = tile_of_values(chunk, slot, size, copy);
  }
  for (int d = 0; d < size; d += 32) {
    for (int row = 0; row < rows; row += kPiece) {
      with_tiles(rows - row, size - d, [&](auto row_tiles, auto column_tiles) {
        load_tiles<row_tiles, column_tiles>(sums + row * size + d, size);
        weigh_tiles<row_tiles, column_tiles>(weights + row * kChunk, size, values, chunk.slots, d, row ? nullptr : ahead);
        store_tiles<row_tiles, column_tiles>(sums + row * size + d, size);
      });
    }
  }
}
#endif

// Scores of a chunk's slots: `scores` is [rows rounded up to 16][kChunk]. Meanwhile `ahead`, unless it is null, is
// prefetched: the V of these slots.
template <typename E>
void score_slots(const LeftOf<E>* query, int rows, int size, const Chunk<E>& chunk, const E* const* ahead, float* scores) {
#ifdef QUIRE_AMX
  if constexpr (std::is_same_v<E, bf16>) {
    if (use_amx && size % 32 == 0) return score_with_tiles(query, rows, size, chunk, ahead, scores);
  }
#endif
  const Strided<LeftOf<E>> left{query, static_cast<size_t>(size)};
  const int at_once = columns_at_once(rows);
  for (int slot = 0; slot < chunk.slots; slot += at_once) {
    const KeyColumns<E> right{chunk.keys + slot / kSlots, ahead ? ahead + slot / kSlots : nullptr};
    const int columns = std::min(at_once, chunk.slots - slot);
    any_panels<E>(left, right, rows, columns, size, scores + slot, kChunk);
  }
}

// Adds a chunk's weighted values: `sums` is [rows rounded up to 16][size]. Meanwhile `ahead`, unless it is null, is
// prefetched: the K of as many slots.
template <typename E>
void add_values(const LeftOf<E>* weights, int rows, int size, const Chunk<E>& chunk, const E* const* ahead, Scratch& s,
                float* sums) {
#ifdef QUIRE_AMX
  if constexpr (std::is_same_v<E, bf16>) {
    if (use_amx) return add_values_with_tiles(weights, rows, size, chunk, ahead, s, sums);
  }
#endif
  (void)s;
  const Strided<LeftOf<E>> left{weights, kChunk};
  const int at_once = columns_at_once(rows);
  for (int d = 0; d < size; d += at_once) {
    const ValueColumns<E> right{chunk.values, ahead, d, static_cast<size_t>(size)};
    any_panels<E>(left, right, rows, std::min(at_once, size - d), chunk.slots, sums + d, size);
  }
}

// The largest score of a row, of `slots`, a multiple of 16.
inline float largest_of(const float* scores, int slots) {
  Vector most = load(scores);
  for (int slot = kLanes; slot < slots; slot += kLanes) most = larger(most, load(scores + slot));
  return largest_lane(most);
}

// Raises a row's largest score, and rescales its earlier sums.
inline void raise(Scratch& s, int row, int size, float largest) {
  const Vector correction = exp2_of(filled(s.largest[row] - largest));
  float* sums = s.sums + row * size;
  for (int d = 0; d < size; d += kLanes) store(sums + d, times(load(sums + d), correction));
  float* total = s.total + row * 16;
  for (int part = 0; part < 16; part += kLanes) store(total + part, times(load(total + part), correction));
  s.largest[row] = largest;
}

// Softmax of a chunk: turns scores, times `unit` logarithms to base 2, into weights, which are multiplied by `scales`,
// unless it is null, after they were added to the total. The scores and weights of these rows are the first, their sums
// come from row `begin` on.
template <typename A>
void weigh(Scratch& s, A* weights, int begin, int rows, int size, int slots, float unit, const float* scales) {
  for (int row = 0; row < rows; ++row) {
    const float largest = largest_of(s.scores + row * kChunk, slots) * unit;
    if (largest > s.largest[begin + row]) raise(s, begin + row, size, largest);
  }
  for (int row = 0; row < rows; ++row) {
    const float* scores = s.scores + row * kChunk;
    A* of_row = weights + row * kChunk;
    const Vector factor = filled(unit), largest = filled(s.largest[begin + row]);
    float* total = s.total + (begin + row) * 16;
    std::memset(of_row + padded(slots, 32) - 16, 0, 16 * sizeof(A));  // tiles have 32 slots
    for (int slot = 0; slot < slots; slot += 16) {
      for (int part = 0; part < 16; part += kLanes) {
        const Vector p = exp2_of(times_minus(load(scores + slot + part), factor, largest));
        store(total + part, plus(load(total + part), p));
        put_lanes(of_row + slot + part, scales ? times(p, load(scales + slot + part)) : p);
      }
    }
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
inline void hide(float* scores, int rows, int group, int first, int slots, const Piece& piece, int position, int window) {
  for (int row = 0; row < rows; ++row) {
    const int here = position + row / group;
    const int begin = std::max(piece.from, window ? here - window + 1 : 0) - first;
    const int end = std::min(piece.to, here + 1) - first;
    float* line = scores + row * kChunk;
    for (int slot = 0; slot < std::min(begin, slots); ++slot) line[slot] = kMinusInfinity;
    for (int slot = std::max(0, end); slot < slots; ++slot) line[slot] = kMinusInfinity;
  }
}

// V of a group of 16 slots of which `valid` belong to the piece. The others become zero, because a weight of zero times a
// stale infinity would be NaN.
template <typename E>
const E* without_stale(const E* values, int size, int valid, E* copy) {
  if (valid >= kSlots) return values;
  std::memcpy(copy, values, sizeof(E) * kSlots * size);
  for (int slot = std::max(0, valid); slot < kSlots; ++slot) {
    for (int d = 0; d < size; ++d) copy[(slot / kInputs<E> * size + d) * kInputs<E> + slot % kInputs<E>] = E{};
  }
  return copy;
}

// Finds the K and V of one head of a piece, of kChunk slots from `first` on or fewer.
template <typename S>
Chunk<S> find(const Attention& attention, const Piece& piece, int head, int first) {
  const Cache& cache = attention.cache;
  const int32_t* table = attention.sequences.table(piece.sequence);
  Chunk<S> chunk{first, std::min(kChunk, padded(piece.to - first, kSlots)), {}, {}, {}, {}};
  for (int group = 0; group < chunk.slots / kSlots; ++group) {
    const int slot = first + group * kSlots, offset = slot % cache.block_size;
    const auto* block = static_cast<const StoredOf<S>*>(cache.data) + table[slot / cache.block_size] * cache.block_stride;
    const auto* keys = block + head * cache.key.head_stride;
    const auto* values = block + cache.value.offset + head * cache.value.head_stride;
    if constexpr (kCoded<S>) {
      chunk.key_scales[group] = keys + scales_of(cache, cache.key) + offset * kScaleBytes;
      chunk.value_scales[group] = values + scales_of(cache, cache.value) + offset * kScaleBytes;
    }
    chunk.keys[group] = keys + static_cast<int64_t>(offset) * cache.key.size;
    chunk.values[group] = values + static_cast<int64_t>(offset) * cache.value.size;
  }
  return chunk;
}

// From a chunk's scores to weights, with a factor of each slot's weights unless `scales` is null.
template <typename A>
void soften(const Attention& attention, const Piece& piece, int begin, int rows, int group, int position, int first,
            int slots, const float* scales, A* weights, Scratch& s) {
  const Scores& how = attention.how;
  if (how.softcap != 0.0f) cap(s.scores, rows, slots, how);
  const int last = first + slots - 1;
  if (first < piece.from || last >= piece.to || last > position || how.window) {
    hide(s.scores, rows, group, first, slots, piece, position, how.window);
  }
  const float unit = how.softcap != 0.0f ? 1.0f : how.scaling * kLog2OfE;
  weigh(s, weights, begin, rows, attention.cache.value.size, slots, unit, scales);
}

// One head of a piece and its slots from `first` on: its rows' sums come from row `begin` on.
template <typename E>
void attend_chunk(const Attention& attention, const Piece& piece, int begin, int rows, int group, int position,
                  Chunk<E> chunk, const Chunk<E>& next, Scratch& s) {
  const int keys = attention.cache.key.size, size = attention.cache.value.size, first = chunk.first;
  auto* weights = reinterpret_cast<LeftOf<E>*>(s.weights);
  const auto* query = reinterpret_cast<const LeftOf<E>*>(s.query) + begin * keys;
  score_slots<E>(query, rows, keys, chunk, keys <= size ? chunk.values : nullptr, s.scores);
  soften(attention, piece, begin, rows, group, position, first, chunk.slots, nullptr, weights, s);
  const E*& values = chunk.values[chunk.slots / kSlots - 1];
  values = without_stale(values, size, piece.to - first - chunk.slots + kSlots, reinterpret_cast<E*>(s.last_values));
  add_values<E>(weights, rows, size, chunk, next.slots < chunk.slots || size > keys ? nullptr : next.keys, s, s.sums + begin * size);
}

// The K, or V, of a chunk as elements of type E without their scales, in s.numbers. Meanwhile as much of `ahead` is
// prefetched, unless it is null.
template <typename E>
Chunk<E> expanded(const int8_t* const* codes, const int8_t* const* ahead, int first, int slots, int size, Scratch& s) {
  Chunk<E> chunk{first, slots, {}, {}, {}, {}};
  for (int group = 0; group < slots / kSlots; ++group) {
    E* numbers = reinterpret_cast<E*>(s.numbers) + group * kSlots * size;
    expand(codes[group], kSlots * size, ahead ? ahead[group] : nullptr, numbers);
    chunk.keys[group] = chunk.values[group] = numbers;
  }
  return chunk;
}

// The scales of a chunk's K, or of its V, in s.scales. Of slots that no token of the piece has
// written, from `valid` on, they are 0: a weight of zero times a stale infinity would be NaN.
inline void take_scales(const int8_t* const* scales, int slots, int valid, Scratch& s) {
  for (int slot = 0; slot < slots; slot += kSlots) load_scales(scales[slot / kSlots], kSlots, s.scales + slot);
  for (int slot = std::max(0, valid); slot < slots; ++slot) s.scales[slot] = 0.0f;
}

// The same for codes: K and V are multiplied without their scales, which are factors of scores and weights.
template <typename E>
void attend_chunk(const Attention& attention, const Piece& piece, int begin, int rows, int group, int position,
                  const Chunk<Coded<E>>& chunk, const Chunk<Coded<E>>& next, Scratch& s) {
  const int size = attention.cache.key.size, width = attention.cache.value.size;
  const int first = chunk.first, slots = chunk.slots, valid = piece.to - first;
  auto* weights = reinterpret_cast<LeftOf<E>*>(s.weights);
  const auto* query = reinterpret_cast<const LeftOf<E>*>(s.query) + begin * size;
  const Chunk<E> keys = expanded<E>(chunk.keys, size <= width ? chunk.values : nullptr, first, slots, size, s);
  score_slots<E>(query, rows, size, keys, nullptr, s.scores);
  take_scales(chunk.key_scales, slots, valid, s);
  for (int row = 0; row < rows; ++row) {
    float* line = s.scores + row * kChunk;
    for (int slot = 0; slot < slots; slot += kLanes) store(line + slot, times(load(line + slot), load(s.scales + slot)));
  }
  take_scales(chunk.value_scales, slots, valid, s);
  soften(attention, piece, begin, rows, group, position, first, slots, s.scales, weights, s);
  const bool as_many = next.slots >= slots && width <= size;
  const Chunk<E> values = expanded<E>(chunk.values, as_many ? next.keys : nullptr, first, slots, width, s);
  add_values<E>(weights, rows, width, values, nullptr, s, s.sums + begin * width);
}

// Attends with the rows of a piece. While a chunk's K is multiplied its V is prefetched, and while its V is multiplied the
// K of the next head or chunk: in even shares, because bursts of prefetches leave the memory idle between them.
template <typename S>
void attend_packed(const Attention& attention, const Piece& piece, int rows, int group, int position, Scratch& s) {
  // Chunks of codes begin at the same slots in each piece, because sums are rescaled between chunks.
  constexpr int kBegin = kCoded<S> ? kChunk : kSlots;
  const int begin = piece.from / kBegin * kBegin, count = (piece.to - begin + kChunk - 1) / kChunk * piece.heads;
  const auto find_at = [&](int number) {
    return find<S>(attention, piece, piece.head + number % piece.heads, begin + number / piece.heads * kChunk);
  };
  Chunk<S> chunk = find_at(0);
  for (int number = 0; number < count; ++number) {
    const Chunk<S> next = number + 1 < count ? find_at(number + 1) : Chunk<S>{};
    attend_chunk(attention, piece, number % piece.heads * 16, rows, group, position, chunk, next, s);
    chunk = next;
  }
}

}  // namespace quire
