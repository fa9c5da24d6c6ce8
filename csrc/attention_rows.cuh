// What a thread of tree attention keeps of its rows: the running softmax, and which keys a row may look at.
#pragma once

#include "attention_tile.cuh"

namespace offload_rt {

constexpr float kNone = -__builtin_inff();

// Over the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// Of weights 2^(score - largest) that add up to `sum`; as a natural logarithm.
__device__ __forceinline__ float log_sum_exp(float largest, float sum) { return (largest + log2f(sum)) * 0.69314718f; }

template <typename Tile>
struct Rows {
  using T = typename Tile::Element;
  static constexpr int kRowTiles = Tile::kRowTiles, kKeyTiles = Tile::kKeys / 8, kDimTiles = Tile::kDim / 8;
  using Scores = float[kRowTiles][kKeyTiles][4];

  float out[kRowTiles][kDimTiles][4];
  float largest[kRowTiles][2], sum[kRowTiles][2];  // of the scores; of the weights in this thread's columns

  __device__ Rows() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int c = 0; c < kDimTiles; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][c][e] = 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) largest[m][half] = kNone, sum[m][half] = 0.f;
    }
  }

  // Packed row of this thread.
  static __device__ int row_of(const Block<Tile>& block, int m, int half) {
    return block.first_row + block.warp * Tile::kWarpRows + 16 * m + 8 * half + block.lane / 4;
  }

  // Row of the masks; the last one where there is no such row.
  static __device__ int node_of(const TreeAttention& args, const Block<Tile>& block, int m, int half) {
    return min(row_of(block, m, half) / args.group, args.n - 1);
  }

  static __device__ void mask_prefix(const TreeAttention& args, const Block<Tile>& block, Scores& scores, int stage) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int depth = args.window ? args.depths[node_of(args, block, m, half)] : 0;
        const int too_early = args.window ? block.n_before + depth - args.window : -1;
        const int first_key = stage * Tile::kKeys + block.lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = first_key + 8 * j + e;
            if (key <= too_early || key >= block.n_before) scores[m][j][2 * half + e] = kNone;
          }
      }
  }

  static __device__ void mask_tree(const TreeAttention& args, const Block<Tile>& block, Scores& scores, int stage) {
    const int first_key = (stage - block.n_prefix) * Tile::kKeys;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int node = node_of(args, block, m, half);
        const int too_shallow = args.window ? args.depths[node] - args.window : -1;
#pragma unroll
        for (int w = 0; w < Tile::kKeys / 32; ++w) {
          const int word = first_key / 32 + w;
          const uint32_t bits =
              word < args.words ? static_cast<uint32_t>(args.masks[static_cast<int64_t>(node) * args.words + word]) : 0u;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int bit = i / 2 * 8 + block.lane % 4 * 2 + i % 2;
            bool is_seen = bits >> bit & 1;
            // Depths are needed only where the path is longer than the window.
            if (is_seen && too_shallow >= 0) is_seen = args.key_depths[first_key + 32 * w + bit] > too_shallow;
            if (!is_seen) scores[m][4 * w + i / 2][2 * half + i % 2] = kNone;
          }
        }
      }
  }

  // Scores become weights; what was gathered before is weighed anew where a larger score has come.
  __device__ __forceinline__ void weigh(const TreeAttention& args, Scores& scores) {
    float fade[kRowTiles][2];
    bool has_faded = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best = largest[m][half];
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) best = fmaxf(best, fmaxf(scores[m][j][2 * half], scores[m][j][2 * half + 1]));
        best = row_max(best);
        // A row that has seen nothing yet: its scores are all minus infinity, and are to become zeros.
        const float shift = best == kNone ? 0.f : best * args.scale_log2;
        fade[m][half] = exp2_fast(largest[m][half] * args.scale_log2 - shift);
        has_faded |= best != largest[m][half];
        largest[m][half] = best;
        float added = 0.f;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            scores[m][j][e] = exp2_fast(scores[m][j][e] * args.scale_log2 - shift);
            added += scores[m][j][e];
          }
        sum[m][half] = sum[m][half] * fade[m][half] + added;
      }
    if (ballot(has_faded) == 0) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int c = 0; c < kDimTiles; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][c][e] *= fade[m][e / 2];
  }

  __device__ void finish(const TreeAttention& args, const Block<Tile>& block, int split) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float whole = row_sum(sum[m][half]);
        const int row = row_of(block, m, half);
        if (row >= block.n_rows) continue;
        const int64_t place = static_cast<int64_t>(row / args.group) * args.n_heads + block.kv_head * args.group +
                              row % args.group;
        if (args.n_splits == 1)
          store(args, block, m, half, place, whole);
        else
          store_partial(args, block, m, half, split * static_cast<int64_t>(args.n) * args.n_heads + place, whole);
      }
  }

 private:
  __device__ void store(const TreeAttention& args, const Block<Tile>& block, int m, int half, int64_t place, float whole) {
    const float scale = whole > 0.f ? 1.f / whole : 0.f;
    if (block.lane % 4 == 0) args.lse[place] = log_sum_exp(largest[m][half] * args.scale_log2, whole);
    uint32_t* to = static_cast<uint32_t*>(args.out) + place * (Tile::kDim / 2) + block.lane % 4;
#pragma unroll
    for (int c = 0; c < kDimTiles; ++c)
      to[4 * c] = pack<T>(out[m][c][2 * half] * scale, out[m][c][2 * half + 1] * scale);
  }

  __device__ void store_partial(const TreeAttention& args, const Block<Tile>& block, int m, int half, int64_t place,
                                float whole) {
    float2* to = reinterpret_cast<float2*>(args.partial) + place * (Tile::kDim / 2) + block.lane % 4;
#pragma unroll
    for (int c = 0; c < kDimTiles; ++c) to[4 * c] = make_float2(out[m][c][2 * half], out[m][c][2 * half + 1]);
    if (block.lane % 4 == 0) args.weights[place] = make_float2(largest[m][half] * args.scale_log2, whole);
  }
};

}  // namespace offload_rt
