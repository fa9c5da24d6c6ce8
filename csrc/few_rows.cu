// y = x w^T for up to 32 rows and a quantised w, which is decoded in registers.
//
// A warp multiplies 16 outputs by tensor cores. A lane reads eight neighbouring codes of two outputs and the same eight inputs
// of a row of x: the order of inputs within a product is free, so neither w nor x passes through shared memory. The warps of
// a block divide the inputs, and their sums are added in order. A result does not depend on the number of rows.
#include "codes.cuh"
#include "kernels.h"
#include "launch.h"
#include "warp.cuh"

namespace offload_rt {
namespace {

constexpr int kWarps = 8, kOuts = 16, kInputs = 32;

// Eight values of an output from `input` on, as pairs of T. They share a scale.
template <typename T, CodeKind kind>
__device__ __forceinline__ void decode(const FewRows& args, int out, int input, uint32_t (&pairs)[4]) {
  constexpr bool is_transposed = kind == CodeKind::kColumns;
  const int64_t scale_out = out / args.block_out, scale_in = input / args.block_in;
  const int64_t at = is_transposed ? scale_in * args.n_scales + scale_out : scale_out * args.n_scales + scale_in;
  const float scale = load(args.scales, at, args.scale_kind);
  const float zero = static_cast<float>(args.zeros ? args.zeros[at] : args.offset);
  uint32_t low = 0, high = 0;
  const uint32_t* words = static_cast<const uint32_t*>(args.codes);
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
      value = (value - zero) * scale;
      if (args.scale_kind != FloatKind::kFloat) value = widen(narrow(value, args.scale_kind), args.scale_kind);
      values[j] = value;
    }
    pairs[pair] = pack<T>(values[0], values[1]);
  }
}

template <typename T, CodeKind kind, int kTiles>
__global__ void __launch_bounds__(32 * kWarps) few_rows_kernel(FewRows args) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int first_out = blockIdx.x * kOuts;
  float sums[kTiles][4] = {};
  for (int input = (warp * 4 + quarter) * 8; input < args.n_in; input += kWarps * kInputs) {
    uint32_t w[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      decode<T, kind>(args, min(first_out + group + 8 * half, args.n_out - 1), input, w[half]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = tile * 8 + group;
      uint4 x{};
      if (row < args.n_rows)
        x = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.x) + row * args.x_row + input);
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
  for (int i = threadIdx.x; i < kOuts * args.n_rows; i += 32 * kWarps) {
    const int out = i % kOuts, row = i / kOuts;
    if (first_out + out >= args.n_out) continue;
    float total = 0.f;
    for (int from = 0; from < kWarps; ++from) total += shared[(from * kOuts + out) * 8 * kTiles + row];
    if (args.bias) total += widen(static_cast<const uint16_t*>(args.bias)[first_out + out], args.kind_of_x);
    static_cast<uint16_t*>(args.y)[static_cast<int64_t>(row) * args.n_out + first_out + out] = narrow(total, args.kind_of_x);
  }
}

template <typename T, CodeKind kind, int kTiles>
void start(const FewRows& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((args.n_out + kOuts - 1) / kOuts));
  launch(few_rows_kernel<T, kind, kTiles>, grid, 32 * kWarps, kWarps * kOuts * 8 * kTiles * sizeof(float), stream, args);
}

template <typename T, CodeKind kind>
void start(const FewRows& args, cudaStream_t stream) {
  if (args.n_rows <= 8) return start<T, kind, 1>(args, stream);
  if (args.n_rows <= 16) return start<T, kind, 2>(args, stream);
  start<T, kind, 4>(args, stream);
}

template <typename T>
void start(const FewRows& args, cudaStream_t stream) {
  switch (args.kind) {
    case CodeKind::kRows: return start<T, CodeKind::kRows>(args, stream);
    case CodeKind::kColumns: return start<T, CodeKind::kColumns>(args, stream);
    case CodeKind::kInt8: return start<T, CodeKind::kInt8>(args, stream);
    case CodeKind::kFloat4: return start<T, CodeKind::kFloat4>(args, stream);
    default: return start<T, CodeKind::kFloat8>(args, stream);
  }
}

}  // namespace

void few_rows(const FewRows& args, cudaStream_t stream) {
  args.kind_of_x == FloatKind::kHalf ? start<Half>(args, stream) : start<BFloat16>(args, stream);
}

}  // namespace offload_rt
