// Joins attention to two disjoint parts of the keys by the log-sum-exp of their scores.
//
// A warp joins a row of a head. Sums are in float32.
#include "attention_rows.cuh"
#include "codes.cuh"
#include "kernels.h"
#include "launch.h"
#include "warp.cuh"

namespace offload_rt {
namespace {

constexpr int kWarps = 8;
constexpr float kLog2E = 1.44269504f;

__global__ void __launch_bounds__(32 * kWarps) merge_attention_kernel(MergeAttention args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= args.n_rows) return;
  const float a = args.lse_a[row] * kLog2E, b = args.lse_b[row] * kLog2E, best = fmaxf(a, b);
  const float shift = best == kNone ? 0.f : best;
  const float weight_a = exp2_fast(a - shift), weight_b = exp2_fast(b - shift), whole = weight_a + weight_b;
  const float scale = whole > 0.f ? 1.f / whole : 0.f;
  for (int i = lane; i < args.width; i += 32) {
    const int64_t at = row * args.width + i;
    const float joined = (load(args.out_a, at, args.kind_a) * weight_a + load(args.out_b, at, args.kind_b) * weight_b) * scale;
    if (args.kind_a == FloatKind::kFloat)
      static_cast<float*>(args.out)[at] = joined;
    else
      static_cast<uint16_t*>(args.out)[at] = narrow(joined, args.kind_a);
  }
  if (lane == 0) args.lse[row] = log_sum_exp(best, whole);
}

}  // namespace

void merge_attention(const MergeAttention& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((args.n_rows + kWarps - 1) / kWarps));
  launch(merge_attention_kernel, grid, 32 * kWarps, 0, stream, args);
}

}  // namespace offload_rt
