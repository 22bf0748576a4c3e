// The CPU's kernels: paged attention that reads blocks in place, products with packed weights, and the whole step of a
// Llama-shaped decoder, so that a step costs one call from Python.
//
// bfloat16 products use AMX tiles where the CPU has them, else AVX512-BF16, else float32 arithmetic with AVX2. All read the
// same layouts: elements that are multiplied are stored in pairs, as the instructions require.
//
//   rows      [row / 16][k / 32][16 rows][32 of k]         of left operands
//   weights   [n / 16][k / 32][16 pairs of k][16 n][2]    zero where n or k is padded
//   K         [kv head][slot / 16][head size / 2][16 slots][2]
//   V         [kv head][slot / 2][head size][2]
//
// K of other types is [kv head][slot / 16][head size][16 slots], V is slot-major: [kv head][slot][head size]. Blocks whose
// size or head size is not a multiple of 16 have slot-major K and V.
//
// K and V in 8 bits have codes in the same orders, those of bfloat16 or of other types by what they are multiplied as. The
// bfloat16 scales of a head's slots follow its codes: [kv head]([block size * head size] codes, [block size] scales).

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "attention/layer.h"
#include "buffer.h"
#include "cache.h"
#include "ceiling.h"
#include "copies.h"
#include "decoder.h"
#include "numbers.h"
#include "products.h"
#include "sampler.h"
#include "state.h"
#include "tiles.h"

using namespace quire;

