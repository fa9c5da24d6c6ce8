// What a decoder layer does between its products and its attention: norms with the residual in front of them, rotations with
// the write of the cache behind them, and the gate. Each rounds where plain torch does, so that only the order in which a
// norm's squares are summed differs from the reference.
//
// All are bound by memory; a thread moves 16 bytes at a time.
#include <cmath>

#include "kernels.h"
#include "launch.h"
#include "warp.cuh"

namespace offload_rt {
namespace {

constexpr int kThreads = 256;
constexpr int kWide = 8;  // numbers in 16 bytes
// A norm keeps its row in registers: so many vectors a thread, and at most the 32 warps of a block for it.
constexpr int kHeld = 2;
static_assert(kMostNormed == 32 * 32 * kHeld * kWide);

struct Numbers {
  float at[kWide];
};

template <typename T>
__device__ __forceinline__ Numbers widened(const uint4& v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  Numbers wide;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<T>(words[i]);
    wide.at[2 * i] = pair.x, wide.at[2 * i + 1] = pair.y;
  }
  return wide;
}

template <typename T>
__device__ __forceinline__ uint4 narrowed(const Numbers& wide) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack<T>(wide.at[2 * i], wide.at[2 * i + 1]);
  return {words[0], words[1], words[2], words[3]};
}

template <typename F>
__device__ __forceinline__ Numbers each(F f) {
  Numbers wide;
#pragma unroll
  for (int i = 0; i < kWide; ++i) wide.at[i] = f(i);
  return wide;
}

template <typename T, typename F>
__device__ __forceinline__ Numbers each_rounded(F f) {
  return widened<T>(narrowed<T>(each(f)));
}

__device__ __forceinline__ const uint4* vectors(const void* elements, int64_t n) {
  return reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(elements) + n);
}
__device__ __forceinline__ uint4* vectors(void* elements, int64_t n) {
  return reinterpret_cast<uint4*>(static_cast<uint16_t*>(elements) + n);
}

int divided(int n, int by) { return (n + by - 1) / by; }

struct NormArgs : RmsNorm {
  int row_warps, block_rows;
};

// A row belongs to row_warps warps of one block, which has block_rows of them.
template <typename T>
__global__ void __launch_bounds__(1024) rms_norm_kernel(NormArgs args) {
  float* sums = reinterpret_cast<float*>(shared_memory());
  const int n_threads = 32 * args.row_warps, own = threadIdx.x / n_threads, thread = threadIdx.x % n_threads;
  const int n_vectors = args.width / kWide;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * args.block_rows + own;
  const bool is_there = row < static_cast<int64_t>(args.n) * args.n_heads;
  const int64_t outer = row / args.n_heads, head = row % args.n_heads;
  uint4* x = vectors(args.x, outer * args.x_row + head * args.x_head);
  uint4 held[kHeld];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = thread + i * n_threads;
    if (!is_there || at >= n_vectors) continue;
    held[i] = x[at];
    if (args.delta != nullptr) {
      const Numbers wide = widened<T>(held[i]), delta = widened<T>(vectors(args.delta, outer * args.delta_row)[at]);
      x[at] = held[i] = narrowed<T>(each([&](int e) { return wide.at[e] + delta.at[e]; }));
    }
    const Numbers wide = widened<T>(held[i]);
#pragma unroll
    for (int e = 0; e < kWide; ++e) sum += wide.at[e] * wide.at[e];
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  sync_block();
  sum = 0;
  for (int warp = 0; warp < args.row_warps; ++warp) sum += sums[own * args.row_warps + warp];
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(args.width) + args.eps);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = thread + i * n_threads;
    if (!is_there || at >= n_vectors) continue;
    const Numbers wide = widened<T>(held[i]), weight = widened<T>(vectors(args.weight, 0)[at]);
    const Numbers normed = each_rounded<T>([&](int e) { return wide.at[e] * scale; });
    vectors(args.out, row * args.width)[at] = narrowed<T>(each([&](int e) { return weight.at[e] * normed.at[e]; }));
  }
}

