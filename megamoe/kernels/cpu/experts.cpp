// SwiGLU FFNs of grouped rows in fp32, both products and the activation between them in one pass over the experts.
//
// Sizes: N rows, H columns, F FFN columns, E experts; up [E, 2F, H], down [E, H, F], ends [E].
#include "blas.h"
#include "scratch.h"
#include "shares.h"
#include "swiglu.h"

// Of a team of threads, each takes the next share.
template <typename Work>
static void for_each_task(const std::vector<Share>& shares, Work work) {
#pragma omp for schedule(dynamic) nowait
  for (size_t s = 0; s < shares.size(); s++)
    for (const Task& task : shares[s]) work(task);
}

// hidden [N, 2F] = rows [N, H] * up^T, kept for the backward pass; out [N, H] = swiglu(hidden) * down^T.
extern "C" void experts_fp32(sgemm call, const float* rows, const float* up, const float* down, const int64_t* ends,
                             int64_t experts, int64_t size, int64_t ffn, float* hidden, float* out, int threads) {
  const std::vector<Share> shares = shares_of(ends, experts, threads);
  const Blas blas = {call};
#pragma omp parallel num_threads(threads)
  {
    Scratch<float> scratch(most_rows(shares) * ffn);
    for_each_task(shares, [&](const Task& task) {
      const int64_t e = task.expert, first = task.first_row(), count = task.rows();
      if (!count) return;
      float *own = hidden + 2 * first * ffn, *active = scratch.data;
      blas.multiply(rows + first * size, false, up + 2 * e * ffn * size, true, count, 2 * ffn, size, own);
      for (int64_t n = 0; n < count; n++) activate(own + 2 * n * ffn, ffn, active + n * ffn);
      blas.multiply(active, false, down + e * size * ffn, true, count, size, ffn, out + first * size);
    });
  }
}

// Its gradients; null for those that are not wanted. hidden becomes its own gradient; active [N, F] is worked out
// again into the memory that is handed in.
extern "C" void experts_backward_fp32(sgemm call, const float* gradient, const float* rows, const float* up,
                                      const float* down, const int64_t* ends, int64_t experts, int64_t size,
                                      int64_t ffn, float* hidden, float* active, float* to_rows, float* to_up,
                                      float* to_down, int threads) {
  const std::vector<Share> shares = shares_of(ends, experts, threads);
  const Blas blas = {call};
#pragma omp parallel num_threads(threads)
  {
    Scratch<float> scratch(most_rows(shares) * ffn);
    for_each_task(shares, [&](const Task& task) {
      const int64_t e = task.expert, first = task.first_row(), count = task.rows();
      if (!count) return;
      float *own = hidden + 2 * first * ffn, *sent = scratch.data;
      blas.multiply(gradient + first * size, false, down + e * size * ffn, false, count, ffn, size, sent);
      for (int64_t n = 0; n < count; n++) {
        float* row = own + 2 * n * ffn;
        activate_backward(sent + n * ffn, row, ffn, row, active + (first + n) * ffn);
      }
      if (to_rows)
        blas.multiply(own, false, up + 2 * e * ffn * size, false, count, size, 2 * ffn, to_rows + first * size);
    });
#pragma omp barrier  // an expert's weights want all of its rows
    if (to_up)
      for_each_task(shares, [&](const Task& task) {
        weight_gradient(blas, task, hidden, rows, 2 * ffn, size, to_up);
      });
    if (to_down)
      for_each_task(shares, [&](const Task& task) {
        weight_gradient(blas, task, gradient, active, size, ffn, to_down);
      });
  }
}
