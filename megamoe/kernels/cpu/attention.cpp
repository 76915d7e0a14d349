// Causal attention in fp32, with rotary positions, by the BLAS that is handed in. A thread takes whole heads; scores
// exist for BLOCK queries at a time, over the keys that these see, and are worked out again in the backward pass.
//
// Sizes: S positions, B sequences, N query heads, G key heads (N / G queries share one), D columns of a head.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "blas.h"
#include "heads.h"
#include "numbers.h"
#include "scratch.h"

namespace {

constexpr int64_t BLOCK = 64;

// Heads as they stand in memory, [S, B, heads, D] with strides in numbers, the last of 1.
struct Heads {
  float* data;
  int64_t s, b, n;
  float* at(int64_t position, int64_t sequence, int64_t head) const {
    return data + position * s + sequence * b + head * n;
  }
};

struct Sizes {
  int64_t positions, batch, heads, groups, columns;
};

// cosine, sine [S, D / 2], or null where nothing is turned.
struct Angles {
  const float *cosine, *sine;
};

// Positions stand far from each other: those to come are asked for early, to read or to write.
template <int write>
void prefetch(Heads heads, int64_t position, int64_t last, int64_t b, int64_t n, int64_t columns) {
  constexpr int64_t ahead = 8;
  if (position + ahead >= last) return;
  for (int64_t d = 0; d < columns; d += 16) __builtin_prefetch(heads.at(position + ahead, b, n) + d, write);
}

// Positions first .. last-1 of a head -> to [last - first, D], turned, times `scale`.
void pack(Heads heads, int64_t first, int64_t last, int64_t b, int64_t n, int64_t columns, Angles angles, float scale,
          float* to) {
  const int64_t half = columns / 2;
  for (int64_t s = first; s < last; s++, to += columns) {
    const float* from = heads.at(s, b, n);
    prefetch<0>(heads, s, last, b, n, columns);
    if (angles.cosine)
      turn(from, to, half, angles.cosine + s * half, angles.sine + s * half, 1.0f);
    else
      std::memcpy(to, from, columns * sizeof(float));
    if (scale == 1.0f) continue;
#pragma omp simd
    for (int64_t d = 0; d < columns; d++) to[d] *= scale;
  }
}

// The way back: from [last - first, D], times `scale`, turned back -> positions first .. last-1 of a head.
void unpack(float* from, Heads heads, int64_t first, int64_t last, int64_t b, int64_t n, int64_t columns,
            Angles angles, float scale) {
  const int64_t half = columns / 2;
  for (int64_t s = first; s < last; s++, from += columns) {
    float* to = heads.at(s, b, n);
    prefetch<1>(heads, s, last, b, n, columns);
#pragma omp simd
    for (int64_t d = 0; d < columns; d++) from[d] *= scale;
    if (angles.cosine)
      turn(from, to, half, angles.cosine + s * half, angles.sine + s * half, -1.0f);
    else
      std::memcpy(to, from, columns * sizeof(float));
  }
}

// So many of `count` that no odd ones are left behind the last whole vector, if they can be had.
int64_t whole_vectors(int64_t seen, int64_t count) { return std::min((seen + 15) / 16 * 16, count); }

// scores [count] -> e^(score - their largest), 0 from `seen` on; the sum, and the logarithm of the plain sum.
float softmax(float* scores, int64_t seen, int64_t count, float& log_sum) {
  float largest = scores[0], sum = 0;
  const int64_t passed = whole_vectors(seen, count);
  for (int64_t i = seen; i < passed; i++) scores[i] = -INFINITY;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < passed; i++) largest = scores[i] > largest ? scores[i] : largest;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < passed; i++) {
    scores[i] = exponential(scores[i] - largest);
    sum += scores[i];
  }
  std::memset(scores + seen, 0, (count - seen) * sizeof(float));
  log_sum = largest + std::log(sum);
  return sum;
}

}  // namespace

// out [S, B, N, D] = softmax(scale * queries * keys^T) * values; log_sum [B, N, S] is kept for the backward pass.
extern "C" int64_t attention_fp32(sgemm call, float* query, int64_t q_s, int64_t q_b, int64_t q_n, float* key,
                               int64_t k_s, int64_t k_b, int64_t k_n, float* value, int64_t v_s, int64_t v_b,
                               int64_t v_n, int64_t positions, int64_t batch, int64_t heads, int64_t groups,
                               int64_t columns, const float* cosine, const float* sine, double scale, float* out,
                               float* log_sum, int threads) {
  return memory_missed([=] {
    const Heads queries = {query, q_s, q_b, q_n}, keys = {key, k_s, k_b, k_n}, values = {value, v_s, v_b, v_n};
    const Heads outputs = {out, batch * heads * columns, heads * columns, columns};
    const Angles angles = {cosine, sine}, none = {nullptr, nullptr};
    const Blas blas = {call};
    const Scratch<float> scratch(threads, (2 * positions + 2 * BLOCK) * columns + BLOCK * positions);
#pragma omp parallel num_threads(threads)
    {
      float *all_keys = scratch.own(), *all_values = all_keys + positions * columns;
      float *own = all_values + positions * columns, *sums = own + BLOCK * columns, *scores = sums + BLOCK * columns;
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < batch * heads; task++) {
        const int64_t b = task / heads, n = task % heads, g = n * groups / heads;
        pack(keys, 0, positions, b, g, columns, angles, 1.0f, all_keys);
        pack(values, 0, positions, b, g, columns, none, 1.0f, all_values);
        for (int64_t first = 0; first < positions; first += BLOCK) {
          const int64_t last = std::min(first + BLOCK, positions), count = last - first;
          float factors[BLOCK];
          pack(queries, first, last, b, n, columns, angles, float(scale), own);
          blas.multiply(own, false, all_keys, true, count, last, columns, scores);
          for (int64_t i = 0; i < count; i++)
            factors[i] = 1 / softmax(scores + i * last, first + i + 1, last, log_sum[task * positions + first + i]);
          blas.multiply(scores, false, all_values, false, count, columns, last, sums);
          for (int64_t i = 0; i < count; i++) {
            float* to = outputs.at(first + i, b, n);
            prefetch<1>(outputs, first + i, last, b, n, columns);
#pragma omp simd
            for (int64_t d = 0; d < columns; d++) to[d] = sums[i * columns + d] * factors[i];
          }
        }
      }
    }
  });
}

