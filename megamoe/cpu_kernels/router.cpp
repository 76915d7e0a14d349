// A router's passes over its scores, fp32 [T, E]: softmax of each row, each row's largest, and a mask.
#include <algorithm>
#include <cmath>

#include "numbers.h"

// Rows may be shorter than a vector: exponentials are taken of a block of them at once.
extern "C" void softmax_fp32(const float* scores, int64_t tokens, int64_t experts, float* out, int threads) {
  const int64_t block = std::max<int64_t>(1, 1024 / experts);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < tokens; first += block) {
    const int64_t last = std::min(first + block, tokens), begin = first * experts, end = last * experts;
    for (int64_t t = first; t < last; t++) {
      const float* from = scores + t * experts;
      float largest = from[0];
      for (int64_t e = 0; e < experts; e++) largest = from[e] > largest ? from[e] : largest;
      for (int64_t e = 0; e < experts; e++) out[t * experts + e] = from[e] - largest;
    }
#pragma omp simd
    for (int64_t i = begin; i < end; i++) out[i] = out[i] < -87.0f ? 0.0f : exponential(out[i]);
    for (int64_t t = first; t < last; t++) {
      float* to = out + t * experts;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t e = 0; e < experts; e++) sum += to[e];
      const float factor = 1.0f / sum;
      for (int64_t e = 0; e < experts; e++) to[e] *= factor;
    }
  }
}

extern "C" void softmax_backward_fp32(const float* gradient, const float* probs, int64_t tokens, int64_t experts,
                                      float* to_scores, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    const float *from = gradient + t * experts, *own = probs + t * experts;
    float* to = to_scores + t * experts;
    float mean = 0;
#pragma omp simd reduction(+ : mean)
    for (int64_t e = 0; e < experts; e++) mean += from[e] * own[e];
#pragma omp simd
    for (int64_t e = 0; e < experts; e++) to[e] = own[e] * (from[e] - mean);
  }
}

// NaN is above all, as PyTorch has it.
static inline bool above(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// chosen [T, count]: the places of each row's `count` largest, from the largest down; of equal ones the first.
extern "C" void top_k_fp32(const float* scores, int64_t tokens, int64_t experts, int64_t count, int64_t* chosen,
                           int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    const float* from = scores + t * experts;
    int64_t* to = chosen + t * count;
    for (int64_t e = 0, held = 0; e < experts; e++) {
      if (held == count && !above(from[e], from[to[count - 1]])) continue;
      int64_t place = held < count ? held++ : count - 1;
      for (; place > 0 && above(from[e], from[to[place - 1]]); place--) to[place] = to[place - 1];
      to[place] = e;
    }
  }
}

// out [N]: the values that are kept, and `otherwise` in place of the others.
extern "C" void masked_fp32(const float* values, const uint8_t* kept, int64_t count, double otherwise, float* out,
                            int threads) {
  const float other = float(otherwise);
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) {
    const float value = values[i];
    out[i] = kept[i] ? value : other;
  }
}
