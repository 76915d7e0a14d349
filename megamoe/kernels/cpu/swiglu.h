// SwiGLU of one row: silu(gate) * value (Shazeer 2020, section 2).
#pragma once
#include "numbers.h"

// 1 / (1 + e^-x); 0 from -88 down, where no float of full precision is left.
static inline float sigmoid(float x) { return x < -88.0f ? 0.0f : 1.0f / (1.0f + exponential(-x)); }

// row [2F] of gate | value -> to [F].
template <typename number>
static inline void activate(const number* row, int64_t width, number* to) {
  const number* values = row + width;
#pragma omp simd
  for (int64_t f = 0; f < width; f++) {
    const float gate = to_float(row[f]);
    from_float(gate * sigmoid(gate) * to_float(values[f]), to[f]);
  }
}

// The gradient [F] -> to_row [2F], which may be the row itself; the same pass writes the activation to `active`, if not
// null.
template <typename number>
static inline void activate_backward(const number* gradient, const number* row, int64_t width, number* to_row,
                                     number* active = nullptr) {
  const number* values = row + width;
  number* to_values = to_row + width;
  const auto at = [&](int64_t f) {
    const float gate = to_float(row[f]), value = to_float(values[f]), sent = to_float(gradient[f]);
    const float share = sigmoid(gate), open = gate * share;
    from_float(sent * open, to_values[f]);
    from_float(sent * value * share * (1.0f + gate * (1.0f - share)), to_row[f]);
    return open * value;
  };
  if (active) {
#pragma omp simd
    for (int64_t f = 0; f < width; f++) from_float(at(f), active[f]);
  } else {
#pragma omp simd
    for (int64_t f = 0; f < width; f++) at(f);
  }
}
