// SwiGLU FFNs of grouped rows: the activation is worked out while its part of a product is in the cache, and worked out
// again in the backward pass.
//
// Sizes: N rows, H columns, F FFN columns, E experts; up [E, 2F, H], down [E, H, F], ends [E].
#include "blas.h"
#include "scratch.h"
#include "shares.h"
#include "swiglu.h"
#include "tiles.h"

// Of a team of threads, each takes the next share.
template <typename Work>
static void for_each_task(const std::vector<Share>& shares, Work work) {
#pragma omp for schedule(dynamic) nowait
  for (size_t s = 0; s < shares.size(); s++)
    for (const Task& task : shares[s]) work(task);
}

// hidden [N, 2F] = rows [N, H] * up^T, kept for the backward pass; out [N, H] = swiglu(hidden) * down^T.
extern "C" int64_t experts_fp32(sgemm call, const float* rows, const float* up, const float* down, const int64_t* ends,
                             int64_t experts, int64_t size, int64_t ffn, float* hidden, float*, float* out, int threads) {
  return memory_missed([=] {
    const std::vector<Share> shares = shares_of(ends, experts, threads);
    const Blas blas = {call};
    const Scratch<float> scratch(threads, most_rows(shares) * ffn);
#pragma omp parallel num_threads(threads)
    {
      for_each_task(shares, [&](const Task& task) {
        const int64_t e = task.expert, first = task.first_row(), count = task.rows();
        if (!count) return;
        float *own = hidden + 2 * first * ffn, *active = scratch.own();
        blas.multiply(rows + first * size, false, up + 2 * e * ffn * size, true, count, 2 * ffn, size, own);
        for (int64_t n = 0; n < count; n++) {
          const float* gates = own + 2 * n * ffn;
          activate(gates, gates + ffn, ffn, active + n * ffn);
        }
        blas.multiply(active, false, down + e * size * ffn, true, count, size, ffn, out + first * size);
      });
    }
  });
}

// Its gradients; null for those that are not wanted. hidden becomes its own gradient; active [N, F] is worked out
// again into the memory that is handed in.
extern "C" int64_t experts_backward_fp32(sgemm call, const float* gradient, const float* rows, const float* up,
                                      const float* down, const int64_t* ends, int64_t experts, int64_t size,
                                      int64_t ffn, float* hidden, float* active, float* to_rows, float* to_up,
                                      float* to_down, int threads) {
  return memory_missed([=] {
    const std::vector<Share> shares = shares_of(ends, experts, threads);
    const Blas blas = {call};
    const Scratch<float> scratch(threads, most_rows(shares) * ffn);
#pragma omp parallel num_threads(threads)
    {
      for_each_task(shares, [&](const Task& task) {
        const int64_t e = task.expert, first = task.first_row(), count = task.rows();
        if (!count) return;
        float *own = hidden + 2 * first * ffn, *sent = scratch.own();
        blas.multiply(gradient + first * size, false, down + e * size * ffn, false, count, ffn, size, sent);
        for (int64_t n = 0; n < count; n++) {
          float *gates = own + 2 * n * ffn, *values = gates + ffn;
          activate_again(sent + n * ffn, gates, values, ffn, gates, values, active + (first + n) * ffn);
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
  });
}

#ifdef HAS_TILES

namespace {

// The first product's end: 32 gates stand beside their values in a panel, which are activated at once.
struct Activated {
  static constexpr int64_t unit = 64;
  bf16 *hidden, *active;
  int64_t ffn;
  int64_t column(int64_t number) const { return number / 64 * 32 + (number & 32 ? ffn : 0); }
  Target target(int64_t row, int64_t number, int64_t, bf16*) const {
    return {hidden + 2 * row * ffn + column(number), 2 * ffn};
  }
  void prepare(int64_t, int64_t, int64_t, int64_t) const {}
  void finish(int64_t row, int64_t rows, int64_t start, int64_t columns, bf16*) const {
    for (int64_t n = row; n < row + rows; n++) {
      const bf16* gates = hidden + 2 * n * ffn + start / 2;
      activate(gates, gates + ffn, columns / 2, active + n * ffn + start / 2);
    }
  }
};

// The end of the second product's gradient, which goes through the activation's at once.
struct ActivatedBackward {
  static constexpr int64_t unit = 32;
  bf16 *hidden, *active;
  int64_t ffn;
  int64_t column(int64_t number) const { return number; }
  Target target(int64_t, int64_t number, int64_t start, bf16* strip) const { return {strip + number - start, PANEL}; }
  void prepare(int64_t row, int64_t rows, int64_t start, int64_t columns) const {
    for (int64_t n = row; n < row + rows; n++)
      for (int64_t f = start; f < start + columns; f += 32) {
        __builtin_prefetch(hidden + 2 * n * ffn + f, 1, 2);
        __builtin_prefetch(hidden + (2 * n + 1) * ffn + f, 1, 2);
      }
  }
  void finish(int64_t row, int64_t rows, int64_t start, int64_t columns, bf16* strip) const {
    for (int64_t i = 0; i < rows; i++) {
      bf16 *gates = hidden + 2 * (row + i) * ffn + start, *values = gates + ffn;
      activate_again(strip + i * PANEL, gates, values, columns, gates, values, active + (row + i) * ffn + start);
    }
  }
};

}  // namespace

// As in fp32; active [N, F] is room for the activation.
extern "C" int64_t experts_bf16(const bf16* rows, const bf16* up, const bf16* down, const int64_t* ends, int64_t experts,
                             int64_t size, int64_t ffn, bf16* hidden, bf16* active, bf16* out, int threads) {
  return memory_missed([=] {
    rows_product(rows, ends, experts, size, 2 * ffn, threads, Transposed{up, size, 2 * ffn},
                 Activated{hidden, active, ffn});
    rows_product(active, ends, experts, ffn, size, threads, Transposed{down, ffn, size}, Plainly{out, size});
  });
}

extern "C" int64_t experts_backward_bf16(const bf16* gradient, const bf16* rows, const bf16* up, const bf16* down,
                                      const int64_t* ends, int64_t experts, int64_t size, int64_t ffn, bf16* hidden,
                                      bf16* active, bf16* to_rows, bf16* to_up, bf16* to_down, int threads) {
  return memory_missed([=] {
    const AsItIs sent = {down, ffn, size};
    if (ffn <= 2 * PANEL) {
      rows_product(gradient, ends, experts, size, ffn, threads, sent, ActivatedBackward{hidden, active, ffn});
    } else {  // parts of rows would lie too far from each other
      rows_product(gradient, ends, experts, size, ffn, threads, sent, Plainly{active, ffn});
#pragma omp parallel for num_threads(threads) schedule(static)
      for (int64_t n = 0; n < ends[experts - 1]; n++) {
        bf16 *gates = hidden + 2 * n * ffn, *values = gates + ffn, *own = active + n * ffn;
        activate_again(own, gates, values, ffn, gates, values, own);
      }
    }
    if (to_rows)
      rows_product(hidden, ends, experts, 2 * ffn, size, threads, AsItIs{up, size, 2 * ffn}, Plainly{to_rows, size});
    if (to_up) weight_product(hidden, rows, ends, experts, size, 2 * ffn, to_up, threads);
    if (to_down) weight_product(gradient, active, ends, experts, ffn, size, to_down, threads);
  });
}

#endif
