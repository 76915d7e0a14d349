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

// Inside of a parallel region BLAS stays on its thread.
template <typename Work>
static void for_each_task(const int64_t* ends, int64_t experts, int threads, Work work) {
  const std::vector<Share> shares = shares_of(ends, experts, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (size_t s = 0; s < shares.size(); s++)
    for (const Task& task : shares[s]) work(task);
}

extern "C" void forward_fp32(sgemm call, const float* rows, const float* weight, const int64_t* ends,
                             int64_t experts, int64_t in, int64_t out_size, float* out, int threads) {
  for_each_task(ends, experts, threads, [=](const Task& task) {
    const int64_t first = task.first_row(), count = task.rows();
    if (count)
      Blas{call}.multiply(rows + first * in, false, weight + task.expert * out_size * in, true, count, out_size,
                          in, out + first * out_size);
  });
}

extern "C" void to_rows_fp32(sgemm call, const float* gradient, const float* weight, const int64_t* ends,
                             int64_t experts, int64_t in, int64_t out_size, float* out, int threads) {
  for_each_task(ends, experts, threads, [=](const Task& task) {
    const int64_t first = task.first_row(), count = task.rows();
    if (count)
      Blas{call}.multiply(gradient + first * out_size, false, weight + task.expert * out_size * in, false, count, in,
                          out_size, out + first * in);
  });
}

extern "C" void to_weight_fp32(sgemm call, const float* gradient, const float* rows, const int64_t* ends,
                               int64_t experts, int64_t in, int64_t out_size, float* out, int threads) {
  for_each_task(ends, experts, threads, [=](const Task& task) {
    weight_gradient({call}, task, gradient, rows, out_size, in, out);
  });
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// A tile is 16 rows of 64 bytes. Of the left matrix: 16 rows x 32 columns. Of the right one: 32 rows x 16
// columns, two rows interleaved in one. Of the sum: 16 x 16 floats.
constexpr int64_t TILE = 512;  // numbers of a packed tile
constexpr int64_t FAR = 1024;  // rows longer than that stand too far from each other to be read tile by tile
constexpr int64_t LEFT_ROWS = 256;  // of the left matrix, packed at once

// GCC's tile instructions do not say that they read memory: what was written before is written here.
void settle(const void* memory) { __asm__ volatile("" ::"r"(memory) : "memory"); }

struct alignas(64) Tiles {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  Tiles() {
    for (int i = 0; i < 8; i++) bytes[i] = 64, rows[i] = 16;
    settle(this);
    _tile_loadconfig(this);
  }
  ~Tiles() { _tile_release(); }
};

// The transpose of 16 x 16 pairs of numbers; row(i) is where row i begins. Half of the work is done while loading.
template <typename Row>
void transpose_pairs(Row row, bf16* to) {
  for (int64_t quad = 0; quad < 4; quad++) {
    __m512i r[4], t[4];
    for (int64_t i = 0; i < 4; i++) {
      r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)(row(i) + 8 * quad)));
      r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i*)(row(i + 4) + 8 * quad)), 1);
      r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i*)(row(i + 8) + 8 * quad)), 2);
      r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i*)(row(i + 12) + 8 * quad)), 3);
    }
    t[0] = _mm512_unpacklo_epi32(r[0], r[1]);
    t[1] = _mm512_unpackhi_epi32(r[0], r[1]);
    t[2] = _mm512_unpacklo_epi32(r[2], r[3]);
    t[3] = _mm512_unpackhi_epi32(r[2], r[3]);
    bf16* out = to + 4 * 32 * quad;
    _mm512_store_si512(out, _mm512_unpacklo_epi64(t[0], t[2]));
    _mm512_store_si512(out + 32, _mm512_unpackhi_epi64(t[0], t[2]));
    _mm512_store_si512(out + 64, _mm512_unpacklo_epi64(t[1], t[3]));
    _mm512_store_si512(out + 96, _mm512_unpackhi_epi64(t[1], t[3]));
  }
}

// Two tiles beside each other, 32 numbers wide, take the numbers in this order, in which two rows interleave in
// two instructions: the first tile 0-3, 8-11, 16-19, 24-27, the second the others.
int64_t place_in_pair(int64_t i) { return (i & 3) + 8 * ((i & 15) >> 2) + 4 * (i >> 4); }

