// Verification of a drafted tree, from the distributions to the last node accepted and the token that follows it, by one block.
//
// What a verdict needs leaves the device as two numbers. The order of the decisions is that of `walk` and `traverse` in
// offload_rt/speculate/residual_kernels.py; only sums over the vocabulary are added up in another order.
#include "launch.h"
#include "verify_tree.cuh"

namespace offload_rt {
namespace {

// Where a rule stopped, and the distribution of the bonus: scale * row.
struct Outcome {
  int node;
  const float* row;
  double scale;
};

__device__ Outcome walk(const Tree& tree) {
  int node = 0, i = 0;
  double scale = 1.;
  float* rest = tree.rests;
  tree.copy_row(rest, tree.target);
  while (i < tree.n_children(node)) {
    const int child = tree.child_of(node, i);
    if (tree.uniforms[child] < tree.odds(node, i, scale, rest)) {
      node = child, i = 0, scale = 1.;
      tree.copy_row(rest, tree.target_of(node));
      continue;
    }
    const Residual left = tree.reject(node, i, 1., scale, rest);
    scale = left.scale;
    if (left.mass <= 0.) {  // the draft's distribution was the target's: rounding alone rejected the child
      tree.copy_row(rest, tree.target_of(node));
      scale = 1.;
    }
    ++i;
  }
  return {node, rest, scale};
}

// A node on the way from the root to the one that is tried.
struct Level {
  double mass, scale;
  int node, at;
};

// The levels above the current one; the current one is in registers, the same in every thread.
struct Stack {
  Level* levels;

  __device__ void push(int level, const Level& current) const {
    if (threadIdx.x == 0) levels[level] = current;
    sync_block();
  }
  __device__ Level pop(int level) const {
    const Level found = levels[level];
    // Nobody writes this level again before all have read it.
    sync_block();
    return found;
  }
};

__device__ Outcome traverse(const Tree& tree) {
  const Stack stack{reinterpret_cast<Level*>(shared_memory() + 32 * sizeof(double))};
  Level now{1., 1., 0, 0};
  int level = 0;
  tree.copy_row(tree.rests, tree.target);
  while (true) {
    float* rest = tree.rests + static_cast<int64_t>(level) * tree.vocabulary;
    if (now.at < tree.n_children(now.node)) {
      const double share = tree.odds(now.node, now.at, now.mass * now.scale, rest);
      ++now.at;
      if (share > 0.) {
        stack.push(level++, now);
        now = {share, 1., tree.child_of(now.node, now.at - 1), 0};
        // A leaf strikes nothing out.
        if (tree.n_children(now.node) > 0) tree.copy_row(rest + tree.vocabulary, tree.target_of(now.node));
        continue;
      }
    } else {
      if (level == 0 || tree.uniforms[now.node] < now.mass) break;
      now = stack.pop(--level);
      rest -= tree.vocabulary;
    }
    const int tried = now.at - 1, n_children = tree.n_children(now.node);
    // The child was rejected, and all below it. The mass only falls: a last child cannot save a node that is lost.
    if (level > 0 && tried == n_children - 1 && tree.uniforms[now.node] >= now.mass) continue;
    const Residual left = tree.reject(now.node, tried, now.mass, now.scale, rest);
    now.scale = left.scale;
    if (left.mass > 0.) {
      now.mass = left.mass / (left.mass + (1. - now.mass));  // in this order: 1 - 1 is to be 0
    } else if (level > 0) {
      now.mass = 0., now.at = n_children;
    } else {
      tree.copy_row(rest, tree.target);
      now.scale = 1.;
    }
  }
  if (tree.n_children(now.node) == 0) return {now.node, tree.target_of(now.node), 1.};
  return {now.node, tree.rests + static_cast<int64_t>(level) * tree.vocabulary, now.scale};
}

// The chance of a token, rounded as the distribution itself would be.
__device__ double chance(const Outcome& outcome, int token) {
  return static_cast<float>(outcome.row[token] * outcome.scale);
}

// The sum over the lanes up to this one.
__device__ double sum_to_lane(double x) {
  for (int n = 1; n < 32; n *= 2) {
    const double below = shuffle_up(x, n);
    if (static_cast<int>(threadIdx.x % 32) >= n) x += below;
  }
  return x;
}

// The first token at which the distribution's distribution function exceeds uniform * total. Each warp sums a share of the
// vocabulary; the warp whose share it falls in looks for it there.
__device__ void draw(const Tree& tree, const Outcome& outcome) {
  double* ends = reinterpret_cast<double*>(shared_memory());
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = (tree.vocabulary + kVerifyThreads - 1) / kVerifyThreads * 32;
  const int first = min(warp * share, tree.vocabulary), last = min(first + share, tree.vocabulary);
  double part = 0.;
  for (int t = first + lane; t < last; t += 32) part += chance(outcome, t);
  for (int lanes = 16; lanes > 0; lanes /= 2) part += shuffle_xor(part, lanes);
  sync_block();
  if (lane == 0) ends[warp] = part;
  sync_block();
  const double own = lane < kVerifyWarps ? ends[lane] : 0., end = sum_to_lane(own), total = shuffle_from(end, 31);
  const double at = tree.uniforms[tree.n] * total;
  const uint32_t past = ballot(end > at), positive = ballot(own > 0.);
  // A draw of exactly the total, possible through rounding, falls into the last share of positive probability.
  const int chosen = past ? first_bit(past) : positive ? last_bit(positive) : 0;
  const double before = shuffle_from(end - own, chosen);
  if (warp != chosen) return;
  int found = -1;
  double below = before;
  for (int start = first; start < last; start += 32) {
    const double x = start + lane < last ? chance(outcome, start + lane) : 0.;
    const double end_of_lane = below + sum_to_lane(x);
    const uint32_t here = ballot(end_of_lane > at && x > 0.), any = ballot(x > 0.);
    if (any) found = start + (here ? first_bit(here) : last_bit(any));
    if (here) break;
    below = shuffle_from(end_of_lane, 31);
  }
  if (lane == 0) tree.verdict[1] = found;
}

__global__ void __launch_bounds__(kVerifyThreads) verify_kernel(Verify args) {
  const Tree tree(args);
  for (int row = threadIdx.x; row < tree.n_draft_probs; row += kVerifyThreads) tree.sums[row] = -1.;
  sync_block();
  const Outcome outcome = tree.leaf_to_root ? traverse(tree) : walk(tree);
  if (threadIdx.x == 0) tree.verdict[0] = outcome.node;
  draw(tree, outcome);
}

}  // namespace

void verify(const Verify& args, cudaStream_t stream) {
  const size_t nbytes = 32 * sizeof(double) + sizeof(Level) * args.n_levels;
  launch(verify_kernel, dim3(1), kVerifyThreads, nbytes, stream, args);
}

}  // namespace offload_rt
