// Stands in for the CUDA runtime where kernels are compiled for a CPU: as much of it as csrc/ uses.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (cuda_on_cpu::here().thread)
#define blockIdx (cuda_on_cpu::here().block)

using dim3 = cuda_on_cpu::Dim3;
struct float2 {
  float x, y;
};
struct int2 {
  int x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }

using std::max;
using std::min;

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "a limit was set twice"; }

// Cards 0, 1 and 2 have the shared memory of compute capability 9.0, 8.0 and 8.6; CUDA_ON_CPU_CARD names the current one.
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaGetDevice(int* card) {
  const char* name = std::getenv("CUDA_ON_CPU_CARD");
  *card = name ? std::atoi(name) : 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int card) {
  constexpr int kShared[] = {228 << 10, 164 << 10, 100 << 10}, kSystem = 1 << 10;
  *value = which == cudaDevAttrMultiProcessorCount ? cuda_on_cpu::kProcessors
                                                   : kShared[card] - (which == cudaDevAttrMaxSharedMemoryPerBlockOptin) * kSystem;
  return cudaSuccess;
}
// Refuses to set a limit again: another thread may launch with the former one.
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int nbytes) {
  int card;
  cudaGetDevice(&card);
  return cuda_on_cpu::limit_shared_memory(card, kernel, nbytes) ? cudaSuccess : 1;
}
