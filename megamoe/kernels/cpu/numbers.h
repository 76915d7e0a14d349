// Numbers of the rows: float, or bfloat16 as its upper half; all arithmetic is float.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

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
