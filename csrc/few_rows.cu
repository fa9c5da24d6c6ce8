// y = x w^T for up to 32 rows and a quantised w, which is decoded in registers; or for rows sorted by matrix, as of experts.
//
// A warp multiplies 16 outputs by tensor cores. A lane reads eight neighbouring codes of two outputs and the same eight inputs
// of a row of x: the order of inputs within a product is free, so neither w nor x passes through shared memory. The warps of
// a block divide the inputs, and their sums are added in order. A result does not depend on the number of rows.
// Blocks find their matrix and rows by the ends on the device, so the host need not know how many rows a matrix has.
#include <algorithm>

#include "codes.cuh"
#include "kernels.h"
#include "launch.h"
#include "warp.cuh"

namespace offload_rt {
namespace {

constexpr int kWarps = 8, kOuts = 16, kInputs = 32;

// Rows [first, last) of y, of a matrix.
struct Tile {
  int matrix, first, last;
};

// Tile `index` of the rows, which are divided matrix by matrix; the rows past the last end follow. Called by whole warps.
__device__ __forceinline__ Tile tile_of(const FewRows& args, int index, int tile_rows) {
  if (args.ends == nullptr) return {0, index * tile_rows, args.n_rows};
  const int lane = threadIdx.x % 32;
  int n_before = 0;
  for (int base = 0; base <= args.n_matrices; base += 32) {
    const int matrix = min(base + lane, args.n_matrices);
    const int first = matrix ? args.ends[matrix - 1] : 0, last = matrix < args.n_matrices ? args.ends[matrix] : args.n_rows;
    const int n_tiles = base + lane <= args.n_matrices ? (last - first + tile_rows - 1) / tile_rows : 0;
    int n_until = n_tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = shuffle_up(n_until, step);
      if (lane >= step) n_until += below;
    }
    const uint32_t reached = ballot(index < n_before + n_until);
    if (reached) {
      const int at = first_bit(reached), skipped = index - n_before - shuffle_from(n_until - n_tiles, at);
      return {base + at, shuffle_from(first, at) + skipped * tile_rows, shuffle_from(last, at)};
    }
    n_before += shuffle_from(n_until, 31);
  }
  return {args.n_matrices, args.n_rows, args.n_rows};
}

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
  const int64_t scale_out = out / args.block_out, scale_in = input / args.block_in;
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
      if (args.scale_kind == FloatKind::kHalf || args.scale_kind == FloatKind::kBFloat16)
        value = widen(narrow(value, args.scale_kind), args.scale_kind);
      values[j] = value;
    }
    pairs[pair] = pack<T>(values[0], values[1]);
  }
}

template <typename T, CodeKind kind, int kTiles>
__global__ void __launch_bounds__(32 * kWarps, 2) few_rows_kernel(FewRows args) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int first_out = blockIdx.y * kOuts;
  const Tile rows = tile_of(args, blockIdx.x, 8 * kTiles);
  const bool has_matrix = rows.matrix < args.n_matrices;
  const int n_rows = min(rows.last - rows.first, 8 * kTiles);
  // Rows of x that a lane multiplies; -1 past the end.
  int x_rows[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int row = tile * 8 + group;
    x_rows[tile] = row < n_rows ? rows.first + row : -1;
    if (args.rows && row < n_rows) x_rows[tile] = static_cast<int>(args.rows[rows.first + row]);
  }
  const uint16_t* inputs = static_cast<const uint16_t*>(args.x);
  float sums[kTiles][4] = {};
  for (int input = (warp * 4 + quarter) * 8; has_matrix && input < args.n_in; input += kWarps * kInputs) {
    uint32_t w[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      decode<T, kind>(args, rows.matrix, min(first_out + group + 8 * half, args.n_out - 1), input, w[half]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint4 x{};
      if (x_rows[tile] >= 0)
        x = *reinterpret_cast<const uint4*>(inputs + x_rows[tile] * args.x_row + input);
      mma_m16n8k16<T>(sums[tile], {w[0][0], w[1][0], w[0][1], w[1][1]}, x.x, x.y);
      mma_m16n8k16<T>(sums[tile], {w[0][2], w[1][2], w[0][3], w[1][3]}, x.z, x.w);
    }
  }
  // shared: (kWarps, kOuts, 8 kTiles)
  float* shared = reinterpret_cast<float*>(shared_memory());
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int out = group + i / 2 * 8, row = tile * 8 + quarter * 2 + i % 2;
      shared[(warp * kOuts + out) * 8 * kTiles + row] = sums[tile][i];
    }
  sync_block();
  for (int i = threadIdx.x; i < kOuts * n_rows; i += 32 * kWarps) {
    const int out = i % kOuts, row = i / kOuts;
    if (first_out + out >= args.n_out) continue;
    float total = 0.f;
    for (int from = 0; from < kWarps; ++from) total += shared[(from * kOuts + out) * 8 * kTiles + row];
    const int64_t bias = static_cast<int64_t>(rows.matrix) * args.n_out + first_out + out;
    if (args.bias && has_matrix) total += widen(static_cast<const uint16_t*>(args.bias)[bias], args.kind_of_x);
    const int64_t at = static_cast<int64_t>(rows.first + row) * args.n_out + first_out + out;
    static_cast<uint16_t*>(args.y)[at] = narrow(total, args.kind_of_x);
  }
}

template <typename T, CodeKind kind, int kTiles>
void start(const FewRows& args, cudaStream_t stream) {
  // Each matrix may leave a tile partly empty, and so may the rows past the last end.
  constexpr int kRows = 8 * kTiles;
  const int n_partial = args.ends ? std::min(args.n_matrices + 1, args.n_rows) : 1;
  const int n_tiles = (args.n_rows + n_partial * (kRows - 1)) / kRows;
  const dim3 grid(static_cast<unsigned>(n_tiles), static_cast<unsigned>((args.n_out + kOuts - 1) / kOuts));
  launch(few_rows_kernel<T, kind, kTiles>, grid, 32 * kWarps, kWarps * kOuts * 8 * kTiles * sizeof(float), stream, args);
}

template <typename T, CodeKind kind>
void start(const FewRows& args, cudaStream_t stream) {
  const int expected = args.ends ? args.n_rows / args.n_matrices : args.n_rows;  // rows of a matrix
  if (expected <= 8) return start<T, kind, 1>(args, stream);
  if (expected <= 16) return start<T, kind, 2>(args, stream);
  start<T, kind, 4>(args, stream);
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

void few_rows(const FewRows& args, cudaStream_t stream) {
  args.kind_of_x == FloatKind::kHalf ? start<Half>(args, stream) : start<BFloat16>(args, stream);
}

}  // namespace offload_rt
