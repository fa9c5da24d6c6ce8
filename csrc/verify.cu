// Verification of a drafted tree, from the distributions to the last node accepted and the token that follows it.
//
// What a verdict needs leaves the device as two numbers. One kernel weighs the children of all nodes at once, a block for each
// node. The decisions come one after another, so another goes through them with blocks that wait for each other: all of them
// decide alike, and each looks after a part of the vocabulary. The order of the decisions is that of offload_rt/speculate/
// residual_kernels.py; only sums over the vocabulary are added up in another order.
#include "launch.h"
#include "verify_tree.cuh"

#include <algorithm>

namespace offload_rt {
namespace {

constexpr int kTokensPerBlock = 1024;

// The children of a node in shared memory: their tokens, and the draft's probabilities of those that are sampled.
struct Siblings {
  int* tokens;
  float* probs;
  int n, n_sampled;

  // Whether one of those from `begin` on and before `end` has a token.
  __device__ bool have(int token, int begin, int end) const {
    for (int j = begin; j < end; ++j)
      if (tokens[j] == token) return true;
    return false;
  }
};

__device__ Siblings siblings_of(const Tree& tree, int node) {
  int* tokens = reinterpret_cast<int*>(shared_memory() + kOfWarpsBytes);
  Siblings found{tokens, reinterpret_cast<float*>(tokens + tree.n), tree.n_children(node), 0};
  double n_sampled = 0.;
  for (int j = threadIdx.x; j < found.n; j += kVerifyThreads) {
    const int64_t own = tree.children[tree.starts[node] + j];
    found.tokens[j] = static_cast<int>(tree.tokens[own]);
    n_sampled += tree.is_sampled[own];
  }
  found.n_sampled = static_cast<int>(block_sum(n_sampled));
  return found;
}

// The draft's probability of all tokens but those of the first n siblings.
__device__ double sum_without(const Tree& tree, const Siblings& siblings, int n, const float* probs) {
  constexpr int kBatch = 8;
  float part = 0.f;
  for (int start = threadIdx.x; start < tree.vocabulary; start += kBatch * kVerifyThreads) {
    float batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int t = start + i * kVerifyThreads;
      batch[i] = t < tree.vocabulary ? probs[t] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (!siblings.have(start + i * kVerifyThreads, 0, n)) part += batch[i];
  }
  return block_sum(part);
}

// What a sampled child was drawn from has `left` of the draft's probability and `n_left` tokens.
__device__ Child sampled_child(double left, double n_left, double prob) {
  const double share = left >= kTiny ? 1. / left : 0., floor = left >= kTiny ? 0. : 1. / fmax(n_left, 1.);
  return {share, floor, share * prob + floor, 0, 0, true, false};
}

__global__ void __launch_bounds__(kVerifyThreads) weigh_children_kernel(Verify args) {
  const Tree tree(args);
  const int node = blockIdx.x;
  if (tree.n_children(node) == 0) return;
  const Siblings siblings = siblings_of(tree, node);
  const int n_sampled = siblings.n_sampled, n_drawn_with = tree.independent ? 0 : siblings.n;
  const float* probs = tree.draft_probs + tree.row_of[node] * tree.vocabulary;
  double others = 0.;
  if (n_sampled > 0) {
    others = sum_without(tree, siblings, n_drawn_with, probs);
    for (int j = threadIdx.x; j < n_sampled; j += kVerifyThreads)
      siblings.probs[j] = siblings.have(siblings.tokens[j], j + 1, n_drawn_with) ? 0.f : probs[siblings.tokens[j]];
  }
  sync_block();
  for (int i = threadIdx.x; i < siblings.n; i += kVerifyThreads) {
    const int token = siblings.tokens[i];
    Child own{0., 0., 1., 0, 0, false, siblings.have(token, n_sampled, i)};
    if (i < n_sampled) {
      double left = others, n_left = tree.vocabulary;
      // Only sums of what is there: subtracting what was taken would leave rounding of the whole.
      for (int j = i; j < n_sampled && !tree.independent; ++j) left += siblings.probs[j];
      if (!tree.independent) n_left -= i + siblings.n - n_sampled;
      own = sampled_child(left, n_left, probs[token]);
    }
    own.node = static_cast<int>(tree.children[tree.starts[node] + i]), own.token = token;
    tree.weighed[tree.starts[node] + i] = own;
  }
}

__device__ Trial walk(Tree& tree) {
  Trial now = tree.enter(0, 1.);
  while (now.at < tree.n_children(now.node)) {
    const Child& child = tree.child(now.node, now.at++);
    if (tree.uniforms[child.node] < tree.odds(now, child))
      now = tree.enter(child.node, 1.);
    else if (tree.reject(now, 0) <= 0.)
      tree.restore(now);
  }
  return now;
}

// The nodes above the current one; that is in registers, the same in every thread.
struct Stack {
  Trial* levels = reinterpret_cast<Trial*>(shared_memory() + kOfWarpsBytes);
  int n = 0;

