// The parts of tree attention: the shape of a tile, what a block moves and multiplies, what a thread keeps of its rows.
//
// Fragments are those of mma.m16n8k16: lane l holds rows l / 4 and l / 4 + 8 of a tile of 16 and, of each 8 columns, two
// neighbours from 2 * (l % 4) on. So the scores of one product are, packed, the left operand of the next.
#pragma once

#include "kernels.h"
#include "warp.cuh"

namespace offload_rt {

// Keys and values lie in two buffers, one of which is filled while the other is read; or in one, in which each waits for
// the product with the other.
template <typename T, int dim, int row_tiles, int keys, int buffers>
struct Tile {
  using Element = T;
  static constexpr int kDim = dim, kRowTiles = row_tiles, kKeys = keys, kBuffers = buffers;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  static constexpr int kChunks = kDim / 8;  // of 16 bytes, in a row
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kQueryBytes = kRows * kRowBytes, kStageBytes = kKeys * kRowBytes;
  // Queries, then the buffers of keys and those of values.
  static constexpr int kSharedBytes = kQueryBytes + 2 * kBuffers * kStageBytes;

  // Where a chunk of a row lies. Any eight rows from a multiple of eight on have a given chunk in eight different
  // groups of banks, so ldmatrix meets no conflict. The turn stays within kTurns chunks and comes back after 16 rows, so that
  // most addresses of a thread differ by constants.
  static constexpr int kTurns = kDim % 64 == 0 ? 8 : 4;
  static __device__ __forceinline__ int place(int row, int chunk) {
    const int turn = (kTurns == 8 ? row : row >> 1) & (kTurns - 1);
    return row * kRowBytes + ((chunk ^ turn) << 4);
  }
  // place(row + rows, lane's chunk + chunk) of an even chunk and a multiple of 16 rows, by a few different addresses.
  static __device__ __forceinline__ int place(int row, int own_chunk, int rows, int chunk) {
    return place(row, chunk % kTurns + own_chunk) + rows * kRowBytes + chunk / kTurns * (kTurns << 4);
  }
  // A row is copied by kTurns threads.
  static constexpr int kRowsAtOnce = kThreads / kTurns;
};

// The stages [first, last) of keys that a block visits.
struct Span {
  int first, last;
};

template <typename Tile>
struct Block {
  using T = typename Tile::Element;

  unsigned char* shared = shared_memory();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int first_row = blockIdx.x * Tile::kRows, kv_head = blockIdx.y;
  int n_rows, n_before, n_keys;  // packed rows; keys of the prefix; keys in all
  int n_prefix, n_stages;        // stages of the prefix; stages in all

  __device__ explicit Block(const TreeAttention& args)
      : n_rows(args.n * args.group),
        n_before(args.extent[0]),
        n_keys(n_before + args.extent[1]),
        n_prefix((n_before + Tile::kKeys - 1) / Tile::kKeys),
        n_stages(n_prefix + (n_keys - n_before + Tile::kKeys - 1) / Tile::kKeys) {}

  __device__ unsigned char* keys(int buffer) const { return shared + Tile::kQueryBytes + buffer * Tile::kStageBytes; }
  __device__ unsigned char* values(int buffer) const { return keys(Tile::kBuffers + buffer); }
  __device__ unsigned char* live() const { return keys(2 * Tile::kBuffers); }

  // The part of a row that this thread copies, and the first of its rows.
  __device__ static int own_row() { return threadIdx.x / Tile::kTurns; }
  __device__ static int own_chunk() { return threadIdx.x % Tile::kTurns; }

  __device__ void load_queries(const TreeAttention& args) const {
    const T* q = static_cast<const T*>(args.q) + kv_head * args.group * args.q_head;
    for (int row = own_row(); row < Tile::kRows; row += Tile::kRowsAtOnce) {
      const int packed = first_row + row;
      const bool is_there = packed < n_rows;
      const int node = is_there ? packed / args.group : 0, head = is_there ? packed % args.group : 0;
      const T* from = q + node * args.q_row + head * args.q_head;
      for (int chunk = own_chunk(); chunk < Tile::kChunks; chunk += Tile::kTurns)
        cp_async_16(shared + Tile::place(row, chunk), from + chunk * 8, is_there);
    }
  }

