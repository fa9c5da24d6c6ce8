// Parts of products of few rows: rows of a block's matrix, division by sizes of scale blocks, sums of the warps.
#pragma once

#include <algorithm>

#include "codes.cuh"
#include "kernels.h"
#include "launch.h"
#include "warp.cuh"

namespace offload_rt {

constexpr int kFewWarps = 8, kFewThreads = 32 * kFewWarps;

// Granlund and Montgomery: n / d is the high word of 2n times 2^(31 + shift) / d, rounded up, shifted.
inline Divisor divisor_of(int d) {
  int shift = 0;
  while (shift < 31 && (int64_t{1} << shift) < d) ++shift;
  const uint64_t power = uint64_t{1} << (31 + shift), size = d > 0 ? d : 1;
  return {static_cast<uint32_t>((power + size - 1) / size), shift};
}
__device__ __forceinline__ int quotient(int n, const Divisor& by) {
  return static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(n) << 1) * by.factor >> 32) >> by.shift);
}

// Rows [first, last) of y, of a matrix.
struct RowTile {
  int matrix, first, last;
};

// Tile `index` of the rows, which are divided matrix by matrix; the rows past the last end follow. Called by whole warps.
__device__ __forceinline__ RowTile tile_of(const FewRows& args, int index, int tile_rows) {
  if (args.ends == nullptr) return {0, index * tile_rows, args.n_rows};
  const int lane = threadIdx.x % 32;
  int n_before = 0;
  for (int base = 0; base <= args.n_matrices; base += 32) {
    const int matrix = min(base + lane, args.n_matrices);
    const int first = matrix ? args.ends[matrix - 1] : 0, last = matrix < args.n_matrices ? args.ends[matrix] : args.n_rows;
    const int n_tiles = base + lane <= args.n_matrices ? (last - first + tile_rows - 1) / tile_rows : 0;
    int n_until = n_tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = shuffle_up(n_until, step);
      if (lane >= step) n_until += below;
    }
    const uint32_t reached = ballot(index < n_before + n_until);
    if (reached) {
      const int at = first_bit(reached), skipped = index - n_before - shuffle_from(n_until - n_tiles, at);
      return {base + at, shuffle_from(first, at) + skipped * tile_rows, shuffle_from(last, at)};
    }
    n_before += shuffle_from(n_until, 31);
  }
  return {args.n_matrices, args.n_rows, args.n_rows};
}

// The rows of x that a lane multiplies: row lane / 4 of each eight. Null past the end.
template <int kTiles>
struct Inputs {
  const uint16_t* rows[kTiles];
  int n_rows;  // of the block

  __device__ Inputs(const FewRows& args, const RowTile& tile) : n_rows(min(tile.last - tile.first, 8 * kTiles)) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int row = i * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
      rows[i] = nullptr;
      if (row >= n_rows) continue;
      const int64_t from = args.rows ? args.rows[tile.first + row] : tile.first + row;
      rows[i] = static_cast<const uint16_t*>(args.x) + from * args.x_row;
    }
  }

  // Eight numbers from `input` on.
  __device__ __forceinline__ uint4 eight(int tile, int input) const {
    return rows[tile] ? *reinterpret_cast<const uint4*>(rows[tile] + input) : uint4{};
  }
};

// Adds the sums of the warps in order, and writes y. A warp's `sums` have the layout of mma.m16n8k16; row i of product m is
// output first_out + out_of(m, i) of the matrix. Shared memory: (kFewWarps, kOuts, 8 kTiles)
template <int kOuts, int kTiles, typename OutOf>
__device__ __forceinline__ void store_sums(const FewRows& args, const RowTile& tile, int n_rows, int first_out,
                                           const float (&sums)[kOuts / 16][kTiles][4], OutOf out_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  float* shared = reinterpret_cast<float*>(shared_memory());
#pragma unroll
  for (int m = 0; m < kOuts / 16; ++m)
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int out = out_of(m, group + i / 2 * 8), row = t * 8 + quarter * 2 + i % 2;
        shared[(warp * kOuts + out) * 8 * kTiles + row] = sums[m][t][i];
      }
  sync_block();
  for (int i = threadIdx.x; i < kOuts * n_rows; i += kFewThreads) {
    const int out = i % kOuts, row = i / kOuts;
    if (first_out + out >= args.n_out) continue;
    float total = 0.f;
    for (int from = 0; from < kFewWarps; ++from) total += shared[(from * kOuts + out) * 8 * kTiles + row];
    const int64_t bias = static_cast<int64_t>(tile.matrix) * args.n_out + first_out + out;
    if (args.bias && tile.matrix < args.n_matrices)
      total += widen(static_cast<const uint16_t*>(args.bias)[bias], args.kind_of_x);
    const int64_t at = static_cast<int64_t>(tile.first + row) * args.n_out + first_out + out;
    static_cast<uint16_t*>(args.y)[at] = narrow(total, args.kind_of_x);
  }
}

// Tiles of 8 rows of a block, by the mean rows of a matrix.
inline int tiles_of(const FewRows& args) {
  const int expected = args.ends ? args.n_rows / args.n_matrices : args.n_rows;
  return expected <= 8 ? 1 : expected <= 16 ? 2 : 4;
}

inline void launch_few_rows(void (*kernel)(FewRows), const FewRows& args, int n_tiles, int n_outs, int ring_nbytes,
                            cudaStream_t stream) {
  // Each matrix may leave a tile partly empty, and so may the rows past the last end.
  const int tile_rows = 8 * n_tiles, n_partial = args.ends ? std::min(args.n_matrices + 1, args.n_rows) : 1;
  const int n_row_tiles = (args.n_rows + n_partial * (tile_rows - 1)) / tile_rows;
  // Blocks of the same outputs are neighbours: the second reads the weights from the L2 cache.
  const dim3 grid(static_cast<unsigned>(n_row_tiles), static_cast<unsigned>((args.n_out + n_outs - 1) / n_outs));
  const int sums_nbytes = kFewWarps * n_outs * tile_rows * static_cast<int>(sizeof(float));
  launch(kernel, grid, kFewThreads, std::max(ring_nbytes, sums_nbytes), stream, args);
}

}  // namespace offload_rt
