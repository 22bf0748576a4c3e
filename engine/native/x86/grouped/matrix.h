// Matrices of a model, of either kind: bfloat16 or packed strips.
#pragma once

#include <cstdint>
#include <cstring>

#include "../products.h"
#include "format.h"
#include "pack.h"
#include "products.h"
#include "rows.h"

namespace quire {

struct Matrix {
  const bf16* dense;     // packed; null if there are strips
  Strips strips;
  const int32_t* order;  // null, or the input that each column of strips multiplies
};

// Left operand of a product with either kind.
struct Inputs {
  Rows rows;
  QuantizedRows quantized;
  QuantizedRows rest = {};  // what rounding left, where rows are quantized twice
  Sums unordered = {};      // rows before they are quantized, where the matrix has an order that they are not made in
};

// Outputs and inputs of a matrix, padded to 16 and to 32.
struct MatrixSize {
  int outputs, inputs;
};

// Multiplies a range of a matrix.
template <typename Take>
void product(const Matrix& m, const MatrixSize& size, const Inputs& a, const Range& range, const Take& take) {
  if (m.strips) return product(m.strips, a.quantized, range, take);
  product(Packed{m.dense, size.outputs, size.inputs}, a.rows, range, take);
}

inline void product_to(const Strips& strips, const QuantizedRows& a, const Range& range, const Sums& to, bool add) {
  product(strips, a, range, [&](int row, int column, int columns, const float* sums) {
    put_sums(sums, columns, to.at(row, column), add);
  });
}

inline void product_to(const Matrix& m, const MatrixSize& size, const Inputs& a, const Range& range, const Sums& to, bool add) {
  if (!m.strips) return product_to(Packed{m.dense, size.outputs, size.inputs}, a.rows, range, to, add);
  product_to(m.strips, a.quantized, range, to, add);
}

// Reads the weights of one output as float32.
inline void read_output(const Matrix& m, int inputs, int output, float* to) {
  const int strip = output / kStrip, n = output % kStrip;
  if (m.strips) {
    const Strip& of_output = m.strips.first[strip];
    with_weight_format(of_output.format, [&](auto number) {
      read_output<kFormats[number]>(of_output.data, inputs, n, m.order, to);
    });
    return;
  }
  const bf16* from = m.dense + static_cast<size_t>(strip) * padded(inputs, kTile) * kStrip + n * 2;
  for (int k = 0; k < inputs; ++k) to[k] = widened(from[k / 2 * 32 + k % 2]);
}

}  // namespace quire
