// y = x w^T for few rows and a quantised w, which is decoded in registers; or for rows sorted by matrix, as of experts.
//
// A warp multiplies 16 outputs by tensor cores. A lane reads eight neighbouring codes of two outputs and the same eight inputs
// of a row of x: the order of inputs within a product is free, so neither w nor x passes through shared memory. The warps of
// a block divide the inputs, and their sums are added in order. A result does not depend on the number of rows.
// Blocks find their matrix and rows by the ends on the device, so the host need not know how many rows a matrix has.
// Integers of 4 bits with scales of 16 have a kernel of their own.
#include "few_rows.cuh"

namespace offload_rt {
namespace {

constexpr int kOuts = 16, kInputs = 32;

// Eight values of an output from `input` on, as pairs of T. They share a scale.
template <typename T, CodeKind kind>
__device__ __forceinline__ void decode(const FewRows& args, int matrix, int out, int input, uint32_t (&pairs)[4]) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(static_cast<const char*>(args.codes) + matrix * args.code_stride);
  if constexpr (kind == CodeKind::kDense) {
    const uint4 eight = reinterpret_cast<const uint4*>(words)[(static_cast<int64_t>(out) * args.n_in + input) / 8];
    pairs[0] = eight.x, pairs[1] = eight.y, pairs[2] = eight.z, pairs[3] = eight.w;
    return;
  }
  constexpr bool is_transposed = kind == CodeKind::kColumns;
  constexpr bool kHasZeros = is_transposed || kind == CodeKind::kRows || kind == CodeKind::kInt8;
  const int64_t scale_out = quotient(out, args.by_block_out), scale_in = quotient(input, args.by_block_in);
  const int64_t at = is_transposed ? scale_in * args.n_scales + scale_out : scale_out * args.n_scales + scale_in;
  const float scale = load(args.scales, matrix * args.scale_stride + at, args.scale_kind);
  int zero = args.offset;
  if (kHasZeros && args.zeros) {
    const char* zeros = static_cast<const char*>(args.zeros) + matrix * args.zero_stride;
    if constexpr (kind == CodeKind::kInt8) {
      zero = static_cast<int8_t>(zeros[at]);
    } else {
      const int64_t word = is_transposed ? scale_in * ((args.n_scales + 7) / 8) + scale_out / 8 : scale_out / 8 * args.n_scales + scale_in;
      const uint32_t code = reinterpret_cast<const uint32_t*>(zeros)[word] >> (scale_out % 8 * 4);
      zero = static_cast<int>(code + static_cast<uint32_t>(args.offset) & 15u);
    }
  }
  // Packing rounds to the dtype of x, which is mostly that of the scales.
  const bool rounds_twice =
      args.scale_kind != args.kind_of_x && (args.scale_kind == FloatKind::kHalf || args.scale_kind == FloatKind::kBFloat16);
  uint32_t low = 0, high = 0;
  if constexpr (kind == CodeKind::kColumns) {
    low = words[static_cast<int64_t>(input / 8) * args.n_out + out];
  } else if constexpr (kind == CodeKind::kRows || kind == CodeKind::kFloat4) {
    low = words[(static_cast<int64_t>(out) * args.n_in + input) / 8];
  } else {
    const uint2 both = reinterpret_cast<const uint2*>(words)[(static_cast<int64_t>(out) * args.n_in + input) / 8];
    low = both.x, high = both.y;
  }
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float values[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int i = 2 * pair + j;
      const uint32_t byte = (i < 4 ? low : high) >> (8 * (i % 4)) & 255u, nibble = low >> (4 * i) & 15u;
      float value;
      if constexpr (kind == CodeKind::kFloat8) value = float8_value(byte);
      else if constexpr (kind == CodeKind::kInt8) value = static_cast<float>(static_cast<int8_t>(byte));
      else if constexpr (kind == CodeKind::kFloat4) value = float4_value(nibble);
      else value = static_cast<float>(nibble);
      value = (value - static_cast<float>(zero)) * scale;
      values[j] = rounds_twice ? widen(narrow(value, args.scale_kind), args.scale_kind) : value;
    }
    pairs[pair] = pack<T>(values[0], values[1]);
  }
}

template <typename T, CodeKind kind, int kTiles>
__global__ void __launch_bounds__(kFewThreads, 2) few_rows_kernel(FewRows args) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int first_out = blockIdx.y * kOuts;
  const RowTile rows = tile_of(args, blockIdx.x, 8 * kTiles);
  const Inputs<kTiles> inputs(args, rows);
  const bool has_matrix = rows.matrix < args.n_matrices;
  float sums[1][kTiles][4] = {};
  for (int input = (warp * 4 + quarter) * 8; has_matrix && input < args.n_in; input += kFewWarps * kInputs) {
    uint32_t w[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      decode<T, kind>(args, rows.matrix, min(first_out + group + 8 * half, args.n_out - 1), input, w[half]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 x = inputs.eight(tile, input);
      mma_m16n8k16<T>(sums[0][tile], {w[0][0], w[1][0], w[0][1], w[1][1]}, x.x, x.y);
      mma_m16n8k16<T>(sums[0][tile], {w[0][2], w[1][2], w[0][3], w[1][3]}, x.z, x.w);
    }
  }
  store_sums<kOuts, kTiles>(args, rows, inputs.n_rows, first_out, sums, [](int, int row) { return row; });
}

template <typename T, CodeKind kind>
void start(const FewRows& args, cudaStream_t stream) {
  const int n_tiles = tiles_of(args);
  const auto kernel = n_tiles == 1   ? few_rows_kernel<T, kind, 1>
                      : n_tiles == 2 ? few_rows_kernel<T, kind, 2>
                                     : few_rows_kernel<T, kind, 4>;
  launch_few_rows(kernel, args, n_tiles, kOuts, 0, stream);
}

template <typename T>
void start(const FewRows& args, cudaStream_t stream) {
  switch (args.kind) {
    case CodeKind::kRows: return start<T, CodeKind::kRows>(args, stream);
    case CodeKind::kColumns: return start<T, CodeKind::kColumns>(args, stream);
    case CodeKind::kInt8: return start<T, CodeKind::kInt8>(args, stream);
    case CodeKind::kFloat4: return start<T, CodeKind::kFloat4>(args, stream);
    case CodeKind::kDense: return start<T, CodeKind::kDense>(args, stream);
    default: return start<T, CodeKind::kFloat8>(args, stream);
  }
}

}  // namespace

void few_rows(FewRows args, cudaStream_t stream) {
  args.by_block_out = divisor_of(args.block_out), args.by_block_in = divisor_of(args.block_in);
  if (serves_int4(args)) return few_rows_int4(args, stream);
  args.kind_of_x == FloatKind::kHalf ? start<Half>(args, stream) : start<BFloat16>(args, stream);
}

}  // namespace offload_rt
