// What the host code knows of the kernels: their arguments, and one function each that starts them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace offload_rt {

// n rows of a tree attend to n_before keys that all of them see and, by their bits, to the n_tree keys that follow. Only the
// device knows these two numbers, so that one captured launch serves caches of every length; the host chooses by upper
// bounds. Strides in elements; the last dimension of q, k and v is dense.
struct TreeAttention {
  const void* q;              // (n, n_heads, d)
  const void* k;              // (n_kv_heads, n_before + n_tree at least, d)
  const void* v;              // as k
  void* out;                  // (n, n_heads, d), dense
  float* lse;                 // (n, n_heads): log-sum-exp of the scaled scores, minus infinity for a row that sees nothing
  const int32_t* masks;       // (n, words)
  const int32_t* depths;      // (n,)
  const int32_t* key_depths;  // (n_tree at least,)
  const int32_t* extent;      // (2,): n_before, n_tree
  float* partial;             // (n_splits, n, n_heads, d), of n_splits > 1
  float2* weights;            // (n_splits, n, n_heads): largest score and sum, of n_splits > 1
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  int n, n_heads, group, head_dim, most_tree, words, window, n_splits;
  float scale_log2;
};

struct Tiling {
  int rows, n_splits;
};

// Rows of a tile, and into how many parts its keys are cut, for so many multiprocessors.
Tiling choose_tiling(int n_rows, int n_kv_heads, int n_keys, int n_processors);
void tree_attention(const TreeAttention& args, bool is_half, int tile_rows, cudaStream_t stream);

struct TreeMasks {
  const int64_t* parents;  // (n,), below zero for a root
  int32_t* masks;          // (n, words)
  int32_t* depths;         // (n,)
  int n, words;
};

constexpr int kMostMaskedRows = 6144;
void tree_masks(const TreeMasks& args, cudaStream_t stream);

// Within each of n_planes, row first + rows[i] goes to first + i.
struct CommitRows {
  void* keys;  // (n_planes, capacity, 16 * n_vectors bytes)
  void* values;
  const int64_t* rows;  // (n_rows,) ascending, rows[i] >= i
  int64_t n_planes, capacity;
  int n_vectors, n_rows, first;
};

void commit_rows(const CommitRows& args, cudaStream_t stream);

// A drafted tree and the target's distributions; see Candidates in offload_rt/speculate/residual_kernels.py.
struct Verify {
  const int64_t* starts;     // (n + 1,)
  const int64_t* children;   // (n - 1,)
  const int64_t* tokens;     // (n,)
  const bool* is_sampled;         // (n,)
  const int64_t* row_of;     // (n,)
  const float* draft_probs;         // (n_laws, vocabulary)
  const float* target;       // (n, vocabulary)
  const double* uniforms;    // (n + 1,), the last for the bonus
  double* sums;              // (n_laws,) of each distribution; written
  float* rests;              // (n_levels, vocabulary), or (1, vocabulary) for a walk; written
  float* kept;               // (n,); written
  int64_t* verdict;          // (2,): the last node accepted, the bonus; written
  int n, n_draft_probs, vocabulary, n_levels;
  bool independent, leaf_to_root;
};

constexpr int kMostLevels = 1024;
void verify(const Verify& args, cudaStream_t stream);

enum class CodeKind : int { kRows, kColumns, kAwq, kInt8, kFloat4, kNormal4, kFloat8 };
enum class FloatKind : int { kFloat, kHalf, kBFloat16 };

// A quantised matrix; see Packing in offload_rt/ops/dequantize.py.
struct Dequantize {
  const void* codes;
  const void* scales;     // (rows / block_rows, n_scales) of scale_kind
  const int32_t* zeros;   // as scales, or null: `offset` is subtracted
  const int32_t* groups;  // the row of scales of each row, of kColumns and kAwq, or the column of each column; or null
  void* out;              // (n_rows, n_columns) of out_kind
  int64_t n_rows, row_size;  // row_size: words or bytes of codes in a row
  int n_columns, n_scales, bits, block_rows, block_columns, offset;
  CodeKind kind;
  FloatKind scale_kind, out_kind;
  bool is_aligned;  // eight neighbouring columns are 16 bytes of their own
};

void dequantize(const Dequantize& args, cudaStream_t stream);

}  // namespace offload_rt
