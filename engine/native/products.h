// Products of rows and packed weights.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>

#include "numbers.h"
#include "tiles.h"

namespace quire {

struct Packed {
  const bf16* weights;
  int outputs;  // multiple of 16
  int inputs;   // multiple of 32
};

#ifdef QUIRE_BF16
inline __m512bh pair(const bf16* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return (__m512bh)_mm512_set1_epi32(bits);
}

// Rows [0, count) of A times 16 columns of the weights, without tiles. `sums` is [count][16] apart by `stride` floats.
template <int count>
void product_rows(const bf16* a, int inputs, const bf16* weights, float* sums, int stride) {
  // Two sums for each row, since an addition takes longer than the load of its weights.
  __m512 even[count], odd[count];
  for (int row = 0; row < count; ++row) even[row] = odd[row] = _mm512_setzero_ps();
  for (int k = 0; k < inputs; k += 4) {
    const __m512bh first = (__m512bh)_mm512_load_si512(weights + static_cast<size_t>(k) * 16);
    const __m512bh second = (__m512bh)_mm512_load_si512(weights + static_cast<size_t>(k) * 16 + 32);
    for (int row = 0; row < count; ++row) {
      even[row] = _mm512_dpbf16_ps(even[row], first, pair(a + static_cast<size_t>(row) * inputs + k));
      odd[row] = _mm512_dpbf16_ps(odd[row], second, pair(a + static_cast<size_t>(row) * inputs + k + 2));
    }
  }
  for (int row = 0; row < count; ++row) _mm512_storeu_ps(sums + row * stride, _mm512_add_ps(even[row], odd[row]));
}

inline void product_vectors(const bf16* a, int rows, int inputs, const bf16* weights, float* sums, int stride) {
  int row = 0;
  for (; row + 8 <= rows; row += 8) {
    product_rows<8>(a + static_cast<size_t>(row) * inputs, inputs, weights, sums + row * stride, stride);
  }
  for (; row + 4 <= rows; row += 4) {
    product_rows<4>(a + static_cast<size_t>(row) * inputs, inputs, weights, sums + row * stride, stride);
  }
  for (; row < rows; ++row) {
    product_rows<1>(a + static_cast<size_t>(row) * inputs, inputs, weights, sums + row * stride, stride);
  }
}
#endif

#ifdef QUIRE_AMX
// 16 rows of A times up to 64 columns: the weights are read once, and no faster than memory gives them.
inline void product_tiles_16(const bf16* a, int inputs, const bf16* weights, int blocks, float* sums, int stride) {
  const int steps = inputs / 32;
  const size_t column = static_cast<size_t>(inputs) * 16;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    const bf16* w = weights + static_cast<size_t>(step) * 512;
    _tile_loadd(4, a + step * 32, inputs * 2);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (blocks > 1) {
      _tile_loadd(7, w + column, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (blocks > 2) {
      _tile_loadd(6, w + 2 * column, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (blocks > 3) {
      _tile_loadd(7, w + 3 * column, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, stride * 4);
  if (blocks > 1) _tile_stored(1, sums + 16, stride * 4);
  if (blocks > 2) _tile_stored(2, sums + 32, stride * 4);
  if (blocks > 3) _tile_stored(3, sums + 48, stride * 4);
}

// 32 rows of A times up to 32 columns.
inline void product_tiles_32(const bf16* a, int inputs, const bf16* weights, int blocks, float* sums, int stride) {
  const int steps = inputs / 32;
  const size_t column = static_cast<size_t>(inputs) * 16;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    const bf16* w = weights + static_cast<size_t>(step) * 512;
    _tile_loadd(4, a + step * 32, inputs * 2);
    _tile_loadd(5, a + static_cast<size_t>(16) * inputs + step * 32, inputs * 2);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (blocks > 1) {
      _tile_loadd(7, w + column, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, stride * 4);
  _tile_stored(1, sums + 16 * stride, stride * 4);
  if (blocks > 1) {
    _tile_stored(2, sums + 16, stride * 4);
    _tile_stored(3, sums + 16 * stride + 16, stride * 4);
  }
}
#endif

constexpr int kColumns = 64;  // columns of one work item of a product at most

// Columns of one work item: few rows share the reading of many weights; many rows read few weights from the nearest cache.
inline int columns_of_item(int rows) { return rows > 32 ? kColumns / 2 : kColumns; }

inline int items_of(int outputs, int rows) {
  const int span = columns_of_item(rows);
  return (padded(outputs, 16) + span - 1) / span;
}

// Multiplies all rows of A, [rows rounded up to 32][inputs], with the columns of one work item, and hands each piece of
// sums, [piece rows][kColumns], on: take(first row, count, first column, columns, sums).
template <typename Take>
void product(const Packed& linear, const bf16* a, int rows, int item, const Take& take) {
#ifdef QUIRE_BF16
  alignas(64) float sums[32 * kColumns];
  const int span = columns_of_item(rows), column = item * span, columns = std::min(span, linear.outputs - column);
  const bf16* weights = linear.weights + static_cast<size_t>(column) * linear.inputs;
  for (int row = 0; row < rows; row += 32) {
    const int count = std::min(32, rows - row);
    const bf16* piece = a + static_cast<size_t>(row) * linear.inputs;
#ifdef QUIRE_AMX
    if (use_amx) {
      if (count > 16) {
        product_tiles_32(piece, linear.inputs, weights, std::min(2, columns / 16), sums, kColumns);
        if (columns > 32) {
          const bf16* more = weights + static_cast<size_t>(32) * linear.inputs;
          product_tiles_32(piece, linear.inputs, more, (columns - 32) / 16, sums + 32, kColumns);
        }
      } else {
        product_tiles_16(piece, linear.inputs, weights, columns / 16, sums, kColumns);
      }
      take(row, count, column, columns, sums);
      continue;
    }
#endif
    for (int block = 0; block < columns; block += 16) {
      product_vectors(piece, count, linear.inputs, weights + static_cast<size_t>(block) * linear.inputs, sums + block,
                      kColumns);
    }
    take(row, count, column, columns, sums);
  }
#endif
}

}  // namespace quire
