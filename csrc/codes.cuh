// Values of codes and of scales in 16 bits.
#pragma once

#include <cstring>

#include "kernels.h"
#include "warp.cuh"

namespace offload_rt {

__device__ __forceinline__ float float_from(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

__device__ __forceinline__ uint16_t narrow(float x, FloatKind kind) {
  return static_cast<uint16_t>(kind == FloatKind::kHalf ? pack<Half>(x, 0.f) : pack<BFloat16>(x, 0.f));
}

__device__ __forceinline__ float widen(uint16_t bits, FloatKind kind) {
  if (kind == FloatKind::kBFloat16) return float_from(static_cast<uint32_t>(bits) << 16);
  const uint32_t size = bits & 0x7fff, sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  // Exponent and mantissa are moved to those of float32 and scaled by 2^112, the difference of the biases.
  return float_from(size << 13 | sign | (size >= 0x7c00 ? 0x7f800000u : 0u)) * 5192296858534827628530496329220096.f;
}

// 2^(code - 127); 2^-127 is below the normal numbers, 2^128 is infinite.
__device__ __forceinline__ float power_of_two(uint8_t code) { return float_from(code ? static_cast<uint32_t>(code) << 23 : 1u << 22); }

__device__ __forceinline__ float load(const void* from, int64_t i, FloatKind kind) {
  if (kind == FloatKind::kPowerOfTwo) return power_of_two(static_cast<const uint8_t*>(from)[i]);
  return kind == FloatKind::kFloat ? static_cast<const float*>(from)[i] : widen(static_cast<const uint16_t*>(from)[i], kind);
}

__device__ __forceinline__ float float4_value(uint32_t code) {
  const uint32_t size = code & 7;
  const float value = size < 4 ? 0.5f * static_cast<float>(size) : static_cast<float>((2 + (size & 1)) << (size / 2 - 2));
  return code & 8 ? -value : value;
}

// bitsandbytes' nf4; a tree of choices needs no table in memory.
__device__ __forceinline__ float normal4_value(uint32_t code) {
  const bool a = code & 8, b = code & 4, c = code & 2, d = code & 1;
  if (!a) {
    if (!b) return c ? (d ? -0.39491748809814453f : -0.5250730514526367f) : (d ? -0.6961928009986877f : -1.f);
    return c ? (d ? 0.f : -0.09105003625154495f) : (d ? -0.18477343022823334f : -0.28444138169288635f);
  }
  if (!b) return c ? (d ? 0.33791524171829224f : 0.24611230194568634f) : (d ? 0.16093020141124725f : 0.07958029955625534f);
  return c ? (d ? 1.f : 0.7229568362236023f) : (d ? 0.5626170039176941f : 0.44070982933044434f);
}

__device__ __forceinline__ float float8_value(uint32_t code) {
  const uint32_t size = code & 0x7f;
  if (size == 0x7f) return float_from(0x7fc00000u);
  return float_from((code & 0x80) << 24 | size << 20) * 1329227995784915872903807060280344576.f;  // 2^120
}

}  // namespace offload_rt
