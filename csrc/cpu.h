// Types of the CPU library (lossless_cpu.cpp, linear_cpu.cpp, attention_cpu.cpp), which is called through ctypes.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
// The dtypes of tensors, as ops/cpu.py numbers them.
enum Dtype { kFloat32, kBFloat16, kFloat16, kExponent8 };

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(Half x) {
  const uint32_t size = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
  // Infinity and NaN: an exponent that stays the largest when it is scaled.
  const uint32_t moved = size << 13 | (size >= 0x7c00u ? 0x7f800000u : 0u);
  return bit_cast<float>(sign | moved) * 0x1p112f;
}
// Rounded to even; a NaN stays one.
inline BFloat16 to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  return {static_cast<uint16_t>(x == x ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fc0u)};
}
inline Half to_half(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), size = bits & 0x7fffffffu;
  uint32_t half = ((size + (size >> 13 & 1u) + 0xfffu) >> 13) - (112u << 10);
  // The last bit of 0.5 and more is 2^-24, like that of the subnormal numbers of float16.
  if (size < 0x38800000u) half = bit_cast<uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3f000000u;
  if (size >= 0x477ff000u) half = 0x7c00u;
  if (size > 0x7f800000u) half = 0x7e00u;
  return {static_cast<uint16_t>(half | (bits >> 16 & 0x8000u))};
}

template <typename T>
inline T smaller(T a, T b) {
  return a < b ? a : b;
}
