// Numbers of the rows: float, or bfloat16 as its upper half; all arithmetic is float.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

using bf16 = uint16_t;

static inline float to_float(float value) { return value; }

static inline float to_float(bf16 value) {
  uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

static inline void from_float(float value, float& result) { result = value; }

// Round to nearest, ties to even; a NaN stays one.
static inline void from_float(float value, bf16& result) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  result = bf16((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

// floats [count] -> numbers, which one instruction rounds where the processor has it.
static inline void round_to(const float* from, int64_t count, bf16* to) {
  int64_t i = 0;
#ifdef __AVX512BF16__
  for (; i + 32 <= count; i += 32)
    _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i)));
#endif
#pragma omp simd
  for (int64_t j = i; j < count; j++) from_float(from[j], to[j]);
}

static inline void round_to(const float* from, int64_t count, float* to) { std::memcpy(to, from, count * sizeof(float)); }

// Where floats are written that become these numbers: there, or first into a buffer.
static inline float* in_place(float* to, float*) { return to; }
static inline float* in_place(bf16*, float* buffer) { return buffer; }

// work(i, out) for i of 0 .. width-1, as vector code; what it gives goes to to[0][i], to[1][i] and so on.
template <int outputs, typename number, typename Work>
static inline void in_blocks(int64_t width, number* const (&to)[outputs], Work work) {
  constexpr int64_t block = 128;
  if constexpr (std::is_same_v<number, float>) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
      float out[outputs];
      work(i, out);
      for (int j = 0; j < outputs; j++) to[j][i] = out[j];
    }
  } else {
    alignas(64) float part[outputs][block];
    for (int64_t begin = 0; begin < width; begin += block) {
      const int64_t count = width - begin < block ? width - begin : block;
#pragma omp simd
      for (int64_t i = 0; i < count; i++) {
        float out[outputs];
        work(begin + i, out);
        for (int j = 0; j < outputs; j++) part[j][i] = out[j];
      }
      for (int j = 0; j < outputs; j++) round_to(part[j], count, to[j] + begin);
    }
  }
}

// e^x, to 2e-7 of the value; x is held in -87 .. 88. Without branches, so that it becomes vector code.
static inline float exponential(float x) {
  float y = x < -87.0f ? -87.0f : x;
  y = y > 88.0f ? 88.0f : y;
  const float whole = std::nearbyint(y * 1.44269504f);
  const float rest = (y - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float power = 1.9875691500e-4f;
  power = power * rest + 1.3981999507e-3f;
  power = power * rest + 8.3334519073e-3f;
  power = power * rest + 4.1665795894e-2f;
  power = power * rest + 1.6666665459e-1f;
  power = power * rest + 5.0000001201e-1f;
  power = power * rest * rest + rest + 1.0f;
  const uint32_t bits = uint32_t(int32_t(whole) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return power * scale;
}

// tanh(x), to 3e-7 of the value: near 0 by Cephes' polynomial, else by e^2|x|. Without branches, as above.
static inline float hyperbolic_tangent(float x) {
  const float size = std::fabs(x), square = x * x;
  float power = -5.70498872745e-3f;
  power = power * square + 2.06390887954e-2f;
  power = power * square - 5.37397155531e-2f;
  power = power * square + 1.33314422036e-1f;
  power = power * square - 3.33332819422e-1f;
  const float near = power * square * x + x;
  const float far = std::copysign(1.0f - 2.0f / (exponential(2.0f * size) + 1.0f), x);
  return size < 0.625f ? near : far;
}
