// SwiGLU FFNs of grouped rows in fp32, both products and the activation between them in one pass over the experts.
//
// Sizes: N rows, H columns, F FFN columns, E experts; up [E, 2F, H], down [E, H, F], ends [E].
#include <cstring>

#include "blas.h"
#include "scratch.h"
#include "swiglu.h"
#include "tasks.h"

// hidden [N, 2F] = rows [N, H] * up^T, kept for the backward pass; out [N, H] = swiglu(hidden) * down^T.
extern "C" void experts_fp32(sgemm call, const float* rows, const float* up, const float* down, const int64_t* ends,
                             int64_t experts, int64_t size, int64_t ffn, float* hidden, float* out, int threads) {
  const std::vector<Task> tasks = tasks_of(ends, experts, threads);
  const Blas blas = {call};
#pragma omp parallel num_threads(threads)
  {
    Scratch<float> active(most_rows(tasks) * ffn);
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < tasks.size(); t++) {
      const int64_t e = tasks[t].expert, first = tasks[t].first_row(), count = tasks[t].rows();
      if (!count) continue;
      float* own = hidden + 2 * first * ffn;
      blas.multiply(rows + first * size, false, up + 2 * e * ffn * size, true, count, 2 * ffn, size, own);
      for (int64_t n = 0; n < count; n++) activate(own + 2 * n * ffn, ffn, active.data + n * ffn);
      blas.multiply(active.data, false, down + e * size * ffn, true, count, size, ffn, out + first * size);
    }
  }
}

// Its gradients; null for those that are not wanted. hidden becomes its own gradient; active [N, F] is worked out
// again into the memory that is handed in.
extern "C" void experts_backward_fp32(sgemm call, const float* gradient, const float* rows, const float* up,
                                      const float* down, const int64_t* ends, int64_t experts, int64_t size,
                                      int64_t ffn, float* hidden, float* active, float* to_rows, float* to_up,
                                      float* to_down, int threads) {
  const std::vector<Task> tasks = tasks_of(ends, experts, threads);
  const Blas blas = {call};
#pragma omp parallel num_threads(threads)
  {
    Scratch<float> sent(most_rows(tasks) * ffn);
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < tasks.size(); t++) {
      const int64_t e = tasks[t].expert, first = tasks[t].first_row(), count = tasks[t].rows();
      if (!count) continue;
      float *own = hidden + 2 * first * ffn, *to_active = active + first * ffn;
      blas.multiply(gradient + first * size, false, down + e * size * ffn, false, count, ffn, size, sent.data);
      for (int64_t n = 0; n < count; n++) {
        activate(own + 2 * n * ffn, ffn, to_active + n * ffn);
        activate_backward(sent.data + n * ffn, own + 2 * n * ffn, ffn, own + 2 * n * ffn);
      }
      if (to_rows)
        blas.multiply(own, false, up + 2 * e * ffn * size, false, count, size, 2 * ffn, to_rows + first * size);
    }
    if (to_up) {
#pragma omp for schedule(dynamic) nowait
      for (size_t t = 0; t < tasks.size(); t++) weight_gradient(blas, tasks[t], hidden, rows, 2 * ffn, size, to_up);
    }
    if (to_down) {
#pragma omp for schedule(dynamic) nowait
      for (size_t t = 0; t < tasks.size(); t++) weight_gradient(blas, tasks[t], gradient, active, size, ffn, to_down);
    }
  }
}