__m512i load_row(const bf16* from, bool there) {
  return there ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
}

// from [rows <= 32, steps * 32] -> two runs of left tiles; absent rows are 0.
void pack_left(const bf16* from, int64_t stride, int64_t rows, int64_t steps, bf16* to) {
  for (int64_t i = 0; i < (rows > 16 ? 32 : 16); i++)
    for (int64_t s = 0; s < steps; s++)
      _mm512_store_si512(to + ((i / 16) * steps + s) * TILE + 32 * (i % 16),
                         load_row(from + i * stride + 32 * s, i < rows));
}

// from [32, 32] -> two right tiles of its transpose, `next` numbers apart.
void pack_right_transposed(const bf16* from, int64_t stride, bf16* to, int64_t next) {
  transpose_pairs([=](int64_t i) { return from + place_in_pair(i) * stride; }, to);
  transpose_pairs([=](int64_t i) { return from + place_in_pair(16 + i) * stride; }, to + next);
}

// from [rows <= 32, 32] -> two right tiles, `next` numbers apart; absent rows are 0.
void pack_right(const bf16* from, int64_t stride, int64_t rows, bf16* to, int64_t next) {
  for (int64_t i = 0; i < 16; i++) {
    __m512i even = load_row(from + 2 * i * stride, 2 * i < rows);
    __m512i odd = load_row(from + (2 * i + 1) * stride, 2 * i + 1 < rows);
    _mm512_store_si512(to + 32 * i, _mm512_unpacklo_epi16(even, odd));
    _mm512_store_si512(to + next + 32 * i, _mm512_unpackhi_epi16(even, odd));
  }
}

// from [rows <= 32, 32] -> two left tiles of its transpose, `next` numbers apart, their rows by place_in_pair.
void pack_left_transposed(const bf16* from, int64_t stride, int64_t rows, bf16* to, int64_t next) {
  alignas(64) bf16 pairs[2 * TILE];
  pack_right(from, stride, rows, pairs, TILE);
  transpose_pairs([&](int64_t i) { return pairs + 32 * i; }, to);
  transpose_pairs([&](int64_t i) { return pairs + TILE + 32 * i; }, to + next);
}

// Where the left tiles of a product are: packed, or in the rows of a matrix.
struct Left {
  const bf16* data;
  int64_t tile, step, stride;  // numbers from one tile to that below, to the next step's, from row to row
  bool paired;                 // rows by place_in_pair
};

