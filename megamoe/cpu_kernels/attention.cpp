// Causal attention in fp32, with rotary positions, by the BLAS that is handed in. A thread takes whole heads; scores
// exist for BLOCK queries at a time, over the keys that these see, and are worked out again in the backward pass.
// A sequence may hold several documents: a query sees the keys of its own, and positions are counted from its start.
// Of these it sees the last `window`. A head may have a sink: one more score of the softmax, without a value. With a
// soft cap c, which is 0 for none, the scores become c * tanh(score / c).
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

// The positions of one sequence. starts [S]: where the document of each one begins; null: the sequence is one document.
struct Documents {
  const int32_t* starts;
  int64_t positions, window;
  int64_t start(int64_t position) const { return starts ? starts[position] : 0; }
  // The first key that a query sees.
  int64_t sees_from(int64_t position) const { return std::max(start(position), position + 1 - window); }
  // The end of the block of queries from `first` on: BLOCK further, or where a document ends that began before `first`.
  // So a block has the keys of one document, or it has its own keys only, at most BLOCK.
  int64_t block_end(int64_t first) const {
    const int64_t last = std::min(first + BLOCK, positions), own = start(first);
    if (own == first) return last;
    for (int64_t s = first + 1; s < last; s++)
      if (start(s) != own) return s;
    return last;
  }
};

// cosine, sine [S, D / 2], or null where nothing is turned.
struct Angles {
  const float *cosine, *sine;
  Documents documents;
  int64_t row(int64_t position) const { return position - documents.start(position); }
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
      turn(from, to, half, angles.cosine + angles.row(s) * half, angles.sine + angles.row(s) * half, 1.0f);
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
      turn(from, to, half, angles.cosine + angles.row(s) * half, angles.sine + angles.row(s) * half, -1.0f);
    else
      std::memcpy(to, from, columns * sizeof(float));
  }
}

// So many of `count` that no odd ones are left behind the last whole vector, if they can be had.
int64_t whole_vectors(int64_t seen, int64_t count) { return std::min((seen + 15) / 16 * 16, count); }

void cap_scores(float* scores, int64_t count, float cap) {
#pragma omp simd
  for (int64_t i = 0; i < count; i++) scores[i] = cap * hyperbolic_tangent(scores[i] / cap);
}

