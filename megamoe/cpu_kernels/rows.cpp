// What an MoE layer does to rows beside its products: sort, combine, activate. Each pass reads and writes its
// rows once. Sizes: T tokens, N (token, expert) pairs, H columns, F FFN columns. A row is contiguous.
#include <cstring>

#include "numbers.h"
#include "swiglu.h"

constexpr int64_t BLOCK = 256;  // columns whose sums are in registers and the nearest cache

// Places of the keys under a stable sort. key [N] in 0 .. size-1 -> order [N], the pairs by key; place [N], where
// each pair went; ends [size], where each key's pairs end. Returns 1, or 0 where a key is another number.
extern "C" int sort_by_key(const int64_t* key, int64_t count, int64_t size, int64_t* order, int64_t* place,
                           int64_t* ends) {
  std::memset(ends, 0, size * sizeof(int64_t));
  for (int64_t n = 0; n < count; n++) {
    if (uint64_t(key[n]) >= uint64_t(size)) return 0;
    ends[key[n]]++;
  }
  int64_t sum = 0;
  for (int64_t s = 0; s < size; s++) {
    int64_t load = ends[s];
    ends[s] = sum;
    sum += load;
  }
  for (int64_t n = 0; n < count; n++) {
    place[n] = ends[key[n]]++;
    order[place[n]] = n;
  }
  return 1;
}

// Rows stand anywhere in memory: those of the token to come are asked for while this one's are summed.
template <typename number>
static void prefetch_rows(const number* rows, const int64_t* row, int64_t first, int64_t last, int64_t width) {
  for (int64_t n = first; n < last; n++) {
    const char* from = reinterpret_cast<const char*>(rows + row[n] * width);
    for (int64_t byte = 0; byte < int64_t(width * sizeof(number)); byte += 64) __builtin_prefetch(from + byte);
  }
}

// out[t] = sum over t's rows of weight[n] * rows[n], in float. row [N]: the rows by token; ends [T], where each
// token's end in it; weight [N], or null for 1.
template <typename number>
static void combine(const number* rows, const int64_t* row, const int64_t* ends, const float* weight,
                    int64_t tokens, int64_t width, number* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    float sum[BLOCK];
    const int64_t first = t ? ends[t - 1] : 0;
    if (t + 1 < tokens) prefetch_rows(rows, row, ends[t], ends[t + 1], width);
    for (int64_t left = 0; left < width; left += BLOCK) {
      const int64_t size = width - left < BLOCK ? width - left : BLOCK;
      std::memset(sum, 0, sizeof(sum));
      for (int64_t n = first; n < ends[t]; n++) {
        const number* from = rows + row[n] * width + left;
        const float factor = weight ? weight[row[n]] : 1.0f;
#pragma omp simd
        for (int64_t h = 0; h < size; h++) sum[h] += factor * to_float(from[h]);
      }
      round_to(sum, size, out + t * width + left);
    }
  }
}

// The gradients of combine: to_rows[n] = weight[n] * gradient[token[n]]; to_weight[n] = <rows[n], the same row>.
template <typename number>
static void combine_backward(const number* gradient, const number* rows, const int64_t* token, const float* weight,
                             int64_t count, int64_t width, number* to_rows, float* to_weight, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t n = 0; n < count; n++) {
    const number *from = gradient + token[n] * width, *own = rows + n * width;
    number* to = to_rows + n * width;
    float factor = weight[n], product = 0;
    for (int64_t left = 0; left < width; left += BLOCK) {
      const int64_t size = width - left < BLOCK ? width - left : BLOCK;
      float buffer[BLOCK], *scaled = in_place(to + left, buffer);
#pragma omp simd reduction(+ : product)
      for (int64_t h = 0; h < size; h++) {
        const float value = to_float(from[left + h]);
        product += value * to_float(own[left + h]);
        scaled[h] = factor * value;
      }
      if (scaled == buffer) round_to(scaled, size, to + left);
    }
    to_weight[n] = product;
  }
}

// rows [N, 2F] of gate | value -> out [N, F] = gate * sigmoid(gate) * value.
template <typename number>
static void swiglu(const number* rows, int64_t count, int64_t width, number* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t n = 0; n < count; n++) {
    const number* gates = rows + 2 * n * width;
    activate(gates, gates + width, width, out + n * width);
  }
}

template <typename number>
static void swiglu_backward(const number* gradient, const number* rows, int64_t count, int64_t width,
                            number* to_rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t n = 0; n < count; n++) {
    const number* gates = rows + 2 * n * width;
    number* to_gates = to_rows + 2 * n * width;
    activate_backward(gradient + n * width, gates, gates + width, width, to_gates, to_gates + width);
  }
}

#define FOR_EACH_NUMBER(number, suffix)                                                                       \
  extern "C" void combine_##suffix(const number* rows, const int64_t* row, const int64_t* ends,               \
                                   const float* weight, int64_t tokens, int64_t width, number* out,           \
                                   int threads) {                                                             \
    combine(rows, row, ends, weight, tokens, width, out, threads);                                            \
  }                                                                                                           \
  extern "C" void combine_backward_##suffix(const number* gradient, const number* rows, const int64_t* token, \
                                            const float* weight, int64_t count, int64_t width,                \
                                            number* to_rows, float* to_weight, int threads) {                 \
    combine_backward(gradient, rows, token, weight, count, width, to_rows, to_weight, threads);               \
  }                                                                                                           \
  extern "C" void swiglu_##suffix(const number* rows, int64_t count, int64_t width, number* out,              \
                                  int threads) {                                                              \
    swiglu(rows, count, width, out, threads);                                                                 \
  }                                                                                                           \
  extern "C" void swiglu_backward_##suffix(const number* gradient, const number* rows, int64_t count,         \
                                           int64_t width, number* to_rows, int threads) {                     \
    swiglu_backward(gradient, rows, count, width, to_rows, threads);                                          \
  }

FOR_EACH_NUMBER(float, fp32)
FOR_EACH_NUMBER(bf16, bf16)
