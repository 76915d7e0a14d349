// Row-major products by the BLAS that is handed in; inside of a parallel region it stays on one thread.
#pragma once
#include <cstring>

#include "shares.h"

// Fortran's SGEMM, column-major.
using sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                       const int*, const float*, const int*, const float*, float*, const int*);

struct Blas {
  sgemm call;

  // out [m, n] = a [m, k] * b [k, n], added to what is there if `add`; transposed ones are stored [k, m] and [n, k].
  // a_stride: from row to row of `a` as it is stored, where it is a part of a wider matrix.
  void multiply(const float* a, bool a_transposed, const float* b, bool b_transposed, int m, int n, int k, float* out,
                bool add = false, int a_stride = 0) const {
    const float one = 1, kept = add;
    const int lda = a_stride ? a_stride : a_transposed ? m : k, ldb = b_transposed ? k : n;
    call(b_transposed ? "T" : "N", a_transposed ? "T" : "N", &n, &m, &k, &one, b, &ldb, a, &lda, &kept, out, &n);
  }
};

// A task's rows of an expert's gradient: out [E, height, width] = gradient [N, height]^T * rows [N, width].
inline void weight_gradient(Blas blas, const Task& task, const float* gradient, const float* rows, int64_t height,
                            int64_t width, float* out) {
  const int64_t begin = task.begin_of(height), part = task.end_of(height) - begin;
  float* to = out + (task.expert * height + begin) * width;
  if (task.count && part)
    blas.multiply(gradient + task.first * height + begin, true, rows + task.first * width, false, part, width,
                  task.count, to, false, height);
  else
    std::memset(to, 0, part * width * sizeof(float));
}
