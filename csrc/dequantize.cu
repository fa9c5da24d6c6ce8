// Quantised matrices to plain ones: (code - zero) * scale, rounded to the dtype of the scales, then to that of the matrix.
//
// A thread makes eight neighbouring columns of a row. The product of a code of at most 8 bits and a scale of 16 is exact in
// float32, so rounding it once gives what a product in the dtype of the scales gives.
#include "codes.cuh"
#include "kernels.h"
#include "launch.h"
#include "warp.cuh"

namespace offload_rt {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 8;

// The `bits` bits from bit `at` on of words that lie `stride` apart.
__device__ __forceinline__ uint32_t dense_code(const uint32_t* words, int64_t stride, int64_t at, int bits) {
  const int shift = static_cast<int>(at % 32);
  const uint32_t* word = words + at / 32 * stride;
  uint32_t code = *word >> shift;
  if (shift + bits > 32) code |= word[stride] << (32 - shift);
  return code & ((1u << bits) - 1);
}

template <CodeKind kind>
constexpr bool kIsInteger = kind == CodeKind::kRows || kind == CodeKind::kColumns || kind == CodeKind::kAwq || kind == CodeKind::kInt8;

// Code of a matrix with rows of `row_size` words or bytes.
template <CodeKind kind>
__device__ __forceinline__ int integer_of(const void* codes, int64_t row_size, int bits, int64_t row, int column) {
  const uint32_t* words = static_cast<const uint32_t*>(codes);
  if constexpr (kind == CodeKind::kRows)
    return dense_code(words + row * row_size, 1, static_cast<int64_t>(column) * bits, bits);
  else if constexpr (kind == CodeKind::kColumns)
    return dense_code(words + column, row_size, row * bits, bits);
  else if constexpr (kind == CodeKind::kAwq)  // columns 0 to 7 are in nibbles 0, 4, 1, 5, 2, 6, 3, 7
    return words[row * row_size + column / 8] >> (column % 2 * 16 + column % 8 / 2 * 4) & 15u;
  else
    return static_cast<const int8_t*>(codes)[row * row_size + column];
}

// Zero point of a place in the grid of the scales. Codes packed along their rows have zeros packed along columns, and conversely.
template <CodeKind kind>
__device__ __forceinline__ int zero_of(const Dequantize& args, int64_t row, int column) {
  constexpr CodeKind packed = kind == CodeKind::kRows ? CodeKind::kColumns : kind == CodeKind::kColumns ? CodeKind::kRows : kind;
  const int zero = integer_of<packed>(args.zeros, args.zero_row_size, args.bits, row, column);
  return kind == CodeKind::kInt8 ? zero : (zero + args.offset) & ((1 << args.bits) - 1);
}

template <CodeKind kind>
__device__ __forceinline__ float value_of(const Dequantize& args, int64_t row, int column) {
  const uint8_t* bytes = static_cast<const uint8_t*>(args.codes) + row * args.row_size;
  if constexpr (kIsInteger<kind>)
    return static_cast<float>(integer_of<kind>(args.codes, args.row_size, args.bits, row, column));
  else if constexpr (kind == CodeKind::kFloat4)
    return float4_value(bytes[column / 2] >> (4 * (column % 2)) & 15u);
  else if constexpr (kind == CodeKind::kNormal4)
    return normal4_value(bytes[column / 2] >> (4 - 4 * (column % 2)) & 15u);
  else
    return float8_value(bytes[column]);
}

template <class Args>
__device__ __forceinline__ void store(const Args& args, int64_t at, int n, const float (&values)[kColumns]) {
  if (args.out_kind == FloatKind::kFloat) {
    for (int i = 0; i < n; ++i) static_cast<float*>(args.out)[at + i] = values[i];
    return;
  }
  const bool is_half = args.out_kind == FloatKind::kHalf;
  if (args.is_aligned) {
    uint32_t pairs[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float low = values[2 * i], high = values[2 * i + 1];
      pairs[i] = is_half ? pack<Half>(low, high) : pack<BFloat16>(low, high);
    }
    static_cast<uint4*>(args.out)[at / kColumns] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    return;
  }
  for (int i = 0; i < n; ++i) static_cast<uint16_t*>(args.out)[at + i] = narrow(values[i], args.out_kind);
}

// Eight neighbouring codes of a row, with few loads where their place allows it.
template <CodeKind kind>
__device__ __forceinline__ void codes_of(const Dequantize& args, int64_t row, int column, float (&codes)[kColumns]) {
  if constexpr (kind == CodeKind::kRows) {
    if (args.bits == 4) {
      const uint32_t word = static_cast<const uint32_t*>(args.codes)[row * args.row_size + column / kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) codes[i] = static_cast<float>(word >> 4 * i & 15u);
      return;
    }
  }
  if constexpr (kind == CodeKind::kInt8 || kind == CodeKind::kFloat8) {
    const uint8_t* bytes = static_cast<const uint8_t*>(args.codes) + row * args.row_size + column;
    if (reinterpret_cast<uintptr_t>(bytes) % kColumns == 0) {
      const uint2 words = *reinterpret_cast<const uint2*>(bytes);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const uint8_t byte = (i < 4 ? words.x : words.y) >> 8 * (i % 4) & 255u;
        codes[i] = kind == CodeKind::kInt8 ? static_cast<float>(static_cast<int8_t>(byte)) : float8_value(byte);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) codes[i] = value_of<kind>(args, row, column + i);
}

__device__ __forceinline__ float product_of(const Dequantize& args, float code, int zero, float scale) {
  const float value = (code - static_cast<float>(zero)) * scale;
  return args.scale_kind == FloatKind::kFloat ? value : widen(narrow(value, args.scale_kind), args.scale_kind);
}

template <CodeKind kind>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(Dequantize args) {
  constexpr bool groups_rows = kind == CodeKind::kColumns || kind == CodeKind::kAwq;
  const int row = blockIdx.x, column = (blockIdx.y * kThreads + threadIdx.x) * kColumns;
  if (column >= args.n_columns) return;
  const int n = min(kColumns, args.n_columns - column);
  const bool groups_columns = args.groups && !groups_rows;
  const int64_t scale_row = args.groups && groups_rows ? args.groups[row] : row / args.block_rows;
  int block = column / args.block_columns, left = args.block_columns - column % args.block_columns;
  const auto zero_at = [&](int scale_column) {
    if constexpr (kIsInteger<kind>)
      if (args.zeros) return zero_of<kind>(args, scale_row, scale_column);
    return args.offset;
  };
  const auto scale_at = [&](int scale_column) {
    return load(args.scales, scale_row * args.n_scales + scale_column, args.scale_kind);
  };
  float values[kColumns];
  if (kind != CodeKind::kNormal4 && n == kColumns && left >= kColumns && !groups_columns) {  // one scale
    const int zero = zero_at(block);
    const float scale = scale_at(block);
    codes_of<kind>(args, row, column, values);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = product_of(args, values[i], zero, scale);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i >= n) break;
      const int scale_column = groups_columns ? args.groups[column + i] : block;
      values[i] = product_of(args, value_of<kind>(args, row, column + i), zero_at(scale_column), scale_at(scale_column));
      if (--left == 0) ++block, left = args.block_columns;
    }
  }
  store(args, static_cast<int64_t>(row) * args.n_columns + column, n, values);
}

