// Moves the kept rows of a cache together, in place, for all layers and heads in one launch.
//
// A thread owns 16 bytes of the width of one plane and goes through the rows in order. As rows[i] >= i, no row is written
// before it is read; and so the loads of a batch of rows may all go before its stores.
#include "kernels.h"
#include "launch.h"
#include "warp.cuh"

namespace offload_rt {
namespace {

constexpr int kThreads = 128;
constexpr int kBatch = 8;

__global__ void __launch_bounds__(kThreads) commit_rows_kernel(CommitRows args) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= args.n_planes * args.n_vectors) return;
  const int64_t plane = column / args.n_vectors;
  uint4* store = static_cast<uint4*>(blockIdx.y == 0 ? args.keys : args.values);
  uint4* own = store + (plane * args.capacity + args.first) * args.n_vectors + column % args.n_vectors;
  for (int start = 0; start < args.n_rows; start += kBatch) {
    uint4 batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (start + i < args.n_rows) batch[i] = own[args.rows[start + i] * args.n_vectors];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (start + i < args.n_rows) own[static_cast<int64_t>(start + i) * args.n_vectors] = batch[i];
  }
}

}  // namespace

void commit_rows(const CommitRows& args, cudaStream_t stream) {
  const int64_t n_columns = args.n_planes * args.n_vectors;
  const dim3 grid(static_cast<unsigned>((n_columns + kThreads - 1) / kThreads), 2);
  launch(commit_rows_kernel, grid, kThreads, 0, stream, args);
}

}  // namespace offload_rt
