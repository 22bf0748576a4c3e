// Products of quantized rows and strips of packed weights.
//
// Integer sums of a tile are exact; their scaled sums are added in the order of the tiles, so that a row's results do not
// depend on the other rows.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../lanes.h"
#include "../products.h"
#include "format.h"
#include "integers.h"
#include "rows.h"

namespace quire {

constexpr int kWideStrips = 4;  // strips whose sums are passed on at once
constexpr int kGroupedRows = kLanes == 16 ? 6 : 2;  // rows of a panel

// A panel's strips, and those that are prefetched meanwhile.
template <int strips>
struct StripPanel {
  const uint8_t* data[strips];
  const uint8_t* ahead[strips];  // the first null: nothing is prefetched
  int first = 0, last = 0;       // cache lines of each tile that this panel prefetches
};

// The scales, or minimums, of the outputs of one vector, in a tile or half of one.
template <Format format>
struct TileScales {
  const uint8_t* codes;   // of the tile
  const uint8_t* supers;  // of the tile's super-block

  Vector scale(int half, int part) const {
    const int at = half * kStrip + part * kLanes;
    if constexpr (format.scales == Scales::kWideTile) return load(reinterpret_cast<const bf16*>(codes) + at);
    if constexpr (!format.two_levels()) return load(reinterpret_cast<const _Float16*>(codes) + at);
    const Vector unit = load(reinterpret_cast<const _Float16*>(supers) + part * kLanes);
    if constexpr (format.minimums()) return times(unit, lanes_of(codes + at));
    return times(unit, lanes_of(reinterpret_cast<const int8_t*>(codes) + at));
  }
  Vector minimum(int half, int part) const {
    const int at = (format.groups() + half) * kStrip + part * kLanes;
    if constexpr (!format.two_levels()) return load(reinterpret_cast<const _Float16*>(codes) + at);
    return times(load(reinterpret_cast<const _Float16*>(supers) + kStrip + part * kLanes), lanes_of(codes + at));
  }
};

template <Format format>
TileScales<format> scales_of(const uint8_t* strip, int tiles, int tile) {
  return {strip + tiles * format.code_bytes() + tile * format.scale_bytes(),
          strip + format.supers_at(tiles) + tile / kSuper * format.super_bytes()};
}

// A row's scale times the sum of its codes, in a tile or half of one.
template <Format format>
float scaled_sum(const RowGroup& group, int row, int half) {
  if constexpr (format.groups() == 1) return group.scaled_sum[row];
  const int first = -group.minus_first[row];
  return group.scale[row] * static_cast<float>(half ? -group.minus_sum[row] - first : first);
}

// Adds the scaled sums of a tile, or of half of one.
template <Format format, int rows, int strips>
[[gnu::always_inline]] inline void add_scaled(Vector (&totals)[rows][strips * kParts], const Integers (&sums)[rows][strips * kParts],
                                              const StripPanel<strips>& b, int tiles, int tile, const RowGroup& group, int first,
                                              int half) {
  for (int i = 0; i < strips * kParts; ++i) {
    if constexpr (format.scales == Scales::kOutput) {
      for (int row = 0; row < rows; ++row) {
        totals[row][i] = times_plus(to_floats(sums[row][i]), filled(group.scale[first + row]), totals[row][i]);
      }
    } else {
      const TileScales<format> scales = scales_of<format>(b.data[i / kParts], tiles, tile);
      const Vector scale = scales.scale(half, i % kParts);
      for (int row = 0; row < rows; ++row) {
        totals[row][i] = times_plus(to_floats(sums[row][i]), times(scale, filled(group.scale[first + row])), totals[row][i]);
      }
      if constexpr (format.minimums()) {
        const Vector minimum = scales.minimum(half, i % kParts);
        for (int row = 0; row < rows; ++row) {
          totals[row][i] = times_plus(minimum, filled(scaled_sum<format>(group, first + row, half)), totals[row][i]);
        }
      }
    }
  }
}

template <Format format, int rows, int strips>
[[gnu::always_inline]] inline void add_tile(Vector (&totals)[rows][strips * kParts], const StripPanel<strips>& b, int tiles,
                                            int tile, const RowGroup& group, int first) {
  const uint8_t* from[strips];
  for (int strip = 0; strip < strips; ++strip) from[strip] = b.data[strip] + tile * format.code_bytes();
  Integers sums[rows][strips * kParts];
  const auto begin = [&](auto minus_sum) __attribute__((always_inline)) {
    for (int row = 0; row < rows; ++row) {
      const Integers initial = initial_sum<format>(minus_sum(first + row));
      for (int i = 0; i < strips * kParts; ++i) sums[row][i] = initial;
    }
  };
  const auto begin_from_zeros = [&]() __attribute__((always_inline)) {
    for (int i = 0; i < strips * kParts; ++i) {
      const Integers zeros = zeros_of<format>(scales_of<format>(b.data[i / kParts], tiles, tile).codes + 2 * kStrip + i % kParts * kLanes);
      for (int row = 0; row < rows; ++row) sums[row][i] = initial_sum(group.minus_sum[first + row], zeros);
    }
  };
  if constexpr (format.groups() == 2) {
    begin([&](int row) { return group.minus_first[row]; });
    add_steps<format, rows, strips>(sums, from, group.codes[first], FirstSteps{});
    add_scaled<format, rows, strips>(totals, sums, b, tiles, tile, group, first, 0);
    begin([&](int row) { return group.minus_sum[row] - group.minus_first[row]; });
    add_steps<format, rows, strips>(sums, from, group.codes[first], LastSteps{});
    add_scaled<format, rows, strips>(totals, sums, b, tiles, tile, group, first, 1);
  } else {
    if constexpr (format.offsets == Offsets::kZeros) {
      begin_from_zeros();
    } else {
      begin([&](int row) { return group.minus_sum[row]; });
    }
    add_steps<format, rows, strips>(sums, from, group.codes[first], AllSteps{});
    add_scaled<format, rows, strips>(totals, sums, b, tiles, tile, group, first, 0);
  }
}

// Multiplies `rows` rows of a group of 16, from `first` on, and `strips` strips; stores the sums.
template <Format format, int rows, int strips>
void strip_panel(const RowGroup* groups, int first, const StripPanel<strips>& b, int tiles, float* to, size_t stride) {
  Vector totals[rows][strips * kParts];
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < strips * kParts; ++i) totals[row][i] = zeros();
  }
  const int lines = b.last - b.first;
  for (int tile = 0; tile < tiles; ++tile) {
    if (b.ahead[0]) {
      for (int strip = 0; strip < strips; ++strip) {
        const char* line = reinterpret_cast<const char*>(b.ahead[strip]) + (tile * lines + b.first * tiles) * 64;
        // Into the L2 cache: four strips may be larger than L1, and few of its misses can be pending at once.
        for (int i = 0; i < lines; ++i) _mm_prefetch(line + i * 64, _MM_HINT_T1);
      }
    }
    add_tile<format, rows, strips>(totals, b, tiles, tile, groups[tile], first);
  }
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < strips * kParts; ++i) {
      if constexpr (format.output_scales()) {
        const uint8_t* scales = b.data[i / kParts] + format.supers_at(tiles);
        totals[row][i] = times(totals[row][i], load(reinterpret_cast<const float*>(scales) + i % kParts * kLanes));
      }
      store(to + row * stride + i * kLanes, totals[row][i]);
    }
  }
}