// blockIdx.x is a row; a thread has 8 columns of the lower half of a head, and those that are turned with them.
template <typename T>
__global__ void __launch_bounds__(kThreads) rotate_and_store_kernel(RotateAndStore args) {
  const int row = blockIdx.x, item = blockIdx.y * kThreads + threadIdx.x, half = args.head_dim / 2;
  const int column = item % (half / kWide) * kWide;
  int head = item / (half / kWide);
  if (head >= args.n_heads + 2 * args.n_kv_heads) return;
  const void* from = args.q;
  void* to = args.out;
  int64_t source = row * args.q_row + head * args.q_head;
  int64_t target = (static_cast<int64_t>(row) * args.n_heads + head) * args.head_dim;
  const bool is_value = head >= args.n_heads + args.n_kv_heads;
  if (head >= args.n_heads) {
    const int64_t place = args.rows != nullptr ? args.rows[row] : args.first + row;
    head -= is_value ? args.n_heads + args.n_kv_heads : args.n_heads;
    from = is_value ? args.v : args.k, to = is_value ? args.values : args.keys;
    source = is_value ? row * args.v_row + head * args.v_head : row * args.k_row + head * args.k_head;
    target = head * args.store_head + place * args.head_dim;
  }
  uint4 low = *vectors(from, source + column), high = *vectors(from, source + half + column);
  if (!is_value) {
    const Numbers a = widened<T>(low), b = widened<T>(high);
    // Of either half: what it has of itself and of the other half, each rounded.
    const auto turned = [&](const Numbers& own, const Numbers& other, float sign, int at) {
      const Numbers cos = widened<T>(*vectors(args.cos, row * args.cos_row + at));
      const Numbers sin = widened<T>(*vectors(args.sin, row * args.sin_row + at));
      const Numbers x = each_rounded<T>([&](int e) { return own.at[e] * cos.at[e]; });
      const Numbers y = each_rounded<T>([&](int e) { return sign * other.at[e] * sin.at[e]; });
      return narrowed<T>(each([&](int e) { return x.at[e] + y.at[e]; }));
    };
    low = turned(a, b, -1.0f, column);
    high = turned(b, a, 1.0f, half + column);
  }
  *vectors(to, target + column) = low;
  *vectors(to, target + half + column) = high;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(SiluMul args) {
  const int64_t row = blockIdx.x;
  const int column = (blockIdx.y * kThreads + threadIdx.x) * kWide;
  if (column >= args.width) return;
  const Numbers gate = widened<T>(*vectors(args.gate, row * args.gate_row + column));
  const Numbers up = widened<T>(*vectors(args.up, row * args.up_row + column));
  const Numbers silu = each_rounded<T>([&](int e) { return gate.at[e] / (1.0f + expf(-gate.at[e])); });
  *vectors(args.out, row * args.width + column) = narrowed<T>(each([&](int e) { return silu.at[e] * up.at[e]; }));
}

}  // namespace

void rms_norm(const RmsNorm& norm, bool is_half, cudaStream_t stream) {
  NormArgs args{norm, divided(norm.width, 32 * kHeld * kWide), 1};
  args.block_rows = max(kThreads / 32 / args.row_warps, 1);
  const int n_warps = args.row_warps * args.block_rows;
  const int64_t n_blocks = (static_cast<int64_t>(args.n) * args.n_heads + args.block_rows - 1) / args.block_rows;
  const dim3 grid(static_cast<unsigned>(n_blocks));
  launch(is_half ? rms_norm_kernel<Half> : rms_norm_kernel<BFloat16>, grid, 32 * n_warps, n_warps * sizeof(float), stream, args);
}

void rotate_and_store(const RotateAndStore& args, bool is_half, cudaStream_t stream) {
  const int n_items = (args.n_heads + 2 * args.n_kv_heads) * (args.head_dim / 2 / kWide);
  const dim3 grid(args.n, divided(n_items, kThreads));
  launch(is_half ? rotate_and_store_kernel<Half> : rotate_and_store_kernel<BFloat16>, grid, kThreads, 0, stream, args);
}

void silu_mul(const SiluMul& args, bool is_half, cudaStream_t stream) {
  const dim3 grid(args.n, divided(args.width / kWide, kThreads));
  launch(is_half ? silu_mul_kernel<Half> : silu_mul_kernel<BFloat16>, grid, kThreads, 0, stream, args);
}

}  // namespace offload_rt
