// Starting a kernel, and what a failure to start it says.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace offload_rt {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Runs kernel(args) with `nbytes` of dynamic shared memory.
template <typename Args>
void launch(void (*kernel)(Args), dim3 grid, int n_threads, size_t nbytes, cudaStream_t stream, Args args) {
#ifdef CUDA_ON_CPU
  cuda_on_cpu::run(grid, n_threads, nbytes, [&] { kernel(args); });
#else
  // A kernel gets 48 KB unless it asks for more.
  if (nbytes > (48u << 10))
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(nbytes)),
               "shared memory of a kernel");
  void* pointers[] = {&args};
  check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(n_threads), pointers, nbytes, stream),
             "launch of a kernel");
#endif
}

}  // namespace offload_rt
