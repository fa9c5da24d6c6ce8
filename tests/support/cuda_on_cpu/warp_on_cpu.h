// The functions of csrc/warp.cuh lane by lane, with the fragment layouts of the PTX documentation ("Matrix Fragments for
// mma.m16n8k16 with floating point type", "ldmatrix"). Included in place of them.
#pragma once

#include <cmath>
#include <cstring>

#include "fibers.h"

namespace offload_rt {

inline unsigned char* shared_memory() { return cuda_on_cpu::shared_memory(); }
inline void sync_block() { cuda_on_cpu::sync_block(); }
inline void sync_grid() { cuda_on_cpu::sync_grid(); }
inline void sync_warp() {
  cuda_on_cpu::meet([](void* const (&)[32]) {}, nullptr);
}

// What a lane brings to a shuffle or a vote, and takes away.
template <typename V>
struct Exchange {
  V given;
  int lanes;
  V taken;
};

template <typename V, typename Source>
V exchange(V value, int lanes, Source) {
  Exchange<V> own{value, lanes, V()};
  cuda_on_cpu::meet(
      [](void* const (&all)[32]) {
        for (int lane = 0; lane < 32; ++lane) {
          auto* to = static_cast<Exchange<V>*>(all[lane]);
          to->taken = static_cast<const Exchange<V>*>(all[Source::of(lane, to->lanes)])->given;
        }
      },
      &own);
  return own.taken;
}

struct Xor {
  static int of(int lane, int lanes) { return lane ^ lanes; }
};
struct Below {
  static int of(int lane, int n) { return lane >= n ? lane - n : lane; }
};
struct From {
  static int of(int, int source) { return source; }
};

template <typename V>
V shuffle_xor(V value, int lanes) {
  return exchange(value, lanes, Xor());
}
template <typename V>
V shuffle_up(V value, int n) {
  return exchange(value, n, Below());
}
template <typename V>
V shuffle_from(V value, int lane) {
  return exchange(value, lane, From());
}

inline uint32_t ballot(bool says) {
  Exchange<uint32_t> own{says ? 1u : 0u, 0, 0};
  cuda_on_cpu::meet(
      [](void* const (&all)[32]) {
        uint32_t bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= static_cast<Exchange<uint32_t>*>(all[lane])->given << lane;
        for (int lane = 0; lane < 32; ++lane) static_cast<Exchange<uint32_t>*>(all[lane])->taken = bits;
      },
      &own);
  return own.taken;
}
// The emulation is compiled without contraction.
inline float rounded_product(float a, float b) { return a * b; }
inline int first_bit(uint32_t bits) { return __builtin_ctz(bits); }
inline int last_bit(uint32_t bits) { return 31 - __builtin_clz(bits); }
inline int count_bits(uint64_t bits) { return __builtin_popcountll(bits); }

inline float exp2_fast(float x) { return std::exp2(x); }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

template <typename T>
uint16_t narrow(float x);
template <>
inline uint16_t narrow<BFloat16>(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <>
inline uint16_t narrow<Half>(float x) {
  const uint16_t sign = bits_of(x) >> 16 & 0x8000;
  const float size = std::fabs(x);
  if (x != x) return 0x7fff;
  if (size >= 65520.f) return sign | 0x7c00;
  // Below the normal numbers the spacing is 2^-24; nearbyint rounds to even as the hardware does.
  if (size < 6.103515625e-05f) return sign | static_cast<uint16_t>(std::nearbyint(size * 16777216.f));
  const uint32_t bits = bits_of(size);
  const uint32_t rounded = bits + 0xfff + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>((rounded >> 13) - (112 << 10));
}

template <typename T>
float widen(uint16_t x);
template <>
inline float widen<BFloat16>(uint16_t x) {
  return float_of(static_cast<uint32_t>(x) << 16);
}
template <>
inline float widen<Half>(uint16_t x) {
  const float sign = x & 0x8000 ? -1.f : 1.f;
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * fraction * 5.9604644775390625e-08f;
  return sign * float_of(static_cast<uint32_t>(exponent + 112) << 23 | static_cast<uint32_t>(fraction) << 13);
}

template <typename T>
uint32_t pack(float low, float high) {
  return narrow<T>(low) | static_cast<uint32_t>(narrow<T>(high)) << 16;
}

template <typename T>
float2 unpack(uint32_t both) {
  return {widen<T>(both & 0xffff), widen<T>(both >> 16)};
}

inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) { return (a & mask) | bits; }

// Differences of codes and zero points are exact in float32, and so are products of two numbers of 16 bits.
template <typename T>
uint32_t subtract_pair(uint32_t a, uint32_t b) {
  const float2 x = unpack<T>(a), y = unpack<T>(b);
  return pack<T>(x.x - y.x, x.y - y.y);
}
template <typename T>
uint32_t multiply_pair(uint32_t a, uint32_t b) {
  const float2 x = unpack<T>(a), y = unpack<T>(b);
  return pack<T>(x.x * y.x, x.y * y.y);
}

struct MatrixLoad {
  uint32_t* r;
  const void* row;
};

// Matrix i has its rows at the addresses of lanes 8 i to 8 i + 7; lane l receives of it row l / 4, columns 2 (l % 4) and
// the next, or of its transpose.
template <bool is_transposed>
void load_matrices(void* const (&all)[32]) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      uint16_t pair[2];
      for (int e = 0; e < 2; ++e) {
        const int own_row = lane / 4, own_column = 2 * (lane % 4) + e;
        const int row = is_transposed ? own_column : own_row, column = is_transposed ? own_row : own_column;
        const auto* from = static_cast<const uint16_t*>(static_cast<MatrixLoad*>(all[8 * i + row])->row);
        pair[e] = from[column];
      }
      static_cast<MatrixLoad*>(all[lane])->r[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  MatrixLoad own{r, row};
  cuda_on_cpu::meet(load_matrices<false>, &own);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  MatrixLoad own{r, row};
  cuda_on_cpu::meet(load_matrices<true>, &own);
}

struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

// a: registers 0 to 3 hold rows g, g + 8, g, g + 8 and columns 2 t + {0, 1}, with 8 added for the last two registers.
// b: registers 0 and 1 hold rows 2 t + {0, 1}, with 8 added for the last, of column g.
// c: entries 0 to 3 hold row g, columns 2 t + {0, 1}, then row g + 8.         (g = lane / 4, t = lane % 4)
template <typename T>
void multiply(void* const (&all)[32]) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* own = static_cast<const Product*>(all[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int e = 0; e < 2; ++e) {
      for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + e + i / 2 * 8] = widen<T>(own->a[i] >> 16 * e & 0xffff);
      for (int i = 0; i < 2; ++i) b[2 * t + e + 8 * i][g] = widen<T>(own->b[i] >> 16 * e & 0xffff);
    }
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
      float& c = static_cast<Product*>(all[lane])->c[i];
      for (int k = 0; k < 16; ++k) c += a[row][k] * b[k][column];
    }
}

template <typename T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product own{c, a, {b0, b1}};
  cuda_on_cpu::meet(multiply<T>, &own);
}

inline void cp_async_16(void* to_shared, const void* from, bool is_there) {
  cuda_on_cpu::copy_later(to_shared, from, is_there);
}
inline void cp_async_commit() { cuda_on_cpu::close_group(); }
template <int n>
void cp_async_wait() {
  cuda_on_cpu::wait_for_groups(n);
}

}  // namespace offload_rt
