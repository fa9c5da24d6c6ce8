// The arithmetic of verification: every thread of every block computes the same scalars, in float64, and all of them share
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
// In shared memory, before anything else.
constexpr int kOfWarpsBytes = 32 * sizeof(double);
__device__ inline double* of_warps() { return reinterpret_cast<double*>(shared_memory()); }

__device__ inline double warp_sum(double x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}

// The sum over the block, the same in every thread. What each warp added to it stays in `of_warps`.
__device__ inline double block_sum(double x) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = warp_sum(x);
  // Whatever was read from these places before, or from what the caller writes next, has been read.
  sync_block();
  if (lane == 0) of_warps()[warp] = x;
  sync_block();
  return warp_sum(lane < kVerifyWarps ? of_warps()[lane] : 0.);
}

// A node whose children are tried: scale * row is what the children rejected so far have left of its distribution, without
// the tokens of the deterministic ones from `since` on. Every pass is over a row that stays and one that is written.
struct Trial {
  const float* row;
  double mass, scale;  // mass: with which it has been accepted so far
  int node, at, since;
};

struct Tree : Verify {
  int first, last;  // the tokens that this block looks after
  int turn = 0;

  __device__ explicit Tree(const Verify& args) : Verify(args) {
    const int share = (vocabulary + n_blocks - 1) / n_blocks;
    first = min(static_cast<int>(blockIdx.x) * share, vocabulary), last = min(first + share, vocabulary);
  }

  __device__ int n_children(int node) const { return static_cast<int>(starts[node + 1] - starts[node]); }
  __device__ const Child& child(int node, int i) const { return weighed[starts[node] + i]; }
  __device__ const float* target_of(int node) const { return target + static_cast<int64_t>(node) * vocabulary; }
  __device__ Trial enter(int node, double mass) const { return {target_of(node), mass, 1., node, 0, 0}; }
  // Whether this thread reads and writes what the rows have of a token.
  __device__ bool is_mine(int token) const {
    return token >= first && token < last && (token - first) % kVerifyThreads == static_cast<int>(threadIdx.x);
  }

  // The sum over each block, one a lane, the same in every warp; what any wrote before is seen by all.
  __device__ double sums_of_blocks(double x) {
    // Nobody writes to this half again before all have come to the barrier of the other.
    double* half = sums + turn * kMostVerifyBlocks;
    turn ^= 1;
    x = block_sum(x);
    if (threadIdx.x == 0) half[blockIdx.x] = x;
    sync_grid();
    const int lane = threadIdx.x % 32;
    return lane < n_blocks ? half[lane] : 0.;
  }
  __device__ double grid_sum(double x) { return warp_sum(sums_of_blocks(x)); }

  __device__ double value(const Trial& trial, const Child& child) const {
    return child.is_repeated ? 0. : trial.row[child.token];
  }

  // min(1, mass * scale * row / distribution) at the token of a child.
  __device__ double odds(const Trial& trial, const Child& child) const {
    const double wanted = trial.mass * trial.scale * value(trial, child);
    return wanted > 0. ? fmin(1., wanted / child.prob) : 0.;
  }

  // Where the next row of a trial is written: not where another block may still read.
  __device__ float* next_row(const Trial& trial, int level) const {
    float* pair = rests + int64_t{2} * level * vocabulary;
    if (trial.row == pair) return pair + vocabulary;
    if (trial.row == target_of(trial.node)) sync_grid();  // both rows may be those of the node before on this level
    return pair;
  }

  // row <- max(mass * scale * row - distribution of the child, 0); returns its sum.
  __device__ double subtract(Trial& trial, const Child& child, int level) {
    const double mass = trial.mass * trial.scale;
    const float factor = mass, share = child.share, floor = child.floor;
    // Distinct by name, so that the loads of several rounds go before the stores of the first.
    const float* __restrict__ from = trial.row;
    const float* __restrict__ probs = draft_probs + row_of[trial.node] * vocabulary;
    float* __restrict__ to = next_row(trial, level);
    float part = 0.f;
#pragma unroll 8
    for (int t = first + threadIdx.x; t < last; t += kVerifyThreads) {
      const float left = fmaxf(rounded_product(factor, from[t]) - rounded_product(share, probs[t]) - floor, 0.f);
      to[t] = left;
      part += left;
    }
    return grid_sum(part + put_back(trial, mass, to));
  }

  // Tokens that the child was not drawn from lose nothing; returns what that adds.
  __device__ double put_back(Trial& trial, double mass, float* to) const {
    double added = 0.;
    for (int j = 0; j < n_children(trial.node) && !independent; ++j) {
      const Child& other = child(trial.node, j);
      if (!is_mine(other.token) || (j >= trial.at - 1 && other.is_sampled)) continue;
      const double whole = mass * trial.row[other.token];
      added += whole - to[other.token];
      to[other.token] = static_cast<float>(whole);
    }
    trial.row = to;
    return added;
  }

  // row <- row without the tokens of the deterministic children tried; returns its sum.
  __device__ double strike(Trial& trial, int level) {
    const float* __restrict__ from = trial.row;
    float* __restrict__ to = next_row(trial, level);
#pragma unroll 8
    for (int t = first + threadIdx.x; t < last; t += kVerifyThreads) to[t] = from[t];
    for (int j = trial.since; j < trial.at; ++j)
      if (const Child& other = child(trial.node, j); !other.is_sampled && is_mine(other.token)) to[other.token] = 0.f;
    trial.row = to;
    float part = 0.f;
    for (int t = first + threadIdx.x; t < last; t += kVerifyThreads) part += trial.row[t];
    return grid_sum(part);
  }

  // Takes the child tried last, which was rejected, out of what is left of its parent. Returns the sum of that, weighed by
  // the parent's mass; 0 where nothing is left.
  __device__ double reject(Trial& trial, int level) {
    const Child& tried = child(trial.node, trial.at - 1);
    if (tried.is_sampled) {
      const double left = subtract(trial, tried, level);
      trial.scale = left > 0. ? 1. / left : 0.;
      return left;
    }
    double stays = 1. - fmin(trial.scale * value(trial, tried), 1.);
    if (stays < kCancelled) stays = trial.scale * strike(trial, level);
    trial.scale = stays > 0. ? trial.scale / stays : 0.;
    return trial.mass * stays;
  }

  // The draft's distribution was the target's, and rounding alone rejected the child.
  __device__ void restore(Trial& trial) const { trial = {target_of(trial.node), 1., 1., trial.node, trial.at, trial.at}; }
};

}  // namespace offload_rt
