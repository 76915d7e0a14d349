// Grouped products of rows with the stacked weights of their experts: fp32 by the BLAS that is handed in, bf16 by
// the tile instructions of AMX. An expert's rows follow each other; it may have none.
//
// Sizes: E experts, N rows, I the weight's input columns, O its output columns; weights are [E, O, I], ends [E].
//   forward    out [N, O] = rows [N, I] * weight^T          to_rows    out [N, I] = gradient [N, O] * weight
//   to_weight  out [E, O, I] = gradient^T * rows, each expert's
#include <cstring>

#include "blas.h"
#include "numbers.h"
#include "scratch.h"
#include "shares.h"
#include "tiles.h"

// Inside of a parallel region BLAS stays on its thread.
template <typename Work>
static void for_each_task(const int64_t* ends, int64_t experts, int threads, Work work) {
  const std::vector<Share> shares = shares_of(ends, experts, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (size_t s = 0; s < shares.size(); s++)
    for (const Task& task : shares[s]) work(task);
}

extern "C" int64_t forward_fp32(sgemm call, const float* rows, const float* weight, const int64_t* ends,
                             int64_t experts, int64_t in, int64_t out_size, float* out, int threads) {
  return memory_missed([=] {
    for_each_task(ends, experts, threads, [=](const Task& task) {
      const int64_t first = task.first_row(), count = task.rows();
      if (count)
        Blas{call}.multiply(rows + first * in, false, weight + task.expert * out_size * in, true, count, out_size,
                            in, out + first * out_size);
    });
  });
}

extern "C" int64_t to_rows_fp32(sgemm call, const float* gradient, const float* weight, const int64_t* ends,
                             int64_t experts, int64_t in, int64_t out_size, float* out, int threads) {
  return memory_missed([=] {
    for_each_task(ends, experts, threads, [=](const Task& task) {
      const int64_t first = task.first_row(), count = task.rows();
      if (count)
        Blas{call}.multiply(gradient + first * out_size, false, weight + task.expert * out_size * in, false, count, in,
                            out_size, out + first * in);
    });
  });
}

extern "C" int64_t to_weight_fp32(sgemm call, const float* gradient, const float* rows, const int64_t* ends,
                               int64_t experts, int64_t in, int64_t out_size, float* out, int threads) {
  return memory_missed([=] {
    for_each_task(ends, experts, threads, [=](const Task& task) {
      weight_gradient({call}, task, gradient, rows, out_size, in, out);
    });
  });
}

#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

// Whether this process may use the tiles; Linux wants to be asked once.
extern "C" int has_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

extern "C" int64_t forward_bf16(const bf16* rows, const bf16* weight, const int64_t* ends, int64_t experts, int64_t in,
                             int64_t out_size, bf16* out, int threads) {
  return memory_missed([=] {
    rows_product(rows, ends, experts, in, out_size, threads, Transposed{weight, in, out_size}, Plainly{out, out_size});
  });
}

extern "C" int64_t to_rows_bf16(const bf16* gradient, const bf16* weight, const int64_t* ends, int64_t experts,
                             int64_t in, int64_t out_size, bf16* out, int threads) {
  return memory_missed([=] {
    rows_product(gradient, ends, experts, out_size, in, threads, AsItIs{weight, in, out_size}, Plainly{out, in});
  });
}

void weight_product(const bf16* gradient, const bf16* rows, const int64_t* ends, int64_t experts, int64_t in,
                    int64_t out_size, bf16* out, int threads) {
  int64_t deepest = 0;
  for (int64_t e = 0; e < experts; e++) deepest = most(deepest, ends[e] - (e ? ends[e - 1] : 0));
  deepest = (deepest + 31) / 32 * 32;
  // A task packs the right matrix of its expert whole, so there are few; the left one in parts.
  const int64_t shares = (8 * threads + experts - 1) / experts;
  const int64_t share = (out_size / 32 + shares - 1) / shares * 32, part = least(share, PANEL);
  const Scratch<bf16> scratch(threads, (in + part) * deepest);
#pragma omp parallel num_threads(threads)
  {
    Tiles tiles;
    bf16 *right = scratch.own(), *left = right + in * deepest;
    share_panels(experts, (out_size + share - 1) / share, [=](int64_t e, int64_t p) {
      const int64_t first = e ? ends[e - 1] : 0, count = ends[e] - first, steps = (count + 31) / 32;
      const int64_t last = least((p + 1) * share, out_size);
      if (!count) std::memset(out + (e * out_size + p * share) * in, 0, (last - p * share) * in * sizeof(bf16));
      for (int64_t s = 0; s < steps; s++)
        for (int64_t c = 0; c < in; c += 32)
          pack_right(rows + (first + 32 * s) * in + c, in, count - 32 * s, right + (c / 16 * steps + s) * TILE,
                     steps * TILE);
      for (int64_t top = p * share; count && top < last; top += part) {
        const int64_t height = least(part, last - top);
        for (int64_t s = 0; s < steps; s++)
          for (int64_t i = 0; i < height; i += 32)
            pack_left_transposed(gradient + (first + 32 * s) * out_size + top + i, out_size, count - 32 * s,
                                 left + (i / 16 * steps + s) * TILE, steps * TILE);
        for (int64_t i = 0; i < height; i += 32)
          for (int64_t c = 0; c < in; c += 32)
            multiply({left + i / 16 * steps * TILE, steps * TILE, TILE, 32, true}, right + c / 16 * steps * TILE,
                     steps, out + (e * out_size + top + i) * in + c, in, 32);
      }
    });
  }
}

extern "C" int64_t to_weight_bf16(const bf16* gradient, const bf16* rows, const int64_t* ends, int64_t experts,
                                  int64_t in, int64_t out_size, bf16* out, int threads) {
  return memory_missed([=] { weight_product(gradient, rows, ends, experts, in, out_size, out, threads); });
}

#else

extern "C" int has_tiles() { return 0; }

#endif
