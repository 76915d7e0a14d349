// Products of grouped bf16 rows over the tile instructions of AMX, where the processor has them. Sizes are multiples
// of 32; ends [E]: where each expert's rows end.
#pragma once
#include "numbers.h"
#include "scratch.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_TILES
#include <immintrin.h>

namespace {

// A tile is 16 rows of 64 bytes. Of the left matrix: 16 rows x 32 columns. Of the right one: 32 rows x 16
// columns, two rows interleaved in one. Of the sum: 16 x 16 floats.
constexpr int64_t TILE = 512;  // numbers of a packed tile
constexpr int64_t FAR = 1024;  // rows longer than that stand too far from each other to be read tile by tile
constexpr int64_t PANEL = 256;  // columns of the right matrix that are packed at once, at most

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

// Columns that a task takes, a multiple of `unit`: as many as leave each thread some tasks, and the right matrix in the
// cache.
int64_t panel_width(int64_t width, int64_t depth, int64_t experts, int threads, int64_t unit) {
  int64_t panel = PANEL;
  while (panel > unit && (experts * (width / panel) < 4 * threads || panel * depth > (1 << 20))) panel /= 2;
  return least(panel, width);
}

// Tasks of (expert, panel) over the threads of the team.
template <typename Work>
void share_panels(int64_t experts, int64_t panels, Work work) {
#pragma omp for schedule(dynamic) collapse(2)
  for (int64_t e = 0; e < experts; e++)
    for (int64_t p = 0; p < panels; p++) work(e, p);
}

// 32 columns of a product's right matrix -> right tiles: of a weight [E, O, I] transposed, from its row `column` on, or
// of the weight itself.
struct Transposed {
  const bf16* weight;
  int64_t in, out;
  void pack(int64_t e, int64_t column, bf16* to) const {
    const bf16* from = weight + (e * out + column) * in;
    for (int64_t s = 0; s < in / 32; s++) pack_right_transposed(from + 32 * s, in, to + s * TILE, 16 * in);
  }
};

struct AsItIs {
  const bf16* weight;
  int64_t in, out;
  void pack(int64_t e, int64_t column, bf16* to) const {
    const bf16* from = weight + e * out * in + column;
    for (int64_t s = 0; s < out / 32; s++) pack_right(from + 32 * s * in, in, 32, to + s * TILE, 16 * out);
  }
};

// Where 32 columns of up to 32 rows are written.
struct Target {
  bf16* data;
  int64_t stride;
};

// The product's columns one beside the other, and nothing done to them.
struct Plainly {
  static constexpr int64_t unit = 32;
  bf16* out;
  int64_t width;
  int64_t column(int64_t number) const { return number; }
  Target target(int64_t row, int64_t number, int64_t, bf16*) const { return {out + row * width + number, width}; }
  void prepare(int64_t, int64_t, int64_t, int64_t) const {}
  void finish(int64_t, int64_t, int64_t, int64_t, bf16*) const {}
};

// left [N, depth] * the right matrix of each row's expert, `width` columns, in panels of them; an `end` says
//   unit                              columns that belong together
//   column(number)                    the right matrix's, for the panels take them in an order of its own
//   target(row, number, start, strip) where a block's columns from `number` on go; strip [32, PANEL] is the thread's own
//   prepare(row, rows, start, columns)         what is asked for before a block's panel is worked out
//   finish(row, rows, start, columns, strip)   what is done to it while it is in the cache
template <typename Right, typename End>
void rows_product(const bf16* left, const int64_t* ends, int64_t experts, int64_t depth, int64_t width, int threads,
                  Right from, End end) {
  const int64_t panel = panel_width(width, depth, experts, threads, End::unit), steps = depth / 32;
  const Scratch<bf16> scratch(threads, (panel + 32) * depth + 32 * PANEL);
#pragma omp parallel num_threads(threads)
  {
    Tiles tiles;
    bf16 *right = scratch.own(), *block = right + panel * depth, *strip = block + 32 * depth;
    share_panels(experts, (width + panel - 1) / panel, [=](int64_t e, int64_t p) {
      const int64_t first = e ? ends[e - 1] : 0, start = p * panel, columns = least(panel, width - start);
      if (ends[e] == first) return;
      for (int64_t c = 0; c < columns; c += 32) from.pack(e, end.column(start + c), right + c * depth);
      for (int64_t n = first; n < ends[e]; n += 32) {
        const int64_t rows = least(32, ends[e] - n);
        end.prepare(n, rows, start, columns);
        Left tiles = {left + n * depth, 16 * depth, 32, depth, false};
        if (rows < 32 || depth > FAR) {
          pack_left(tiles.data, depth, rows, steps, block);
          tiles = {block, steps * TILE, TILE, 32, false};
        }
        for (int64_t c = 0; c < columns; c += 32) {
          const Target to = end.target(n, start + c, start, strip);
          multiply(tiles, right + c * depth, steps, to.data, to.stride, rows);
        }
        end.finish(n, rows, start, columns, strip);
      }
    });
  }
}

}  // namespace

// out [E, O, I] = gradient [N, O]^T * rows [N, I], each expert's.
void weight_product(const bf16* gradient, const bf16* rows, const int64_t* ends, int64_t experts, int64_t in,
                    int64_t out_size, bf16* out, int threads);

#endif
