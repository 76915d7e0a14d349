// Passes of a transformer block beside its products: RMSNorm and rotary positions.
#include <cmath>

#include "heads.h"
#include "numbers.h"
#include "scratch.h"

// out = rows * weight / root mean square of the row (Zhang and Sennrich 2019, eq. 4); scale [N]: one over that root.
template <typename number>
static void rms_norm(const number* rows, const number* weight, int64_t count, int64_t width, double eps,
                     number* out, float* scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t n = 0; n < count; n++) {
    const number* from = rows + n * width;
    number* to = out + n * width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t h = 0; h < width; h++) sum += to_float(from[h]) * to_float(from[h]);
    const float factor = 1.0f / std::sqrt(sum / width + float(eps));
    scale[n] = factor;
#pragma omp simd
    for (int64_t h = 0; h < width; h++) from_float(to_float(from[h]) * factor * to_float(weight[h]), to[h]);
  }
}

// The weight's gradient is summed over runs of rows, and over the runs in order: the same whatever the threads.
template <typename number>
static void rms_norm_backward(const number* gradient, const number* rows, const number* weight, const float* scale,
                              int64_t count, int64_t width, number* to_rows, float* to_weight, int threads) {
  constexpr int64_t run = 128;
  const int64_t runs = (count + run - 1) / run;
  const Scratch<float> scratch(1, runs * width);
  float* sums = scratch.own();
  std::memset(sums, 0, runs * width * sizeof(float));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < runs; r++) {
    float* own = sums + r * width;
    const int64_t last = (r + 1) * run < count ? (r + 1) * run : count;
    for (int64_t n = r * run; n < last; n++) {
      const number *from = gradient + n * width, *row = rows + n * width;
      number* to = to_rows + n * width;
      const float factor = scale[n];
      float product = 0;
#pragma omp simd reduction(+ : product)
      for (int64_t h = 0; h < width; h++) {
        const float normed = to_float(row[h]) * factor, sent = to_float(from[h]);
        product += sent * to_float(weight[h]) * normed;
        own[h] += sent * normed;
      }
      const float share = product / width;
#pragma omp simd
      for (int64_t h = 0; h < width; h++) {
        const float normed = to_float(row[h]) * factor;
        from_float(factor * (to_float(from[h]) * to_float(weight[h]) - normed * share), to[h]);
      }
    }
  }
  for (int64_t h = 0; h < width; h++) to_weight[h] = 0;
  for (int64_t r = 0; r < runs; r++)
    for (int64_t h = 0; h < width; h++) to_weight[h] += sums[r * width + h];
}

// Heads turned by their positions, see `turn`. Both sides are [S, B, heads, 2 half] with strides of their own, the last
// of 1; cosine, sine [S, half].
template <typename number>
static void rotate(const number* from, int64_t from_s, int64_t from_b, int64_t from_n, number* to, int64_t to_s,
                   int64_t to_b, int64_t to_n, int64_t positions, int64_t batch, int64_t heads, int64_t half,
                   const float* cosine, const float* sine, double sign, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t s = 0; s < positions; s++) {
    const float *cosines = cosine + s * half, *sines = sine + s * half;
    for (int64_t b = 0; b < batch; b++) {
      for (int64_t n = 0; n < heads; n++) {
        const number* head = from + s * from_s + b * from_b + n * from_n;
        number* turned = to + s * to_s + b * to_b + n * to_n;
        turn(head, turned, half, cosines, sines, sign);
      }
    }
  }
}

#define FOR_EACH_NUMBER(number, suffix)                                                                           \
  extern "C" void rms_norm_##suffix(const number* rows, const number* weight, int64_t count, int64_t width,       \
                                    double eps, number* out, float* scale, int threads) {                         \
    rms_norm(rows, weight, count, width, eps, out, scale, threads);                                               \
  }                                                                                                               \
  extern "C" int64_t rms_norm_backward_##suffix(const number* gradient, const number* rows, const number* weight, \
                                                const float* scale, int64_t count, int64_t width,                 \
                                                number* to_rows, float* to_weight, int threads) {                 \
    return memory_missed([=] {                                                                                    \
      rms_norm_backward(gradient, rows, weight, scale, count, width, to_rows, to_weight, threads);                \
    });                                                                                                           \
  }                                                                                                               \
  extern "C" void rotate_##suffix(const number* from, int64_t from_s, int64_t from_b, int64_t from_n, number* to, \
                                  int64_t to_s, int64_t to_b, int64_t to_n, int64_t positions, int64_t batch,     \
                                  int64_t heads, int64_t half, const float* cosine, const float* sine,            \
                                  double sign, int threads) {                                                     \
    rotate(from, from_s, from_b, from_n, to, to_s, to_b, to_n, positions, batch, heads, half, cosine, sine, sign, \
           threads);                                                                                              \
  }

FOR_EACH_NUMBER(float, fp32)
FOR_EACH_NUMBER(bf16, bf16)
