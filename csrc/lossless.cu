// Layers encoded without loss, decoded; see offload_rt/ops/lossless.py for the format.
//
// A warp decodes 4,096 weights, which start on their own: it counts their escapes, 64 weights to each half of a lane, then goes
// through them 256 at a time. A lane makes eight neighbours: it reads 8 bytes, and writes 16 or 32.
#include <cstring>

#include "kernels.h"
#include "launch.h"
#include "warp.cuh"

namespace offload_rt {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChunk = 1 << 19, kBlock = 1 << 12, kGroup = 64, kBlockGroups = kBlock / kGroup;
constexpr int kParts = kChunk / kBlock / kWarps;  // thread blocks of a chunk
constexpr int kEach = 8;
enum Kind { kRaw, kBFloat16, kHalf, kFloat };

struct Planes {
  uint64_t a, b, c;
  __device__ __forceinline__ uint64_t escapes() const { return ~(a | b | c); }
};

__device__ __forceinline__ Planes planes_of(const uint64_t* planes, int group) {
  return {planes[3 * group], planes[3 * group + 1], planes[3 * group + 2]};
}

__device__ __forceinline__ void copy_part(const uint8_t* from, uint8_t* to, int nbytes, int part, int lane) {
  const int stop = min(nbytes, (part + 1) * 2 * kBlock);
  for (int at = part * 2 * kBlock + kEach * lane; at < stop; at += 32 * kEach) {
    if (at + kEach <= stop) {
      *reinterpret_cast<uint64_t*>(to + at) = *reinterpret_cast<const uint64_t*>(from + at);
    } else {
      for (int i = at; i < stop; ++i) to[i] = from[i];
    }
  }
}

__device__ __forceinline__ uint16_t word_of(uint32_t sign, uint32_t other, int kind) {
  const uint32_t top = (sign & 0x80) << 8, kept = sign & 0x7f;
  return static_cast<uint16_t>(kind == kHalf ? top | (other & 0xf8) << 7 | kept << 3 | (other & 7) : top | other << 7 | kept);
}

// Eight weights or, at the end of a tensor, fewer.
__device__ __forceinline__ void store(const uint16_t (&words)[kEach], int kind, int n, uint8_t* to) {
  if (n == kEach) {
    uint32_t pairs[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      pairs[i] = kind == kFloat ? static_cast<uint32_t>(words[i]) << 16 : words[2 * i % kEach] | words[2 * i % kEach + 1] << 16;
    uint4* out = reinterpret_cast<uint4*>(to);
    out[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    if (kind == kFloat) out[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
    return;
  }
  for (int i = 0; i < n; ++i) {
    if (kind == kFloat) {
      reinterpret_cast<uint32_t*>(to)[i] = static_cast<uint32_t>(words[i]) << 16;
    } else {
      reinterpret_cast<uint16_t*>(to)[i] = words[i];
    }
  }
}

__device__ __forceinline__ void decode_part(const LosslessChunk& chunk, const uint8_t* from, uint8_t* to, int part, int lane) {
  const int n_groups = (chunk.n + kGroup - 1) / kGroup, n_blocks = (n_groups + kBlockGroups - 1) / kBlockGroups;
  const uint8_t* signs = from + chunk.nbytes - 88 * n_groups;
  const auto* starts = reinterpret_cast<const uint32_t*>(from + 8);
  const auto* escapes = reinterpret_cast<const uint8_t*>(starts + n_blocks + 1);
  const auto* planes = reinterpret_cast<const uint64_t*>(signs + kGroup * n_groups) + 3 * kBlockGroups * part;
  const int n_here = min(kBlockGroups, n_groups - kBlockGroups * part), kind = static_cast<int>(chunk.kind);
  const uint64_t table = *reinterpret_cast<const uint64_t*>(from);
  // A start beyond the escapes is not followed: what is there is not this chunk's.
  const auto room = static_cast<uint32_t>(signs - escapes);
  const uint32_t start = min(starts[part], room);

  const int first = 2 * lane < n_here ? count_bits(planes_of(planes, 2 * lane).escapes()) : 0;
  const int both = first + (2 * lane + 1 < n_here ? count_bits(planes_of(planes, 2 * lane + 1).escapes()) : 0);
  int before = both;
  for (int far = 1; far < 32; far *= 2) {
    const int more = shuffle_up(before, far);
    if (lane >= far) before += more;
  }
  before -= both;

  for (int at = 0; at < n_here; at += 4) {
    const int group = at + lane / kEach, shift = lane % kEach * kEach;
    uint32_t escape = start + shuffle_from(before, group / 2);
    const int more = shuffle_from(first, group / 2);
    if (group >= n_here) continue;
    const Planes codes = planes_of(planes, group);
    const uint64_t left = codes.escapes();
    escape += (group % 2 ? more : 0) + count_bits(left & ((uint64_t{1} << shift) - 1));
    const int weight = (kBlockGroups * part + group) * kGroup + shift;
    const uint64_t kept = *reinterpret_cast<const uint64_t*>(signs + weight);
    const auto a = static_cast<uint32_t>(codes.a >> shift), b = static_cast<uint32_t>(codes.b >> shift);
    const auto c = static_cast<uint32_t>(codes.c >> shift);
    uint16_t words[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t code = (a >> i & 1) | (b >> i & 1) << 1 | (c >> i & 1) << 2;
      const auto other = code ? static_cast<uint32_t>(table >> 8 * code) & 0xff : escapes[escape++];
      words[i] = word_of(static_cast<uint32_t>(kept >> kEach * i) & 0xff, other, kind);
    }
    store(words, kind, min(kEach, chunk.n - weight), to + static_cast<int64_t>(weight) * (kind == kFloat ? 4 : 2));
  }
}

__global__ void __launch_bounds__(kThreads) lossless_kernel(Lossless args) {
  const LosslessChunk chunk = reinterpret_cast<const LosslessChunk*>(args.block)[blockIdx.x / kParts];
  const int part = static_cast<int>(blockIdx.x % kParts * kWarps + threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const uint8_t* from = args.block + chunk.source;
  uint8_t* to = args.out + chunk.target;
  if (chunk.kind == kRaw) {
    copy_part(from, to, chunk.n, part, lane);
  } else if (part * kBlock < chunk.n) {
    decode_part(chunk, from, to, part, lane);
  }
}

}  // namespace

void lossless_decode(const Lossless& args, int n_chunks, cudaStream_t stream) {
  launch(lossless_kernel, dim3(static_cast<unsigned>(n_chunks * kParts)), kThreads, 0, stream, args);
}

}  // namespace offload_rt
