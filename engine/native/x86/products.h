// Products of rows and packed weights.
//
// Rows are stored in tiles, like weights, so that each load, of tiles or vectors, is contiguous.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "numbers.h"
#include "panel.h"
#include "tiles.h"

namespace quire {

// Weights of `outputs` columns. Both numbers are padded.
struct Packed {
  const bf16* weights;
  int outputs;  // multiple of 16
  int inputs;   // multiple of 32
};

// The left operand of a product: [rows rounded up to 32 / 16][inputs / 32][16 rows][32].
struct Rows {
  operand* data;
  int inputs;         // multiple of 32
  int first_row = 0;  // first row of `data`, a multiple of 32
  int first_input = 0;

  operand* at(int row, int k) const {
    k -= first_input;
    const size_t tile = static_cast<size_t>((row - first_row) / 16) * (inputs / 32) + k / 32;
    return data + tile * 512 + row % 16 * 32 + k % 32;
  }
};

// Clears the padding of a row: weights are zero there, but zero times a stale value may be NaN.
inline void clear_end(const Rows& rows, int row, int inputs) {
  if (inputs % 32) std::memset(rows.at(row, inputs), 0, sizeof(operand) * (32 - inputs % 32));
}

// The rows and columns of a product that one thread computes. `row` is a multiple of 32, `column` of 16. With `inputs` only
// `inputs` inputs from `input` on are multiplied. `next` is the first column of the thread's next range, if any.
struct Range {
  int row, rows;
  int column, columns;
  int input = 0, inputs = 0;
  int next = -1;
};

// Target of sums: [rows rounded up to 32][stride], from this row and column on.
struct Sums {
  float* data;
  int stride;
  int row = 0, column = 0;

  float* at(int of_row, int of_column) const {
    return data + static_cast<size_t>(of_row - row) * stride + (of_column - column);
  }
};

// Stores some columns of a row's sums, a multiple of 16, or adds them.
inline void put_sums(const float* sums, int columns, float* to, bool add) {
  for (int n = 0; n < columns; n += kLanes) store(to + n, add ? plus(load(to + n), load(sums + n)) : load(sums + n));
}

constexpr int kPiece = 32;      // rows, and columns, of the sums that are passed on at once
constexpr int kMaxRows = 512;  // of a range

#ifdef QUIRE_AMX
// Maximum inputs of one pass: 32 columns of their weights stay in the 48 KiB L1 cache for all rows of a range. Sums are
// stored and reloaded unchanged between passes, so that splitting does not change results.
constexpr int kInputsAtOnce = 640;

inline int inputs_at_once(int inputs) {
  if (!use_amx) return inputs;
  const int cuts = (inputs + kInputsAtOnce - 1) / kInputsAtOnce;
  return padded((inputs + cuts - 1) / cuts, 32);
}
#else
inline int inputs_at_once(int inputs) { return inputs; }
#endif

// Rows of a range: all, or fewer where all threads then get the same number of ranges. Tiles multiply few rows more slowly.
inline int rows_at_once(int rows, int pieces, int threads) {
  const int blocks = std::max(1, (rows + kMaxRows - 1) / kMaxRows);
  if (use_amx || pieces * blocks % threads == 0 || rows < 2 * kPiece * threads) return kMaxRows;
  return padded((rows + blocks * threads - 1) / (blocks * threads), kPiece);
}

// Columns of a range that is added to the residual: of few rows, such that all threads have some.
inline int added_columns(int rows) { return rows >= 2 * kPiece && !use_amx ? kPanelColumns : 48; }

#ifdef QUIRE_AMX
// Weights prefetched while others are multiplied, a few lines in each step: two pieces, one for each 16 columns.
struct Ahead {
  const char* next[2];
  int each;  // lines of each piece with every step
  int left;  // lines of each piece

  void fetch() {
    const int lines = std::min(each, left);
    for (int line = 0; line < lines; ++line) {
      _mm_prefetch(next[0] + line * 64, _MM_HINT_T1);
      _mm_prefetch(next[1] + line * 64, _MM_HINT_T1);
    }
    next[0] += lines * 64;
    next[1] += lines * 64;
    left -= lines;
  }
};

// Sums of one piece waiting to be stored, while the tile unit computes the next piece.
template <typename Take>
struct Waiting {
  const Take& take;
  const float* sums = nullptr;
  int row = 0, end = 0;
  int column = 0, columns = 0;
  int each = 0;  // rows that are stored in every step

