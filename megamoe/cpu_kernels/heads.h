// One head of attention at one position.
#pragma once
#include "numbers.h"

// Each pair (x_i, x_{i + half}) turned by the position's angle (Su et al. 2021, RoFormer, section 3.2), in halves as
// Megatron-Core does; cosine, sine [half]. `sign` is 1, or -1 for the way back.
template <typename number>
static inline void turn(const number* head, number* turned, int64_t half, const float* cosine, const float* sine,
                        float sign) {
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    const float first = to_float(head[i]), second = to_float(head[i + half]), sin = sign * sine[i];
    from_float(first * cosine[i] - second * sin, turned[i]);
    from_float(second * cosine[i] + first * sin, turned[i + half]);
  }
}
