// Draws keyed by token, bit for bit those of moe/rng.py: SplitMix64's finaliser (Steele, Lea and Flood 2014).
#include <cstdint>

static inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// out [T, C] in [0, 1): of each token and column, counted from `first`.
extern "C" void uniform_fp32(const int64_t* token_index, int64_t tokens, int64_t first, int64_t columns, int64_t key,
                             float* out, int threads) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15u;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    const uint64_t state = mix(uint64_t(token_index[t]) * golden + uint64_t(key));
    float* to = out + t * columns;
#pragma omp simd
    for (int64_t c = 0; c < columns; c++)
      to[c] = float(int32_t(mix(state + uint64_t(first + c + 1) * golden) >> 40)) * 0x1p-24f;
  }
}
