// Stands in for the CUDA runtime where kernels are compiled for a CPU: as much of it as csrc/ uses.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

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
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
