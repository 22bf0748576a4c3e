// Packing of grouped weights into strips, and reading one output's weights back.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../numbers.h"
#include "format.h"

namespace quire {

// A matrix in the form of engine/native/formats/grouped.py. Arrays that a format lacks are null.
struct GroupedSource {
  const uint8_t* codes;  // [outputs][inputs]
  const float* scales;   // [outputs][groups], of groups or of outputs
  const float* minimums;
  const uint8_t* zeros;        // [outputs][groups]
  const float* output_scales;  // [outputs], units of the scales of groups
  const uint8_t* scale_codes;  // [outputs][groups], of two levels; int8 without minimums
  const uint8_t* minimum_codes;
  const float* super_scales;  // [outputs][inputs / 256]
  const float* super_minimums;
  int32_t outputs, inputs;
};

// Stores the codes of one tile: `bytes` is [8 steps][16 outputs][4 inputs].
inline void pack_codes(int bits, const uint8_t* bytes, uint8_t* to) {
  if (bits == 8) {
    std::memcpy(to, bytes, kSteps * kStepBytes);
    return;
  }
  for (int i = 0; i < 4 * kStepBytes; ++i) {
    to[i] = static_cast<uint8_t>((bytes[i] & 15) | (bytes[i + 4 * kStepBytes] & 15) << 4);
  }
  uint8_t* above = to + 4 * kStepBytes;
  for (int i = 0; bits > 4 && i < kStepBytes; ++i) {
    unsigned first = 0, last = 0;
    for (int step = 0; step < 4; ++step) {
      const int apart = bits - 4;
      first |= (bytes[step * kStepBytes + i] >> 4) << step * apart;
      last |= (bytes[(step + 4) * kStepBytes + i] >> 4) << step * apart;
    }
    above[i] = static_cast<uint8_t>(bits == 5 ? first | last << 4 : first);
    if (bits == 6) above[i + kStepBytes] = static_cast<uint8_t>(last);
  }
}

// Gathers the codes of one tile by steps; those of padding are 0.
inline void gather_codes(const GroupedSource& from, int first, int tile, uint8_t* bytes) {
  std::memset(bytes, 0, kSteps * kStepBytes);
  const int outputs = std::min(kStrip, from.outputs - first), inputs = std::min(kTile, from.inputs - tile * kTile);
  for (int n = 0; n < outputs; ++n) {
    const uint8_t* line = from.codes + static_cast<size_t>(first + n) * from.inputs + tile * kTile;
    if (inputs == kTile) {
      for (int step = 0; step < kSteps; ++step) std::memcpy(bytes + step * kStepBytes + n * 4, line + step * 4, 4);
    } else {
      for (int k = 0; k < inputs; ++k) bytes[k / 4 * kStepBytes + n * 4 + k % 4] = line[k];
    }
  }
}

// Stores one column of [outputs][columns] for the outputs of a strip.
template <typename To, typename From>
void pack_column(const From* from, int columns, int column, int first, int outputs, To* to, float sign = 1.0f) {
  for (int n = 0; n < kStrip; ++n) {
    const bool real = first + n < outputs;
    const From value = real ? from[static_cast<size_t>(first + n) * columns + column] : From{};
    if constexpr (std::is_same_v<From, float>) {
      put(to + n, sign * value);
    } else {
      to[n] = static_cast<To>(value);
    }
  }
}

// Stores the scales, minimums and zeros of one tile.
inline void pack_tile_scales(const Format& format, const GroupedSource& from, int first, int tiles, int tile, uint8_t* to) {
  const int groups = format.groups(), columns = groups * tiles;
  auto* halves = reinterpret_cast<_Float16*>(to);
  for (int group = 0, apart = groups * kStrip; group < groups; ++group) {
    const int column = groups * tile + group, at = group * kStrip;
    if (format.two_levels()) {
      pack_column(from.scale_codes, columns, column, first, from.outputs, to + at);
      if (format.minimums()) pack_column(from.minimum_codes, columns, column, first, from.outputs, to + apart + at);
    } else if (format.scales == Scales::kWideTile) {
      pack_column(from.scales, columns, column, first, from.outputs, reinterpret_cast<bf16*>(to));
    } else {
      pack_column(from.scales, columns, column, first, from.outputs, halves + at);
      if (format.minimums()) pack_column(from.minimums, columns, column, first, from.outputs, halves + apart + at);
    }
  }
  if (format.offsets == Offsets::kZeros) pack_column(from.zeros, columns, tile, first, from.outputs, to + 2 * kStrip);
}

inline void pack_scales(const Format& format, const GroupedSource& from, int first, int tiles, uint8_t* strip) {
  for (int tile = 0; format.scale_bytes() && tile < tiles; ++tile) {
    uint8_t* to = strip + tiles * format.code_bytes() + tile * format.scale_bytes();
    pack_tile_scales(format, from, first, tiles, tile, to);
  }
  uint8_t* tail = strip + format.supers_at(tiles);
  if (format.output_scales()) {
    const float* scales = format.scales == Scales::kOutput ? from.scales : from.output_scales;
    pack_column(scales, 1, 0, first, from.outputs, reinterpret_cast<float*>(tail));
  }
  for (int super = 0; format.super_bytes() && super < tiles / kSuper; ++super) {
    auto* units = reinterpret_cast<_Float16*>(tail + super * format.super_bytes());
    pack_column(from.super_scales, tiles / kSuper, super, first, from.outputs, units);
    if (format.minimums()) {  // minimums are subtracted
      pack_column(from.super_minimums, tiles / kSuper, super, first, from.outputs, units + kStrip, -1.0f);
    }
  }
}

// Packs the strip of 16 outputs from `first` on.
inline void pack_strip(const Format& format, const GroupedSource& from, int first, uint8_t* strip) {
  const int tiles = padded(from.inputs, kTile) / kTile;
  alignas(64) uint8_t bytes[kSteps * kStepBytes];
  for (int tile = 0; tile < tiles; ++tile) {
    gather_codes(from, first, tile, bytes);
    pack_codes(format.bits, bytes, strip + tile * format.code_bytes());
  }
  pack_scales(format, from, first, tiles, strip);
}

// One code of a tile, of output n and input k.
template <int bits>
int code_at(const uint8_t* tile, int n, int k) {
  const int step = k / 4, byte = n * 4 + k % 4;
  if constexpr (bits == 8) return tile[step * kStepBytes + byte];
  const int low = tile[step % 4 * kStepBytes + byte] >> (step < 4 ? 0 : 4) & 15;
  const uint8_t* above = tile + 4 * kStepBytes;
  if constexpr (bits == 5) return low | (above[byte] >> step & 1) << 4;
  if constexpr (bits == 6) return low | (above[step / 4 * kStepBytes + byte] >> step % 4 * 2 & 3) << 4;
  return low;
}

// What the numbers of one output are multiplied by in half of a tile, and what is added.
struct Line {
  float scale, minimum;
};

template <Format format>
Line line_of(const uint8_t* scales, const uint8_t* tail, int tile, int half, int n) {
  const int at = format.groups() == 2 ? half * kStrip + n : n, minimum_at = format.groups() * kStrip + at;
  const auto* numbers = reinterpret_cast<const _Float16*>(scales);
  if constexpr (format.scales == Scales::kOutput) return {reinterpret_cast<const float*>(tail)[n], 0.0f};
  if constexpr (format.scales == Scales::kHalfOutput) return {element(numbers + at) * reinterpret_cast<const float*>(tail)[n], 0.0f};
  if constexpr (format.two_levels()) {
    const auto* units = reinterpret_cast<const _Float16*>(tail + tile / kSuper * format.super_bytes());
    if (!format.minimums()) return {element(units + n) * static_cast<int8_t>(scales[at]), 0.0f};
    return {element(units + n) * scales[at], element(units + kStrip + n) * scales[minimum_at]};
  }
  const bool wide = format.scales == Scales::kWideTile;
  const float scale = wide ? widened(reinterpret_cast<const bf16*>(scales)[at]) : element(numbers + at);
  if constexpr (format.offsets == Offsets::kZeros) return {scale, scale * (format.zero() - scales[2 * kStrip + n])};
  return {scale, format.minimums() ? element(numbers + minimum_at) : 0.0f};
}

// Reads the weights of one output of a strip. `order`: null, or the place of each weight.
template <Format format>
void read_output(const uint8_t* strip, int inputs, int n, const int32_t* order, float* to) {
  const int tiles = padded(inputs, kTile) / kTile;
  const uint8_t* tail = strip + format.supers_at(tiles);
  for (int tile = 0; tile < tiles; ++tile) {
    const uint8_t* codes = strip + tile * format.code_bytes();
    const uint8_t* scales = strip + tiles * format.code_bytes() + tile * format.scale_bytes();
    const Line lines[2] = {line_of<format>(scales, tail, tile, 0, n), line_of<format>(scales, tail, tile, 1, n)};
    for (int k = 0, first = tile * kTile, count = std::min(kTile, inputs - first); k < count; ++k) {
      const float number = static_cast<float>(format.number_of(code_at<format.bits>(codes, n, k)));
      to[order ? order[first + k] : first + k] = lines[k / 16].scale * number + lines[k / 16].minimum;
    }
  }
}

}  // namespace quire
