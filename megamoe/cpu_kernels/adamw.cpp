// The optimiser's passes over all parameters: over many tensors at once, cut into pieces that the threads share.
#include <cmath>
#include <vector>

#include "numbers.h"
#include "scratch.h"

namespace {

constexpr int64_t PIECE = 1 << 14;  // numbers

struct Piece {
  int64_t tensor, first, last;
};

std::vector<Piece> pieces_of(const int64_t* counts, int64_t tensors) {
  std::vector<Piece> pieces;
  for (int64_t t = 0; t < tensors; t++)
    for (int64_t first = 0; first < counts[t]; first += PIECE)
      pieces.push_back({t, first, first + PIECE < counts[t] ? first + PIECE : counts[t]});
  return pieces;
}

}  // namespace

// Of all numbers, in double over the sums of the pieces, which do not depend on the threads.
extern "C" int64_t sum_of_squares(const float* const* values, const int64_t* counts, int64_t tensors, double* total,
                               int threads) {
  return memory_missed([=] {
    const std::vector<Piece> pieces = pieces_of(counts, tensors);
    std::vector<float> sums(pieces.size());
#pragma omp parallel for num_threads(threads) schedule(static)
    for (size_t p = 0; p < pieces.size(); p++) {
      const float* from = values[pieces[p].tensor];
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = pieces[p].first; i < pieces[p].last; i++) sum += from[i] * from[i];
      sums[p] = sum;
    }
    *total = 0;
    for (float sum : sums) *total += sum;
  });
}

// One update of AdamW (Loshchilov and Hutter 2019, algorithm 2) by `factor` times the gradients, in one pass.
// l2: instead of the decoupled decay, Adam's: so many times the weight are added to the scaled gradient.
// correction1, correction2: of each tensor, 1 - beta^step. rounded: the weights in bf16 for the model, or null.
extern "C" int64_t adamw(float* const* weights, const float* const* gradients, float* const* means, float* const* squares,
                      bf16* const* rounded, const int64_t* counts, const double* correction1,
                      const double* correction2, int64_t tensors, double factor, double lr, double beta1,
                      double beta2, double eps, double decay, double l2, int threads) {
  return memory_missed([=] {
    const std::vector<Piece> pieces = pieces_of(counts, tensors);
    const float scale = factor, keep = 1 - lr * decay, part1 = 1 - beta1, kept2 = beta2, part2 = 1 - beta2, least = eps,
                pull = l2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (size_t p = 0; p < pieces.size(); p++) {
      const auto [t, begin, end] = pieces[p];
      const float* gradient = gradients[t];
      float *weight = weights[t], *mean = means[t], *square = squares[t];
      const float step = lr / correction1[t], root = 1 / std::sqrt(correction2[t]);
      const int64_t first = begin, last = end;
#pragma omp simd
      for (int64_t i = first; i < last; i++) {
        const float slope = gradient[i] * scale + pull * weight[i];
        mean[i] += part1 * (slope - mean[i]);
        square[i] = kept2 * square[i] + part2 * slope * slope;
        weight[i] = weight[i] * keep - step * mean[i] / (std::sqrt(square[i]) * root + least);
      }
      if (!rounded) continue;
      bf16* to = rounded[t];
#pragma omp simd
      for (int64_t i = first; i < last; i++) from_float(weight[i], to[i]);
    }
  });
}
