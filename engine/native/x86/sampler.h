// Samples a row of logits: the token that engine/run/sampling.py gives, near ties aside.
//
// A filter keeps the most likely tokens down to some distance from the most likely one, and of those at this distance the
// first. So a filter is a bound, found by bisection over the bits of the distances, and no row is sorted. Noise is a
// function of the token: most tokens are so unlikely that a lower bound of their uniform number rules them out, and the
// logarithms are taken of few.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "buffer.h"
#include "lanes.h"

namespace quire {

// How a row is sampled. Of no filter: top_k 0, top_p 1, min_p 0, top_n_sigma 0.
struct RowDraw {
  uint64_t state;  // from which the noise of each token is counted
  float temperature, top_p, min_p, top_n_sigma;
  int32_t top_k;
};

// The bits of splitmix64 (Steele et al. 2014) for a token.
inline uint64_t noise_bits(uint64_t state, int32_t token) {
  uint64_t bits = state + static_cast<uint64_t>(token) * 0x9E3779B97F4A7C15u;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  return bits ^ (bits >> 31);
}

// Gumbel noise -log(-log(1 - u)) of bits, u rounded to float32.
inline float gumbel_noise(uint64_t bits) {
  const float uniform = static_cast<float>((static_cast<double>(bits >> 11) + 0.5) * 0x1p-53);
  return static_cast<float>(-std::log(-std::log1p(-static_cast<double>(std::min(uniform, 1.0f - 0x1p-24f)))));
}

// The tokens of one row that may be chosen, in ascending order. The buffers are kept from row to row.
class Candidates {
 public:
  // Begins with all tokens. The distance of a token is by how much its logit, divided by the temperature, is below the
  // largest. Distances are held by their bits, which have the order of the numbers; NaN is behind infinity.
  void fill(const float* logits, int count, float temperature) {
    count_ = count;
    const size_t room = static_cast<size_t>(padded(count, kChunk));
    distances_ = distance_buffer_.at_least(room);
    weights_ = weight_buffer_.at_least(room);
    tokens_ = token_buffer_.at_least(room);
    const float largest = largest_of(logits, count), factor = 1.0f / temperature;
    for (int i = 0; i < count; ++i) distances_[i] = std::bit_cast<uint32_t>((largest - logits[i]) * factor);
    for (int i = count; i < static_cast<int>(room); ++i) distances_[i] = kBeyond;
    for (int i = 0; i < count; ++i) tokens_[i] = i;
    for (size_t i = 0; i < room; i += kLanes) {
      const Vector distances = load(reinterpret_cast<const float*>(distances_ + i));
      store(weights_ + i, exp2_of(times(distances, filled(-kLog2OfE))));
    }
  }

  // Keeps tokens at least min_p times as likely as the most likely one.
  void keep_by_chance(float min_p) {
    if (min_p > 0) keep(std::bit_cast<uint32_t>(std::fabs(std::log(min_p))), kAll);
  }

  // Keeps tokens within so many standard deviations of the largest logit (Tang et al. 2024).
  void keep_by_deviation(float sigmas) {
    if (sigmas <= 0) return;
    double sum = 0, squares = 0;
    const Sum all = total();
    for (int i = 0; i < count_; ++i) sum += distances_[i] <= kFarthest ? std::bit_cast<float>(distances_[i]) : 0.0f;
    const double mean = sum / std::max(1, all.count);
    for (int i = 0; i < count_; ++i) {
      const double difference = std::bit_cast<float>(distances_[i]) - mean;
      squares += distances_[i] <= kFarthest ? difference * difference : 0.0;
    }
    const double bound = sigmas * std::sqrt(squares / std::max(1, all.count));
    keep(std::bit_cast<uint32_t>(static_cast<float>(std::min<double>(bound, std::numeric_limits<float>::max()))), kAll);
  }

