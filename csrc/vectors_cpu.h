// Vectors of kLanes floats for one LEVEL, by GCC's vector extensions; the compiler defines LEVEL (ops/build.py).
// Multiplications and additions are fused by `fma` alone (the compiler contracts nothing), so results do not depend on how
// loops are unrolled.
#if LEVEL >= 2
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float V __attribute__((vector_size(4 * kLanes)));
typedef int32_t VI __attribute__((vector_size(4 * kLanes)));
typedef V Unaligned __attribute__((aligned(4), may_alias));

#if defined(__ARM_NEON)
#include "neon_cpu.h"
#endif

inline V set1(float value) { return value - V{}; }  // not a sum, which would lose the sign of -0
inline V load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, V value) { *reinterpret_cast<Unaligned*>(to) = value; }

// a * b + c, rounded once where the instruction set can.
inline V fma(V a, V b, V c) {
#if LEVEL >= 2
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LEVEL == 1
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return neon_fma(a, b, c);
#else
  return a * b + c;
#endif
}

inline V load(const BFloat16* from) {
#if LEVEL >= 2
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return (V)_mm512_slli_epi32(wide, 16);
#elif LEVEL == 1
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return (V)_mm256_slli_epi32(wide, 16);
#elif defined(__ARM_NEON)
  return neon_load(from);
#else
  VI wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<int32_t>(static_cast<uint32_t>(from[i].bits) << 16);
  return (V)wide;
#endif
}

inline V load(const Half* from) {
#if LEVEL >= 2
  return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif LEVEL == 1
  return (V)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__ARM_NEON)
  return neon_load(from);
#else
  V wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = to_float(from[i]);
  return wide;
#endif
}

inline float half_at(const uint8_t* bytes) {
  Half half;
  memcpy(&half, bytes, 2);
#if LEVEL >= 1
  return _cvtsh_ss(half.bits);
#else
  return to_float(half);
#endif
}

inline void store(BFloat16* to, V value) {
  // Rounds to even; a NaN stays one. The instruction of AVX512-bf16 would make zeros of subnormal numbers.
  const VI bits = (VI)value;
  VI rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = value == value ? rounded : VI{} + 0x7fc0;
#if LEVEL >= 2
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)rounded));
#elif defined(__ARM_NEON)
  neon_store(to, rounded);
#else
  for (int i = 0; i < kLanes; ++i) to[i].bits = static_cast<uint16_t>(rounded[i]);
#endif
}

inline void store(Half* to, V value) {
#if LEVEL >= 2
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif LEVEL == 1
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__ARM_NEON)
  neon_store(to, value);
#else
  for (int i = 0; i < kLanes; ++i) to[i] = to_half(value[i]);
#endif
}

// The first n < kLanes numbers, zeros behind them.
template <typename T>
inline V load_first(const T* from, int n) {
  T padded[kLanes] = {};
#if LEVEL >= 2
  if constexpr (sizeof(T) == 2) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(padded), _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1 << n) - 1), from));
    return load(padded);
  }
#endif
  for (int i = 0; i < n; ++i) padded[i] = from[i];
  return load(padded);
}
template <typename T>
inline void store_first(T* to, V value, int n) {
  T padded[kLanes];
  store(padded, value);
  for (int i = 0; i < n; ++i) to[i] = padded[i];
}

// The sums of four vectors, in one order for every caller: neighbours first, then neighbouring pairs, and so on.
inline void sum4(V a, V b, V c, V d, float* sums) {
#if LEVEL >= 1
#if LEVEL >= 2
  const auto half = [](V x, int i) { return i ? _mm512_extractf32x8_ps((__m512)x, 1) : _mm512_castps512_ps256((__m512)x); };
  __m256 x[2];
  for (int i = 0; i < 2; ++i)
    x[i] = _mm256_hadd_ps(_mm256_hadd_ps(half(a, i), half(b, i)), _mm256_hadd_ps(half(c, i), half(d, i)));
  const __m128 low = _mm_add_ps(_mm256_castps256_ps128(x[0]), _mm256_extractf128_ps(x[0], 1));
  const __m128 high = _mm_add_ps(_mm256_castps256_ps128(x[1]), _mm256_extractf128_ps(x[1], 1));
  _mm_storeu_ps(sums, _mm_add_ps(low, high));
#else
  const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
#endif
#elif defined(__ARM_NEON)
  neon_sum4(a, b, c, d, sums);
#else
  const V all[4] = {a, b, c, d};
  for (int j = 0; j < 4; ++j) {
    const V x = all[j];
    sums[j] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
  }
#endif
}

// The largest lane, and the sum of the lanes: halves first, then quarters, and so on.
inline float max_of(V x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
  return lanes[0];
}
inline float sum_of(V x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  return lanes[0];
}

// e^x to 1 ulp, the same in every lane: 1 at 0, 0 below -87, infinity above 89; a NaN stays one.
inline V exp(V x) {
  const V limited = x > 89.0f ? set1(89.0f) : x;
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the last bits.
  const V magic = set1(0x1.8p23f), shifted = fma(limited, set1(0x1.715476p0f), magic), n = shifted - magic;
  const V r = fma(n, set1(-0x1.7f7d1cp-20f), fma(n, set1(-0x1.62e4p-1f), limited));
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f};
  V y = set1(1.9875691500e-4f);
  for (int i = 0; i < 7; ++i) y = fma(y, r, set1(kTerms[i]));
  const V power = (V)(((VI)shifted - (VI)magic + 127) << 23);
  return x < -87.0f ? V{} : y * power;
}
