// Numbers of the rows: float, or bfloat16 as its upper half; all arithmetic is float.
#pragma once
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
