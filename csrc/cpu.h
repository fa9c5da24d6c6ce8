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

// One matrix (n_out, n_in), and its product. Columns and AWQ order store its transpose.
struct Matrix {
  const void* x;          // (n_rows, n_in), read by products
  void* y;                // (n_rows, n_out), written by products
  int64_t n_rows, ldx, ldy;  // numbers between rows

  const uint8_t* codes;
  const void* scales;     // (n_out / block_out, n_in / block_in), or transposed; grid of a type of GGUF
  const uint8_t* zeros;   // codes of zero points in a grid like that of the scales, or null
  const int32_t* groups;  // (n_in,) the group of each input, or null: input / block_in
  const void* bias;       // (n_out,) or null
  int64_t row_nbytes;     // of the codes of an output; of an input where the transpose is stored
  int64_t n_out, n_in, block_out, block_in;
  int64_t grid_columns;   // of the stored grid of scales
  int32_t kind, bits, offset;
  int32_t scale_dtype, product_dtype;  // of a code times its scale
  int32_t zero_order, zero_plus;       // order as Kind
  int32_t bias_dtype;
  int32_t rounds_inputs;  // to 8 bits, for codes that are integers; see rounded_cpu.h
};

// Keys and values of one layer, queries of rows of a tree, and what the rows see; see ops/attention_cpu.py.
struct TreeAttention {
  const void *q, *k, *v;  // (n, n_heads, k_dim), (n_kv_heads, n_before + n_tree, k_dim or v_dim)
  void* out;              // (n, n_heads, v_dim), dense
  float* lse;             // (n, n_heads)
  const float* sinks;     // (n_heads,) or null
  const int32_t *bits, *depths;
  int64_t n, n_heads, n_kv_heads, k_dim, v_dim, n_words;
  int64_t q_row, q_head, k_head, k_row, v_head, v_row;  // strides in numbers
  int64_t n_before, n_tree, window;                     // window 0: none
  float scale, softcap;                                 // softcap 0: none
  int32_t dtype;
};

EXPORT void offload_rt_linear(const Matrix* matrices, int n_matrices, int dtype, int n_threads);
EXPORT void offload_rt_tree_attention(const TreeAttention* attention, int n_threads);