  void put(const float* piece, int first, int rows, int of_column, int column_count, int steps) {
    sums = piece;
    row = first;
    end = first + rows;
    column = of_column;
    columns = column_count;
    each = (rows + steps - 1) / steps;
  }
  void some() {
    const int until = std::min(end, row + each);
    for (; row < until; ++row, sums += kPiece) take(row, column, columns, sums);
  }
  void all() {
    for (; row < end; ++row, sums += kPiece) take(row, column, columns, sums);
  }
};

struct NothingWaits {
  void put(const float*, int, int, int, int, int) {}
  void some() {}
  void all() {}
};

// Adds the product of one or two tiles of rows and one or two of columns to the sums in tiles 0 to 3. `rows_apart` and
// `columns_apart` are elements from one tile of them to the next.
template <bool many, int row_tiles, int column_tiles, typename Meanwhile>
void multiply(const bf16* a, size_t rows_apart, const bf16* b, size_t columns_apart, int steps, Ahead& ahead,
              Meanwhile& meanwhile) {
  for (int step = 0; step < steps; ++step, a += 512, b += 512) {
    // Data reused only much later (rows, if there are many) is loaded without polluting the L1 cache.
    if constexpr (many) {
      _tile_stream_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      if constexpr (row_tiles > 1) _tile_stream_loadd(5, a + rows_apart, 64);
      if constexpr (column_tiles > 1) _tile_loadd(7, b + columns_apart, 64);
    } else {
      _tile_loadd(4, a, 64);
      _tile_stream_loadd(6, b, 64);
      if constexpr (row_tiles > 1) _tile_loadd(5, a + rows_apart, 64);
      if constexpr (column_tiles > 1) _tile_stream_loadd(7, b + columns_apart, 64);
    }
    ahead.fetch();
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (row_tiles > 1) _tile_dpbf16ps(1, 5, 6);
    if constexpr (column_tiles > 1) _tile_dpbf16ps(2, 4, 7);
    if constexpr (row_tiles > 1 && column_tiles > 1) _tile_dpbf16ps(3, 5, 7);
    meanwhile.some();
  }
}

template <int row_tiles, int column_tiles>
void store_tiles(float* sums, int stride) {
  _tile_stored(0, sums, stride * 4);
  if constexpr (row_tiles > 1) _tile_stored(1, sums + 16 * stride, stride * 4);
  if constexpr (column_tiles > 1) _tile_stored(2, sums + 16, stride * 4);
  if constexpr (row_tiles > 1 && column_tiles > 1) _tile_stored(3, sums + 16 * stride + 16, stride * 4);
}

template <int row_tiles, int column_tiles>
void load_tiles(const float* sums, int stride) {
  _tile_loadd(0, sums, stride * 4);
  if constexpr (row_tiles > 1) _tile_loadd(1, sums + 16 * stride, stride * 4);
  if constexpr (column_tiles > 1) _tile_loadd(2, sums + 16, stride * 4);
  if constexpr (row_tiles > 1 && column_tiles > 1) _tile_loadd(3, sums + 16 * stride + 16, stride * 4);
}

inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Calls work(row tiles, column tiles) with both, one or two, as constants.
template <typename Work>
void with_tiles(int rows, int columns, const Work& work) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  if (rows > 16) {
    columns > 16 ? work(Two{}, Two{}) : work(Two{}, One{});
  } else {
    columns > 16 ? work(One{}, Two{}) : work(One{}, One{});
  }
}

