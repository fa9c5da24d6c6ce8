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

enum class FloatKind : int { kFloat, kHalf, kBFloat16, kPowerOfTwo };  // the last: exponents of scales, in bytes

// Attention to two disjoint parts of the keys, joined. Dense; log-sum-exp as above.
struct MergeAttention {
  const void* out_a;  // (n_rows, width) of kind_a, a row for each row and head
  const void* out_b;  // as out_a, of kind_b
  const float* lse_a;  // (n_rows,)
  const float* lse_b;
  void* out;  // as out_a
  float* lse;
  int64_t n_rows;
  int width;
  FloatKind kind_a, kind_b;
};

void merge_attention(const MergeAttention& args, cudaStream_t stream);

// Bytes from one place to another, of which either may be pinned memory of the host.
struct Transfer {
  void* to;
  const void* from;
  int64_t nbytes, n_vectors, n_threads;  // the last two are set by `transfer`
};

void transfer(Transfer args, cudaStream_t stream);

// Within each of n_planes, row first + rows[i] goes to first + i. The rows are arguments of the launch: nothing is copied.
constexpr int kMostCommitted = 256;
struct CommitRows {
  void* keys;  // (n_planes, capacity, 16 * n_vectors bytes)
  void* values;
  int64_t n_planes, capacity;
  int rows[kMostCommitted];  // (n_rows,) ascending, rows[i] >= i
  int n_vectors, n_rows, first;
};

void commit_rows(const CommitRows& args, cudaStream_t stream);

// The kernels of a decoder layer work on float16 or bfloat16, 16 bytes at a time: strides and widths are multiples of 8
// elements, the last dimension is dense.

// Each row of `width` numbers by the root of the mean of its squares, times the weight.
struct RmsNorm {
  void* x;             // (n, n_heads, width); delta is added to it in place
  const void* delta;   // (n, width) where n_heads is 1, or null
  const void* weight;  // (width,)
  void* out;           // (n, n_heads, width), dense
  int64_t x_row, x_head, delta_row;
  int n, n_heads, width;
  float eps;
};

constexpr int kMostNormed = 16384;  // the widest row
void rms_norm(const RmsNorm& args, bool is_half, cudaStream_t stream);

// Turns q and k by position, and writes k and v to row rows[i] of the cache, or first + i where rows is null.
struct RotateAndStore {
  const void* q;    // (n, n_heads, head_dim)
  const void* k;    // (n, n_kv_heads, head_dim)
  const void* v;    // as k
  const void* cos;  // (n, head_dim)
  const void* sin;
  void* keys;  // (n_kv_heads, capacity, head_dim), rows dense
  void* values;
  const int64_t* rows;  // (n,), or null
  void* out;            // q turned, dense
  int64_t q_row, q_head, k_row, k_head, v_row, v_head, cos_row, sin_row, store_head, first;
  int n, n_heads, n_kv_heads, head_dim;
};

void rotate_and_store(const RotateAndStore& args, bool is_half, cudaStream_t stream);

// gate / (1 + exp(-gate)) * up
struct SiluMul {
  const void* gate;  // (n, width)
  const void* up;
  void* out;  // (n, width), dense
  int64_t gate_row, up_row;
  int n, width;
};

void silu_mul(const SiluMul& args, bool is_half, cudaStream_t stream);

// A child under verification. A sampled one was drawn from share * q + floor, without the tokens that are struck for it.
struct Child {
  double share, floor, prob;  // prob: of its own token
  int node, token;
  bool is_sampled, is_repeated;  // is_repeated: an earlier deterministic sibling has its token
};

// A drafted tree and the target's distributions; see Candidates in offload_rt/ops/verification.py.
struct Verify {
  const int64_t* starts;     // (n + 1,)
  const int64_t* children;   // (n - 1,), of each node the sampled ones first
  const int64_t* tokens;     // (n,)
  const bool* is_sampled;    // (n,)
  const int64_t* row_of;     // (n,)
  const float* draft_probs;  // (rows, vocabulary)
  const float* target;       // (n, vocabulary)
  const double* uniforms;    // (n + 1,), the last for the bonus
  Child* weighed;            // (n - 1,), in the order of `children`; written
  float* rests;              // (2 * n_levels, vocabulary), or (2, vocabulary) from the top down; written
  double* sums;              // (2, kMostVerifyBlocks); written
  int64_t* verdict;          // (2,): the last node accepted, the bonus; written
  int n, vocabulary, n_levels, n_blocks;
  bool independent, leaf_to_root;
};

constexpr int kMostVerifyBlocks = 32;
constexpr int kMostLevels = 1024;
void verify(const Verify& args, cudaStream_t stream);

enum class CodeKind : int { kRows, kColumns, kAwq, kInt8, kFloat4, kNormal4, kFloat8, kDense };

