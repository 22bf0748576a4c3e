// A step's attention over one layer.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../lanes.h"
#include "../state.h"
#include "packed.h"
#include "pieces.h"
#include "scratch.h"
#include "slots.h"

namespace quire {

// Contiguous rows of elements.
template <typename T>
struct Lines {
  T* data;
  int64_t stride;
  T* at(int64_t row, int64_t column) const { return data + row * stride + column; }
};

// Stores one head of one row in runs of 16 elements, which are contiguous in every layout.
template <typename Out>
void put_head(const Out& output, int row, int column, const float* sums, int size, float factor) {
  for (int d = 0; d < size; d += 16) {
    auto* to = output.at(row, column + d);
    const int count = std::min(16, size - d);
    if (count == 16) {
      for (int i = 0; i < 16; i += kLanes) put_lanes(to + i, times(load(sums + d + i), filled(factor)));
      continue;
    }
    for (int i = 0; i < count; ++i) put(to + i, sums[d + i] * factor);
  }
}

// Loads the queries of one head as left operands of type A.
template <typename A, typename T>
void take_query(const T* query, int64_t stride, int rows, int group, int size, A* to) {
  for (int row = 0; row < rows; ++row, to += size) {
    const T* from = query + row / group * stride + row % group * size;
    if constexpr (std::is_same_v<A, T>) {
      std::memcpy(to, from, sizeof(T) * size);
    } else {
      for (int d = 0; d < size; ++d) put(to + d, element(from + d));
    }
  }
}

inline float total_of(const Scratch& s, int row) {
  float total = 0.0f;
  for (int part = 0; part < 16; ++part) total += s.total[row * 16 + part];
  return total;
}

// Stores the rows of one head in the output, or in the piece's partial result: [kRows][size + 2], sums, largest score,
// total weight.
template <typename Out>
void put_rows(const Attention& attention, const Piece& piece, int head, int place, const Out& output, float* partials,
              const Scratch& s) {
  const Grouping grouping(attention);
  const int size = attention.cache.head_size, width = grouping.width(piece.part), rows = piece.tokens * width;
  const int offset = ((piece.head + head) * grouping.group + piece.part * kRows) * size;
  for (int row = 0; row < rows; ++row) {
    const int at = head * 16 + row;
    if (piece.partial < 0) {
      put_head(output, place + row / width, offset + row % width * size, s.sums + at * size, size, 1.0f / total_of(s, at));
      continue;
    }
    const size_t number = (static_cast<size_t>(piece.partial) + head * piece.apart) * kRows + row;
    float* partial = partials + number * (size + 2);
    std::memcpy(partial, s.sums + at * size, sizeof(float) * size);
    partial[size] = s.largest[at];
    partial[size + 1] = total_of(s, at);
  }
}

// Computes one piece of attention to a cache of format S.
template <typename S, typename T, typename Out>
void attend_piece(const Attention& attention, const Piece& piece, const T* query, int64_t query_stride, const Out& output,
                  float* partials, Scratch& s) {
  const Cache& cache = attention.cache;
  const Grouping grouping(attention);
  const int size = cache.head_size, width = grouping.width(piece.part), rows = piece.tokens * width;
  const int place = attention.sequences.first[piece.sequence] + piece.token;
  const int fed = attention.sequences.first[piece.sequence + 1] - attention.sequences.first[piece.sequence];
  const int position = attention.sequences.ends[piece.sequence] - fed + piece.token;
  const int all_rows = (piece.heads - 1) * 16 + padded(rows, 16);
  for (int row = 0; row < all_rows; ++row) s.largest[row] = kNothingSeen;
  std::memset(s.total, 0, sizeof(float) * all_rows * 16);
  std::memset(s.sums, 0, sizeof(float) * all_rows * size);
  const bool packed = is_packed(cache);
  for (int head = 0; head < piece.heads; ++head) {
    const int offset = ((piece.head + head) * grouping.group + piece.part * kRows) * size, first = head * 16 * size;
    const T* from = query + place * query_stride + offset;
    if (packed) {
      take_query(from, query_stride, rows, width, size, reinterpret_cast<LeftOf<NumberOf<S>>*>(s.query) + first);
    } else {
      take_query(from, query_stride, rows, width, size, s.query + first);
    }
  }
  if (packed) {
    attend_packed<S>(attention, piece, rows, width, position, s);
  } else {
    attend_slots<S>(attention, piece, rows, width, position, s);
  }
  for (int head = 0; head < piece.heads; ++head) put_rows(attention, piece, head, place, output, partials, s);
}

// Combines the pieces of one token, KV head and part; `item` is their index.
template <typename Out>
void combine(const Attention& attention, const Pieces& pieces, int item, const float* partials,
             const Out& output) {
  const Grouping grouping(attention);
  const int size = attention.cache.head_size, heads = attention.cache.heads * grouping.parts;
  const int head = item % heads / grouping.parts, part = item % grouping.parts, count = pieces.counts[item];
  const int64_t offset = (static_cast<int64_t>(head) * grouping.group + part * kRows) * size;
  for (int row = 0; row < grouping.width(part); ++row) {
    const float* first = partials + (static_cast<size_t>(pieces.partials[item]) * kRows + row) * (size + 2);
    const size_t step = static_cast<size_t>(kRows) * (size + 2);
    float largest = kNothingSeen, total = 0.0f, sums[256] = {};
    for (int i = 0; i < count; ++i) largest = std::max(largest, first[i * step + size]);
    for (int i = 0; i < count; ++i) {
      const float* partial = first + i * step;
      const float factor = std::exp2(partial[size] - largest);
      total += factor * partial[size + 1];
      for (int d = 0; d < size; ++d) sums[d] += factor * partial[d];
    }
    put_head(output, item / heads, offset + row * size, sums, size, 1.0f / total);
  }
}

// Computes a step's attention on all threads of the team; every thread calls it.
template <typename S, typename T, typename Out>
void attend_together(Team& team, State& state, int thread, const Attention& attention, const T* query, int64_t query_stride,
                     const Out& output, float* partials) {
  const Pieces& pieces = state.pieces;
  team.each(static_cast<int>(pieces.all.size()), [&](int item) {
    attend_piece<S>(attention, pieces.all[item], query, query_stride, output, partials, *state.scratch[thread]);
  });
  if (pieces.partial_count == 0) return;
  team.each(static_cast<int>(pieces.counts.size()), [&](int item) {
    if (pieces.counts[item]) combine(attention, pieces, item, partials, output);
  });
}

}  // namespace quire
