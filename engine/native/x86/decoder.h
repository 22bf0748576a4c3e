// A whole step of a Llama-shaped decoder.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>

#include "attention/layer.h"
#include "experts.h"
#include "grouped/matrix.h"
#include "model.h"
#include "products.h"
#include "state.h"

namespace quire {

// Runs a step. Few rows are multiplied by all threads together, each with its share of the columns, because they are bound
// by memory bandwidth. Many rows are split into bands; one thread processes a band from one attention to the next, so
// that intermediate values stay in its caches, and streams the weights once for each band.
class Step {
 public:
  Step(const Decoder& d, const CacheView* const* caches, const Batch& b, float* logits, State& s)
      : d_(d), b_(b), logits_(logits), s_(s), team_(*s.team), caches_(caches), coded_(caches[0]->type == 3) {
    const int tokens = b.tokens, tall = padded(tokens, kPiece);
    stride_ = padded(d.hidden, 16);
    queries_ = d.heads * d.head_size;
    const int inputs = padded(d.hidden, 32), inner = padded(d.intermediate, 32), outer = padded(queries_, 32);
    x_ = s.hidden.at_least(static_cast<size_t>(tall) * stride_);
    query_ = s.queries.at_least(static_cast<size_t>(tall) * queries_);
    attended_.rows = {s.attended.at_least(static_cast<size_t>(tall) * outer), outer};
    bands_ = band_count();
    const int band = padded((tall / kPiece + bands_ - 1) / bands_ * kPiece, kPiece);
    banded_ = tokens > kMinBand * team_.size();
    const int kept = s.last.plan(b, kMinBand * team_.size());
    together_ = banded_ ? kept : tokens;
    const int shared = padded(std::max(together_, b.rows), kPiece), each = padded(together_, kPiece);
    normed_.rows = {s.normed.at_least(static_cast<size_t>(shared) * inputs), inputs};
    gated_.rows = {s.gated.at_least(static_cast<size_t>(each) * inner), inner};
    grouped_ = has_strips(d);
    if (grouped_) {
      plain_ = {s.plain.at_least(static_cast<size_t>(tall) * queries_), queries_};
      attended_.quantized = quantized_rows(s.quantized_attended, tall, queries_);
      normed_.quantized = quantized_rows(s.quantized_normed, shared, d.hidden);
      normed_.rest = quantized_rows(s.rest, each, d.hidden);
      gated_.quantized = quantized_rows(s.quantized_gated, each, d.intermediate);
      reordered_ = std::any_of(d.layer, d.layer + d.layers, [](const Layer& layer) { return layer.down.order; });
      if (reordered_) gated_.unordered = {s.unordered.at_least(static_cast<size_t>(each) * d.intermediate), d.intermediate};
    }
    const int most = std::max(banded_ ? band : 0, std::min(each, kMaxRows));
    for (auto& bench : s.benches) {
      bench->head.at_least(static_cast<size_t>(most) * d.head_size);
      if (!banded_) continue;
      bench->normed.at_least(static_cast<size_t>(band) * inputs);
      bench->gated.at_least(static_cast<size_t>(band) * inner_at_once());
      if (!grouped_) continue;
      quantized_rows(bench->quantized_normed, band, d.hidden);
      quantized_rows(bench->rest, band, d.hidden);
      quantized_rows(bench->quantized_gated, band, d.intermediate);
      if (reordered_) bench->unordered.at_least(static_cast<size_t>(band) * d.intermediate);
    }
    attention_ = {cache_of(*caches[0]),
                  {b.sequences, b.first, b.ends, nullptr, 0},
                  {d.scaling, 0.0f, 0, nullptr},
                  d.heads,
                  coded_};
    mixture_.emplace(d, s, tokens, x_, stride_);
  }

  // Called by every thread of the team.
  void run(int thread) {
    team_.each(b_.tokens, [&](int token) { embed(token); });
    for (int number = 0; number < d_.layers; ++number) {
      const bool few = number + 1 == d_.layers && s_.last.fewer;
      enter_all(number, few ? d_.heads : 0, thread);
      if (few) {
        if (thread == 0) keep_last();
        team_.barrier();
        enter_together(d_.layer[number], 0, d_.heads, thread, number);
      }
      if (thread == 0) plan(number);
      team_.barrier();
      coded_ ? attend<Coded<bf16>>(d_.layer[number], thread) : attend<bf16>(d_.layer[number], thread);
      if (d_.layer[number].router) {
        leave_attention(d_.layer[number]);
        mixture_->run(d_.layer[number], thread);
      } else if (!banded_) {
        leave_together(d_.layer[number]);
      }
    }
    const Layer& last = d_.layer[d_.layers - 1];
    if (banded_ && !last.router) each_band([&](int row, int rows) { leave(last, row, rows, thread); });
    score();
  }

