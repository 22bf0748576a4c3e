// Products of a few rows and a few columns, with all sums in registers.
//
// Right operands have 16 adjacent columns for each step of inputs: pairs of bfloat16 inputs, or single inputs of the other
// types. Left operands are bfloat16 where the CPU multiplies its pairs, else float32. Each sum has one chain of additions
// in the order of the inputs, so that a row's results do not depend on the other rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "lanes.h"
#include "numbers.h"

namespace quire {

constexpr int kColumns = 16;
constexpr int kVectors = kColumns / kLanes;
// Sums of a panel: 24 of 32 registers with AVX512, 12 of 16 with AVX2. The others hold a step's columns and a row's input.
constexpr int kPanelRows = 6;
constexpr int kPanelColumns = 64;  // at most
// Columns of a panel, such that few rows have enough independent sums and many rows have enough registers.
constexpr int columns_at_once(int rows) {
  if constexpr (kLanes == 16) return kPanelColumns;
  return rows == 1 ? 64 : rows <= 3 ? 32 : 16;
}

#ifdef QUIRE_BF16
using operand = bf16;  // left operand of a product with bfloat16 numbers
#else
using operand = float;
#endif

template <typename E>
using LeftOf = std::conditional_t<std::is_same_v<E, bf16>, operand, float>;

// Inputs of one step.
template <typename E>
constexpr int kInputs = std::is_same_v<E, bf16> ? 2 : 1;

// Left operands: contiguous rows that are `stride` apart.
template <typename A>
struct Strided {
  const A* data;
  size_t stride;

  Strided below(int rows) const { return {data + rows * stride, stride}; }
};

// Left operands whose distances are constants: [inputs / 32][16 rows][32].
template <typename A>
struct Tiled {
  const A* data;

  Tiled below(int rows) const { return {data + rows * 32}; }
  const A* at(int row, int input) const { return data + row * 32 + input; }
};

// Left operands of any rows from `first` on of tiles, [rows / 16][inputs / 32][16 rows][32]; `apart` is the distance from
// one 16 rows to the next.
template <typename A>
struct TileRows {
  const A* data;
  size_t apart;
  int first = 0;

  TileRows below(int rows) const { return {data, apart, first + rows}; }
  const A* row(int number) const { return data + (first + number) / 16 * apart + (first + number) % 16 * 32; }
};

// The left operand of the rows of a product from `row` on, whose tiles begin at `data`, and how many rows are multiplied
// before their sums are passed on. With AVX512 panels span tiles, because all but the last few then have most rows: 16 rows
// are panels of 6, 5 and 5. With AVX2, where loads bound the panels, distances are constants.
#if defined(__AVX512F__)
constexpr int kTall = 8 * kPanelRows;
inline TileRows<operand> left_rows(const operand* data, size_t apart, int row) { return {data, apart, row}; }
#else
constexpr int kTall = 16;
inline Tiled<operand> left_rows(const operand* data, size_t apart, int row) { return {data + row / 16 * apart}; }
#endif

// A panel's place in strided rows: at(row, input) is one of the next 16 inputs. Each row has a pointer: the compiler would keep
// multiples of the stride in memory, and load one for each product.
template <typename A, int rows>
struct StridedPlace {
  const A* of_row[rows];

  explicit StridedPlace(const Strided<A>& a) {
    for (int row = 0; row < rows; ++row) {
      of_row[row] = a.data + row * a.stride;
      asm("" : "+r"(of_row[row]));  // not as vectors, which would go through memory
    }
  }
  const A* at(int row, int input) const { return of_row[row] + input; }
  void next(int) {
    for (int row = 0; row < rows; ++row) {
      of_row[row] += kColumns;
      asm("" : "+r"(of_row[row]));  // hides that all rows move alike
    }
  }
};

// The same in rows of tiles: each has a pointer, since they may be in two of them.
template <typename A, int rows>
struct TilePlace {
  const A* of_row[rows];

