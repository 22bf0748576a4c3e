// A Llama-shaped model and a batch as the bindings pass them, and the arithmetic of single rows.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "grouped/matrix.h"
#include "lanes.h"
#include "numbers.h"
#include "products.h"

namespace quire {

// With a router, `gates` and `down` have the outputs of all experts one after the other, those of each padded to 16, and
// no order.
struct Layer {
  Matrix projections;  // q, k, v one after the other
  Matrix output;
  Matrix gates;  // 16 columns of the gate, 16 of the product that it gates, and so on; strips only if `down` has them
  Matrix down;   // strips if `gates` has them
  const float* attention_norm;
  const float* mlp_norm;
  const float* projection_bias;  // or null
  const float* query_norm;       // or null
  const float* key_norm;         // or null
  const float* output_bias;      // or null
  const float* sinks;            // or null, of each query head
  const float* router;           // null: no experts; [experts / 16][hidden][16], zero where experts or inputs (to 32) are padded
  const float* router_bias;      // or null
  const float* gates_bias;       // or null, of the experts, in the order of `gates`
  const float* down_bias;        // or null, the same of `down`
  int32_t window;                // 0: none
};

// Mixtures of experts. Weights of chosen experts are a softmax of their scores, or that of all experts' scores (`of_all`).
struct Experts {
  int32_t count;   // 0: none
  int32_t chosen;  // for each row
  int32_t intermediate;
  int32_t of_all;
  float limit, alpha;  // of clamped gates; limit 0: gated SiLU
};

struct Decoder {
  int32_t layers, hidden, heads, kv_heads, head_size, intermediate, vocabulary;
  float epsilon, scaling;
  Experts experts;
  const Layer* layer;
  Matrix embedding;  // the outputs are tokens; rows are read in the order of their inputs
  Matrix head;       // the same if they are tied
  const float* final_norm;
  const float* cosine;  // [positions][head size / 2]
  const float* sine;
};

// The cache of one layer, whose K begins at `data` in block 0.
struct CacheView {
  void* data;
  int64_t block_stride;
  int64_t value_offset;
  int64_t key_head_stride, value_head_stride;
  int32_t block_size, heads, key_size, value_size;
  int32_t type;  // 1: bfloat16, 3: codes
  int32_t kind;  // of its blocks
};

inline Cache cache_of(const CacheView& c) {
  const Part key{0, c.key_head_stride, c.key_size}, value{c.value_offset, c.value_head_stride, c.value_size};
  return {c.data, c.block_stride, key, value, c.block_size, c.heads};
}

// Slots and tables in one kind of blocks.
struct Places {
  const int64_t* slots;   // [tokens]
  const int32_t* tables;  // [sequences][width]
  int32_t width;
};

struct Batch {
  int32_t tokens, sequences, rows;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* first;
  const int32_t* ends;
  const int32_t* places;  // [rows] tokens whose logits are requested
  const Places* kinds;
};

// The rows of a step that its logits depend on in the last layer: of each sequence the tokens from the first requested one on.
struct LastRows {
  bool fewer = false;  // than the step's tokens
  std::vector<int32_t> kept;                     // [rows] their tokens
  std::vector<int32_t> first, positions, places;  // as in Batch

  // Finds them, and returns their number; 0 if they are more than `most`, or about as many as the tokens.
  int plan(const Batch& b, int most) {
    std::vector<int32_t> begins(b.first + 1, b.first + 1 + b.sequences);
    const auto sequence_of = [&](int place) { return std::upper_bound(b.first, b.first + b.sequences, place) - b.first - 1; };
    for (int row = 0; row < b.rows; ++row) {
      int32_t& begin = begins[sequence_of(b.places[row])];
      begin = std::min(begin, b.places[row]);
    }
    kept.clear();
    first.assign(1, 0);
    for (int i = 0; i < b.sequences; ++i) {
      for (int token = begins[i]; token < b.first[i + 1]; ++token) kept.push_back(token);
      first.push_back(static_cast<int32_t>(kept.size()));
    }
    const int rows = static_cast<int>(kept.size());
    fewer = rows <= most && rows <= b.tokens / 2;
    positions.clear();
    for (const int32_t token : kept) positions.push_back(b.positions[token]);
    places.clear();
    for (int row = 0; row < b.rows; ++row) {
      const auto i = sequence_of(b.places[row]);
      places.push_back(b.places[row] - begins[i] + first[i]);
    }
    return fewer ? rows : 0;
  }

  // Keeps these rows of the residual, and returns their batch: its tokens need only queries, since K and V are in the cache.
  Batch keep(Batch b, float* x, int stride) const {
    for (size_t row = 0; row < kept.size(); ++row) {
      std::memmove(x + row * stride, x + static_cast<size_t>(kept[row]) * stride, sizeof(float) * stride);
    }
    b.tokens = static_cast<int32_t>(kept.size());
    b.first = first.data();
    b.positions = positions.data();
    b.places = places.data();
    return b;
  }
};

inline bool has_strips(const Decoder& d) {
  return d.head.strips || std::any_of(d.layer, d.layer + d.layers, [](const Layer& layer) {
    return layer.projections.strips || layer.output.strips || layer.gates.strips;
  });
}

inline float root_of_mean_square(const float* x, int size, float epsilon) {
  float squares = 0.0f;
  for (int i = 0; i < size; ++i) squares += x[i] * x[i];
  return std::sqrt(squares / static_cast<float>(size) + epsilon);
}

// Stores a normalized row as the left operand of a product with `m`, in its order; `twice`: also what its quantization
// left. `plain`: null, or the row as float32, padded with zeros to a multiple of 32; then there is no order.
inline void normalize(const float* x, int size, const float* weight, float epsilon, const Matrix& m, const Inputs& out, int row,
                      bool twice, float* plain = nullptr) {
  const float factor = 1.0f / root_of_mean_square(x, size, epsilon);
  for (int k = 0; k < size; k += 32) {
    alignas(64) float line[32];
    const int real = std::min(32, size - k);
    if (m.order) {
      for (int i = 0; i < real; ++i) line[i] = x[m.order[k + i]] * factor * weight[m.order[k + i]];
    } else {
      for (int i = 0; i < real; ++i) line[i] = x[k + i] * factor * weight[k + i];
    }
    for (int i = real; i < 32; ++i) line[i] = 0.0f;
    if (plain) std::memcpy(plain + k, line, sizeof(line));
    if (m.strips && twice) {
      quantize_twice(line, out.quantized.at(row, k / 32), out.rest.at(row, k / 32), row % 16);
    } else if (m.strips) {
      quantize(line, out.quantized.at(row, k / 32), row % 16);
    } else {
      put_all(line, 32, out.rows.at(row, k));
    }
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

// GPT-OSS's gate: (up + 1) * g * sigmoid(alpha * g), both clamped. NaN passes, because it is the second operand.
inline Vector clamped_gate(Vector g, Vector up, float limit, float alpha) {
  g = smaller(filled(limit), g);
  up = larger(filled(-limit), smaller(filled(limit), up));
  const Vector e = exp2_of(smaller(times(g, filled(-alpha * kLog2OfE)), filled(125.0f)));
  return divided(times(g, plus(up, filled(1.0f))), plus(e, filled(1.0f)));
}

}  // namespace quire
