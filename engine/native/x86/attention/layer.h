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

// Not inlined: compiled in several places, additions may have several orders.
[[gnu::noipa]] inline float total_of(const Scratch& s, int row) {
  float total = 0.0f;
  for (int part = 0; part < 16; ++part) total += s.total[row * 16 + part];
  return total;
}

// Adds the sums, the largest score and the total weight of a row's later slots to those of its earlier ones. Not inlined for
// the same reason.
[[gnu::noipa]] inline void merge(float* sums, float& largest, float& total, const float* later_sums, float later_largest,
                                 float later_total, int size) {
  if (later_total == 0.0f) return;  // the row sees none of them
  if (total == 0.0f) largest = later_largest;
  const float most = std::max(largest, later_largest);
  const float factor = std::exp2(largest - most), later_factor = std::exp2(later_largest - most);
  for (int d = 0; d < size; ++d) sums[d] = sums[d] * factor + later_sums[d] * later_factor;
  total = total * factor + later_total * later_factor;
  largest = most;
}

// The factor of a row's sums: the inverse of its total weight, with that of its head's sink. `largest` is its largest score.
// Not inlined for the same reason as total_of.
[[gnu::noipa]] inline float factor_of(float largest, float total, const float* sinks, int64_t head) {
  if (!sinks) return 1.0f / total;
  const float sink = sinks[head] * kLog2OfE, most = std::max(largest, sink);
  const float of_slots = std::exp2(largest - most);
  return of_slots / (total * of_slots + std::exp2(sink - most));
}

// Stores the rows of one head in the output, or in the piece's partial result: for each row of a token sums, largest score
// and total weight.
template <typename Out>
void put_rows(const Attention& attention, const Piece& piece, int head, int place, const Out& output, float* partials,
              const Scratch& s) {
  const Grouping grouping(attention);
  const int size = attention.cache.value.size, width = grouping.width(piece.part), rows = piece.tokens * width;
  const int first = (piece.head + head) * grouping.group + piece.part * kRows;
  for (int row = 0; row < rows; ++row) {
    const int at = head * 16 + row;
    if (piece.partial < 0) {
      const int of = first + row % width;
      const float factor = factor_of(s.largest[at], total_of(s, at), attention.how.sinks, of);
      put_head(output, place + row / width, of * size, s.sums + at * size, size, factor);
      continue;
    }
    const size_t number = (static_cast<size_t>(piece.partial) + head * piece.apart) * grouping.rows() + row;
    float* partial = partials + number * (size + 2);
    std::memcpy(partial, s.sums + at * size, sizeof(float) * size);
    partial[size] = s.largest[at];
    partial[size + 1] = total_of(s, at);
  }
}

inline void clear_rows(Scratch& s, int rows, int size) {
  for (int row = 0; row < rows; ++row) s.largest[row] = kNothingSeen;
  std::memset(s.total, 0, sizeof(float) * rows * 16);
  std::memset(s.sums, 0, sizeof(float) * rows * size);
}

// Calls work(row) for the rows of all heads of a piece.
template <typename Work>
void each_row(const Piece& piece, int rows, const Work& work) {
  for (int head = 0; head < piece.heads; ++head) {
    for (int row = head * 16; row < head * 16 + rows; ++row) work(row);
  }
}

// Calls attend(part) for the segments of a piece, and adds their results; without segments for the whole piece.
template <typename Attend>
void attend_segments(const Attention& attention, const Piece& piece, int rows, Scratch& s, const Attend& attend) {
  const int size = attention.cache.value.size;
  if (!attention.by_segments || segment_end(piece.from, piece.to) == piece.to) return attend(piece);
  each_row(piece, rows, [&](int row) { s.earlier_total[row] = 0.0f; });
  std::memset(s.earlier_sums, 0, sizeof(float) * ((piece.heads - 1) * 16 + rows) * size);
  Piece part = piece;
  for (part.to = piece.from; part.to < piece.to;) {
    part.from = part.to;
    part.to = segment_end(part.from, piece.to);
    attend(part);
    each_row(piece, rows, [&](int row) {
      float* sums = s.earlier_sums + row * size;
      merge(sums, s.earlier_largest[row], s.earlier_total[row], s.sums + row * size, s.largest[row], total_of(s, row), size);
    });
  }
  each_row(piece, rows, [&](int row) {
    std::memcpy(s.sums + row * size, s.earlier_sums + row * size, sizeof(float) * size);
    std::memset(s.total + row * 16, 0, sizeof(float) * 16);
    s.total[row * 16] = s.earlier_total[row];
    s.largest[row] = s.earlier_largest[row];
  });
}

// Computes one piece of attention to a cache of format S.
template <typename S, typename T, typename Out>
void attend_piece(const Attention& attention, const Piece& piece, const T* query, int64_t query_stride, const Out& output,
                  float* partials, Scratch& s) {
  const Cache& cache = attention.cache;
  const Grouping grouping(attention);
  const int size = cache.key.size, width = grouping.width(piece.part), rows = piece.tokens * width;
  const int place = attention.sequences.first[piece.sequence] + piece.token;
  const int fed = attention.sequences.first[piece.sequence + 1] - attention.sequences.first[piece.sequence];
  const int position = attention.sequences.ends[piece.sequence] - fed + piece.token;
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
  attend_segments(attention, piece, rows, s, [&](const Piece& part) {
    clear_rows(s, (piece.heads - 1) * 16 + padded(rows, 16), cache.value.size);
    if (packed) {
      attend_packed<S>(attention, part, rows, width, position, s);
    } else {
      attend_slots<S>(attention, part, rows, width, position, s);
    }
  });
  for (int head = 0; head < piece.heads; ++head) put_rows(attention, piece, head, place, output, partials, s);
}

// Numbers of all partial results.
inline size_t partial_size(const Attention& attention, const Pieces& pieces) {
  return static_cast<size_t>(pieces.partial_count) * Grouping(attention).rows() * (attention.cache.value.size + 2) + 1;
}

// Combines the pieces of one token, KV head and part; `item` is their index.
template <typename Out>
void combine(const Attention& attention, const Pieces& pieces, int item, const float* partials,
             const Out& output) {
  const Grouping grouping(attention);
  const int size = attention.cache.value.size, heads = attention.cache.heads * grouping.parts;
  const int head = item % heads / grouping.parts, part = item % grouping.parts, count = pieces.counts[item];
  const int64_t first_head = static_cast<int64_t>(head) * grouping.group + part * kRows;
  for (int row = 0; row < grouping.width(part); ++row) {
    const size_t step = static_cast<size_t>(grouping.rows()) * (size + 2);
    const float* first = partials + pieces.partials[item] * step + row * (size + 2);
    float largest = kNothingSeen, total = 0.0f, sums[kLargestHead] = {};
    for (int i = 0; i < count; ++i) {
      const float* partial = first + i * step;
      merge(sums, largest, total, partial, partial[size], partial[size + 1], size);
    }
    const int64_t of = first_head + row;
    put_head(output, item / heads, of * size, sums, size, factor_of(largest, total, attention.how.sinks, of));
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
