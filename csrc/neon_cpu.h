// Eight floats as two NEON registers, for vectors_cpu.h. The order of sums is that of AVX2.
#pragma once
#include <arm_neon.h>

inline float32x4_t low_of(V x) { return (float32x4_t)__builtin_shufflevector(x, x, 0, 1, 2, 3); }
inline float32x4_t high_of(V x) { return (float32x4_t)__builtin_shufflevector(x, x, 4, 5, 6, 7); }
inline V join(float32x4_t low, float32x4_t high) { return (V)__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7); }

inline V neon_fma(V a, V b, V c) {
  return join(vfmaq_f32(low_of(c), low_of(a), low_of(b)), vfmaq_f32(high_of(c), high_of(a), high_of(b)));
}

inline V neon_load(const BFloat16* from) {
  const uint16x8_t bits = vld1q_u16(reinterpret_cast<const uint16_t*>(from));
  return join(vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16)));
}
inline V neon_load(const Half* from) {
  const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(from)));
  return join(vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves));
}

// The low 16 bits of every lane.
inline void neon_store(BFloat16* to, VI bits) {
  const uint32x4_t low = vreinterpretq_u32_f32(low_of((V)bits)), high = vreinterpretq_u32_f32(high_of((V)bits));
  vst1q_u16(reinterpret_cast<uint16_t*>(to), vmovn_high_u32(vmovn_u32(low), high));
}
inline void neon_store(Half* to, V value) {
  const float16x8_t halves = vcvt_high_f16_f32(vcvt_f16_f32(low_of(value)), high_of(value));
  vst1q_u16(reinterpret_cast<uint16_t*>(to), vreinterpretq_u16_f16(halves));
}

inline void neon_sum4(V a, V b, V c, V d, float* sums) {
  const auto pairs = [](V x) { return vpaddq_f32(low_of(x), high_of(x)); };
  vst1q_f32(sums, vpaddq_f32(vpaddq_f32(pairs(a), pairs(b)), vpaddq_f32(pairs(c), pairs(d))));
}