  // Keeps the `most` most likely tokens.
  void keep_by_rank(int most) {
    const int count = total().count;
    if (most <= 0 || most >= count) return;
    const Bound bound = least_bound(count, [&](const Sum& sum) { return sum.count >= most; });
    keep(bound.distance, most - bound.before.count);
  }

  // Keeps a token while the more likely ones have less than this part of the probability, and always one.
  void keep_by_mass(float top_p) {
    if (top_p >= 1) return;
    const Sum all = total();
    const float wanted = top_p * all.mass;
    const Bound bound = least_bound(all.count, [&](const Sum& sum) { return sum.mass >= wanted; });
    const float each = std::exp(-std::bit_cast<float>(bound.distance));
    keep(bound.distance, static_cast<int>(std::ceil(std::clamp((wanted - bound.before.mass) / each, 1.0f, 1e9f))));
  }

  // Returns the token with the largest sum of scaled logit and noise, the first of equal ones; -1 without any.
  int32_t choose(uint64_t state) const {
    float best = kMinusInfinity, scale = std::numeric_limits<float>::max();
    int32_t chosen = -1;
    uint64_t bits[kChunk];
    for (int start = 0; start < count_; start += kChunk) {
      const int size = std::min(kChunk, count_ - start);
      for (int i = 0; i < kChunk; ++i) bits[i] = noise_bits(state, tokens_[start + i]);
      if (!may_win(bits, weights_ + start, scale)) continue;
      for (int i = 0; i < size; ++i) {
        if (distances_[start + i] > kFarthest) continue;
        const float score = gumbel_noise(bits[i]) - std::bit_cast<float>(distances_[start + i]);
        if (score > best) best = score, chosen = tokens_[start + i];
      }
      scale = std::exp(-best) * kSlack;
    }
    return chosen;
  }

 private:
  static constexpr int kChunk = 64, kAll = 1 << 30;
  static constexpr uint32_t kFarthest = 0x7f7fffff, kBeyond = 0x7f800000;  // the largest finite distance, and infinity
  static constexpr int kRoundsByValue = 12;
  static constexpr float kSlack = 1.001f;                                 // for the rounding of weights

  static float largest_of(const float* logits, int count) {
    Vector largest = filled(kMinusInfinity);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) largest = larger(load(logits + i), largest);
    float result = largest_lane(largest);
    for (; i < count; ++i) result = logits[i] > result ? logits[i] : result;
    return result;
  }

  // Whether a token can have a score of more than log(kSlack / scale). As -log(-log(1 - u)) <= -log(u), only with
  // u < weight * scale; of u the upper 24 bits are compared.
  static bool may_win(const uint64_t* bits, const float* weights, float scale) {
    int some = 0;
    for (int i = 0; i < kChunk; ++i) {
      some |= static_cast<float>(static_cast<int32_t>(bits[i] >> 40)) * 0x1p-24f <= weights[i] * scale;
    }
    return some;
  }

  struct Sum {
    int count;
    float mass;
  };
  struct Bound {
    uint32_t distance;
    Sum before;  // of the tokens that are nearer
  };

  // Sums up the tokens with a distance of `low` to `high`.
  static Sum sum_of(const uint32_t* distances, const float* weights, int count, uint32_t low, uint32_t high) {
    Sum sum{0, 0.0f};
    for (int i = 0; i < count; ++i) {
      const bool inside = distances[i] - low <= high - low;
      sum.count += inside;
      sum.mass += inside ? weights[i] : 0.0f;
    }
    return sum;
  }
  Sum total() const { return sum_of(distances_, weights_, count_, 0, kFarthest); }

  uint32_t farthest() const {
    uint32_t most = 0;
    for (int i = 0; i < count_; ++i) most = std::max(most, distances_[i] <= kFarthest ? distances_[i] : 0);
    return most;
  }