 private:
  static constexpr int kMinBand = 192;  // rows; smaller bands are bound by the bandwidth of weights
  static constexpr int kBandBytes = 1152 << 10;  // of the 2 MiB L2 cache, for values between two products

  // Gated values are multiplied in pieces that fit beside the residual, except by strips, whose sums are not kept between pieces.
  int inner_at_once() const {
    return grouped_ ? padded(d_.intermediate, 32) : inputs_at_once(padded(d_.intermediate, 32));
  }

  // A band has as many rows as fit into the L2 cache, such that all threads get the same number of bands.
  int band_count() const {
    const int bytes = 4 * d_.hidden + 2 * d_.hidden + 2 * inner_at_once();
    const int most = std::clamp(kBandBytes / bytes, kMinBand, kMaxRows) / kPiece * kPiece;
    return padded((b_.tokens + most - 1) / most, team_.size());
  }

  // Bands differ by at most one piece, and the higher ones come first: then they are shared equally by the threads.
  template <typename Work>
  void each_band(const Work& work) {
    const int pieces = (b_.tokens + kPiece - 1) / kPiece, least = pieces / bands_, higher = pieces % bands_;
    team_.each(bands_, [&](int item) {
      const int row = (item * least + std::min(item, higher)) * kPiece, rows = (least + (item < higher)) * kPiece;
      work(row, std::min(rows, b_.tokens - row));
    });
  }

  // Calls work(range) for ranges of many rows and a limited number of columns, of those from `first` to `end`.
  template <typename Work>
  void each_range(int rows, int first, int end, int at_once, const Work& work) {
    const int pieces = (end - first + at_once - 1) / at_once, high = rows_at_once(rows, pieces, team_.size());
    team_.each(pieces * ((rows + high - 1) / high), [&](int item) {
      const int column = first + item % pieces * at_once, row = item / pieces * high, next = item % pieces + team_.size();
      const int width = std::min(at_once, end - column), height = std::min(high, rows - row);
      // Most often a thread's next item is the one after those that all threads have now.
      work(Range{row, height, column, width, 0, 0, next < pieces ? first + next * at_once : -1});
    });
  }

  void embed(int token) {
    read_output(d_.embedding, d_.hidden, b_.token_ids[token], x_ + static_cast<size_t>(token) * stride_);
    clear_end(attended_.rows, token, queries_);
    if (token < together_) clear_end(gated_.rows, token, d_.intermediate);
  }

  void norm(int token, const float* weight, const Matrix& m, const Inputs& to, int row, bool twice = false) {
    normalize(x_ + static_cast<size_t>(token) * stride_, d_.hidden, weight, d_.epsilon, m, to, row, twice);
  }

  // Inputs of v are quantized twice: much of the error of 8-bit activations would come from them, and they are multiplied
  // by few weights.
  void enter_norm(const Layer& layer, const Inputs& to, int token) {
    norm(token, layer.attention_norm, layer.projections, to, token, true);
  }

  // From the residual of the layer before to the heads of a layer from number `first` on, of all rows.
  void enter_all(int number, int first, int thread) {
    const int heads = d_.heads + 2 * d_.kv_heads;
    if (!banded_) return enter_together(d_.layer[number], first, heads, thread, number);
    each_band([&](int row, int rows) {
      if (number > 0 && !d_.layer[number - 1].router) leave(d_.layer[number - 1], row, rows, thread);
      enter(d_.layer[number], first, row, rows, thread, number);
    });
  }

  // From the residual to queries, and to K and V in the cache.
  void enter(const Layer& layer, int first, int row, int rows, int thread, int number) {
    const Inputs normed = normed_by(thread, row);
    for (int token = row; token < row + rows; ++token) enter_norm(layer, normed, token);
    for (int head = first, heads = d_.heads + 2 * d_.kv_heads, size = d_.head_size; head < heads; ++head) {
      const int next = head + 1 < heads ? (head + 1) * size : -1;
      project(layer, normed, {row, rows, head * size, size, 0, 0, next}, thread, number);
    }
  }

  void enter_together(const Layer& layer, int first, int end, int thread, int number) {
    team_.each(b_.tokens, [&](int token) { enter_norm(layer, normed_, token); });
    each_range(b_.tokens, first * d_.head_size, end * d_.head_size, d_.head_size, [&](const Range& range) {
      project(layer, normed_, range, thread, number);
    });
  }

  // Continues with the rows that logits depend on: in the last layer the others only have K and V.
  void keep_last() {
    attention_.sequences.all = b_.first;
    b_ = s_.last.keep(b_, x_, stride_);
    banded_ = false;
    attention_.sequences.first = b_.first;
    planned_ = -1;
    mixture_.emplace(d_, s_, b_.tokens, x_, stride_);
  }

