// Mixtures of experts: each row is multiplied by the few experts that its router chooses.
//
// The rows of a step are grouped by expert, so that an expert's weights are streamed once for all rows that chose it. A
// row's results are added to the residual in the order of the experts, so that they do not depend on the other rows.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "grouped/matrix.h"
#include "model.h"
#include "products.h"
#include "state.h"

namespace quire {

// Chooses the experts with the largest scores, of equal ones those of lower index first, and their weights: a softmax of
// the chosen scores, or the chosen parts of that of all. Distinct experts also if scores are NaN.
inline void choose_experts(const Experts& experts, const float* scores, int32_t* chosen, float* weights) {
  int count = 0;
  for (int one = 0; one < experts.count; ++one) {
    if (count == experts.chosen && !(scores[one] > scores[chosen[count - 1]])) continue;
    int place = count < experts.chosen ? count++ : count - 1;
    for (; place > 0 && scores[one] > scores[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
    chosen[place] = one;
  }
  const float largest = scores[chosen[0]];
  float total = 0.0f;
  for (int i = 0; i < experts.chosen; ++i) total += weights[i] = std::exp(scores[chosen[i]] - largest);
  if (experts.of_all) {
    total = 0.0f;
    for (int one = 0; one < experts.count; ++one) total += std::exp(scores[one] - largest);
  }
  for (int i = 0; i < experts.chosen; ++i) weights[i] /= total;
}

// Copies a row of a product's left operand.
inline void copy_row(const Inputs& from, int row, const Inputs& to, int place, int inputs, bool quantized) {
  for (int k = 0; k < inputs; k += kTile) {
    if (!quantized) {
      std::memcpy(to.rows.at(place, k), from.rows.at(row, k), sizeof(operand) * kTile);
      continue;
    }
    const RowGroup* source = from.quantized.at(row, k / kTile);
    RowGroup* target = to.quantized.at(place, k / kTile);
    std::memcpy(target->codes[place % 16], source->codes[row % 16], kTile);
    target->scale[place % 16] = source->scale[row % 16];
    target->scaled_sum[place % 16] = source->scaled_sum[row % 16];
    target->minus_sum[place % 16] = source->minus_sum[row % 16];
    target->minus_first[place % 16] = source->minus_first[row % 16];
  }
}

// The mixtures of a step's layers.
class Mixture {
 public:
  // `x` is the residual of all tokens, [tokens][stride]. Without experts nothing is allocated.
  Mixture(const Decoder& d, State& s, int tokens, float* x, int stride)
      : d_(d), e_(d.experts), s_(s.mixture), team_(*s.team), tokens_(tokens), x_(x), stride_(stride),
        inputs_(padded(d.hidden, kTile)), inner_(padded(d.experts.intermediate, kTile)), scored_(padded(d.experts.count, 16)) {
    if (!e_.count) return;
    const int routed = tokens * e_.chosen, rows = routed + 15 * std::min(e_.count, routed);
    s_.plain.at_least(static_cast<size_t>(tokens) * inputs_);
    s_.scores.at_least(static_cast<size_t>(tokens) * scored_);
    s_.chosen.resize(routed);
    s_.weights.resize(routed);
    s_.places.resize(routed);
    normed_ = operands(s_.normed, s_.quantized_normed, tokens, inputs_);
    routed_ = operands(s_.routed, s_.quantized_routed, rows, inputs_);
    gated_ = operands(s_.gated, s_.quantized_gated, rows, inner_);
  }

  // Adds the experts' results to the residual. Called by every thread of the team.
  void run(const Layer& layer, int thread) {
    team_.each(tokens_, [&](int token) {
      const float* row = x_ + static_cast<size_t>(token) * stride_;
      normalize(row, d_.hidden, layer.mlp_norm, d_.epsilon, layer.gates, normed_, token, false, plain(token));
    });
    score(layer);
    team_.each(tokens_, [&](int token) { choose(layer, token); });
    if (thread == 0) group();
    team_.barrier();
    team_.each(tokens_ * e_.chosen, [&](int item) { gather(layer, item); });
    team_.each(static_cast<int>(s_.ranges.size()), [&](int item) { gate(layer, s_.ranges[item]); });
    const int at_once = down_columns();
    team_.each((stride_ + at_once - 1) / at_once, [&](int item) { add_down(layer, item, at_once); });
  }

 private:
  static constexpr int kGateColumns = 192;  // of a range
  static constexpr int kDownColumns = 48;
  static constexpr int kScoredRows = 4 * kPanelRows;

  // Whether some experts are strips, or not.
  bool some_experts(bool strips) const {
    return std::any_of(d_.layer, d_.layer + d_.layers, [=](const Layer& one) { return one.router && bool(one.gates.strips) == strips; });
  }

  // Room for rows of the kinds that the experts multiply.
  Inputs operands(Buffer<operand>& rows, Buffer<RowGroup>& groups, int count, int inputs) const {
    Inputs found{{nullptr, inputs}, {nullptr, inputs / kTile}};
    const int tall = padded(count, kPiece);
    if (some_experts(false)) found.rows.data = rows.at_least(static_cast<size_t>(tall) * inputs);
    if (some_experts(true)) found.quantized.data = groups.at_least(row_groups(tall, inputs));
    return found;
  }

  float* plain(int token) const { return s_.plain.at_least(0) + static_cast<size_t>(token) * inputs_; }
  float* scores(int token) const { return s_.scores.at_least(0) + static_cast<size_t>(token) * scored_; }

  // The router's products, in float32: a rounding may choose another expert.
  void score(const Layer& layer) {
    const int columns = scored_ / kColumns, blocks = (tokens_ + kScoredRows - 1) / kScoredRows;
    team_.each(columns * blocks, [&](int item) {
      const int column = item % columns * kColumns, row = item / columns * kScoredRows;
      const Strided<float> left{plain(row), static_cast<size_t>(inputs_)};
      const PackedColumns<float> right{layer.router + static_cast<size_t>(column) * inputs_, 0, nullptr};
      any_panels<float>(left, right, std::min(kScoredRows, tokens_ - row), kColumns, inputs_, scores(row) + column, scored_);
    });
  }

  void choose(const Layer& layer, int token) {
    float* found = scores(token);
    for (int one = 0; layer.router_bias && one < e_.count; ++one) found[one] += layer.router_bias[one];
    choose_experts(e_, found, s_.chosen.data() + token * e_.chosen, s_.weights.data() + token * e_.chosen);
  }

  // Gives each expert's rows adjacent places, from a multiple of 16 on, in the order of the tokens.
  void group() {
    s_.counts.assign(e_.count, 0);
    s_.first.resize(e_.count);
    s_.next.resize(e_.count);
    for (const int32_t one : s_.chosen) ++s_.counts[one];
    int row = 0;
    for (int one = 0; one < e_.count; ++one) {
      s_.first[one] = s_.next[one] = row;
      row += padded(s_.counts[one], 16);
    }
    s_.rows.resize(row);
    for (size_t item = 0; item < s_.chosen.size(); ++item) {
      s_.places[item] = s_.next[s_.chosen[item]]++;
      s_.rows[s_.places[item]] = {static_cast<int32_t>(item) / e_.chosen, s_.weights[item]};
    }
    plan_gates();
  }

  // Splits the gates of all experts into ranges, of which each prefetches those that its thread most often has next.
  void plan_gates() {
    const int columns = 2 * e_.intermediate;
    s_.ranges.clear();
    for (int one = 0; one < e_.count; ++one) {
      each_block(one, [&](int row, int rows) {
        for (int column = 0; column < columns; column += kGateColumns) {
          s_.ranges.push_back({row, rows, one * columns + column, std::min(kGateColumns, columns - column)});
        }
      });
    }
    for (size_t i = 0, next = team_.size(); next < s_.ranges.size(); ++i, ++next) s_.ranges[i].next = s_.ranges[next].column;
  }

  // Calls work(row, rows) for the rows of an expert, kMaxRows at most at once.
  template <typename Work>
  void each_block(int expert, const Work& work) const {
    for (int done = 0; done < s_.counts[expert]; done += kMaxRows) {
      work(s_.first[expert] + done, std::min(kMaxRows, s_.counts[expert] - done));
    }
  }

  void gather(const Layer& layer, int item) {
    const int place = s_.places[item];
    const bool quantized = static_cast<bool>(layer.gates.strips);
    copy_row(normed_, item / e_.chosen, routed_, place, inputs_, quantized);
    // Weights of padding are zero, but zero times a stale value may be NaN.
    if (!quantized && e_.intermediate % kTile) std::memset(gated_.rows.at(place, e_.intermediate), 0, sizeof(operand) * 16);
  }

  Vector gated(const Layer& layer, const float* sums, int column) const {
    Vector g = load(sums), up = load(sums + 16);
    if (layer.gates_bias) {
      g = plus(g, load(layer.gates_bias + column));
      up = plus(up, load(layer.gates_bias + column + 16));
    }
    return e_.limit == 0.0f ? gated_silu(g, up) : clamped_gate(g, up, e_.limit, e_.alpha);
  }

  // Gated values of 32 columns at once.
  void gate(const Layer& layer, const Range& range) {
    const int base = range.column / (2 * e_.intermediate) * 2 * e_.intermediate;
    if (layer.gates.strips) return gate_quantized(layer, range, base);
    product(layer.gates, {e_.count * 2 * e_.intermediate, inputs_}, routed_, range, [&](int row, int column, int, const float* sums) {
      operand* to = gated_.rows.at(row, (column - base) / 2);
      for (int i = 0; i < 16; i += kLanes) put_lanes(to + i, gated(layer, sums + i, column + i));
    });
  }

  // The same as codes: 64 columns are a group of 32 gated values, except for the last 32.
  void gate_quantized(const Layer& layer, const Range& range, int base) {
    product(layer.gates.strips, routed_.quantized, range, [&](int row, int column, int columns, const float* sums) {
      alignas(64) float line[kTile] = {};
      for (int half = 0; half < columns; half += 32) {
        for (int i = 0; i < 16; i += kLanes) store(line + half / 2 + i, gated(layer, sums + half + i, column + half + i));
      }
      quantize(line, gated_.quantized.at(row, (column - base) / 64), row % 16);
    });
  }

  // Columns of a piece of the last product. All gated values are read once for each: of many rows there are few pieces.
  int down_columns() const {
    if (tokens_ <= kPiece) return kDownColumns;
    const int pieces = 4 * team_.size();
    return std::max(kDownColumns, padded((stride_ + pieces - 1) / pieces, kPiece));
  }

  // The next expert that has rows; the number of experts if there is none.
  int next_expert(int expert) const {
    while (++expert < e_.count && s_.counts[expert] == 0) {}
    return expert;
  }

  // Adds some columns of all experts' results, one expert after the other.
  void add_down(const Layer& layer, int item, int at_once) {
    const int column = item * at_once, columns = std::min(at_once, stride_ - column);
    for (int one = next_expert(-1), next; one < e_.count; one = next) {
      next = next_expert(one);
      each_block(one, [&](int row, int rows) {
        const Range range{row, rows, one * stride_ + column, columns, 0, 0, next < e_.count ? next * stride_ + column : -1};
        product(layer.down, {e_.count * stride_, inner_}, gated_, range, [&](int place, int at, int width, const float* sums) {
          const Routed& routed = s_.rows[place];
          float* to = x_ + static_cast<size_t>(routed.token) * stride_ + (at - one * stride_);
          for (int i = 0; i < width; i += kLanes) {
            Vector found = load(sums + i);
            if (layer.down_bias) found = plus(found, load(layer.down_bias + at + i));
            store(to + i, times_plus(found, filled(routed.weight), load(to + i)));
          }
        });
      });
    }
  }

  const Decoder& d_;
  const Experts& e_;
  MixtureState& s_;
  Team& team_;
  int tokens_;
  float* x_;
  int stride_, inputs_, inner_, scored_;  // of the residual, the experts' two products, and the router's scores
  Inputs normed_{}, routed_{}, gated_{};  // of tokens, and of the rows of all experts
};

}  // namespace quire