__device__ __forceinline__ float half_at(const uint8_t* bytes) {
  return widen(static_cast<uint16_t>(bytes[0] | bytes[1] << 8), FloatKind::kHalf);
}

__device__ __forceinline__ int nibble(const uint8_t* codes, int i, int width) {
  return codes[i / (2 * width) * width + i % width] >> (i / width % 2 * 4) & 15;
}

// Pairs of bits of 32 bytes, or single ones: the low bits of all of them first.
__device__ __forceinline__ int pair_of(const uint8_t* codes, int i) { return codes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3; }
__device__ __forceinline__ int bit_of(const uint8_t* codes, int i) { return codes[i % 32] >> (i / 32) & 1; }

// A tree of choices, as above.
__device__ __forceinline__ int level_of_iq4(int code) {
  const bool a = code & 8, b = code & 4, c = code & 2, d = code & 1;
  if (!a) return b ? (c ? (d ? -10 : -22) : (d ? -35 : -49)) : (c ? (d ? -65 : -83) : (d ? -104 : -127));
  return b ? (c ? (d ? 113 : 89) : (d ? 69 : 53)) : (c ? (d ? 38 : 25) : (d ? 13 : 1));
}

// Code i of a block, less what is subtracted from all.
__device__ __forceinline__ int block_code(const DequantizeBlocks& args, const uint8_t* block, int i) {
  const uint8_t* codes = block + args.layout.codes;
  switch (args.kind) {
    case BlockKind::kQ4_0: return nibble(codes, i, 16) - 8;
    case BlockKind::kQ4_1: return nibble(codes, i, 16);
    case BlockKind::kQ5_0: return (nibble(codes, i, 16) | (codes[i / 8 - 4] >> i % 8 & 1) << 4) - 16;
    case BlockKind::kQ5_1: return nibble(codes, i, 16) | (codes[i / 8 - 4] >> i % 8 & 1) << 4;
    case BlockKind::kQ8_0: return static_cast<int8_t>(codes[i]);
    case BlockKind::kQ2_K: return pair_of(codes, i);
    case BlockKind::kQ3_K: return pair_of(codes, i) + 4 * bit_of(block, i) - 4;
    case BlockKind::kQ4_K: return nibble(codes, i, 32);
    case BlockKind::kQ5_K: return nibble(codes, i, 32) | bit_of(block + 16, i) << 4;
    case BlockKind::kQ6_K: return (nibble(codes, i, 64) | pair_of(block + 128, i) << 4) - 32;
    default: return level_of_iq4(nibble(codes, i, 16));
  }
}