  __device__ void push(const Trial& current) {
    if (threadIdx.x == 0) levels[n] = current;
    ++n;
    sync_block();
  }
  __device__ Trial pop() {
    const Trial found = levels[--n];
    // Nobody writes this level again before all have read it.
    sync_block();
    return found;
  }
};

// `level` is that of the node returned.
__device__ Trial traverse(Tree& tree, int& level) {
  Stack stack;
  Trial now = tree.enter(0, 1.);
  while (true) {
    if (now.at < tree.n_children(now.node)) {
      const Child& child = tree.child(now.node, now.at++);
      const double share = tree.odds(now, child);
      if (share > 0.) {
        stack.push(now);
        now = tree.enter(child.node, share);
        continue;
      }
    } else {
      level = stack.n;
      if (level == 0 || tree.uniforms[now.node] < now.mass) return now;
      now = stack.pop();
    }
    // The child was rejected, and all below it. The mass only falls: a last child cannot save a node that is lost.
    if (stack.n > 0 && now.at == tree.n_children(now.node) && tree.uniforms[now.node] >= now.mass) continue;
    const double left = tree.reject(now, stack.n);
    if (left > 0.)
      now.mass = left / (left + (1. - now.mass));  // in this order: 1 - 1 is to be 0
    else if (stack.n > 0)
      now.mass = 0., now.at = tree.n_children(now.node);
    else
      tree.restore(now);
  }
}

// The chance of a token, rounded as the distribution itself would be.
__device__ double chance(const Trial& end, int token) { return static_cast<float>(end.row[token] * end.scale); }

// The sum over the lanes up to this one.
__device__ double sum_to_lane(double x) {
  for (int n = 1; n < 32; n *= 2) {
    const double below = shuffle_up(x, n);
    if (static_cast<int>(threadIdx.x % 32) >= n) x += below;
  }
  return x;
}

// Of shares of a distribution, one a lane: the one that a point falls into, and what lies before it.
struct Place {
  int share;
  double before;
};

__device__ Place find_share(double own, double before, double point) {
  const double end = before + sum_to_lane(own);
  const uint32_t past = ballot(end > point), positive = ballot(own > 0.);
  // A point at the very end, possible through rounding, falls into the last share of positive probability.
  const int share = past ? first_bit(past) : positive ? last_bit(positive) : 0;
  return {share, shuffle_from(end - own, share)};
}

// The first token at which the distribution function exceeds uniform * total. Each warp sums a share of its block's tokens;
// the warp whose share it falls in looks for it there.
__device__ void draw(Tree& tree, const Trial& end) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = (tree.last - tree.first + kVerifyThreads - 1) / kVerifyThreads * 32;
  const int first = min(tree.first + warp * share, tree.last), last = min(first + share, tree.last);
  double part = 0.;
  for (int t = first + lane; t < last; t += 32) part += chance(end, t);
  const double of_block = tree.sums_of_blocks(part), total = shuffle_from(sum_to_lane(of_block), 31);
  const double point = tree.uniforms[tree.n] * total;
  const Place in_grid = find_share(of_block, 0., point);
  if (in_grid.share != static_cast<int>(blockIdx.x)) return;
  const Place in_block = find_share(lane < kVerifyWarps ? of_warps()[lane] : 0., in_grid.before, point);
  if (in_block.share != warp) return;
  int found = -1;
  double below = in_block.before;
  for (int start = first; start < last; start += 32) {
    const double x = start + lane < last ? chance(end, start + lane) : 0.;
    const double end_of_lane = below + sum_to_lane(x);
    const uint32_t here = ballot(end_of_lane > point && x > 0.), any = ballot(x > 0.);
    if (any) found = start + (here ? first_bit(here) : last_bit(any));
    if (here) break;
    below = shuffle_from(end_of_lane, 31);
  }
  if (lane == 0) tree.verdict[1] = found;
}

__global__ void __launch_bounds__(kVerifyThreads, 1) verify_kernel(Verify args) {
  Tree tree(args);
  int level = 0;
  Trial end = tree.leaf_to_root ? traverse(tree, level) : walk(tree);
  // Deterministic children come last, and their tokens are still in the row.
  if (end.at > end.since && !tree.child(end.node, end.at - 1).is_sampled) tree.strike(end, level);
  if (blockIdx.x == 0 && threadIdx.x == 0) tree.verdict[0] = end.node;
  draw(tree, end);
}

}  // namespace

void verify(const Verify& args, cudaStream_t stream) {
  Verify own = args;
  const int n_processors = attribute(cudaDevAttrMultiProcessorCount, "number of multiprocessors");
  own.n_blocks = std::min({(args.vocabulary + kTokensPerBlock - 1) / kTokensPerBlock, n_processors, kMostVerifyBlocks});
  const size_t nbytes_of_siblings = kOfWarpsBytes + (sizeof(int) + sizeof(float)) * args.n;
  launch(weigh_children_kernel, dim3(args.n), kVerifyThreads, nbytes_of_siblings, stream, own);
  launch(verify_kernel, dim3(own.n_blocks), kVerifyThreads, kOfWarpsBytes + sizeof(Trial) * args.n_levels, stream, own, true);
}

}  // namespace offload_rt
