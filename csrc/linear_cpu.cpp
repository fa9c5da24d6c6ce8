// Matrix products on a CPU, for ctypes; see linear_cpu.h.
#include <cstdlib>
#include <vector>

#include "cpu.h"
#include "threads_cpu.h"

namespace {

// How the codes of a matrix are stored, as ops/linear_cpu.py numbers them.
enum Kind {
  kDenseFloat32, kDenseBFloat16, kDenseFloat16,  // as Dtype
  kRows, kColumns, kAwq, kInt8, kE2m1, kNf4, kFloat8,  // as ORDERS of ops/dequantize.py, and float8
  kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIq4Nl, kIq4Xs,  // as BLOCKS
  kIq2Xxs, kIq2Xs, kIq3Xxs, kIq1S, kIq3S, kIq2S, kIq1M,
};

// Column of eight in the nibbles of an AWQ word.
constexpr int kAwqNibbles[8] = {0, 4, 1, 5, 2, 6, 3, 7};
constexpr float kE2m1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float kNf4Values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

inline float number(const void* from, int dtype, int64_t i) {
  if (dtype == kBFloat16) return to_float(static_cast<const BFloat16*>(from)[i]);
  if (dtype == kFloat16) return to_float(static_cast<const Half*>(from)[i]);
  if (dtype == kExponent8) {  // 2^(code - 127), of which 2^-127 is subnormal
    const uint32_t code = static_cast<const uint8_t*>(from)[i];
    return bit_cast<float>(code ? code << 23 : 1u << 22);
  }
  return static_cast<const float*>(from)[i];
}

inline uint32_t word_at(const uint8_t* bytes, int64_t i) {
  uint32_t word;
  memcpy(&word, bytes + 4 * i, 4);
  return word;
}

// A code of `bits` bits, densely packed along words that lie `stride` words apart.
inline int packed_code(const uint8_t* words, int64_t stride, int bits, int64_t i) {
  const int64_t word = i * bits / 32, shift = i * bits % 32;
  uint64_t both = word_at(words, word * stride);
  if (shift + bits > 32) both |= static_cast<uint64_t>(word_at(words, (word + 1) * stride)) << 32;
  return static_cast<int>(both >> shift & ((1u << bits) - 1));
}

// The zero point at (row, column) of the stored grid.
inline float zero_at(const Matrix& m, int64_t row, int64_t column) {
  if (m.zeros == nullptr) return static_cast<float>(m.offset);
  int code;
  if (m.zero_order == kInt8) {
    code = static_cast<const int8_t*>(static_cast<const void*>(m.zeros))[row * m.grid_columns + column];
  } else if (m.zero_order == kColumns) {
    code = packed_code(m.zeros + 4 * column, m.grid_columns, m.bits, row);
  } else if (m.zero_order == kAwq) {
    const int64_t words = (m.grid_columns + 7) / 8;
    code = word_at(m.zeros, row * words + column / 8) >> (4 * kAwqNibbles[column % 8]) & 15;
  } else {
    const int64_t words = (m.grid_columns * m.bits + 31) / 32;
    code = packed_code(m.zeros + 4 * row * words, 1, m.bits, column);
  }
  return static_cast<float>(m.zero_plus ? (code + m.zero_plus) & ((1 << m.bits) - 1) : code);
}

#include "vectors_cpu.h"
#include "linear_cpu.h"

}  // namespace

// y = x w^T + bias for several matrices, with inputs and outputs of one dtype.
EXPORT void offload_rt_linear(const Matrix* matrices, int n_matrices, int dtype, int n_threads) {
  linear(matrices, n_matrices, dtype, n_threads);
}

// Products of ranges of rows: range i ends at row ends[i] and is multiplied by the matrices of group groups[i] of a stack
// (groups, n_matrices), whose outputs are columns [columns[j], columns[j + 1]) of y. x: rows `ldx` numbers apart.
EXPORT void offload_rt_linear_groups(const Matrix* stack, int n_matrices, const int64_t* columns, const int64_t* groups,
                                     const int64_t* ends, int n_ranges, const char* x, int64_t ldx, char* y, int dtype,
                                     int n_threads) {
  const int64_t itemsize = dtype == kFloat32 ? 4 : 2, ldy = columns[n_matrices];
  std::vector<Matrix> matrices;
  matrices.reserve(n_ranges * n_matrices);
  int64_t start = 0;
  for (int i = 0; i < n_ranges; start = ends[i++])
    for (int j = 0; j < n_matrices; ++j) {
      Matrix m = stack[groups[i] * n_matrices + j];
      m.x = x + start * ldx * itemsize, m.y = y + (start * ldy + columns[j]) * itemsize;
      m.n_rows = ends[i] - start, m.ldx = ldx, m.ldy = ldy;
      matrices.push_back(m);
    }
  linear(matrices.data(), n_ranges * n_matrices, dtype, n_threads);
}

// Rows of a matrix as numbers: rows (n_rows,), or null for all of them; out (n_rows, n_in) dense.
EXPORT void offload_rt_unpack(const Matrix* m, const int64_t* rows, int64_t n_rows, void* out, int dtype, int n_threads) {
  unpack_rows(*m, rows, n_rows, out, dtype, n_threads);
}

// FLOP/s of fused multiply-adds in registers, one thread, for benchmarks.
EXPORT double offload_rt_fma_rate(int64_t n_times, double* sink) {
  return fma_chains(n_times, sink);
}