// Multiplies a range with tiles: 32 columns with all rows, then the next. Sums of a piece are at place(row, column);
// `add` says whether they are valid. Complete sums are queued for storing.
template <bool many, typename Place, typename Meanwhile>
void multiply_range(const Packed& w, const Rows& a, const Range& range, bool add, const Place& place, int stride,
                    Meanwhile& waiting) {
  const int at_once = inputs_at_once(w.inputs), end = range.inputs ? range.input + range.inputs : w.inputs;
  const size_t apart = static_cast<size_t>(w.inputs) * 16, rows_apart = static_cast<size_t>(a.inputs) * 16;
  const int last_row = range.row + range.rows, last_column = range.column + range.columns;
  const int each = std::max(1, 16 * kPiece / padded(range.rows, kPiece));
  for (int column = range.column; column < last_column; column += kPiece) {
    const bf16* weights = w.weights + static_cast<size_t>(column) * w.inputs;
    const int columns = std::min(kPiece, last_column - column);
    for (int first = range.input; first < end; first += at_once) {
      const int steps = std::min(at_once, end - first) / 32;
      const bool more = first + at_once < end;
      const bf16* next = more ? weights + static_cast<size_t>(first + at_once) * 16 : weights + range.input * 16 + 2 * apart;
      Ahead ahead{{reinterpret_cast<const char*>(next), reinterpret_cast<const char*>(next + apart)}, each, 0};
      if (more || column + kPiece < last_column) ahead.left = 16 * steps;
      for (int row = range.row; row < last_row; row += kPiece) {
        const int rows = std::min(kPiece, last_row - row);
        float* sums = place(row, column);
        with_tiles(rows, columns, [&](auto row_tiles, auto column_tiles) {
          if (add || first > range.input) {
            load_tiles<row_tiles, column_tiles>(sums, stride);
          } else {
            zero_tiles();
          }
          multiply<many, row_tiles, column_tiles>(a.at(row, first), rows_apart,
                                                  weights + static_cast<size_t>(first) * 16, apart, steps, ahead, waiting);
          waiting.all();  // these sums may overwrite theirs
          store_tiles<row_tiles, column_tiles>(sums, stride);
        });
        if (!more) waiting.put(sums, row, rows, column, columns, steps);
      }
    }
  }
  waiting.all();
}

template <typename Place, typename Meanwhile>
void multiply_range(const Packed& w, const Rows& a, const Range& range, bool add, const Place& place, int stride,
                    Meanwhile& waiting) {
  if (range.rows > kPiece) {
    multiply_range<true>(w, a, range, add, place, stride, waiting);
  } else {
    multiply_range<false>(w, a, range, add, place, stride, waiting);
  }
}
#endif

// Multiplies a range, and calls take(row, column, columns, sums) for each row of up to kPiece columns.
template <typename Take>
void product(const Packed& w, const Rows& a, const Range& range, const Take& take) {
#ifdef QUIRE_AMX
  if (use_amx) {
    alignas(64) float sums[kMaxRows * kPiece];
    const bool cut = w.inputs > kInputsAtOnce;  // else the sums of all pieces share one buffer in L1
    const auto place = [&](int row, int) { return sums + (cut ? (row - range.row) * kPiece : 0); };
    Waiting<Take> waiting{take};
    multiply_range(w, a, range, false, place, kPiece, waiting);
    return;
  }
#endif
  constexpr int kWide = kPanelColumns;
  alignas(64) float sums[kTall * kWide];
  const size_t apart = static_cast<size_t>(w.inputs) * kColumns;
  const int last_column = range.column + range.columns;
  for (int column = range.column; column < last_column; column += kWide) {
    const int columns = std::min(kWide, last_column - column), tiles = (range.rows + kTall - 1) / kTall;
    const int next = column + kWide < last_column ? column + kWide : range.next;
    // The CPU's own prefetching suffices for a single row with AVX512, whose products take a tenth of the loads' time.
    const bool early = next >= 0 && (range.rows > 1 || kLanes < 16);
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = range.row + tile * kTall, rows = std::min(kTall, range.rows - tile * kTall);
      const auto left = left_rows(a.at(range.row, 0), static_cast<size_t>(a.inputs) * 16, tile * kTall);
      const int at_once = columns_at_once(rows);
      for (int from = 0; from < columns; from += at_once) {
        const bf16* weights = w.weights + static_cast<size_t>(column + from) * w.inputs;
        const bf16* ahead = !early ? nullptr : w.weights + static_cast<size_t>(next + from) * w.inputs;
        const PackedColumns<bf16> right{weights, apart, ahead, AheadLines<bf16>{}.share(tile, tiles)};
        any_panels<bf16>(left, right, rows, std::min(at_once, columns - from), a.inputs, sums + from, kWide);
      }
      for (int i = 0; i < rows; ++i) {
        for (int from = 0; from < columns; from += kPiece) {
          take(row + i, column + from, std::min(kPiece, columns - from), sums + i * kWide + from);
        }
      }
    }
  }
}

// Stores the product of a range in its sums; with `add`, adds it.
inline void product_to(const Packed& w, const Rows& a, const Range& range, const Sums& to, bool add) {
#ifdef QUIRE_AMX
  if (use_amx) {
    const auto place = [&](int row, int column) { return to.at(row, column); };
    NothingWaits nothing;
    multiply_range(w, a, range, add, place, to.stride, nothing);
    return;
  }
#endif
  product(w, a, range, [&](int row, int column, int columns, const float* sums) {
    put_sums(sums, columns, to.at(row, column), add);
  });
}

}  // namespace quire
