// SwiGLU of one row: silu(gate) * value (Shazeer 2020, section 2).
#pragma once
#include "numbers.h"

// 1 / (1 + e^-x); 0 from -88 down, where no float of full precision is left.
static inline float sigmoid(float x) { return x < -88.0f ? 0.0f : 1.0f / (1.0f + exponential(-x)); }

// gates, values [F] -> to [F].
template <typename number>
static inline void activate(const number* gates, const number* values, int64_t width, number* to) {
  in_blocks<1>(width, {to}, [=](int64_t f, float (&out)[1]) {
    const float gate = to_float(gates[f]);
    out[0] = gate * sigmoid(gate) * to_float(values[f]);
  });
}

// The gradient [F] -> to_gates, to_values [F], which may be the gates and values themselves.
template <typename number>
static inline void activate_backward(const number* gradient, const number* gates, const number* values, int64_t width,
                                     number* to_gates, number* to_values) {
  in_blocks<2>(width, {to_gates, to_values}, [=](int64_t f, float (&out)[2]) {
    const float gate = to_float(gates[f]), value = to_float(values[f]), sent = to_float(gradient[f]);
    const float share = sigmoid(gate);
    out[0] = sent * value * share * (1.0f + gate * (1.0f - share));
    out[1] = sent * gate * share;
  });
}

// The same with the activation once more, to active [F], which may be the gradient itself. Written out, for what both
// have in common as a function of its own is not vectorised by GCC 12, and takes ten times as long.
template <typename number>
static inline void activate_again(const number* gradient, const number* gates, const number* values, int64_t width,
                                  number* to_gates, number* to_values, number* active) {
  in_blocks<3>(width, {to_gates, to_values, active}, [=](int64_t f, float (&out)[3]) {
    const float gate = to_float(gates[f]), value = to_float(values[f]), sent = to_float(gradient[f]);
    const float share = sigmoid(gate), open = gate * share;
    out[0] = sent * value * share * (1.0f + gate * (1.0f - share));
    out[1] = sent * open;
    out[2] = open * value;
  });
}