  explicit TilePlace(const TileRows<A>& a) {
    for (int row = 0; row < rows; ++row) of_row[row] = a.row(row);
  }
  const A* at(int row, int input) const { return of_row[row] + input; }
  void next(int k) {
    for (int row = 0; row < rows; ++row) of_row[row] += kColumns + (k % 32 ? 16 * 32 - 32 : 0);
  }
};

template <int rows, typename A>
StridedPlace<A, rows> place_in(const Strided<A>& a) { return StridedPlace<A, rows>(a); }
template <int rows, typename A>
TilePlace<A, rows> place_in(const TileRows<A>& a) { return TilePlace<A, rows>(a); }

// Cache lines of 256 elements, of which a panel prefetches those from `first` to `last`: all panels of the same columns
// together prefetch each once, in even shares. Bursts of prefetches would leave the memory idle between them.
template <typename E>
struct AheadLines {
  int first = 0, last = 256 * sizeof(E) / 64;

  // The lines of one of `count` panels.
  AheadLines share(int number, int count) const {
    return {first + (last - first) * number / count, first + (last - first) * (number + 1) / count};
  }
  // Prefetches the lines of 256 elements, number `place` of them.
  void prefetch(const E* from, int place) const {
    const char* line = reinterpret_cast<const char*>(from + place * 256);
    for (int i = first; i < last; ++i) _mm_prefetch(line + i * 64, _MM_HINT_T0);
  }
};

// Right operands, whose products are added to sums in memory if `kAdds`. at(block, k) points to 16 columns, at their inputs from k on, a multiple of 16; `step` is the distance
// from one step of inputs to the next. Unless it is null, `ahead` is prefetched meanwhile: then loads from memory overlap
// with products, which the CPU's own prefetching of a few KiB does not achieve.
template <typename E>
struct PackedColumns {
  const E* data;
  size_t block_stride;
  const E* ahead;
  AheadLines<E> lines = {};
  static constexpr bool kAdds = false;
  static constexpr size_t step() { return kInputs<E> * kColumns; }
  const E* at(int block, int k) const {
    const size_t place = block * block_stride + static_cast<size_t>(k) * kColumns;
    if (ahead) lines.prefetch(ahead + place, 0);
    return data + place;
  }
};

// K of groups of 16 slots, which are the columns; the inputs are a head's elements.
template <typename E>
struct KeyColumns {
  const E* const* groups;
  const E* const* ahead;
  AheadLines<E> lines = {};
  static constexpr bool kAdds = false;
  static constexpr size_t step() { return kInputs<E> * kColumns; }
  const E* at(int block, int k) const {
    if (ahead) lines.prefetch(ahead[block], k / kColumns);
    return groups[block] + static_cast<size_t>(k) * kColumns;
  }
};

// V of groups of 16 slots, which are the inputs; the columns are a head's elements from `first` on.
template <typename E>
struct ValueColumns {
  const E* const* groups;
  const E* const* ahead;
  int first;
  size_t size;
  AheadLines<E> lines = {};
  static constexpr bool kAdds = true;
  size_t step() const { return kInputs<E> * size; }
  const E* at(int block, int k) const {
    if (ahead) lines.prefetch(ahead[k / kColumns], first / kColumns + block);
    return groups[k / kColumns] + (first + block * kColumns) * kInputs<E>;
  }
};

#ifdef QUIRE_BF16
inline __m512bh pair(const bf16* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return (__m512bh)_mm512_set1_epi32(bits);
}
#endif

// The columns of one vector at one of a step's inputs.
inline Vector columns_of(const float* step, int, int vector) { return load(step + vector * kLanes); }
inline Vector columns_of(const _Float16* step, int, int vector) { return load(step + vector * kLanes); }
inline Vector columns_of(const bf16* step, int input, int vector) {
  return input ? second_of(step + vector * 2 * kLanes) : first_of(step + vector * 2 * kLanes);
}

// Adds the products of 16 inputs to the sums.
template <typename E, int rows, int blocks, typename Left, typename Right>
[[gnu::always_inline]] inline void add_products(Vector (&sums)[rows][blocks * kVectors], const Left& a, const Right& b, int k) {
  const E* columns[blocks];
  for (int block = 0; block < blocks; ++block) columns[block] = b.at(block, k);
#pragma GCC unroll 16
  for (int input = 0; input < kColumns; input += kInputs<E>) {
#ifdef QUIRE_BF16
    if constexpr (std::is_same_v<E, bf16>) {
      __m512bh right[blocks];
      for (int block = 0; block < blocks; ++block) right[block] = (__m512bh)_mm512_loadu_si512(columns[block]);
      for (int row = 0; row < rows; ++row) {
        const __m512bh left = pair(a.at(row, input));
        for (int block = 0; block < blocks; ++block) sums[row][block] = _mm512_dpbf16_ps(sums[row][block], right[block], left);
      }
    }
#endif
    if constexpr (std::is_same_v<LeftOf<E>, float>) {
      for (int part = 0; part < kInputs<E>; ++part) {
        if constexpr (blocks * kVectors > rows) {
          Vector left[rows];
          for (int row = 0; row < rows; ++row) left[row] = filled(*a.at(row, input + part));
          for (int i = 0; i < blocks * kVectors; ++i) {
            const Vector right = columns_of(columns[i / kVectors], part, i % kVectors);
            for (int row = 0; row < rows; ++row) sums[row][i] = times_plus(left[row], right, sums[row][i]);
          }
        } else {
          Vector right[blocks * kVectors];
          for (int i = 0; i < blocks * kVectors; ++i) right[i] = columns_of(columns[i / kVectors], part, i % kVectors);
          for (int row = 0; row < rows; ++row) {
            const Vector left = filled(*a.at(row, input + part));
            for (int i = 0; i < blocks * kVectors; ++i) sums[row][i] = times_plus(left, right[i], sums[row][i]);
          }
        }
      }
    }
    for (int block = 0; block < blocks; ++block) columns[block] += b.step();
  }
}

// Multiplies `rows` rows and 16 * `blocks` columns, and stores the sums. `inputs` is a multiple of 16.
template <typename E, int rows, int blocks, typename Left, typename Right>
void panel(const Left& a, const Right& b, int inputs, float* to, size_t stride) {
  Vector sums[rows][blocks * kVectors];
  // Loops over the sums are unrolled early: otherwise their first values go through memory.
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 8
    for (int i = 0; i < blocks * kVectors; ++i) sums[row][i] = Right::kAdds ? load(to + row * stride + i * kLanes) : zeros();
  }
  if constexpr (std::is_same_v<Left, Tiled<LeftOf<E>>>) {
    Left place = a;
    for (int k = 0; k < inputs; k += 32, place.data += 16 * 32) {
      add_products<E, rows, blocks>(sums, place, b, k);
      add_products<E, rows, blocks>(sums, Left{place.at(0, kColumns)}, b, k + kColumns);
    }
  } else {
    auto place = place_in<rows>(a);
    for (int k = 0; k < inputs; k += kColumns) {
      add_products<E, rows, blocks>(sums, place, b, k);
      place.next(k);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 8
    for (int i = 0; i < blocks * kVectors; ++i) store(to + row * stride + i * kLanes, sums[row][i]);
  }
}

// The same for any number of rows, in panels of similar heights.
template <typename E, int blocks, typename Left, typename Right>
void panels(Left a, Right b, int rows, int inputs, float* to, size_t stride) {
  const int all = (rows + kPanelRows - 1) / kPanelRows;
  const auto lines = b.lines;
  for (int count = all; count > 0; --count) {
    const int height = (rows + count - 1) / count;
    b.lines = lines.share(all - count, all);
    const auto multiply = [&](auto height) {
      // Other combinations do not occur, and compiling them would take half of the time.
      if constexpr (kLanes == 16 || blocks * kColumns <= columns_at_once(height)) panel<E, height, blocks>(a, b, inputs, to, stride);
    };
    switch (height) {
      case 1: multiply(std::integral_constant<int, 1>{}); break;
      case 2: multiply(std::integral_constant<int, 2>{}); break;
      case 3: multiply(std::integral_constant<int, 3>{}); break;
      case 4: multiply(std::integral_constant<int, 4>{}); break;
      case 5: multiply(std::integral_constant<int, 5>{}); break;
      default: multiply(std::integral_constant<int, 6>{});
    }
    rows -= height;
    a = a.below(height);
    to += height * stride;
  }
}

// The same for 16 to columns_at_once(rows) columns, a multiple of 16.
template <typename E, typename Left, typename Right>
void any_panels(const Left& a, const Right& b, int rows, int columns, int inputs, float* to, size_t stride) {
  switch (columns / kColumns) {
    case 1: return panels<E, 1>(a, b, rows, inputs, to, stride);
    case 2: return panels<E, 2>(a, b, rows, inputs, to, stride);
    case 3: return panels<E, 3>(a, b, rows, inputs, to, stride);
    default: return panels<E, 4>(a, b, rows, inputs, to, stride);
  }
}

}  // namespace quire