  // One head of q, k or v, rotated, with all rows of a range.
  void project(const Layer& layer, const Inputs& normed, const Range& range, int thread, int number) {
    const int size = d_.head_size, column = range.column, kv_head = column / size - d_.heads;
    const Sums sums{s_.benches[thread]->head.at_least(0), size, range.row, column};
    product_to(layer.projections, {padded((d_.heads + 2 * d_.kv_heads) * size, 16), normed.rows.inputs}, normed, range, sums, false);
    if (layer.projections.strips && kv_head >= d_.kv_heads) product_to(layer.projections.strips, normed.rest, range, sums, true);
    const Cache cache = cache_of(*caches_[number]);
    const int64_t* slots = b_.kinds[caches_[number]->kind].slots;
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
        coded_ ? write_head<Coded<bf16>>(cache, slots[token], kv_head % d_.kv_heads, values, line)
               : write_head<bf16>(cache, slots[token], kv_head % d_.kv_heads, values, line);
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
  void attend(const Layer& layer, int thread) {
    const operand* query = query_;
    if (layer.output.strips) {
      attend_together<S>(team_, s_, thread, attention_, query, queries_, plain_, partials_);
    } else {
      attend_together<S>(team_, s_, thread, attention_, query, queries_, attended_.rows, partials_);
    }
  }

  void plan(int number) {
    const int window = d_.layer[number].window;
    const Places& places = b_.kinds[caches_[number]->kind];
    attention_.cache = cache_of(*caches_[number]);
    attention_.sequences.tables = places.tables;
    attention_.sequences.width = places.width;
    attention_.how.window = window;
    attention_.how.sinks = d_.layer[number].sinks;
    if (window == planned_) return;
    s_.pieces.plan(attention_, team_.size());
    planned_ = window;
    partials_ = s_.partials.at_least(partial_size(attention_, s_.pieces));
  }

  // Buffers of a thread's band, whose first row is `row`.
  Inputs normed_by(int thread, int row) {
    Bench& bench = *s_.benches[thread];
    const int inputs = padded(d_.hidden, 32);
    return {{bench.normed.at_least(0), inputs, row},
            {bench.quantized_normed.at_least(0), inputs / kTile, row},
            {bench.rest.at_least(0), inputs / kTile, row}};
  }
  Inputs gated_by(int thread, int row, int first, int inputs) {
    Bench& bench = *s_.benches[thread];
    return {{bench.gated.at_least(0), inputs, row, first},
            {bench.quantized_gated.at_least(0), inputs / kTile, row},
            {},
            {bench.unordered.at_least(0), d_.intermediate, row}};
  }

  void quantize_attended(const Layer& layer, int token) {
    quantize_row(plain_.at(token, 0), queries_, attended_.quantized, token, layer.output.order);
  }

  void quantize_gated(const Layer& layer, const Inputs& gated, int token) {
    quantize_row(gated.unordered.at(token, 0), d_.intermediate, gated.quantized, token, layer.down.order);
  }

  // The bias of the attention's output is added before the product.
  void add_bias(const Layer& layer, int token) {
    float* row = x_ + static_cast<size_t>(token) * stride_;
    for (int i = 0; layer.output_bias && i < d_.hidden; ++i) row[i] += layer.output_bias[i];
  }

  // Adds the attention output of a band to the residual.
  void add_attended(const Layer& layer, int row, int rows) {
    for (int token = row; token < row + rows; ++token) {
      if (layer.output.strips) quantize_attended(layer, token);
      add_bias(layer, token);
    }
    add(layer.output, attended_, {row, rows, 0, stride_});
  }

  // The same of all rows.
  void add_attended_together(const Layer& layer) {
    if (layer.output.strips || layer.output_bias) {
      team_.each(b_.tokens, [&](int token) {
        if (layer.output.strips) quantize_attended(layer, token);
        add_bias(layer, token);
      });
    }
    each_range(b_.tokens, 0, stride_, added_columns(b_.tokens), [&](const Range& range) { add(layer.output, attended_, range); });
  }

  // Before a mixture of experts, which takes the rows of all bands.
  void leave_attention(const Layer& layer) {
    if (!banded_) return add_attended_together(layer);
    each_band([&](int row, int rows) { add_attended(layer, row, rows); });
  }

  // From the attention output to the residual of the next layer.
  void leave(const Layer& layer, int row, int rows, int thread) {
    const Inputs normed = normed_by(thread, row);
    add_attended(layer, row, rows);
    for (int token = row; token < row + rows; ++token) norm(token, layer.mlp_norm, layer.gates, normed, token);
    const int inner = padded(d_.intermediate, 32), at_once = inner_at_once();
    for (int first = 0; first < inner; first += at_once) {
      const int inputs = std::min(at_once, inner - first);
      const Inputs gated = gated_by(thread, row, first, inputs);
      gate(layer, normed, gated, {row, rows, 2 * first, 2 * std::min(inputs, d_.intermediate - first)});
      for (int token = row; layer.down.order && token < row + rows; ++token) quantize_gated(layer, gated, token);
      for (int token = row; first + inputs > d_.intermediate && token < row + rows; ++token) {
        clear_end(gated.rows, token, d_.intermediate);
      }
      add(layer.down, gated, {row, rows, 0, stride_, first, inputs}, inner);
    }
  }

  void leave_together(const Layer& layer) {
    add_attended_together(layer);
    team_.each(b_.tokens, [&](int token) { norm(token, layer.mlp_norm, layer.gates, normed_, token); });
    each_range(b_.tokens, 0, 2 * d_.intermediate, 192, [&](const Range& range) { gate(layer, normed_, gated_, range); });
    if (layer.down.order) team_.each(b_.tokens, [&](int token) { quantize_gated(layer, gated_, token); });
    each_range(b_.tokens, 0, stride_, added_columns(b_.tokens), [&](const Range& range) { add(layer.down, gated_, range); });
  }

  // Adds a product to the residual. `inputs` are those of the weights if the rows have fewer.
  void add(const Matrix& m, const Inputs& rows, const Range& range, int inputs = 0) {
    product_to(m, {stride_, inputs ? inputs : rows.rows.inputs}, rows, range, {x_, stride_}, true);
  }

  // Gated values of 32 columns at once.
  void gate(const Layer& layer, const Inputs& normed, const Inputs& gated, const Range& range) {
    if (layer.gates.strips) return gate_quantized(layer, normed, gated, range);
    product(layer.gates, {2 * d_.intermediate, normed.rows.inputs}, normed, range, [&](int row, int column, int, const float* sums) {
      operand* to = gated.rows.at(row, column / 2);
      for (int i = 0; i < 16; i += kLanes) put_lanes(to + i, gated_silu(load(sums + i), load(sums + 16 + i)));
    });
  }

  // The same as codes, unless another order comes first: 64 columns are a group of 32 gated values, except for the last 32.
  void gate_quantized(const Layer& layer, const Inputs& normed, const Inputs& gated, const Range& range) {
    product(layer.gates.strips, normed.quantized, range, [&](int row, int column, int columns, const float* sums) {
      alignas(64) float line[kTile] = {};
      for (int half = 0; half < columns; half += 32) {
        for (int i = 0; i < 16; i += kLanes) store(line + half / 2 + i, gated_silu(load(sums + half + i), load(sums + half + 16 + i)));
      }
      if (layer.down.order) {
        std::memcpy(gated.unordered.at(row, column / 2), line, sizeof(float) * columns / 2);
      } else {
        quantize(line, gated.quantized.at(row, column / 64), row % 16);
      }
    });
  }

  void score() {
    team_.each(b_.rows, [&](int row) { norm(b_.places[row], d_.final_norm, d_.head, normed_, row); });
    each_range(b_.rows, 0, padded(d_.vocabulary, 16), 256, [&](const Range& range) {
      product(d_.head, {padded(d_.vocabulary, 16), normed_.rows.inputs}, normed_, range, [&](int row, int column, int columns, const float* sums) {
        const int real = std::min(columns, d_.vocabulary - column);
        std::memcpy(logits_ + static_cast<size_t>(row) * d_.vocabulary + column, sums, sizeof(float) * real);
      });
    });
  }

  const Decoder& d_;
  Batch b_;  // in the last layer, with the rows that logits depend on
  float* logits_;
  State& s_;
  Team& team_;
  const CacheView* const* caches_;  // [layers]
  bool coded_;
  Attention attention_;
  std::optional<Mixture> mixture_;
  int stride_, queries_;  // of the residual, of queries
  float* x_;              // the residual: [tokens][stride]
  operand* query_;        // [tokens][heads][head size]
  Inputs attended_{}, normed_{}, gated_{};
  Lines<float> plain_{};  // attention's output before it is quantized: [tokens][heads][head size]
  bool grouped_ = false;    // some matrices are strips
  bool reordered_ = false;  // some layers need another order of gated values
  bool banded_ = false;
  int together_ = 0;  // rows that are multiplied by all threads together, at most
  int bands_ = 0;
  int planned_ = -1;  // window that the pieces were planned for
  float* partials_ = nullptr;
};

inline void run_step(const Decoder* d, const CacheView* const* caches, const Batch* b, float* logits, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  Step step(*d, caches, *b, logits, s);
  s.team->run([&](int thread) {
    const Tiles tiles;
    step.run(thread);
  });
}

}  // namespace quire
