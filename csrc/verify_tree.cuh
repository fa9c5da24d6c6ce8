// The arithmetic of verification by one block: every thread computes the same scalars, in float64, and all of them share
// each pass over the vocabulary. Function by function this is offload_rt/speculate/residual_kernels.py, which says what it means.
#pragma once

#include "kernels.h"
#include "warp.cuh"

namespace offload_rt {

// Fewer threads than a block may have: the scalars cost every warp its share of the few float64 units of a consumer card.
constexpr int kVerifyThreads = 512;
constexpr int kVerifyWarps = kVerifyThreads / 32;
// What is left of a distribution is added up anew where subtracting would leave mostly rounding.
constexpr double kCancelled = 1e-4;
// The smallest normal float32.
constexpr double kTiny = 1.1754943508222875e-38;

// The sum over the block, the same in every thread.
__device__ inline double block_sum(double x) {
  double* of_warps = reinterpret_cast<double*>(shared_memory());
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  // Whatever was read from these places before, or from what the caller writes next, has been read.
  sync_block();
  if (lane == 0) of_warps[warp] = x;
  sync_block();
  x = lane < kVerifyWarps ? of_warps[lane] : 0.;
  for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}

// The distribution of a sampled child: share * q + floor on the tokens it was drawn from.
struct ChildProbs {
  double share, floor;
};

// What is left of a node after a rejection; nothing where mass is 0.
struct Residual {
  double mass, scale;
};

struct Tree : Verify {
  __device__ explicit Tree(const Verify& args) : Verify(args) {}

  __device__ int n_children(int node) const { return static_cast<int>(starts[node + 1] - starts[node]); }
  __device__ int child_of(int node, int i) const { return static_cast<int>(children[starts[node] + i]); }
  __device__ const float* probs_of(int node) const { return draft_probs + row_of[node] * vocabulary; }
  __device__ const float* target_of(int node) const { return target + static_cast<int64_t>(node) * vocabulary; }
  // Whether the j-th child's token was out of reach when the i-th was drawn.
  __device__ bool is_struck(int node, int i, int j) const { return j < i || !is_sampled[child_of(node, j)]; }

  __device__ double sum_of_row(const float* row) const {
    float part = 0.f;
#pragma unroll 8
    for (int t = threadIdx.x; t < vocabulary; t += kVerifyThreads) part += row[t];
    return block_sum(part);
  }

  __device__ double sum_of_law(int node) const {
    double* known = sums + row_of[node];
    const double before = *known;
    if (before >= 0.) return before;
    const double sum = sum_of_row(probs_of(node));
    // All threads have read `before` ahead of the barriers of the sum.
    if (threadIdx.x == 0) *known = sum;
    sync_block();
    return sum;
  }

  __device__ bool is_struck_token(int node, int i, int token) const {
    for (int j = 0; j < n_children(node); ++j)
      if (is_struck(node, i, j) && tokens[child_of(node, j)] == token) return true;
    return false;
  }

  __device__ ChildProbs child_probs(int node, int i) const {
    const float* probs = probs_of(node);
    double left = sum_of_law(node), n_left = vocabulary;
    if (!independent) {
      double taken = 0., n_taken = 0.;
      for (int j = threadIdx.x; j < n_children(node); j += kVerifyThreads)
        if (is_struck(node, i, j)) {
          taken += probs[tokens[child_of(node, j)]];
          n_taken += 1.;
        }
      left -= block_sum(taken);
      n_left -= block_sum(n_taken);
      if (left < kCancelled) {
        double part = 0.;
        for (int t = threadIdx.x; t < vocabulary; t += kVerifyThreads)
          if (probs[t] != 0.f && !is_struck_token(node, i, t)) part += probs[t];
        left = block_sum(part);
      }
    }
    return left >= kTiny ? ChildProbs{1. / left, 0.} : ChildProbs{0., 1. / fmax(n_left, 1.)};
  }

  // min(1, mass * rest / distribution) at the token of the i-th child; `mass` includes the scale of `rest`.
  __device__ double odds(int node, int i, double mass, const float* rest) const {
    const int child = child_of(node, i);
    const int64_t token = tokens[child];
    const double wanted = mass * rest[token];
    if (wanted <= 0.) return 0.;
    double probs = 1.;
    if (is_sampled[child]) {
      const ChildProbs of_child = child_probs(node, i);
      probs = of_child.share * probs_of(node)[token] + of_child.floor;
    }
    return fmin(1., wanted / probs);
  }

  // rest <- max(mass * rest - distribution of the i-th child, 0); returns its sum.
  __device__ double subtract_sampled(int node, int i, double mass, float* rest, ChildProbs child_law) const {
    const int n_kept = independent ? 0 : n_children(node);
    for (int j = threadIdx.x; j < n_kept; j += kVerifyThreads) kept[j] = rest[tokens[child_of(node, j)]];
    sync_block();
    const float factor = mass, share = child_law.share, floor = child_law.floor;
    // Distinct by name, so that the loads of several rounds go before the stores of the first.
    const float* __restrict__ probs = probs_of(node);
    float* __restrict__ own = rest;
    float part = 0.f;
#pragma unroll 8
    for (int t = threadIdx.x; t < vocabulary; t += kVerifyThreads) {
      const float left = fmaxf(factor * own[t] - share * probs[t] - floor, 0.f);
      own[t] = left;
      part += left;
    }
    const double kept_mass = block_sum(part);  // before anything is put back: no thread is in the loop above any more
    return kept_mass + put_back(node, i, mass, rest, n_kept);
  }

  // Tokens the child was not drawn from lose nothing; returns what that adds.
  __device__ double put_back(int node, int i, double mass, float* rest, int n_kept) const {
    double added = 0.;
    for (int j = threadIdx.x; j < n_kept; j += kVerifyThreads) {
      const int64_t token = tokens[child_of(node, j)];
      if (!is_struck(node, i, j) || is_repeated(node, i, j, token)) continue;
      added += mass * kept[j] - rest[token];
      rest[token] = static_cast<float>(mass * kept[j]);
    }
    return block_sum(added);
  }

  __device__ bool is_repeated(int node, int i, int j, int64_t token) const {
    for (int before = 0; before < j; ++before)
      if (is_struck(node, i, before) && tokens[child_of(node, before)] == token) return true;
    return false;
  }

  // Strike the rejected i-th child out of its parent's residual, weighed as mass * scale * rest.
  __device__ Residual reject(int node, int i, double mass, double scale, float* rest) const {
    const int child = child_of(node, i);
    if (is_sampled[child]) {
      const double left = subtract_sampled(node, i, mass * scale, rest, child_probs(node, i));
      return left > 0. ? Residual{left, 1. / left} : Residual{0., 0.};
    }
    const int64_t token = tokens[child];
    double stays = 1. - fmin(scale * rest[token], 1.);
    sync_block();
    if (threadIdx.x == 0) rest[token] = 0.f;
    sync_block();
    if (stays < kCancelled) stays = scale * sum_of_row(rest);
    return stays > 0. ? Residual{mass * stays, scale / stays} : Residual{0., 0.};
  }

  __device__ void copy_row(float* __restrict__ to, const float* __restrict__ from) const {
    sync_block();
#pragma unroll 8
    for (int t = threadIdx.x; t < vocabulary; t += kVerifyThreads) to[t] = from[t];
    sync_block();
  }
};

}  // namespace offload_rt