// The sum over `steps` of 2 x 2 tiles -> 32 columns of out, of which `rows` <= 32 are written. Right: two runs of
// packed tiles, one for every step.
void multiply(Left left, const bf16* right, int64_t steps, bf16* out, int64_t stride, int64_t rows) {
  const bf16 *left0 = left.data, *left1 = left.data + left.tile, *right1 = right + steps * TILE;
  settle(right);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; s++) {
    _tile_loadd(4, left0 + s * left.step, 2 * left.stride);
    _tile_loadd(6, right + s * TILE, 64);
    _tile_loadd(7, right1 + s * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (rows > 16) {
      _tile_loadd(5, left1 + s * left.step, 2 * left.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sum[32 * 32];
  _tile_stored(0, sum, 128);
  _tile_stored(1, sum + 16, 128);
  if (rows > 16) {
    _tile_stored(2, sum + 16 * 32, 128);
    _tile_stored(3, sum + 16 * 32 + 16, 128);
  }
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t i = 0; i < rows; i++) {
    __m512bh row = _mm512_cvtne2ps_pbh(_mm512_load_ps(sum + 32 * i + 16), _mm512_load_ps(sum + 32 * i));
    int64_t place = left.paired ? place_in_pair(i) : i;
    _mm512_storeu_si512(out + place * stride, _mm512_permutexvar_epi64(order, (__m512i)row));
  }
}

int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Columns that a task takes: as many as leave each thread some tasks, and the right matrix in the cache.
int64_t panel_width(int64_t width, int64_t depth, int64_t experts, int threads) {
  int64_t panel = 256;
  while (panel > 32 && (experts * (width / panel) < 4 * threads || panel * depth > (1 << 20))) panel /= 2;
  return least(panel, width);
}

// Tasks of (expert, panel) over the threads of the team.
template <typename Work>
void share_panels(int64_t experts, int64_t panels, Work work) {
#pragma omp for schedule(dynamic) collapse(2)
  for (int64_t e = 0; e < experts; e++)
    for (int64_t p = 0; p < panels; p++) work(e, p);
}

// out [N, width] = left [N, depth] * right_e; pack_columns(e, column, to): its 32 columns from `column` on.
template <typename Pack>
void rows_product(const bf16* left, const int64_t* ends, int64_t experts, int64_t depth, int64_t width, bf16* out,
                  int threads, Pack pack_columns) {
  const int64_t panel = panel_width(width, depth, experts, threads), steps = depth / 32;
#pragma omp parallel num_threads(threads)
  {
    Tiles tiles;
    Scratch<bf16> scratch((panel + 32) * depth);
    bf16 *right = scratch.data, *block = right + panel * depth;
    share_panels(experts, (width + panel - 1) / panel, [=](int64_t e, int64_t p) {
      const int64_t first = e ? ends[e - 1] : 0, start = p * panel, columns = least(panel, width - start);
      if (ends[e] == first) return;
      for (int64_t c = 0; c < columns; c += 32) pack_columns(e, start + c, right + c * depth);
      for (int64_t n = first; n < ends[e]; n += 32) {
        const int64_t rows = least(32, ends[e] - n);
        Left tiles = {left + n * depth, 16 * depth, 32, depth, false};
        if (rows < 32 || depth > FAR) {
          pack_left(tiles.data, depth, rows, steps, block);
          tiles = {block, steps * TILE, TILE, 32, false};
        }
        for (int64_t c = 0; c < columns; c += 32)
          multiply(tiles, right + c * depth, steps, out + n * width + start + c, width, rows);
      }
    });
  }
}

}  // namespace

// Whether this process may use the tiles; Linux wants to be asked once.
extern "C" int has_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// Of all three: sizes are multiples of 32.
extern "C" void forward_bf16(const bf16* rows, const bf16* weight, const int64_t* ends, int64_t experts, int64_t in,
                             int64_t out_size, bf16* out, int threads) {
  rows_product(rows, ends, experts, in, out_size, out, threads, [=](int64_t e, int64_t column, bf16* to) {
    const bf16* from = weight + (e * out_size + column) * in;
    for (int64_t s = 0; s < in / 32; s++) pack_right_transposed(from + 32 * s, in, to + s * TILE, 16 * in);
  });
}

extern "C" void to_rows_bf16(const bf16* gradient, const bf16* weight, const int64_t* ends, int64_t experts,
                             int64_t in, int64_t out_size, bf16* out, int threads) {
  rows_product(gradient, ends, experts, out_size, in, out, threads, [=](int64_t e, int64_t column, bf16* to) {
    const bf16* from = weight + e * out_size * in + column;
    for (int64_t s = 0; s < out_size / 32; s++)
      pack_right(from + 32 * s * in, in, 32, to + s * TILE, 16 * out_size);
  });
}

extern "C" void to_weight_bf16(const bf16* gradient, const bf16* rows, const int64_t* ends, int64_t experts,
                               int64_t in, int64_t out_size, bf16* out, int threads) {
  int64_t deepest = 0;
  for (int64_t e = 0; e < experts; e++) deepest = most(deepest, ends[e] - (e ? ends[e - 1] : 0));
  deepest = (deepest + 31) / 32 * 32;
  // A task packs the right matrix of its expert whole, so there are few; the left one in parts.
  const int64_t shares = (8 * threads + experts - 1) / experts;
  const int64_t share = (out_size / 32 + shares - 1) / shares * 32, part = least(share, LEFT_ROWS);
#pragma omp parallel num_threads(threads)
  {
    Tiles tiles;
    Scratch<bf16> scratch((in + part) * deepest);
    bf16 *right = scratch.data, *left = right + in * deepest;
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

#else

extern "C" int has_tiles() { return 0; }

#endif