namespace {

// Calls work with a value of the cache's format: 0 float32, 1 bfloat16, 2 float16; 3 codes multiplied as bfloat16, 4 codes
// multiplied as float32.
template <typename Work>
void with_format(int32_t type, const Work& work) {
  switch (type) {
    case 0: return work(float{});
    case 1: return work(bf16{});
    case 3: return work(Coded<bf16>{});
    case 4: return work(Coded<float>{});
    default: return work(_Float16{});
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Enables tiles if the build has them and the system grants them; returns 1 if they are enabled.
int32_t quire_enable_tiles() {
#ifdef QUIRE_AMX
  use_amx = ask_for_tiles();
#endif
  return use_amx;
}

// Packs [outputs][inputs] weights; `packed` has room for both rounded up, to 16 and to 32, and is zero.
void quire_pack(const bf16* weights, int32_t outputs, int32_t inputs, bf16* packed) {
  const int steps = padded(inputs, 32) / 32;
  for (int n = 0; n < outputs; ++n) {
    for (int k = 0; k < inputs; ++k) {
      const size_t tile = static_cast<size_t>(n / 16) * steps + k / 32;
      packed[tile * 512 + (k % 32 / 2 * 16 + n % 16) * 2 + k % 2] = weights[static_cast<size_t>(n) * inputs + k];
    }
  }
}

// Packs a matrix of a format of grouped/format.h into strips of `strip_bytes`, one after the other.
void quire_pack_grouped(const GroupedSource* source, int64_t format, uint8_t* packed, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  const Format& packing = kFormats[format];
  const size_t bytes = packing.strip_bytes(padded(source->inputs, kTile) / kTile);
  s.team->run([&](int) {
    s.team->each((source->outputs + kStrip - 1) / kStrip, [&](int strip) {
      pack_strip(packing, *source, strip * kStrip, packed + strip * bytes);
    });
  });
}

// Returns the bytes of a strip of a format, with padded inputs.
int64_t quire_strip_bytes(int64_t format, int32_t inputs) {
  return static_cast<int64_t>(kFormats[format].strip_bytes(padded(inputs, kTile) / kTile));
}

// Multiplies rows, [rows][inputs], and a matrix of strips: `sums` is [rows][outputs].
void quire_multiply_grouped(const Strip* strips, int32_t outputs, int32_t inputs, const float* rows, int32_t count,
                            float* sums, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  const QuantizedRows quantized{s.quantized_normed.at_least(row_groups(count, inputs)), padded(inputs, kTile) / kTile};
  s.team->run([&](int) {
    s.team->each(count, [&](int row) { quantize_row(rows + static_cast<size_t>(row) * inputs, inputs, quantized, row); });
    constexpr int kAtOnce = 64;
    const int items = (outputs + kAtOnce - 1) / kAtOnce;
    const Strips all{strips, padded(outputs, kStrip) / kStrip};
    s.team->each(items, [&](int item) {
      const int columns = std::min(kAtOnce, padded(outputs, kStrip) - item * kAtOnce), next = item + s.team->size();
      const Range range{0, count, item * kAtOnce, columns, 0, 0, next < items ? next * kAtOnce : -1};
      product(all, quantized, range, [&](int row, int column, int columns, const float* from) {
        const int real = std::min(columns, outputs - column);
        std::memcpy(sums + static_cast<size_t>(row) * outputs + column, from, sizeof(float) * real);
      });
    });
  });
}

// Reads the weights of one output of a matrix as float32.
void quire_read_grouped(const Strip* strips, const int32_t* order, int32_t inputs, int32_t output, float* to) {
  read_output({nullptr, {strips, output / kStrip + 1}, order}, inputs, output, to);
}

// Writes K and V of each token, contiguous [tokens][heads][size] of the type that the cache's are multiplied as, to its
// slot.
void quire_write(const CacheView* c, const void* key, const void* value, int32_t tokens, const int64_t* slots) {
  with_format(c->type, [&](auto format) {
    using S = decltype(format);
    using E = NumberOf<S>;
    const Cache cache = cache_of(*c);
    for (int token = 0; token < tokens; ++token) {
      const int64_t number = static_cast<int64_t>(token) * cache.heads;
      write_token<S>(cache, slots[token], static_cast<const E*>(key) + number * cache.key.size,
                     static_cast<const E*>(value) + number * cache.value.size);
    }
  });
}

// Attends with [tokens][heads][key size] queries of that type; the output has it too, and is contiguous.
void quire_attend(const CacheView* c, const Batch* b, const void* query, int64_t stride, void* output, int32_t heads,
                  float scaling, float softcap, int32_t window, const float* sinks, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  with_format(c->type, [&](auto format) {
    using S = decltype(format);
    using E = NumberOf<S>;
    const Places& places = b->kinds[0];
    const Attention attention{cache_of(*c),
                              {b->sequences, b->first, b->ends, places.tables, places.width},
                              {scaling, softcap, window, sinks},
                              heads,
                              kCoded<S>};
    s.pieces.plan(attention, threads);
    float* partials = s.partials.at_least(partial_size(attention, s.pieces));
    const Lines<E> lines{static_cast<E*>(output), static_cast<int64_t>(heads) * c->value_size};
    s.team->run([&](int thread) {
      const Tiles tiles;
      attend_together<S>(*s.team, s, thread, attention, static_cast<const E*>(query), stride, lines, partials);
    });
  });
}

// Reads memory, a multiple of 1 MiB, at full bandwidth, and returns a number that depends on all of it.
int64_t quire_read(const void* data, int64_t bytes, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  constexpr int64_t kPiece = 1 << 20;
  std::atomic<int64_t> total{0};
  s.team->run([&](int) {
    s.team->each(static_cast<int>(bytes / kPiece), [&](int item) {
      total.fetch_xor(exclusive_or(static_cast<const char*>(data) + item * kPiece, kPiece));
    });
  });
  return total;
}

// Multiplies registers on all threads, and returns the number of operations: a multiplication and an addition are two.
int64_t quire_multiply(int64_t rounds, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  std::atomic<int64_t> operations{0};
  s.team->run([&](int thread) {
    const Tiles tiles;
    operations += multiply_registers(rounds, s.scratch[thread]->scores);
  });
  return operations;
}

// The same with 8-bit integers.
int64_t quire_multiply_int8(int64_t rounds, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  std::atomic<int64_t> operations{0};
  s.team->run([&](int thread) {
    const Tiles tiles;
    operations += multiply_int8_registers(rounds, reinterpret_cast<int32_t*>(s.scratch[thread]->scores));
  });
  return operations;
}

void quire_prefer_large_pages(void* data, int64_t bytes) { prefer_large_pages(data, static_cast<size_t>(bytes)); }

// Copies whole blocks, of `bytes` each: row `pairs[2 i]` of the source to row `pairs[2 i + 1]` of the target. No row is
// both source and target. Threads take pieces smaller than a block, so that they end at the same time.
void quire_copy(const void* source, void* target, const int64_t* pairs, int32_t count, int64_t bytes, int32_t threads) {
  constexpr int64_t kPiece = 128 << 10;
  constexpr int64_t kAlone = 512 << 10;  // copied in less time than waking a thread
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;
  const auto copy = [&](int item) {
    const int64_t* pair = pairs + 2 * (item / pieces);
    const int64_t begin = item % pieces * kPiece;
    copy_past_the_caches(static_cast<char*>(target) + pair[1] * bytes + begin,
                         static_cast<const char*>(source) + pair[0] * bytes + begin, std::min(kPiece, bytes - begin));
  };
  const int items = static_cast<int>(count * pieces);
  if (count * bytes <= kAlone) {
    for (int item = 0; item < items; ++item) copy(item);
    return;
  }
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  s.team->run([&](int) { s.team->each(items, copy); });
}

// Copies whole blocks in the same way, and writes the checksum of each block's bytes.
void quire_copy_checked(const void* source, void* target, const int64_t* pairs, int32_t count, int64_t bytes,
                        uint64_t* checksums, int32_t threads) {
  const auto copy = [&](int item) {
    checksums[item] = copy_checked(static_cast<char*>(target) + pairs[2 * item + 1] * bytes,
                                   static_cast<const char*>(source) + pairs[2 * item] * bytes, bytes);
  };
  if (count == 1) return copy(0);
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  s.team->run([&](int) { s.team->each(count, copy); });
}

// Samples a token for each of `count` draws from rows of [rows][vocabulary] logits: `rows[i]` is the row of `draws[i]`.
void quire_sample(const float* logits, int32_t vocabulary, const RowDraw* draws, const int64_t* rows, int32_t count,
                  int64_t* tokens, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  const auto sample = [&](int item, int thread) {
    tokens[item] = sample_row(logits + rows[item] * vocabulary, vocabulary, draws[item], *s.candidates[thread]);
  };
  if (count == 1) return sample(0, 0);  // not worth waking a thread
  s.team->run([&](int thread) { s.team->each(count, [&](int item) { sample(item, thread); }); });
}

// Runs a whole step of a decoder over the caches of its layers; `logits` is [rows][vocabulary].
void quire_step(const Decoder* d, const CacheView* const* caches, const Batch* b, float* logits, int32_t threads) {
  run_step(d, caches, b, logits, threads);
}

}  // extern "C"
#pragma GCC visibility pop