  __device__ void load_keys(const TreeAttention& args, int stage, int buffer) const {
    load_stage(static_cast<const T*>(args.k) + kv_head * args.k_head, args.k_row, stage, keys(buffer));
  }
  __device__ void load_values(const TreeAttention& args, int stage, int buffer) const {
    load_stage(static_cast<const T*>(args.v) + kv_head * args.v_head, args.v_row, stage, values(buffer));
  }

  // Rows past the end become zeros: a weight of zero times what happens to lie there might not be zero.
  __device__ void load_stage(const T* from, int64_t stride, int stage, unsigned char* to) const {
    const bool is_prefix = stage < n_prefix;
    const int start = is_prefix ? stage * Tile::kKeys : n_before + (stage - n_prefix) * Tile::kKeys;
    const int end = is_prefix ? n_before : n_keys;
    const int row = own_row(), n_there = end - start - row;
    from += (start + row) * stride + own_chunk() * 8;
    to += Tile::place(row, own_chunk());
#pragma unroll
    for (int rows = 0; rows < Tile::kKeys; rows += Tile::kRowsAtOnce, from += Tile::kRowsAtOnce * stride)
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; chunk += Tile::kTurns)
        cp_async_16(to + rows * Tile::kRowBytes + chunk * 16, from + chunk * 8, rows < n_there);
  }

  // Marks the stages of the tree's keys that some node of this tile looks at.
  __device__ void find_live(const TreeAttention& args) const {
    constexpr int kWords = Tile::kKeys / 32;
    const int last_row = min(first_row + Tile::kRows, n_rows) - 1;
    const int first_node = first_row / args.group, last_node = last_row / args.group;
    for (int stage = warp; stage < n_stages - n_prefix; stage += Tile::kWarps) {
      int32_t seen = 0;
      for (int i = lane; i < (last_node - first_node + 1) * kWords; i += 32) {
        const int word = stage * kWords + i % kWords;
        const int64_t row = first_node + i / kWords;
        if (word < args.words) seen |= args.masks[row * args.words + word];
      }
      const bool is_live = ballot(seen != 0) != 0;
      if (lane == 0) live()[stage] = is_live;
    }
  }

  // The first stage from `stage` on that has to be visited.
  __device__ int next(int stage, int last) const {
    while (stage < last && stage >= n_prefix && !live()[stage - n_prefix]) ++stage;
    return stage;
  }

  // scores = queries keys^T
  __device__ __forceinline__ void score(float (&scores)[Tile::kRowTiles][Tile::kKeys / 8][4], int buffer) const {
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
      for (int j = 0; j < Tile::kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][j][e] = 0.f;
    const unsigned char* queries = shared + warp * Tile::kWarpRows * Tile::kRowBytes;
    const int query = lane % 16, key = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int c = 0; c < Tile::kChunks; c += 2) {
      uint32_t a[Tile::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m)
        ldmatrix_x4(a[m], queries + Tile::place(query, lane / 16, 16 * m, c));
#pragma unroll
      for (int j = 0; j < Tile::kKeys / 8; j += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, keys(buffer) + Tile::place(key, lane / 8 % 2, 8 * j, c));
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m) {
          mma_m16n8k16<T>(scores[m][j], a[m], b[0], b[1]);
          mma_m16n8k16<T>(scores[m][j + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // out += weights values
  __device__ __forceinline__ void gather(float (&out)[Tile::kRowTiles][Tile::kDim / 8][4],
                                         const float (&weights)[Tile::kRowTiles][Tile::kKeys / 8][4],
                                         int buffer) const {
    const int key = lane % 16;
#pragma unroll
    for (int j = 0; j < Tile::kKeys / 8; j += 2) {
      uint32_t a[Tile::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          a[m][2 * half] = pack<T>(weights[m][j + half][0], weights[m][j + half][1]);
          a[m][2 * half + 1] = pack<T>(weights[m][j + half][2], weights[m][j + half][3]);
        }
#pragma unroll
      for (int c = 0; c < Tile::kChunks; c += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, values(buffer) + Tile::place(key, lane / 16, 8 * j, c));
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m) {
          mma_m16n8k16<T>(out[m][c], a[m], b[0], b[1]);
          mma_m16n8k16<T>(out[m][c + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
};

}  // namespace offload_rt
