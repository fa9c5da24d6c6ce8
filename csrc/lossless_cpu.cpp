// Lossless weights on a CPU, for ctypes: built by g++ alone, with AVX512-VBMI2 where the processor that runs it has it.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_AVX512
#include <immintrin.h>
#endif

namespace {

constexpr int kGroup = 64, kGroupBytes = 88, kBlockGroups = 64;
constexpr int kBFloat16 = 1, kHalf = 2, kFloat = 3;
constexpr uint32_t kPrime = 0x9E3779B1u;
constexpr uint64_t kPrime64 = 0x9E3779B97F4A7C15u;

template <typename T>
inline T load(const uint8_t* from) {
  T value;
  memcpy(&value, from, sizeof(value));
  return value;
}

namespace portable {

// Bit i of a byte to byte i.
inline uint64_t spread(uint8_t bits) {
  const uint64_t apart = bits * 0x0101010101010101u & 0x8040201008040201u;
  return (apart + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

// Writes the bits of 64 weights that are neither sign nor kept mantissa; returns how many of them were escapes.
inline int exponents(const uint8_t* planes, const uint8_t* table, const uint8_t* escapes, uint8_t* others) {
  uint8_t own[8];
  memcpy(own, table, sizeof(own));
  for (int i = 0; i < 8; ++i) {
    const uint64_t codes = spread(planes[i]) | spread(planes[8 + i]) << 1 | spread(planes[16 + i]) << 2;
    memcpy(others + 8 * i, &codes, 8);
  }
  // By comparisons, which are vectorised; looking up is not.
  for (int i = 0; i < kGroup; ++i) {
    uint8_t known = 0;
    for (int code = 1; code < 8; ++code) known |= own[code] & -(others[i] == code);
    others[i] = known;
  }
  int n = 0;
  uint64_t left = ~(load<uint64_t>(planes) | load<uint64_t>(planes + 8) | load<uint64_t>(planes + 16));
  for (; left; left &= left - 1) others[__builtin_ctzll(left)] = escapes[n++];
  return n;
}

}  // namespace portable

#define ISA portable
#include "lossless_cpu.h"
#undef ISA

#ifdef HAS_AVX512
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,bmi,bmi2,popcnt,prefer-vector-width=512")
namespace avx512 {

inline int exponents(const uint8_t* planes, const uint8_t* table, const uint8_t* escapes, uint8_t* others) {
  const uint64_t a = load<uint64_t>(planes), b = load<uint64_t>(planes + 8), c = load<uint64_t>(planes + 16);
  const uint64_t left = ~(a | b | c);
  __m512i codes = _mm512_maskz_set1_epi8(a, 1);
  codes = _mm512_mask_add_epi8(codes, b, codes, _mm512_set1_epi8(2));
  codes = _mm512_mask_add_epi8(codes, c, codes, _mm512_set1_epi8(4));
  const __m512i known = _mm512_permutexvar_epi8(codes, _mm512_set1_epi64(load<int64_t>(table)));
  _mm512_store_si512(others, _mm512_mask_expand_epi8(known, left, _mm512_loadu_si512(escapes)));
  return __builtin_popcountll(left);
}

}  // namespace avx512

#define ISA avx512
#include "lossless_cpu.h"
#undef ISA
#pragma GCC pop_options

const bool has_avx512 = __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vbmi") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2");
#endif

}  // namespace

extern "C" {

__attribute__((visibility("default"))) uint64_t offload_rt_digest(const uint8_t* bytes, int64_t n) {
#ifdef HAS_AVX512
  if (has_avx512) return avx512::digest(bytes, n);
#endif
  return portable::digest(bytes, n);
}

// is_portable: as on a processor without AVX512, for tests.
__attribute__((visibility("default"))) bool offload_rt_decode(const uint8_t* chunk, int64_t nbytes, int kind, int64_t n,
                                                              uint8_t* out, bool is_portable) {
#ifdef HAS_AVX512
  if (has_avx512 && !is_portable) return avx512::decode_kind(chunk, nbytes, kind, n, out);
#endif
  return portable::decode_kind(chunk, nbytes, kind, n, out);
}
}
