// Attention of the rows of a tree to a prefix and to their ancestors.
//
// A block takes a tile of query rows of one KV head, packed as (node, head in group), so that each key is read once for the
// whole group, and goes through the keys in stages: first the prefix, which takes no mask work except at its two ends, then
// the tree's own keys, of which stages that no node of the tile looks at are left out. Scores and sums stay in registers.
// Where there are too few tiles to fill the machine the stages are divided among blocks, and a second kernel combines them; a
// block that is left without a stage, as where there are fewer keys than there might be, weighs nothing.
#include "attention_rows.cuh"
#include "launch.h"

#include <algorithm>
#include <climits>

namespace offload_rt {
namespace {

// Least and greatest depth of a tile's nodes; every warp finds them for itself.
template <typename Tile>
__device__ int2 depth_range(const TreeAttention& args, const Block<Tile>& block) {
  const int last_row = min(block.first_row + Tile::kRows, block.n_rows) - 1;
  int least = INT_MAX, most = 0;
  for (int node = block.first_row / args.group + block.lane; node <= last_row / args.group; node += 32) {
    least = min(least, args.depths[node]);
    most = max(most, args.depths[node]);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    least = min(least, shuffle_xor(least, lanes));
    most = max(most, shuffle_xor(most, lanes));
  }
  return make_int2(least, most);
}

// The block's share of the stages from the first key that any of its rows can see.
template <typename Tile>
__device__ Span span_of(const TreeAttention& args, const Block<Tile>& block, int least_depth) {
  const int first_key = args.window ? max(0, block.n_before + least_depth - args.window + 1) : 0;
  const int first = min(first_key / Tile::kKeys, block.n_prefix);
  const int share = (block.n_stages - first + args.n_splits - 1) / args.n_splits;
  const int start = first + static_cast<int>(blockIdx.z) * share;
  return {min(start, block.n_stages), min(start + share, block.n_stages)};
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) tree_attention_kernel(TreeAttention args) {
  const Block<Tile> block(args);
  block.load_queries(args);
  block.find_live(args);
  const int2 depths = args.window ? depth_range(args, block) : make_int2(0, 0);
  const Span span = span_of(args, block, depths.x);
  // Prefix stages before this one hold keys that lie outside some row's window.
  const int first_whole = args.window ? max(0, block.n_before + depths.y - args.window) / Tile::kKeys + 1 : 0;
  const int last_whole = block.n_before / Tile::kKeys;
  Rows<Tile> rows;
  sync_block();
  constexpr bool kIsAhead = Tile::kBuffers == 2;
  int stage = block.next(span.first, span.last), buffer = 0;
  if (stage < span.last) block.load_keys(args, stage, buffer);
  if (kIsAhead && stage < span.last) block.load_values(args, stage, buffer);
  cp_async_commit();
  while (stage < span.last) {
    cp_async_wait<0>();
    // Past this, what was copied has arrived for all warps, and none still reads the buffer that is filled next.
    sync_block();
    const int next = block.next(stage + 1, span.last);
    if (!kIsAhead) block.load_values(args, stage, 0);
    if (kIsAhead && next < span.last) block.load_keys(args, next, buffer ^ 1), block.load_values(args, next, buffer ^ 1);
    cp_async_commit();
    typename Rows<Tile>::Scores scores;
    block.score(scores, buffer);
    if (stage >= block.n_prefix)
      Rows<Tile>::mask_tree(args, block, scores, stage);
    else if (stage < first_whole || stage >= last_whole)
      Rows<Tile>::mask_prefix(args, block, scores, stage);
    if (!kIsAhead) {
      cp_async_wait<0>();
      sync_block();
      if (next < span.last) block.load_keys(args, next, 0);
      cp_async_commit();
    }
    rows.weigh(args, scores);
    block.gather(rows.out, scores, buffer);
    stage = next;
    if (kIsAhead) buffer ^= 1;
  }
  rows.finish(args, block, blockIdx.z);
}

constexpr int kCombineThreads = 128;

// Two columns of one row a thread.
template <typename T>
__global__ void __launch_bounds__(kCombineThreads) combine_splits_kernel(TreeAttention args) {
  const int64_t n_rows = static_cast<int64_t>(args.n) * args.n_heads, n_pairs = args.head_dim / 2;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x;
  if (i >= n_rows * n_pairs) return;
  const float2* weights = args.weights + i / n_pairs;
  const float2* partial = reinterpret_cast<const float2*>(args.partial) + i;
  float best = kNone;
  for (int split = 0; split < args.n_splits; ++split) best = fmaxf(best, weights[split * n_rows].x);
  float whole = 0.f, low = 0.f, high = 0.f;
  for (int split = 0; split < args.n_splits; ++split) {
    const float2 own = weights[split * n_rows], sums = partial[split * n_rows * n_pairs];
    const float weight = own.x == kNone ? 0.f : exp2_fast(own.x - best);
    whole += weight * own.y;
    low += weight * sums.x;
    high += weight * sums.y;
  }
  const float scale = whole > 0.f ? 1.f / whole : 0.f;
  static_cast<uint32_t*>(args.out)[i] = pack<T>(low * scale, high * scale);
  if (i % n_pairs == 0) args.lse[i / n_pairs] = log_sum_exp(best, whole);
}

template <typename Tile>
void run(const TreeAttention& args, cudaStream_t stream) {
  const int n_tiles = (args.n * args.group + Tile::kRows - 1) / Tile::kRows;
  const int n_marks = (args.most_tree + Tile::kKeys - 1) / Tile::kKeys;
  const dim3 grid(n_tiles, args.n_heads / args.group, args.n_splits);
  launch(tree_attention_kernel<Tile>, grid, Tile::kThreads, Tile::kSharedBytes + n_marks, stream, args);
}

// The first of some tiles of which two blocks fit on a multiprocessor, or the last: one block multiplies while the other
// weighs. A kilobyte of each block is the system's, another is for the marks.
template <typename First, typename... Others>
void run_first_that_fits(const TreeAttention& args, int shared_bytes, cudaStream_t stream) {
  if constexpr (sizeof...(Others) > 0)
    if (2 * (First::kSharedBytes + (2 << 10)) > shared_bytes) return run_first_that_fits<Others...>(args, shared_bytes, stream);
  run<First>(args, stream);
}

// Few rows wait for keys: two buffers. Many wait for products: long stages read the queries less often.
template <typename T>
void run_for(const TreeAttention& args, int tile_rows, cudaStream_t stream) {
  const int shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, "shared memory of a multiprocessor");
  const bool is_few = tile_rows == 64;
  if (args.head_dim == 64) is_few ? run<Tile<T, 64, 1, 64, 2>>(args, stream) : run<Tile<T, 64, 2, 64, 2>>(args, stream);
  if (args.head_dim == 96 && is_few) run<Tile<T, 96, 1, 64, 2>>(args, stream);
  if (args.head_dim == 96 && !is_few)
    run_first_that_fits<Tile<T, 96, 2, 64, 2>, Tile<T, 96, 2, 32, 2>>(args, shared_bytes, stream);
  if (args.head_dim == 128 && is_few) run<Tile<T, 128, 1, 64, 2>>(args, stream);
  if (args.head_dim == 128 && !is_few)
    run_first_that_fits<Tile<T, 128, 2, 32, 2>, Tile<T, 128, 2, 32, 1>>(args, shared_bytes, stream);
  if (args.n_splits == 1) return;
  const int64_t n_pairs = static_cast<int64_t>(args.n) * args.n_heads * args.head_dim / 2;
  const dim3 grid(static_cast<unsigned>((n_pairs + kCombineThreads - 1) / kCombineThreads));
  launch(combine_splits_kernel<T>, grid, kCombineThreads, 0, stream, args);
}

}  // namespace

Tiling choose_tiling(int n_rows, int n_kv_heads, int n_keys, int n_processors) {
  constexpr int kBlocksPerProcessor = 2, kLeastKeys = 256, kMostSplits = 64;
  const int rows = n_rows > 64 ? 128 : 64;
  const int n_blocks = (n_rows + rows - 1) / rows * n_kv_heads;
  const int wanted = kBlocksPerProcessor * n_processors / n_blocks;
  return {rows, std::max(1, std::min({wanted, n_keys / kLeastKeys, kMostSplits}))};
}

void tree_attention(const TreeAttention& args, bool is_half, int tile_rows, cudaStream_t stream) {
  if (is_half)
    run_for<Half>(args, tile_rows, stream);
  else
    run_for<BFloat16>(args, tile_rows, stream);
}

}  // namespace offload_rt
