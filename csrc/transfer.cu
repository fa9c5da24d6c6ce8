// Copies bytes between memory of the device and pinned memory of the host by loads and stores, past the copy engine.
//
// A read of the host's memory takes a microsecond or two, so all threads of the grid have one of 16 bytes under way at once.
#include <algorithm>

#include "kernels.h"
#include "launch.h"
#include "warp.cuh"

namespace offload_rt {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 64;

__global__ void __launch_bounds__(kThreads) transfer_kernel(Transfer args) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < args.n_vectors; i += args.n_threads)
    static_cast<uint4*>(args.to)[i] = static_cast<const uint4*>(args.from)[i];
  for (int64_t i = 16 * args.n_vectors + first; i < args.nbytes; i += args.n_threads)
    static_cast<uint8_t*>(args.to)[i] = static_cast<const uint8_t*>(args.from)[i];
}

}  // namespace

void transfer(Transfer args, cudaStream_t stream) {
  const auto addresses = reinterpret_cast<uintptr_t>(args.to) | reinterpret_cast<uintptr_t>(args.from);
  args.n_vectors = addresses % 16 == 0 ? args.nbytes / 16 : 0;
  const int64_t n_items = args.n_vectors + args.nbytes - 16 * args.n_vectors;
  const int64_t n_blocks = std::min((n_items + kThreads - 1) / kThreads, kMostBlocks);
  args.n_threads = n_blocks * kThreads;
  launch(transfer_kernel, dim3(static_cast<unsigned>(n_blocks)), kThreads, 0, stream, args);
}

}  // namespace offload_rt
