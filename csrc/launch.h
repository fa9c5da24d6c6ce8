// Starting a kernel, and what a failure to start it says.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace offload_rt {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

inline int current_card() {
  int card = 0;
  check_cuda(cudaGetDevice(&card), "current card");
  return card;
}

inline int attribute(cudaDeviceAttr which, const char* what) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, current_card()), what);
  return value;
}

// A kernel gets 48 KB of shared memory unless it asks for more, which it does once on each card, for all there is: what a
// launch needs varies, and another thread may launch in between.
inline void allow_shared_memory(const void* kernel) {
  static std::mutex mutex;
  static std::set<std::pair<int, const void*>> allowed;
  const std::lock_guard<std::mutex> guard(mutex);
  const std::pair<int, const void*> here(current_card(), kernel);
  if (allowed.count(here)) return;
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, "shared memory of a block");
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "shared memory of a kernel");
  allowed.insert(here);
}

// Runs kernel(args) with `nbytes` of dynamic shared memory.
// is_cooperative: all blocks run at the same time, and may wait for each other.
template <typename Args>
void launch(void (*kernel)(Args), dim3 grid, int n_threads, size_t nbytes, cudaStream_t stream, Args args,
            bool is_cooperative = false) {
  const void* entry = reinterpret_cast<const void*>(kernel);
  if (nbytes > (48u << 10)) allow_shared_memory(entry);
#ifdef CUDA_ON_CPU
  cuda_on_cpu::run({current_card(), entry, grid, n_threads, nbytes, is_cooperative}, [&] { kernel(args); });
#else
  void* pointers[] = {&args};
  const cudaError_t status = is_cooperative
                                 ? cudaLaunchCooperativeKernel(entry, grid, dim3(n_threads), pointers, nbytes, stream)
                                 : cudaLaunchKernel(entry, grid, dim3(n_threads), pointers, nbytes, stream);
  check_cuda(status, "launch of a kernel");
#endif
}

}  // namespace offload_rt