// What the codes around i are multiplied with, and what is then subtracted.
__device__ __forceinline__ float2 block_scale(const DequantizeBlocks& args, const uint8_t* block, int i) {
  const int group = i / args.layout.group;
  const float scale = half_at(block + args.layout.scale), minimum = half_at(block + args.layout.minimum);
  switch (args.kind) {
    case BlockKind::kQ4_1: case BlockKind::kQ5_1: return {scale, -minimum};
    case BlockKind::kQ2_K: return {scale * (block[group] & 15), minimum * (block[group] >> 4)};
    case BlockKind::kQ3_K: {
      const int low = block[96 + group % 8] >> (group / 8 * 4) & 15, high = block[104 + group % 4] >> (group / 4 * 2) & 3;
      return {scale * ((low | high << 4) - 32), 0.f};
    }
    case BlockKind::kQ4_K: case BlockKind::kQ5_K: {
      const uint8_t *bytes = block + 4 + group % 4, low = bytes[0], middle = bytes[4], high = bytes[8];
      if (group < 4) return {scale * (low & 63), minimum * (middle & 63)};
      return {scale * (high & 15 | low >> 6 << 4), minimum * (high >> 4 | middle >> 6 << 4)};
    }
    case BlockKind::kQ6_K: return {scale * static_cast<int8_t>(block[192 + group]), 0.f};
    case BlockKind::kIQ4_XS: {
      const int low = block[4 + group / 2] >> (group % 2 * 4) & 15, high = block[2 + group / 4] >> (group % 4 * 2) & 3;
      return {scale * ((low | high << 4) - 32), 0.f};
    }
    default: return {scale, 0.f};
  }
}

// Eight neighbouring columns share a scale. Codes times scales are exact in float32, so it is the difference that is rounded.
__global__ void __launch_bounds__(kThreads) dequantize_blocks_kernel(DequantizeBlocks args) {
  const int64_t row = blockIdx.x;
  const int column = (blockIdx.y * kThreads + threadIdx.x) * kColumns, n = args.layout.n, first = column % n;
  if (column >= args.n_columns) return;
  const uint8_t* block = args.blocks + (row * (args.n_columns / n) + column / n) * args.layout.size;
  const float2 scale = block_scale(args, block, first);
  float values[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) values[i] = block_code(args, block, first + i) * scale.x - scale.y;
  store(args, row * args.n_columns + column, kColumns, values);
}

// A block of threads for a part of a row.
dim3 grid_of(int64_t n_rows, int n_columns) {
  constexpr int kPart = kThreads * kColumns;
  return dim3(static_cast<unsigned>(n_rows), static_cast<unsigned>((n_columns + kPart - 1) / kPart));
}

template <CodeKind kind>
void start(const Dequantize& args, cudaStream_t stream) {
  launch(dequantize_kernel<kind>, grid_of(args.n_rows, args.n_columns), kThreads, 0, stream, args);
}

}  // namespace

void dequantize_blocks(const DequantizeBlocks& args, cudaStream_t stream) {
  launch(dequantize_blocks_kernel, grid_of(args.n_rows, args.n_columns), kThreads, 0, stream, args);
}

void dequantize(const Dequantize& args, cudaStream_t stream) {
  switch (args.kind) {
    case CodeKind::kRows: return start<CodeKind::kRows>(args, stream);
    case CodeKind::kColumns: return start<CodeKind::kColumns>(args, stream);
    case CodeKind::kAwq: return start<CodeKind::kAwq>(args, stream);
    case CodeKind::kInt8: return start<CodeKind::kInt8>(args, stream);
    case CodeKind::kFloat4: return start<CodeKind::kFloat4>(args, stream);
    case CodeKind::kNormal4: return start<CodeKind::kNormal4>(args, stream);
    default: return start<CodeKind::kFloat8>(args, stream);
  }
}

}  // namespace offload_rt