// scores [count] -> e^(score - their largest), 0 from `seen` on; the sum, and the logarithm of the plain sum. The sums
// have a term of the sink, if it is not null.
float softmax(float* scores, int64_t seen, int64_t count, const float* sink, float& log_sum) {
  float largest = scores[0], sum = 0;
  const int64_t passed = whole_vectors(seen, count);
  for (int64_t i = seen; i < passed; i++) scores[i] = -INFINITY;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < passed; i++) largest = scores[i] > largest ? scores[i] : largest;
  if (sink) {
    largest = std::max(largest, *sink);
    sum = std::exp(*sink - largest);
  }
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
// sinks [N], or null.
extern "C" int64_t attention_fp32(sgemm call, float* query, int64_t q_s, int64_t q_b, int64_t q_n, float* key,
                               int64_t k_s, int64_t k_b, int64_t k_n, float* value, int64_t v_s, int64_t v_b,
                               int64_t v_n, int64_t positions, int64_t batch, int64_t heads, int64_t groups,
                               int64_t columns, const float* cosine, const float* sine, double scale,
                               const int32_t* starts, int64_t window, double soft_cap, float* out, float* log_sum,
                               const float* sinks, int threads) {
  return memory_missed([=] {
    const Heads queries = {query, q_s, q_b, q_n}, keys = {key, k_s, k_b, k_n}, values = {value, v_s, v_b, v_n};
    const Heads outputs = {out, batch * heads * columns, heads * columns, columns};
    const Blas blas = {call};
    const float cap = float(soft_cap);
    const Scratch<float> scratch(threads, (2 * positions + 2 * BLOCK) * columns + BLOCK * positions);
#pragma omp parallel num_threads(threads)
    {
      float *all_keys = scratch.own(), *all_values = all_keys + positions * columns;
      float *own = all_values + positions * columns, *sums = own + BLOCK * columns, *scores = sums + BLOCK * columns;
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < batch * heads; task++) {
        const int64_t b = task / heads, n = task % heads, g = n * groups / heads;
        const Documents documents = {starts ? starts + b * positions : nullptr, positions, window};
        const Angles angles = {cosine, sine, documents}, none = {nullptr, nullptr, documents};
        pack(keys, 0, positions, b, g, columns, angles, 1.0f, all_keys);
        pack(values, 0, positions, b, g, columns, none, 1.0f, all_values);
        for (int64_t first = 0, last; first < positions; first = last) {
          last = documents.block_end(first);
          const int64_t count = last - first, begin = documents.sees_from(first), width = last - begin;
          float factors[BLOCK];
          pack(queries, first, last, b, n, columns, angles, float(scale), own);
          blas.multiply(own, false, all_keys + begin * columns, true, count, width, columns, scores);
          for (int64_t i = 0; i < count; i++) {
            const int64_t hidden = documents.sees_from(first + i) - begin;
            float* row = scores + i * width;
            std::memset(row, 0, hidden * sizeof(float));
            const int64_t passed = whole_vectors(first + i + 1 - begin - hidden, width - hidden);
            if (cap) cap_scores(row + hidden, passed, cap);
            factors[i] = 1 / softmax(row + hidden, first + i + 1 - begin - hidden, width - hidden,
                                     sinks ? sinks + n : nullptr, log_sum[task * positions + first + i]);
          }
          blas.multiply(scores, false, all_values + begin * columns, false, count, columns, width, sums);
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
    int64_t groups, int64_t columns, const float* cosine, const float* sine, double scale, const int32_t* starts,
    int64_t window, double soft_cap, float* out, const float* log_sum, float* gradient, float* to_query, int64_t tq_s, int64_t tq_b, int64_t tq_n,
    float* to_key, int64_t tk_s, int64_t tk_b, int64_t tk_n, float* to_value, int64_t tv_s, int64_t tv_b, int64_t tv_n,
    int threads) {
  return memory_missed([=] {
    const Heads queries = {query, q_s, q_b, q_n}, keys = {key, k_s, k_b, k_n}, values = {value, v_s, v_b, v_n};
    const Heads to_queries = {to_query, tq_s, tq_b, tq_n}, to_keys = {to_key, tk_s, tk_b, tk_n};
    const Heads to_values = {to_value, tv_s, tv_b, tv_n};
    const Heads outputs = {out, batch * heads * columns, heads * columns, columns};
    const Heads gradients = {gradient, outputs.s, outputs.b, outputs.n};
    const Blas blas = {call};
    const float cap = float(soft_cap);
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
        const Documents documents = {starts ? starts + b * positions : nullptr, positions, window};
        const Angles angles = {cosine, sine, documents}, none = {nullptr, nullptr, documents};
        pack(keys, 0, positions, b, g, columns, angles, 1.0f, all_keys);
        pack(values, 0, positions, b, g, columns, none, 1.0f, all_values);
        std::memset(key_sums, 0, 2 * whole * sizeof(float));
        for (int64_t n = g * shared; n < (g + 1) * shared; n++) {
          const float* log_sums = log_sum + (b * heads + n) * positions;
          for (int64_t first = 0, last; first < positions; first = last) {
            last = documents.block_end(first);
            const int64_t count = last - first, begin = documents.sees_from(first), width = last - begin;
            const float *seen_keys = all_keys + begin * columns, *seen_values = all_values + begin * columns;
            pack(queries, first, last, b, n, columns, angles, float(scale), own);
            pack(gradients, first, last, b, n, columns, none, 1.0f, sent);
            blas.multiply(own, false, seen_keys, true, count, width, columns, shares);
            blas.multiply(sent, false, seen_values, true, count, width, columns, slopes);
            for (int64_t i = 0; i < count; i++) {
              const int64_t hidden = documents.sees_from(first + i) - begin;
              float *share = shares + i * width + hidden, *slope = slopes + i * width + hidden;
              const float *row = outputs.at(first + i, b, n), *from = sent + i * columns, logarithm = log_sums[first + i];
              const int64_t seen = first + i + 1 - begin - hidden, passed = whole_vectors(seen, width - hidden);
              prefetch<0>(outputs, first + i, last, b, n, columns);
              float mean = 0;
#pragma omp simd reduction(+ : mean)
              for (int64_t d = 0; d < columns; d++) mean += row[d] * from[d];
              if (cap) {
#pragma omp simd
                for (int64_t j = 0; j < passed; j++) {
                  const float tangent = hyperbolic_tangent(share[j] / cap);
                  share[j] = exponential(cap * tangent - logarithm);
                  slope[j] = share[j] * (slope[j] - mean) * (1 - tangent * tangent);
                }
              } else {
#pragma omp simd
                for (int64_t j = 0; j < passed; j++) {
                  share[j] = exponential(share[j] - logarithm);
                  slope[j] = share[j] * (slope[j] - mean);
                }
              }
              std::memset(share + seen, 0, (width - hidden - seen) * sizeof(float));
              std::memset(slope + seen, 0, (width - hidden - seen) * sizeof(float));
              std::memset(share - hidden, 0, hidden * sizeof(float));
              std::memset(slope - hidden, 0, hidden * sizeof(float));
            }
            blas.multiply(shares, true, sent, false, width, columns, count, value_sums + begin * columns, true);
            blas.multiply(slopes, true, own, false, width, columns, count, key_sums + begin * columns, true);
            blas.multiply(slopes, false, seen_keys, false, count, columns, width, sums);
            unpack(sums, to_queries, first, last, b, n, columns, angles, float(scale));
          }
        }
        unpack(key_sums, to_keys, 0, positions, b, g, columns, angles, 1.0f);
        unpack(value_sums, to_values, 0, positions, b, g, columns, none, 1.0f);
      }
    }
  });
}
