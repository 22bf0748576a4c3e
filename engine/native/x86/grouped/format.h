// Packed weights of 4 to 8 bits: formats and their layout.
//
// A matrix is strips of 16 outputs, each with its own format. A strip has three regions, each in the order of its inputs:
//
//   codes    a tile for each 32 inputs, 8 steps of 4 inputs: [16 outputs][4 inputs] bytes a step. With fewer than 8 bits,
//            64 bytes hold the low 4 bits of step i (low nibbles) and of step i + 4, i = 0..3; then come the bits above:
//            5 bits: 64 bytes, bit i is of step i; 6 bits: 128 bytes, bits 2 i and 2 i + 1 are of steps i, and i + 4
//   scales   by tile, see Scales
//   supers   by 8 tiles, if there are two levels of scales
//
// A weight is scale * (code - zero) or scale * code + minimum. Formats are those of GGML's Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
// Q4_K, Q5_K and Q6_K, and 8 bits with a scale for each output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace quire {

constexpr int kStrip = 16;       // outputs of a strip
constexpr int kTile = 32;        // inputs of a tile
constexpr int kSuper = 8;        // tiles of a super-block
constexpr int kSteps = 8;        // of 4 inputs in a tile
constexpr int kStepBytes = 64;   // of 16 outputs

enum class Scales {
  kTile,        // 16 float16 scales, then 16 float16 minimums if the format has them
  kOutput,      // 16 float32 scales for all tiles
  kTwoLevels,   // 16 uint8 scales and 16 uint8 minimums, in units of 16 float16 scales and 16 float16 minimums
  kTwoLevels16  // 16 int8 scales for the first 16 inputs and 16 for the others, in units of 16 float16 scales
};

struct Format {
  int bits;
  Scales scales;
  bool minimums;

  constexpr int zero() const { return minimums ? 0 : 1 << (bits - 1); }
  constexpr size_t code_bytes() const { return bits * kStepBytes; }
  constexpr size_t scale_bytes() const { return scales == Scales::kOutput ? 0 : minimums && scales == Scales::kTile ? 64 : 32; }
  constexpr size_t super_bytes() const {
    return scales == Scales::kTwoLevels ? 64 : scales == Scales::kTwoLevels16 ? 32 : 0;
  }
  constexpr size_t supers_at(int tiles) const { return tiles * (code_bytes() + scale_bytes()); }
  // Bytes of a strip: whole cache lines.
  constexpr size_t strip_bytes(int tiles) const {
    const size_t tail = scales == Scales::kOutput ? kStrip * sizeof(float) : tiles / kSuper * super_bytes();
    return (supers_at(tiles) + tail + 63) / 64 * 64;
  }
};

// In the order of engine/native/grouped_matrix.py.
constexpr Format kFormats[] = {
    {4, Scales::kTile, false},     {4, Scales::kTile, true},      {5, Scales::kTile, false},
    {5, Scales::kTile, true},      {8, Scales::kTile, false},     {8, Scales::kOutput, false},
    {4, Scales::kTwoLevels, true}, {5, Scales::kTwoLevels, true}, {6, Scales::kTwoLevels16, false},
};
constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

struct Strip {
  const uint8_t* data;  // aligned to cache lines
  int64_t format;       // index in kFormats
};

// The strips of a matrix; none if it is of another kind.
struct Strips {
  const Strip* first;
  int64_t count;
  explicit operator bool() const { return first != nullptr; }
};

// Calls work with a format as a constant, kFormats[number].
template <int number = 0, typename Work>
void with_weight_format(int64_t format, const Work& work) {
  if constexpr (number + 1 < kFormatCount) {
    if (format != number) return with_weight_format<number + 1>(format, work);
  }
  work(std::integral_constant<int, number>{});
}

}  // namespace quire
