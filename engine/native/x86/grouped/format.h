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
// A weight is scale * (code - zero), scale * code + minimum, or scale * table[code]. Formats are those of GGML's Q4_0, Q4_1,
// Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K; 8 bits with a scale for each output; 4 and 8 bits with zeros by tile (GPTQ, AWQ);
// 4 bits with a scale for each output; 4 and 8 bits with bfloat16 scales, with and without zeros (compressed-tensors); 4 bits
// with a table: GGML's IQ4_NL and IQ4_XS, MXFP4 and NVFP4; and GGML's Q2_K, whose codes of 2 bits take 4.
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
  kTile,         // 16 float16 scales, then 16 float16 minimums or 16 uint8 zeros if the format has them
  kWideTile,     // the same with bfloat16 scales, whose range is wider
  kOutput,       // 16 float32 scales for all tiles
  kTwoLevels,    // 16 uint8 scales and 16 uint8 minimums, in units of 16 float16 scales and 16 float16 minimums; without
                 // minimums 16 int8 scales
  kTwoLevels16,  // the same for the first 16 inputs and for the others: first all scales, then all minimums
  kHalfOutput    // 16 float16 scales for the first 16 inputs and 16 for the others, in units of 16 float32 for all tiles
};

// What groups have beside scales: minimums, which are added, or zeros instead of Format::zero().
enum class Offsets { kNone, kMinimums, kZeros };

enum class Table { kNone, kE2m1, kIq4nl };

// The numbers of e2m1, doubled, and kvalues_iq4nl of GGML. The same are in engine/native/formats/grouped.py.
constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kIq4nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct Format {
  int bits;
  Scales scales;
  Offsets offsets = Offsets::kNone;
  Table table = Table::kNone;

  constexpr bool minimums() const { return offsets == Offsets::kMinimums; }
  // What unsigned numbers, the codes or those of the table, count from if groups have no zeros.
  constexpr int zero() const {
    if (table != Table::kNone) return table == Table::kE2m1 ? 12 : 128;
    return minimums() ? 0 : 1 << (bits - 1);
  }
  constexpr int number_of(int code) const {
    if (table != Table::kNone) return table == Table::kE2m1 ? kE2m1[code] : kIq4nl[code];
    return code - zero();
  }
  // Groups of a tile that have scales of their own.
  constexpr int groups() const { return scales == Scales::kTwoLevels16 || scales == Scales::kHalfOutput ? 2 : 1; }
  constexpr bool two_levels() const { return scales == Scales::kTwoLevels || scales == Scales::kTwoLevels16; }
  constexpr bool output_scales() const { return scales == Scales::kOutput || scales == Scales::kHalfOutput; }
  constexpr size_t code_bytes() const { return bits * kStepBytes; }
  constexpr size_t scale_bytes() const {
    if (scales == Scales::kOutput) return 0;
    const size_t arrays = (minimums() ? 2 : 1) * groups() * kStrip;
    return arrays * (two_levels() ? 1 : 2) + (offsets == Offsets::kZeros ? kStrip : 0);
  }
  constexpr size_t super_bytes() const { return two_levels() ? (minimums() ? 64 : 32) : 0; }
  constexpr size_t supers_at(int tiles) const { return tiles * (code_bytes() + scale_bytes()); }
  // Bytes of a strip: whole cache lines.
  constexpr size_t strip_bytes(int tiles) const {
    const size_t tail = output_scales() ? kStrip * sizeof(float) : tiles / kSuper * super_bytes();
    return (supers_at(tiles) + tail + 63) / 64 * 64;
  }
};

// In the order of engine/native/grouped_strips.py.
constexpr Format kFormats[] = {
    {4, Scales::kTile},
    {4, Scales::kTile, Offsets::kMinimums},
    {5, Scales::kTile},
    {5, Scales::kTile, Offsets::kMinimums},
    {8, Scales::kTile},
    {8, Scales::kOutput},
    {4, Scales::kTwoLevels, Offsets::kMinimums},
    {5, Scales::kTwoLevels, Offsets::kMinimums},
    {6, Scales::kTwoLevels16},
    {4, Scales::kTile, Offsets::kZeros},
    {8, Scales::kTile, Offsets::kZeros},
    {4, Scales::kOutput},
    {4, Scales::kWideTile},
    {8, Scales::kWideTile},
    {4, Scales::kWideTile, Offsets::kZeros},
    {8, Scales::kWideTile, Offsets::kZeros},
    {4, Scales::kTile, Offsets::kNone, Table::kIq4nl},
    {4, Scales::kTwoLevels, Offsets::kNone, Table::kIq4nl},
    {4, Scales::kWideTile, Offsets::kNone, Table::kE2m1},
    {4, Scales::kHalfOutput, Offsets::kNone, Table::kE2m1},
    {4, Scales::kTwoLevels16, Offsets::kMinimums},
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
