// Splits a step's attention into pieces of work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../cache.h"
#include "../numbers.h"

namespace quire {

constexpr int kRows = 64;         // query rows of one piece, which share loads of K and V
constexpr int kChunk = 128;       // slots between two rescalings of the softmax
constexpr int kMinSplit = 128;  // minimum slots of one piece of a sequence
constexpr int kSegment = 512;   // slots, a multiple of kChunk: see Attention

struct Scores {
  float scaling;
  float softcap;  // 0: none
  int window;     // 0: none
  const float* sinks;  // of each query head, or null: a score without a slot, neither scaled nor capped
};

struct Sequences {
  int count;
  const int32_t* first;   // [count + 1] index of each one's first fed token
  const int32_t* ends;    // [count] lengths, fed tokens included
  const int32_t* tables;  // [count][width] block ids
  int width;
  const int32_t* all = nullptr;  // null, or `first` of tokens of which only some attend

  // Whether a sequence's slots may be split: not those of several tokens, even if only the last attends, so that its result is
  // that of all.
  bool may_split(int sequence) const {
    const int32_t* of = (all ? all : first) + sequence;
    return of[1] - of[0] == 1;
  }
  const int32_t* table(int sequence) const { return tables + static_cast<int64_t>(sequence) * width; }
};

// A piece of work: rows of one sequence and KV head over a range of its slots; while decoding, of a few KV heads, because
// their K and V are adjacent, and sequential reads are fastest. If more query heads than a piece has rows share a KV head,
// `part` identifies the subset.
struct Piece {
  int sequence;
  int head;   // the first
  int heads;
  int part;
  int token;   // first of them, within the fed tokens
  int tokens;  // of the tile
  int from, to;  // slots
  int partial;   // index of the first head's partial result, -1: not split
  int apart;     // from one head's partial result to the next one's
};

// A step's attention over one layer. Queries are [tokens][heads][key size], outputs [tokens][heads][value size], of any of
// the three types.
//
// With `by_segments` a row's results do not depend on the batch, however its slots are divided: those of each segment of a
// sequence are added alone, and segments in their order. Codes need it: a last bit becomes a whole step of a later code.
struct Attention {
  Cache cache;
  Sequences sequences;
  Scores how;
  int heads;
  bool by_segments;
};

// The end of a segment, from any slot in it.
inline int segment_end(int slot, int to) { return std::min(to, slot / kSegment * kSegment + kSegment); }

// Assignment of the query heads of a KV head to tiles.
struct Grouping {
  int group;  // query heads of one KV head
  int parts;  // number of subsets, of at most kRows heads
  explicit Grouping(const Attention& attention)
      : group(attention.heads / attention.cache.heads), parts((group + kRows - 1) / kRows) {}
  int width(int part) const { return std::min(kRows, group - part * kRows); }
  int tokens() const { return std::max(1, kRows / group); }
  int rows() const { return std::min(kRows, group); }  // at most, of one token
  // KV heads of a piece with one token: each uses a tile of rows.
  int heads(const Cache& cache) const { return group <= 16 ? std::min(kRows / 16, cache.heads) : 1; }
};

// Splits a step's attention into pieces: tiles of 16 rows, and ranges of slots for long sequences, to balance the threads.
struct Pieces {
  std::vector<Piece> all;
  std::vector<int> partials;  // [tokens][kv heads][parts] first partial result of each, stored consecutively
  std::vector<int> counts;
  int partial_count = 0;

  void plan(const Attention& attention, int threads) {
    const Sequences& sequences = attention.sequences;
    const Grouping grouping(attention);
    const int per_tile = grouping.tokens(), heads = attention.cache.heads * grouping.parts;
    all.clear();
    partial_count = 0;
    int64_t work = 0;
    for (int i = 0; i < sequences.count; ++i) {
      const int fed = sequences.first[i + 1] - sequences.first[i];
      work += static_cast<int64_t>(padded(fed, per_tile) / per_tile) * sequences.ends[i] * heads;
    }
    const int64_t share = threads > 1 ? work / (threads * 4) : work;
    const int limit = static_cast<int>(std::min<int64_t>(share, 1 << 20)) / grouping.heads(attention.cache) + 1;
    const int split = std::max(kMinSplit, padded(limit, kChunk));
    const auto heads_at_once = [&](int slots) {
      // Whole segments may be too few pieces for the threads.
      const bool apart = attention.by_segments && grouping.heads(attention.cache) * std::min<int64_t>(slots, kSegment) > 2 * share;
      return apart ? 1 : grouping.heads(attention.cache);
    };
    const int tokens = sequences.first[sequences.count];
    partials.assign(static_cast<size_t>(tokens) * heads, -1);
    counts.assign(static_cast<size_t>(tokens) * heads, 0);
    for (int i = 0; i < sequences.count; ++i) {
      const int fed = sequences.first[i + 1] - sequences.first[i];
      const int at_once = fed == 1 ? heads_at_once(sequences.ends[i]) : 1;
      for (int head = 0; head < heads; head += at_once) {
        for (int token = 0; token < fed; token += per_tile) {
          add(attention, i, head, std::min(at_once, heads - head), token, std::min(per_tile, fed - token), split);
        }
      }
    }
    // The longest first, so that the last pieces are short.
    std::stable_sort(all.begin(), all.end(), [](const Piece& a, const Piece& b) { return a.to - a.from > b.to - b.from; });
  }

 private:
  void add(const Attention& attention, int i, int place_of_head, int heads, int token, int tokens, int split) {
    const int parts = Grouping(attention).parts, head = place_of_head / parts, part = place_of_head % parts;
    const Sequences& sequences = attention.sequences;
    const int fed = sequences.first[i + 1] - sequences.first[i], position = sequences.ends[i] - fed + token;
    const int window = attention.how.window, to = position + tokens;
    const int from = window ? std::max(0, position - window + 1) : 0;
    int pieces = sequences.may_split(i) ? std::max(1, (to - from + split - 1) / split) : 1;
    const int origin = attention.by_segments ? from / kSegment * kSegment : from;
    if (pieces > 1 && attention.by_segments) pieces = (to - origin + kSegment - 1) / kSegment;
    if (pieces == 1) {
      all.push_back({i, head, heads, part, token, tokens, from, to, -1, 0});
      return;
    }
    const size_t place = static_cast<size_t>(sequences.first[i] + token) * attention.cache.heads * parts + place_of_head;
    for (int other = 0; other < heads; ++other) {
      partials[place + other] = partial_count + other * pieces;
      counts[place + other] = pieces;
    }
    const int length = attention.by_segments ? kSegment : padded((to - from + pieces - 1) / pieces, kSlots);
    for (int piece = 0; piece < pieces; ++piece) {
      const int begin = std::clamp(origin + piece * length, from, to), end = std::min(origin + (piece + 1) * length, to);
      all.push_back({i, head, heads, part, token, tokens, begin, end, partial_count + piece, pieces});
    }
    partial_count += heads * pieces;
  }
};

}  // namespace quire