// The same for any number of rows up to 16, in panels of similar heights.
template <Format format, int strips>
void strip_panels(const RowGroup* groups, int rows, StripPanel<strips> b, int tiles, float* to, size_t stride) {
  const int all = (rows + kGroupedRows - 1) / kGroupedRows, lines = b.last;
  int first = 0;
  for (int count = all; count > 0; --count) {
    const int height = (rows - first + count - 1) / count;
    b.first = lines * (all - count) / all;
    b.last = lines * (all - count + 1) / all;
    const auto multiply = [&](auto constant) {
      strip_panel<format, constant, strips>(groups, first, b, tiles, to + first * stride, stride);
    };
    switch (height) {
      case 1: multiply(std::integral_constant<int, 1>{}); break;
      case 2: multiply(std::integral_constant<int, 2>{}); break;
#if defined(__AVX512F__)
      case 3: multiply(std::integral_constant<int, 3>{}); break;
      case 4: multiply(std::integral_constant<int, 4>{}); break;
      case 5: multiply(std::integral_constant<int, 5>{}); break;
      case 6: multiply(std::integral_constant<int, 6>{}); break;
#endif
    }
    first += height;
  }
}

// Multiplies rows of a group of 16 with up to kWideStrips strips, which may have different formats. `to` has room for one
// strip more. `ahead` is null, or points to the strips to prefetch.
inline void multiply_strips(const Strip* strips, int count, const Strip* ahead, const RowGroup* groups, int rows, int tiles,
                            float* to, size_t stride) {
  for (int i = 0; i < count;) {
    const Strip* one = strips + i;
    const bool two = i + 1 < count && one[1].format == one->format;
    with_weight_format(one->format, [&](auto constant) {
      constexpr Format format = kFormats[constant];
      const int lines = static_cast<int>(format.strip_bytes(tiles) / 64 + tiles - 1) / tiles;
      StripPanel<2> b{{one->data, one[two].data}, {nullptr, nullptr}, 0, 0};
      if (ahead) {
        b.ahead[0] = ahead[i].data;
        b.ahead[1] = ahead[i + two].data;
        b.last = lines;
      }
      strip_panels<format, 2>(groups, rows, b, tiles, to + i * kStrip, stride);
    });
    i += 1 + two;
  }
}

// Multiplies a range, and calls take(row, column, columns, sums) for each row of up to 64 columns.
template <typename Take>
void product(const Strips& strips, const QuantizedRows& a, const Range& range, const Take& take) {
  constexpr int kTall = 16, kWide = kWideStrips * kStrip, kStride = kWide + kStrip;
  alignas(64) float sums[kTall * kStride];
  const int last_column = range.column + range.columns, blocks = (range.rows + kTall - 1) / kTall;
  for (int column = range.column; column < last_column; column += kWide) {
    const int columns = std::min(kWide, last_column - column);
    const int next = column + kWide < last_column ? column + kWide : range.next;
    for (int block = 0; block < blocks; ++block) {
      const int row = range.row + block * kTall, rows = std::min(kTall, range.rows - block * kTall);
      const bool early = next >= 0 && block == 0 && (next + columns) / kStrip <= strips.count;
      const Strip* ahead = early ? strips.first + next / kStrip : nullptr;
      multiply_strips(strips.first + column / kStrip, columns / kStrip, ahead, a.at(row), rows, a.tiles, sums, kStride);
      for (int i = 0; i < rows; ++i) take(row + i, column, columns, sums + i * kStride);
    }
  }
}

}  // namespace quire
