// A whole step of a Llama-shaped decoder.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention/layer.h"
#include "products.h"
#include "state.h"

namespace quire {

struct Layer {
  const bf16* projections;  // q, k, v one after the other, packed
  const bf16* output;
  const bf16* gates;  // 16 columns of the gate, 16 of the product that it gates, and so on
  const bf16* down;
  const float* attention_norm;
  const float* mlp_norm;
  const float* projection_bias;  // or null
  const float* query_norm;       // or null
  const float* key_norm;         // or null
  int32_t window;                // 0: none
};

struct Decoder {
  int32_t layers, hidden, heads, kv_heads, head_size, intermediate, vocabulary;
  float epsilon, scaling;
  const Layer* layer;
  const bf16* embedding;  // [vocabulary][hidden]
  const bf16* head;       // packed
  const float* final_norm;
  const float* cosine;  // [positions][head size / 2]
  const float* sine;
};

struct CacheView {
  void* data;
  int64_t block_stride;
  int64_t layer_stride;
  int64_t value_offset;
  int64_t head_stride;
  int32_t block_size, heads, head_size;
  int32_t type;  // 1: bfloat16, 3: codes
};

// The cache of a layer whose K begins at `data`.
inline Cache cache_of(const CacheView& c, void* data) {
  return {data, c.block_stride, c.value_offset, c.head_stride, c.block_size, c.heads, c.head_size};
}

struct Batch {
  int32_t tokens, sequences, width, rows;
  const int32_t* token_ids;
  const int32_t* positions;
  const int64_t* slots;
  const int32_t* first;
  const int32_t* ends;
  const int32_t* tables;
  const int32_t* places;  // [rows] tokens whose logits are requested
};

inline float root_of_mean_square(const float* x, int size, float epsilon) {
  float squares = 0.0f;
  for (int i = 0; i < size; ++i) squares += x[i] * x[i];
  return std::sqrt(squares / static_cast<float>(size) + epsilon);
}

inline void normalize(const float* x, int size, const float* weight, float epsilon, const Rows& out, int row) {
  const float factor = 1.0f / root_of_mean_square(x, size, epsilon);
  for (int k = 0; k < out.inputs; k += 32) {
    alignas(64) float line[32];
    const int real = std::min(32, size - k);
    for (int i = 0; i < real; ++i) line[i] = x[k + i] * factor * weight[k + i];
    for (int i = real; i < 32; ++i) line[i] = 0.0f;
    put_all(line, 32, out.at(row, k));
  }
}

inline void normalize_head(float* x, int size, const float* weight, float epsilon) {
  const float factor = 1.0f / root_of_mean_square(x, size, epsilon);
  for (int i = 0; i < size; ++i) x[i] *= factor * weight[i];
}

inline void rotate(float* __restrict x, int size, const float* __restrict cosine, const float* __restrict sine) {
  const int half = size / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

// silu(g) * up, with silu(g) = g / (1 + exp(-g)). The quotient has at least 14 bits, six more than the rounded result.
inline Vector gated_silu(Vector g, Vector up) {
  const Vector e = exp2_of(smaller(times(g, filled(-kLog2OfE)), filled(125.0f)));
  return divided(times(g, up), plus(e, filled(1.0f)));
}

// Runs a step. Few rows are multiplied by all threads together, each with its share of the columns, because they are bound
// by memory bandwidth. Many rows are split into bands; one thread processes a band from one attention to the next, so
// that intermediate values stay in its caches, and streams the weights once for each band.
class Step {
 public:
  Step(const Decoder& d, const CacheView& c, const Batch& b, float* logits, State& s)
      : d_(d), b_(b), logits_(logits), s_(s), team_(*s.team), data_(static_cast<char*>(c.data)), coded_(c.type == 3),
        layer_bytes_(c.layer_stride * static_cast<int64_t>(coded_ ? sizeof(int8_t) : sizeof(bf16))) {
    const int tokens = b.tokens, tall = padded(tokens, kPiece);
    stride_ = padded(d.hidden, 16);
    queries_ = d.heads * d.head_size;
    const int inputs = padded(d.hidden, 32), inner = padded(d.intermediate, 32), outer = padded(queries_, 32);
    x_ = s.hidden.at_least(static_cast<size_t>(tall) * stride_);
    query_ = s.queries.at_least(static_cast<size_t>(tall) * queries_);
    attended_ = {s.attended.at_least(static_cast<size_t>(tall) * outer), outer};
    bands_ = band_count();
    const int band = padded((tall / kPiece + bands_ - 1) / bands_ * kPiece, kPiece);
    banded_ = tokens > kMinBand * team_.size();
    const int shared = padded(banded_ ? b.rows : std::max(tokens, static_cast<int>(b.rows)), kPiece);
    normed_ = {s.normed.at_least(static_cast<size_t>(shared) * inputs), inputs};
    if (!banded_) gated_ = {s.gated.at_least(static_cast<size_t>(tall) * inner), inner};
    const int most = banded_ ? band : std::min(tall, kMaxRows);
    for (auto& bench : s.benches) {
      bench->head.at_least(static_cast<size_t>(most) * d.head_size);
      if (!banded_) continue;
      bench->normed.at_least(static_cast<size_t>(band) * inputs);
      bench->gated.at_least(static_cast<size_t>(band) * inner_at_once());
    }
    attention_ = {cache_of(c, nullptr),
                  {b.sequences, b.first, b.ends, b.tables, b.width},
                  {d.scaling, 0.0f, 0},
                  d.heads};
  }

  // Called by every thread of the team.
  void run(int thread) {
    team_.each(b_.tokens, [&](int token) { embed(token); });
    for (int number = 0; number < d_.layers; ++number) {
      if (banded_) {
        each_band([&](int row, int rows) {
          if (number > 0) leave(d_.layer[number - 1], row, rows, thread);
          enter(d_.layer[number], row, rows, thread, number);
        });
      } else {
        enter_together(d_.layer[number], thread, number);
      }
      if (thread == 0) plan(number);
      team_.barrier();
      coded_ ? attend<Coded<bf16>>(thread) : attend<bf16>(thread);
      if (!banded_) leave_together(d_.layer[number]);
    }
    if (banded_) each_band([&](int row, int rows) { leave(d_.layer[d_.layers - 1], row, rows, thread); });
    score();
  }

 private:
  static constexpr int kMinBand = 192;  // rows; smaller bands are bound by the bandwidth of weights
  static constexpr int kBandBytes = 1152 << 10;  // of the 2 MiB L2 cache, for values between two products

  // The gated values are multiplied in pieces that fit beside the residual. Without tiles no product is split.
  int inner_at_once() const {
#ifdef QUIRE_AMX
    if (use_amx) return inputs_at_once(padded(d_.intermediate, 32));
#endif
    return padded(d_.intermediate, 32);
  }

  // A band has as many rows as fit into the L2 cache, such that all threads get the same number of bands.
  int band_count() const {
    const int bytes = 4 * d_.hidden + 2 * d_.hidden + 2 * inner_at_once();
    const int most = std::clamp(kBandBytes / bytes, kMinBand, kMaxRows) / kPiece * kPiece;
    return padded((b_.tokens + most - 1) / most, team_.size());
  }

  // The bands' heights differ by at most one piece: a low last band would leave its thread waiting for the others.
  template <typename Work>
  void each_band(const Work& work) {
    const int pieces = (b_.tokens + kPiece - 1) / kPiece;
    team_.each(bands_, [&](int item) {
      const int row = item * pieces / bands_ * kPiece, end = (item + 1) * pieces / bands_ * kPiece;
      work(row, std::min(end, b_.tokens) - row);
    });
  }

  // Calls work(range) for ranges of all rows and a limited number of columns.
  template <typename Work>
  void each_range(int rows, int columns, int at_once, const Work& work) {
    const int pieces = (columns + at_once - 1) / at_once, blocks = (rows + kMaxRows - 1) / kMaxRows;
    team_.each(pieces * blocks, [&](int item) {
      const int column = item % pieces * at_once, row = item / pieces * kMaxRows, next = item % pieces + team_.size();
      const int width = std::min(at_once, columns - column), height = std::min(kMaxRows, rows - row);
      // Most often a thread's next item is the one after those that all threads have now.
      work(Range{row, height, column, width, 0, 0, next < pieces ? next * at_once : -1});
    });
  }

  void embed(int token) {
    const bf16* from = d_.embedding + static_cast<size_t>(b_.token_ids[token]) * d_.hidden;
    float* to = x_ + static_cast<size_t>(token) * stride_;
    for (int i = 0; i < d_.hidden; ++i) to[i] = widened(from[i]);
    clear_end(attended_, token, queries_);
    if (!banded_) clear_end(gated_, token, d_.intermediate);
  }

  // Clears the padding of a row: weights are zero there, but zero times a stale value may be NaN.
  static void clear_end(const Rows& rows, int row, int inputs) {
    if (inputs % 32) std::memset(rows.at(row, inputs), 0, sizeof(operand) * (32 - inputs % 32));
  }

  void norm(int token, const float* weight, const Rows& to, int row) {
    normalize(x_ + static_cast<size_t>(token) * stride_, d_.hidden, weight, d_.epsilon, to, row);
  }

  // From the residual to queries, and to K and V in the cache.
  void enter(const Layer& layer, int row, int rows, int thread, int number) {
    const Rows normed{s_.benches[thread]->normed.at_least(0), padded(d_.hidden, 32), row};
    for (int token = row; token < row + rows; ++token) norm(token, layer.attention_norm, normed, token);
    for (int head = 0, heads = d_.heads + 2 * d_.kv_heads, size = d_.head_size; head < heads; ++head) {
      const int next = head + 1 < heads ? (head + 1) * size : -1;
      project(layer, normed, {row, rows, head * size, size, 0, 0, next}, thread, number);
    }
  }

  void enter_together(const Layer& layer, int thread, int number) {
    team_.each(b_.tokens, [&](int token) { norm(token, layer.attention_norm, normed_, token); });
    each_range(b_.tokens, (d_.heads + 2 * d_.kv_heads) * d_.head_size, d_.head_size, [&](const Range& range) {
      project(layer, normed_, range, thread, number);
    });
  }

  // One head of q, k or v, rotated, with all rows of a range.
  void project(const Layer& layer, const Rows& normed, const Range& range, int thread, int number) {
    const int size = d_.head_size, column = range.column, kv_head = column / size - d_.heads;
    const Sums sums{s_.benches[thread]->head.at_least(0), size, range.row, column};
    product_to({layer.projections, padded((d_.heads + 2 * d_.kv_heads) * size, 16), normed.inputs}, normed, range, sums, false);
    Cache cache = attention_.cache;
    cache.data = data_ + number * layer_bytes_;
    for (int token = range.row; token < range.row + range.rows; ++token) {
      float* line = sums.at(token, column);
      if (layer.projection_bias) {
        for (int i = 0; i < size; ++i) line[i] += layer.projection_bias[column + i];
      }
      if (kv_head < d_.kv_heads) turn(line, token, kv_head < 0 ? layer.query_norm : layer.key_norm);
      if (kv_head < 0) {
        put_all(line, size, query_ + static_cast<size_t>(token) * queries_ + column);
      } else {
        const bool values = kv_head >= d_.kv_heads;
        coded_ ? write_head<Coded<bf16>>(cache, b_.slots[token], kv_head % d_.kv_heads, values, line)
               : write_head<bf16>(cache, b_.slots[token], kv_head % d_.kv_heads, values, line);
      }
    }
  }

  void turn(float* line, int token, const float* weight) {
    const int size = d_.head_size;
    const size_t at = static_cast<size_t>(b_.positions[token]) * (size / 2);
    if (weight) normalize_head(line, size, weight, d_.epsilon);
    rotate(line, size, d_.cosine + at, d_.sine + at);
  }

  template <typename S>
  void attend(int thread) {
    const operand* query = query_;
    attend_together<S>(team_, s_, thread, attention_, query, queries_, attended_, partials_);
  }

  void plan(int number) {
    const int window = d_.layer[number].window;
    attention_.cache.data = data_ + number * layer_bytes_;
    attention_.how.window = window;
    if (window == planned_) return;
    s_.pieces.plan(attention_, team_.size());
    planned_ = window;
    partials_ = s_.partials.at_least(static_cast<size_t>(s_.pieces.partial_count) * kRows * (d_.head_size + 2) + 1);
  }

  // From the attention output to the residual of the next layer.
  void leave(const Layer& layer, int row, int rows, int thread) {
    const Rows normed{s_.benches[thread]->normed.at_least(0), padded(d_.hidden, 32), row};
    add(layer.output, attended_, {row, rows, 0, stride_});
    for (int token = row; token < row + rows; ++token) norm(token, layer.mlp_norm, normed, token);
    const int inner = padded(d_.intermediate, 32), at_once = inner_at_once();
    for (int first = 0; first < inner; first += at_once) {
      const int inputs = std::min(at_once, inner - first);
      const Rows gated{s_.benches[thread]->gated.at_least(0), inputs, row, first};
      gate(layer, normed, gated, {row, rows, 2 * first, 2 * std::min(inputs, d_.intermediate - first)});
      for (int token = row; first + inputs > d_.intermediate && token < row + rows; ++token) {
        clear_end(gated, token, d_.intermediate);
      }
      product_to({layer.down, stride_, inner}, gated, {row, rows, 0, stride_, first, inputs}, {x_, stride_}, true);
    }
  }

  void leave_together(const Layer& layer) {
    each_range(b_.tokens, stride_, 48, [&](const Range& range) { add(layer.output, attended_, range); });
    team_.each(b_.tokens, [&](int token) { norm(token, layer.mlp_norm, normed_, token); });
    each_range(b_.tokens, 2 * d_.intermediate, 192, [&](const Range& range) { gate(layer, normed_, gated_, range); });
    each_range(b_.tokens, stride_, 48, [&](const Range& range) { add(layer.down, gated_, range); });
  }

  void add(const bf16* weights, const Rows& rows, const Range& range) {
    product_to({weights, stride_, rows.inputs}, rows, range, {x_, stride_}, true);
  }

  void gate(const Layer& layer, const Rows& normed, const Rows& gated, const Range& range) {
    product({layer.gates, 2 * d_.intermediate, normed.inputs}, normed, range,
            [&](int row, int column, int, const float* sums) {
              operand* to = gated.at(row, column / 2);
              for (int i = 0; i < 16; i += kLanes) put_lanes(to + i, gated_silu(load(sums + i), load(sums + 16 + i)));
            });
  }

  void score() {
    team_.each(b_.rows, [&](int row) { norm(b_.places[row], d_.final_norm, normed_, row); });
    each_range(b_.rows, padded(d_.vocabulary, 16), 256, [&](const Range& range) {
      product({d_.head, padded(d_.vocabulary, 16), normed_.inputs}, normed_, range,
              [&](int row, int column, int columns, const float* sums) {
                const int real = std::min(columns, d_.vocabulary - column);
                std::memcpy(logits_ + static_cast<size_t>(row) * d_.vocabulary + column, sums, sizeof(float) * real);
              });
    });
  }

  const Decoder& d_;
  const Batch& b_;
  float* logits_;
  State& s_;
  Team& team_;
  char* data_;  // of the cache
  bool coded_;
  int64_t layer_bytes_;
  Attention attention_;
  int stride_, queries_;  // of the residual, of queries
  float* x_;              // the residual: [tokens][stride]
  operand* query_;        // [tokens][heads][head size]
  Rows attended_{}, normed_{}, gated_{};
  bool banded_ = false;
  int bands_ = 0;
  int planned_ = -1;  // window that the pieces were planned for
  float* partials_ = nullptr;
};

inline void run_step(const Decoder* d, const CacheView* c, const Batch* b, float* logits, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  Step step(*d, *c, *b, logits, s);
  s.team->run([&](int thread) {
    const Tiles tiles;
    step.run(thread);
  });
}

}  // namespace quire