// A quantised matrix; see Packing in offload_rt/ops/dequantize.py.
struct Dequantize {
  const void* codes;
  const void* scales;     // (rows / block_rows, n_scales) of scale_kind
  const void* zeros;      // as scales, or null: kColumns, kAwq: packed as a row of codes; kRows: as a column; kInt8: bytes
  const int32_t* groups;  // the row of scales of each row, of kColumns and kAwq, or the column of each column; or null
  void* out;              // (n_rows, n_columns) of out_kind
  int64_t n_rows, row_size, zero_row_size;  // sizes: words or bytes of codes, or of zeros, in a row
  int n_columns, n_scales, bits, block_rows, block_columns, offset;  // offset: subtracted, or added to packed zeros
  CodeKind kind;
  FloatKind scale_kind, out_kind;
  bool is_aligned;  // eight neighbouring columns are 16 bytes of their own
};

void dequantize(const Dequantize& args, cudaStream_t stream);

// A divisor of numbers below 2^31, by a product; see `quotient` in csrc/few_rows.cuh.
struct Divisor {
  uint32_t factor;
  int shift;
};

// x w^T + bias for quantised or 16-bit w (n_out, n_in) of any kind but kAwq and kNormal4; kColumns stores its transpose.
// Eight neighbouring inputs share a scale, n_in is a multiple of kFewInputs, codes have 4 or 8 bits by their kind.
// Few rows share one w. With `ends`, any number of rows is sorted by matrix; rows past the last end become zeros.
constexpr int kMostFewRows = 128, kFewInputs = 32, kMostFewOutputs = 65535 * 16;
struct FewRows {
  const void* x;         // (rows of x, n_in) of kind_of_x, rows at multiples of 16 bytes
  const int64_t* rows;   // (n_rows,) row of x of each row of y, or null: the same row
  const int32_t* ends;   // (n_matrices,) end of the rows of each matrix, or null: one matrix
  const void* codes;     // (n_matrices, ...), a matrix dense; kDense: of kind_of_x
  const void* scales;    // (n_matrices, n_out / block_out, n_scales) of scale_kind; (..., n_in / block_in, n_scales) of kColumns
  const void* zeros;     // (n_matrices, ...) as scales, or null: kRows, kColumns: eight outputs in a word; kInt8: bytes
  const void* bias;      // (n_matrices, n_out) of kind_of_x, or null
  void* y;               // (n_rows, n_out) of kind_of_x, dense
  int64_t x_row, code_stride, scale_stride, zero_stride;  // of a row of x, in elements; of a matrix: bytes, elements, bytes
  int n_rows, n_matrices, n_out, n_in, n_scales, block_out, block_in, offset;  // offset: subtracted, or added to packed zeros
  CodeKind kind;
  FloatKind kind_of_x, scale_kind;
  Divisor by_block_out, by_block_in;  // set by `few_rows`
};

void few_rows(FewRows args, cudaStream_t stream);
// For kRows and kColumns with scales of 16 bits, whole steps of inputs in a group, and alignment to 16 bytes.
bool serves_int4(const FewRows& args);
void few_rows_int4(const FewRows& args, cudaStream_t stream);

// A layer encoded without loss; see offload_rt/ops/lossless.py. `block` begins with the chunks.
struct LosslessChunk {
  int64_t source, target;  // bytes in `block` and `out`
  int32_t n, nbytes;
  int64_t kind;
};
struct Lossless {
  const uint8_t* block;
  uint8_t* out;
};

void lossless_decode(const Lossless& args, int n_chunks, cudaStream_t stream);

enum class BlockKind : int { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS };

// A type of GGUF: weights and bytes of a block, weights that share a scale; offsets in a block of its float16, of that of its
// minimum, which is any other where there is none, and of its lowest bits.
struct BlockLayout {
  int n, size, group, scale, minimum, codes;
};

constexpr BlockLayout kBlockLayouts[] = {
    {32, 18, 32, 0, 0, 2},       {32, 20, 32, 0, 2, 4},       {32, 22, 32, 0, 0, 6},   {32, 24, 32, 0, 2, 8},
    {32, 34, 32, 0, 0, 2},       {256, 84, 16, 80, 82, 16},   {256, 110, 16, 108, 108, 32}, {256, 144, 32, 0, 2, 16},
    {256, 176, 32, 0, 2, 48},    {256, 210, 16, 208, 208, 0}, {32, 18, 32, 0, 0, 2},   {256, 136, 32, 0, 0, 8},
};

// A matrix of such blocks.
struct DequantizeBlocks {
  const uint8_t* blocks;  // (n_rows, n_columns / layout.n, layout.size)
  void* out;              // (n_rows, n_columns) of out_kind
  int64_t n_rows;
  int n_columns;
  BlockKind kind;
  BlockLayout layout;
  FloatKind out_kind;
  bool is_aligned;  // as above
};

void dequantize_blocks(const DequantizeBlocks& args, cudaStream_t stream);

}  // namespace offload_rt