// The gradients of attention: gradient and out [S, B, N, D] -> those of queries, keys and values. A thread takes a
// key head with all its queries, in order: the same sums whatever the threads.
extern "C" int64_t attention_backward_fp32(
    sgemm call, float* query, int64_t q_s, int64_t q_b, int64_t q_n, float* key, int64_t k_s, int64_t k_b, int64_t k_n,
    float* value, int64_t v_s, int64_t v_b, int64_t v_n, int64_t positions, int64_t batch, int64_t heads,
    int64_t groups, int64_t columns, const float* cosine, const float* sine, double scale, float* out,
    const float* log_sum, float* gradient, float* to_query, int64_t tq_s, int64_t tq_b, int64_t tq_n, float* to_key,
    int64_t tk_s, int64_t tk_b, int64_t tk_n, float* to_value, int64_t tv_s, int64_t tv_b, int64_t tv_n, int threads) {
  return memory_missed([=] {
    const Heads queries = {query, q_s, q_b, q_n}, keys = {key, k_s, k_b, k_n}, values = {value, v_s, v_b, v_n};
    const Heads to_queries = {to_query, tq_s, tq_b, tq_n}, to_keys = {to_key, tk_s, tk_b, tk_n};
    const Heads to_values = {to_value, tv_s, tv_b, tv_n};
    const Heads outputs = {out, batch * heads * columns, heads * columns, columns};
    const Heads gradients = {gradient, outputs.s, outputs.b, outputs.n};
    const Angles angles = {cosine, sine}, none = {nullptr, nullptr};
    const Blas blas = {call};
    const int64_t whole = positions * columns, part = BLOCK * columns, shared = heads / groups;
    const Scratch<float> scratch(threads, 4 * whole + 3 * part + 2 * BLOCK * positions);
#pragma omp parallel num_threads(threads)
    {
      float *all_keys = scratch.own(), *all_values = all_keys + whole, *key_sums = all_values + whole;
      float *value_sums = key_sums + whole, *own = value_sums + whole, *sent = own + part, *sums = sent + part;
      float *shares = sums + part, *slopes = shares + BLOCK * positions;
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < batch * groups; task++) {
        const int64_t b = task / groups, g = task % groups;
        pack(keys, 0, positions, b, g, columns, angles, 1.0f, all_keys);
        pack(values, 0, positions, b, g, columns, none, 1.0f, all_values);
        std::memset(key_sums, 0, 2 * whole * sizeof(float));
        for (int64_t n = g * shared; n < (g + 1) * shared; n++) {
          const float* log_sums = log_sum + (b * heads + n) * positions;
          for (int64_t first = 0; first < positions; first += BLOCK) {
            const int64_t last = std::min(first + BLOCK, positions), count = last - first;
            pack(queries, first, last, b, n, columns, angles, float(scale), own);
            pack(gradients, first, last, b, n, columns, none, 1.0f, sent);
            blas.multiply(own, false, all_keys, true, count, last, columns, shares);
            blas.multiply(sent, false, all_values, true, count, last, columns, slopes);
            for (int64_t i = 0; i < count; i++) {
              float *share = shares + i * last, *slope = slopes + i * last;
              const float *row = outputs.at(first + i, b, n), *from = sent + i * columns, logarithm = log_sums[first + i];
              const int64_t seen = first + i + 1, passed = whole_vectors(seen, last);
              prefetch<0>(outputs, first + i, last, b, n, columns);
              float mean = 0;
#pragma omp simd reduction(+ : mean)
              for (int64_t d = 0; d < columns; d++) mean += row[d] * from[d];
#pragma omp simd
              for (int64_t j = 0; j < passed; j++) {
                share[j] = exponential(share[j] - logarithm);
                slope[j] = share[j] * (slope[j] - mean);
              }
              std::memset(share + seen, 0, (last - seen) * sizeof(float));
              std::memset(slope + seen, 0, (last - seen) * sizeof(float));
            }
            blas.multiply(shares, true, sent, false, last, columns, count, value_sums, true);
            blas.multiply(slopes, true, own, false, last, columns, count, key_sums, true);
            blas.multiply(slopes, false, all_keys, false, count, columns, last, sums);
            unpack(sums, to_queries, first, last, b, n, columns, angles, float(scale));
          }
        }
        unpack(key_sums, to_keys, 0, positions, b, g, columns, angles, 1.0f);
        unpack(value_sums, to_values, 0, positions, b, g, columns, none, 1.0f);
      }
    }
  });
}
