// State kept between calls.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "attention/pieces.h"
#include "attention/scratch.h"
#include "buffer.h"
#include "grouped/rows.h"
#include "model.h"
#include "panel.h"
#include "products.h"
#include "sampler.h"
#include "team.h"

namespace quire {

// Buffers of one thread for a step's products.
struct Bench {
  Buffer<operand> normed, gated;
  Buffer<RowGroup> quantized_normed, quantized_gated, rest;
  Buffer<float> head, unordered;
};

// A row of an expert: its token, and the weight of the expert's result.
struct Routed {
  int32_t token;
  float weight;
};

// A step's rows by expert.
struct MixtureState {
  Buffer<float> plain, scores;  // [tokens][hidden], [tokens][experts], padded
  Buffer<operand> normed, routed, gated;
  Buffer<RowGroup> quantized_normed, quantized_routed, quantized_gated;
  std::vector<int32_t> chosen, places;  // [tokens][chosen] experts, and places of their rows
  std::vector<float> weights;           // the same
  std::vector<int32_t> counts, first, next;  // [experts]
  std::vector<Routed> rows;                  // of all experts
  std::vector<Range> ranges;                 // of the gates of all experts
};

struct State {
  std::mutex mutex;  // serializes callers, because team and buffers are shared
  std::unique_ptr<Team> team;
  std::vector<std::unique_ptr<Scratch>> scratch;
  Pieces pieces;
  Buffer<float> partials;
  std::vector<std::unique_ptr<Bench>> benches;
  std::vector<std::unique_ptr<Candidates>> candidates;  // of each thread
  Buffer<float> hidden;
  Buffer<operand> queries, attended, normed, gated;
  Buffer<float> plain, unordered;
  Buffer<RowGroup> quantized_attended, quantized_normed, quantized_gated, rest;
  MixtureState mixture;
  LastRows last;
};

inline QuantizedRows quantized_rows(Buffer<RowGroup>& buffer, int rows, int inputs) {
  return {buffer.at_least(row_groups(rows, inputs)), padded(inputs, kTile) / kTile};
}

inline State& state() {
  static State* one = new State;  // its threads end with the process
  return *one;
}

inline void prepare_team(int threads) {
  State& s = state();
  if (!s.team || s.team->size() != threads) {
    s.team.reset();
    s.team = std::make_unique<Team>(threads);
  }
  while (static_cast<int>(s.scratch.size()) < threads) {
    s.scratch.push_back(std::make_unique<Scratch>());
    s.benches.push_back(std::make_unique<Bench>());
    s.candidates.push_back(std::make_unique<Candidates>());
  }
}

}  // namespace quire
