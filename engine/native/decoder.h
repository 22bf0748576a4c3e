// A whole step of a Llama-shaped decoder.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
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
  int32_t block_size, heads, head_size;
  int32_t type;
};

struct Batch {
  int32_t tokens, sequences, width, rows;
  const int32_t* token_ids;
  const int32_t* positions;
  const int64_t* slots;
  const int32_t* first;
  const int32_t* ends;
  const int32_t* tables;
  const int32_t* places;  // [rows] tokens whose logits are wanted
};

inline void normalize(const float* x, int size, const float* weight, float epsilon, bf16* out) {
  float squares = 0.0f;
  for (int i = 0; i < size; ++i) squares += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
  for (int i = 0; i < size; ++i) out[i] = narrowed(x[i] * factor * weight[i]);
}

inline void normalize_head(float* x, int size, const float* weight, float epsilon) {
  float squares = 0.0f;
  for (int i = 0; i < size; ++i) squares += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
  for (int i = 0; i < size; ++i) x[i] *= factor * weight[i];
}

inline void rotate(float* x, int size, const float* cosine, const float* sine) {
  const int half = size / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

// Runs a whole step of a decoder; `logits` is [rows][vocabulary].
inline void run_step(const Decoder* d, const CacheView* c, const Batch* b, float* logits, int32_t threads) {
#ifdef QUIRE_BF16
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  Team& team = *s.team;
  const int tokens = b->tokens, tall = padded(std::max(tokens, static_cast<int>(b->rows)), 32), size = d->head_size;
  const int queries = d->heads * size, keys = d->kv_heads * size, wide = queries + 2 * keys, wide_padded = padded(wide, 16);
  const int in = padded(d->hidden, 32), in_attended = padded(queries, 32), in_gated = padded(d->intermediate, 32);
  float* x = s.hidden.at_least(static_cast<size_t>(tokens) * d->hidden);
  float* qkv = s.projected.at_least(static_cast<size_t>(tokens) * wide_padded);
  bf16* normed = s.normed.at_least(static_cast<size_t>(tall) * in);
  bf16* attended = s.attended.at_least(static_cast<size_t>(tall) * in_attended);
  bf16* gated = s.gated.at_least(static_cast<size_t>(tall) * in_gated);
  Attention attention{{nullptr, c->block_stride, c->value_offset, c->block_size, c->heads, c->head_size},
                      {b->sequences, b->first, b->ends, b->tables, b->width},
                      {d->scaling, 0.0f, 0},
                      d->heads,
                      1};
  int planned = -1;  // window that the pieces were planned for
  float* partials = nullptr;

  const auto add = [&](const Packed& linear, const bf16* a, int item) {
    product(linear, a, tokens, item, [&](int row, int count, int column, int columns, const float* sums) {
      const int real = std::min(columns, d->hidden - column);
      for (int i = 0; i < count; ++i) {
        float* to = x + static_cast<size_t>(row + i) * d->hidden + column;
        for (int n = 0; n < real; ++n) to[n] += sums[i * kColumns + n];
      }
    });
  };
  const auto products = [] {
#ifdef QUIRE_AMX
    if (use_amx) configure_products();
#endif
  };

  team.run([&](int thread) {
    team.each(tokens, [&](int token) {
      const bf16* row = d->embedding + static_cast<size_t>(b->token_ids[token]) * d->hidden;
      for (int i = 0; i < d->hidden; ++i) x[static_cast<size_t>(token) * d->hidden + i] = widened(row[i]);
    });
    for (int number = 0; number < d->layers; ++number) {
      const Layer& layer = d->layer[number];
      team.each(tokens, [&](int token) {
        normalize(x + static_cast<size_t>(token) * d->hidden, d->hidden, layer.attention_norm, d->epsilon,
                  normed + static_cast<size_t>(token) * in);
      });
      products();
      team.each(items_of(wide, tokens), [&](int item) {
        product({layer.projections, wide_padded, in}, normed, tokens, item,
                [&](int row, int count, int column, int columns, const float* sums) {
                  for (int i = 0; i < count; ++i) {
                    float* to = qkv + static_cast<size_t>(row + i) * wide_padded + column;
                    std::memcpy(to, sums + i * kColumns, sizeof(float) * columns);
                    if (layer.projection_bias) {
                      const int real = std::min(columns, wide - column);
                      for (int n = 0; n < real; ++n) to[n] += layer.projection_bias[column + n];
                    }
                  }
                });
      });
      if (thread == 0) {
        attention.cache.data = static_cast<bf16*>(c->data) + number * c->layer_stride;
        attention.how.window = layer.window;
        if (planned != layer.window) {
          s.pieces.plan(attention, threads);
          planned = layer.window;
          partials = s.partials.at_least(static_cast<size_t>(s.pieces.partial_count) * kRows * (size + 2) + 1);
        }
      }
      team.barrier();
      team.each(tokens, [&](int token) {
        float* line = qkv + static_cast<size_t>(token) * wide_padded;
        const float* cosine = d->cosine + static_cast<size_t>(b->positions[token]) * (size / 2);
        const float* sine = d->sine + static_cast<size_t>(b->positions[token]) * (size / 2);
        for (int head = 0; head < d->heads + d->kv_heads; ++head) {
          const float* norm = head < d->heads ? layer.query_norm : layer.key_norm;
          if (norm) normalize_head(line + head * size, size, norm, d->epsilon);
          rotate(line + head * size, size, cosine, sine);
        }
        write_token(attention.cache, 1, b->slots[token], line + queries, line + queries + keys);
      });
      attend_together(team, s, thread, attention, static_cast<const float*>(qkv), wide_padded, attended, in_attended, partials);
      products();
      const int items = items_of(d->hidden, tokens), outputs = padded(d->hidden, 16);
      team.each(items, [&](int item) { add({layer.output, outputs, in_attended}, attended, item); });
      team.each(tokens, [&](int token) {
        normalize(x + static_cast<size_t>(token) * d->hidden, d->hidden, layer.mlp_norm, d->epsilon,
                  normed + static_cast<size_t>(token) * in);
      });
      const int gate_columns = 2 * padded(d->intermediate, 16);
      team.each(items_of(gate_columns, tokens), [&](int item) {
        product({layer.gates, gate_columns, in}, normed, tokens, item,
                [&](int row, int count, int column, int columns, const float* sums) {
                  for (int i = 0; i < count; ++i) {
                    for (int block = 0; block < columns; block += 32) {
                      const float* gate = sums + i * kColumns + block;
                      const int to = (column + block) / 2;
                      const __m512 g = _mm512_loadu_ps(gate);
                      // silu(g) = g / (1 + exp(-g)), by whichever exponent is not positive
                      const __m512 e = exp_negative(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(g)));
                      const __mmask16 below = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_LT_OQ);
                      const __m512 top = _mm512_mask_mul_ps(g, below, g, e);
                      const __m512 silu = _mm512_div_ps(top, _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
                      const __m512 result = _mm512_mul_ps(silu, _mm512_loadu_ps(gate + 16));
                      bf16* out = gated + static_cast<size_t>(row + i) * in_gated + to;
                      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(result));
                    }
                  }
                });
      });
      team.each(items, [&](int item) { add({layer.down, outputs, in_gated}, gated, item); });
    }
    team.each(b->rows, [&](int row) {
      normalize(x + static_cast<size_t>(b->places[row]) * d->hidden, d->hidden, d->final_norm, d->epsilon,
                normed + static_cast<size_t>(row) * in);
    });
    products();
    team.each(items_of(d->vocabulary, b->rows), [&](int item) {
      product({d->head, padded(d->vocabulary, 16), in}, normed, b->rows, item,
              [&](int row, int count, int column, int columns, const float* sums) {
                const int real = std::min(columns, d->vocabulary - column);
                for (int i = 0; i < count; ++i) {
                  std::memcpy(logits + static_cast<size_t>(row + i) * d->vocabulary + column, sums + i * kColumns,
                              sizeof(float) * real);
                }
              });
    });
#ifdef QUIRE_AMX
    if (use_amx) _tile_release();
#endif
  });
#endif
  (void)d, (void)c, (void)b, (void)logits, (void)threads;
}

}  // namespace quire
