// What a warp does as one: the instructions that C++ has no words for, each behind one inline function.
//
// Compiled for a CPU (CUDA_ON_CPU), the same functions come from tests/cuda_on_cpu, which runs a block's threads as fibers
// and takes the fragment layouts from the PTX documentation. So kernels hold no other inline assembly and no other
// intrinsics than those named here, and take all shared memory through `shared_memory`, where a test can poison it.
#pragma once

#ifndef CUDA_ON_CPU
#include <cooperative_groups.h>
#endif
#include <cstdint>
#include <cuda_runtime.h>

namespace offload_rt {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

}  // namespace offload_rt

#ifdef CUDA_ON_CPU
#include "warp_on_cpu.h"
#else

namespace offload_rt {

constexpr unsigned kWholeWarp = 0xffffffffu;

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  return dynamic_shared;
}

__device__ __forceinline__ void sync_block() { __syncthreads(); }
// Of all blocks of a cooperative launch; what each wrote before is seen by all after it.
__device__ __forceinline__ void sync_grid() { cooperative_groups::this_grid().sync(); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }

template <typename V>
__device__ __forceinline__ V shuffle_xor(V value, int lanes) {
  return __shfl_xor_sync(kWholeWarp, value, lanes);
}
template <typename V>
__device__ __forceinline__ V shuffle_up(V value, int n) {
  return __shfl_up_sync(kWholeWarp, value, n);
}
template <typename V>
__device__ __forceinline__ V shuffle_from(V value, int lane) {
  return __shfl_sync(kWholeWarp, value, lane);
}
// Bit i is set where lane i says so.
__device__ __forceinline__ uint32_t ballot(bool says) { return __ballot_sync(kWholeWarp, says); }
// A product that the compiler does not fuse with a later sum: equal products cancel exactly.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ int first_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }
__device__ __forceinline__ int last_bit(uint32_t bits) { return 31 - __clz(static_cast<int>(bits)); }
__device__ __forceinline__ int count_bits(uint64_t bits) { return __popcll(bits); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to T, the first in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<Half>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// a & mask | bits in one instruction, which the compiler does not choose for two constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(a), "r"(mask), "r"(bits));
  return y;
}

// a - b and a * b of two pairs of T, each rounded once.
template <typename T>
__device__ __forceinline__ uint32_t subtract_pair(uint32_t a, uint32_t b);
template <typename T>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t subtract_pair<Half>(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
template <>
__device__ __forceinline__ uint32_t multiply_pair<Half>(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
// Before 9.0 bfloat16 has no other arithmetic than a * b + c: b times -1, and a negative zero, which changes no sum.
template <>
__device__ __forceinline__ uint32_t subtract_pair<BFloat16>(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(b), "r"(0xbf80bf80u), "r"(a));
  return y;
}
template <>
__device__ __forceinline__ uint32_t multiply_pair<BFloat16>(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));
  return y;
}

// The two of them, widened; the lower half first.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t both);
template <>
__device__ __forceinline__ float2 unpack<Half>(uint32_t both) {
  float2 pair;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(pair.x), "=f"(pair.y)
      : "r"(both));
  return pair;
}
template <>
__device__ __forceinline__ float2 unpack<BFloat16>(uint32_t both) {
  return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)};
}

__device__ __forceinline__ uint32_t shared_address(const void* in_shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(in_shared));
}

// Four 8x8 matrices of 16-bit entries; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// c += a b with a (16, 16), b (16, 8), c (16, 8).
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<Half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<BFloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes to shared memory behind the thread's back; zeros instead where there is nothing to read.
__device__ __forceinline__ void cp_async_16(void* to_shared, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most n of the groups this thread has committed are under way.
template <int n>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

}  // namespace offload_rt

#endif