  // Returns the least distance at which the tokens up to it are enough; all of them, `inside`, are. The window has the
  // tokens of which it is not known yet whether they are within it, and others until these are too many.
  template <typename Enough>
  Bound least_bound(int inside, const Enough& enough) {
    const uint32_t* distances = distances_;
    const float* weights = weights_;
    int size = count_;
    uint32_t low = 0, high = farthest();
    Sum before{0, 0.0f};
    for (int round = 0; low < high; ++round) {
      const uint32_t middle = round < kRoundsByValue ? half_way(low, high) : low + (high - low) / 2;
      const Sum sum = sum_of(distances, weights, size, low, middle);
      const Sum together{before.count + sum.count, before.mass + sum.mass};
      if (enough(together)) {
        high = middle;
        inside = sum.count;
      } else {
        low = middle + 1;
        before = together;
        inside -= sum.count;
      }
      if (2 * inside <= size) {
        size = move_to_window(distances, weights, size, low, high);
        distances = window_distances_.at_least(0), weights = window_weights_.at_least(0);
      }
    }
    return {low, before};
  }

  // The distance in the middle: most tokens are far from the nearest one, and half of the bits stand for tiny distances.
  static uint32_t half_way(uint32_t low, uint32_t high) {
    const float middle = 0.5f * (std::bit_cast<float>(low) + std::bit_cast<float>(high));
    return std::clamp(std::bit_cast<uint32_t>(middle), low, high - 1);
  }

  // Moves the tokens with a distance of `low` to `high` to the window, from the window or elsewhere.
  int move_to_window(const uint32_t* distances, const float* weights, int count, uint32_t low, uint32_t high) {
    uint32_t* to_distances = window_distances_.at_least(count_ + kChunk);
    float* to_weights = window_weights_.at_least(count_ + kChunk);
    int moved = 0;
    for (int i = 0; i < count; i += kLanes) {
      const uint32_t selected = lanes_within(distances + i, low, high - low) & lanes_below(count - i);
      put_selected(to_distances + moved, distances + i, selected);
      put_selected(to_weights + moved, weights + i, selected);
      moved += std::popcount(selected);
    }
    return moved;
  }

  // Drops tokens beyond a bound, and of those at it all but the first `equal` ones.
  void keep(uint32_t bound, int equal) {
    int kept = 0;
    for (int i = 0; i < count_; i += kLanes) {
      uint32_t selected = lanes_within(distances_ + i, 0, bound) & lanes_below(count_ - i);
      if (!selected) continue;
      uint32_t ties = lanes_within(distances_ + i, bound, 0) & selected;
      for (; ties && equal > 0; --equal) ties &= ties - 1;
      selected &= ~ties;
      put_selected(distances_ + kept, distances_ + i, selected);
      put_selected(weights_ + kept, weights_ + i, selected);
      put_selected(tokens_ + kept, tokens_ + i, selected);
      kept += std::popcount(selected);
    }
    count_ = kept;
  }

  // A bit for each of the first `count` lanes.
  static uint32_t lanes_below(int count) { return count < kLanes ? (1u << count) - 1 : (1u << kLanes) - 1; }

  Buffer<uint32_t> distance_buffer_, window_distances_;
  Buffer<float> weight_buffer_, window_weights_;
  Buffer<int32_t> token_buffer_;
  uint32_t* distances_ = nullptr;
  float* weights_ = nullptr;  // e^-distance
  int32_t* tokens_ = nullptr;
  int count_ = 0;
};

// Returns the token of a row; the first one if none has a finite logit.
inline int32_t sample_row(const float* logits, int vocabulary, const RowDraw& draw, Candidates& candidates) {
  candidates.fill(logits, vocabulary, draw.temperature);
  candidates.keep_by_deviation(draw.top_n_sigma);
  candidates.keep_by_chance(draw.min_p);
  candidates.keep_by_rank(draw.top_k);
  candidates.keep_by_mass(draw.top_p);
  return std::max(0, candidates.choose(draw.state));
}

}  // namespace quire
