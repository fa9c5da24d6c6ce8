// Products y = x w^T for one instruction set; the compiler defines LEVEL (ops/build.py).
//
// Lanes run along the inputs, for x and w alike, so a checkpoint's rows are read as they lie. Each output is
//   sum over blocks of kDepth inputs, in order, of the lanes' sum (`add_sums`) of fused multiply-adds in order
// whatever the number of rows, threads and outputs: a row's result does not depend on its neighbours. Packing is the only
// part that knows the format of the weights.

// A register tile of rows and outputs.
#if LEVEL >= 2
constexpr int kTileRows = 6, kTileOuts = 4;
#else
constexpr int kTileRows = 4, kTileOuts = 3;
#endif
// Outputs of a panel of few and of many rows, and most outputs of any; rows that are multiplied at a time.
constexpr int kFewRows = 4 * kTileRows, kFewOuts = 24, kManyOuts = 96, kPanelOuts = 128, kMostRows = 384;
// Outputs of a panel of one row or of unpacked weights, and of its tasks: two threads that take 8 rows of a matrix in turn
// defeat the processor's prefetching.
constexpr int kTile = 8, kTiledOuts = 64;
// Least multiplications of a piece, and most pieces of each thread.
constexpr int64_t kPieceProducts = 1 << 18, kMostPieces = 16;
// Inputs and multiplications that one thread finishes before another wakes.
constexpr int64_t kSerialInputs = 1 << 14, kSerialProducts = 1 << 17;
// Most rows whose weights are decoded in registers, and the outputs that a thread multiplies at a time.
constexpr int kDecodedRows = LEVEL >= 2 ? 8 : 4, kDecodedOuts = 96;
// Most outputs of a transposed matrix that a thread multiplies at a time: rows of more codes are read at a higher rate.
constexpr int kGatheredOuts = 512;
// Outputs of a row and a vector of places behind them.
constexpr int kLine = kGatheredOuts + kLanes;
constexpr int64_t kBlockNbytes = 2048;
// Bytes between the codes that are unpacked and the codes that are prefetched.
constexpr int kAhead = 2048;
// Least bytes between the codes of these outputs and the prefetched codes of later outputs.
constexpr int64_t kAheadOuts = 8192;
// Distance of prefetched weights in rows of more than kShortRow bytes. Of shorter rows, those of the next tile are prefetched.
constexpr int kAheadInRow = 512, kShortRow = 4096;
// Numbers of x between two sums of the lanes: kDepth<X>.
template <typename X>
constexpr int kDepth = kBlockNbytes / sizeof(X);
constexpr int kLongestBlock = kBlockNbytes / 2;

// Adds the sums of the lanes of n vectors to totals, or sets these; the order of a sum does not depend on n.
inline void add_sums(const V* sums, int n, float* totals, bool is_first) {
#if LEVEL >= 2
  // 128-bit quarters first: (0 + 1) + (2 + 3), then the numbers of a quarter likewise.
  const auto fold = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  for (int first = 0; first < n; first += 16) {
    __m512 quads[4];
    for (int i = 0; i < 4; ++i) {
      __m512 x[4];
      for (int j = 0; j < 4; ++j)
        x[j] = first + 4 * i + j < n ? (__m512)sums[first + 4 * i + j] : _mm512_setzero_ps();
      quads[i] = fold(fold(x[0], x[1]), fold(x[2], x[3]));
    }
    __m512 pairs[2];
    for (int i = 0; i < 2; ++i)
      pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(quads[2 * i], quads[2 * i + 1]),
                               _mm512_unpackhi_ps(quads[2 * i], quads[2 * i + 1]));
    const __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(pairs[0]), _mm512_castps_pd(pairs[1])));
    const __m512 high = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(pairs[0]), _mm512_castps_pd(pairs[1])));
    // Number 4 q + i is the sum of vector 4 i + q.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512 ordered = _mm512_permutexvar_ps(order, _mm512_add_ps(low, high));
    const __mmask16 mask = static_cast<__mmask16>(n - first >= 16 ? 0xffff : (1 << (n - first)) - 1);
    const __m512 before = is_first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, totals + first);
    _mm512_mask_storeu_ps(totals + first, mask, _mm512_add_ps(before, ordered));
  }
#else
  for (int first = 0; first < n; first += 4) {
    float four[4];
    const V none = {};
    sum4(sums[first], first + 1 < n ? sums[first + 1] : none, first + 2 < n ? sums[first + 2] : none,
         first + 3 < n ? sums[first + 3] : none, four);
    for (int i = 0; i < 4 && first + i < n; ++i)
      totals[first + i] = (is_first ? 0.0f : totals[first + i]) + four[i];
  }
#endif
}

// Weights of the next panel, prefetched during the products of this panel: each tile prefetches a row.
//   next        next row to prefetch; after the last row, tiles repeat it
//   row_nbytes  distance of rows
//   step        bytes per vector of inputs
//   n_rows      rows left
struct Ahead {
  const uint8_t* next;
  int64_t row_nbytes, step;
  int n_rows;

  const uint8_t* take_row() {
    if (n_rows > 0) --n_rows, next += row_nbytes;
    return next - row_nbytes;
  }
};
// Few rows multiply too little for that: their tiles prefetch the rows of the next tile.
struct NextTile {};

// Adds a block of n inputs to M x N outputs of y, whose tiles are stored densely: y (M * N).
template <int M, int N, typename X, typename W, typename Next>
inline void add_tile(const X* x, int64_t ldx, const W* w, int64_t ldw, int n, float* y, bool is_first, Next& next) {
  constexpr bool is_next_tile = __is_same(Next, NextTile);
  const uint8_t* ahead = nullptr;
  if constexpr (!is_next_tile) ahead = next.take_row();
  V sums[M * N];
#pragma GCC unroll 24
  for (int i = 0; i < M * N; ++i) sums[i] = V{};
  const int64_t ahead_in_tile = M == 1 && ldw * int64_t(sizeof(W)) > kShortRow ? kAheadInRow / int64_t(sizeof(W)) : N * ldw;
#if LEVEL >= 3
  if constexpr (sizeof(X) == 2) {
    for (int k = 0; k < n; k += 2 * kLanes) {
      __m512bh b[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        b[j] = (__m512bh)_mm512_loadu_si512(w + j * ldw + k);
        if constexpr (is_next_tile) __builtin_prefetch(w + j * ldw + k + ahead_in_tile, 0, 2);
      }
      if constexpr (!is_next_tile) __builtin_prefetch(ahead, 0, 2), ahead += next.step;
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const __m512bh a = (__m512bh)_mm512_loadu_si512(x + i * ldx + k);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) sums[i * N + j] = (V)_mm512_dpbf16_ps((__m512)sums[i * N + j], a, b[j]);
      }
    }
    add_sums(sums, M * N, y, is_first);
    return;
  }
#endif
  if constexpr (M == 1) {
    for (int k = 0; k < n; k += kLanes) {
      const V a = load(x + k);
      if (k * sizeof(W) % 64 == 0)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) __builtin_prefetch(w + j * ldw + k + ahead_in_tile, 0, 2);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sums[j] = fma(load(w + j * ldw + k), a, sums[j]);
    }
    add_sums(sums, N, y, is_first);
    return;
  }
  for (int k = 0; k < n; k += kLanes) {
    V b[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      b[j] = load(w + j * ldw + k);
      if constexpr (is_next_tile) __builtin_prefetch(w + j * ldw + k + ahead_in_tile, 0, 2);
    }
    if constexpr (!is_next_tile) __builtin_prefetch(ahead, 0, 2), ahead += next.step;
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const V a = load(x + i * ldx + k);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sums[i * N + j] = fma(a, b[j], sums[i * N + j]);
    }
  }
  add_sums(sums, M * N, y, is_first);
}

template <int M, int N, typename X, typename W, typename Next>
inline void add_tiles(const X* x, const W* w, int64_t ldw, int n_outs, int n, float* y, bool is_first, Next& next) {
  int j = 0;
  for (; j + N <= n_outs; j += N) {
    if constexpr (!__is_same(Next, NextTile)) {  // the inputs of the next rows
      const char* behind = reinterpret_cast<const char*>(x) + M * kBlockNbytes * (n_outs + j) / n_outs;
      for (int64_t i = 0; i < M * N * kBlockNbytes / n_outs; i += 64) __builtin_prefetch(behind + i);
    }
    add_tile<M, N>(x, kDepth<X>, w + j * ldw, ldw, n, y + j * M, is_first, next);
  }
  for (; j < n_outs; ++j) add_tile<M, 1>(x, kDepth<X>, w + j * ldw, ldw, n, y + j * M, is_first, next);
}

// Outputs of a tile by its rows: as many as registers hold the sums of.
#if LEVEL >= 2
constexpr int kOuts[] = {0, 8, 8, 6, 6, 4, 4};
#else
constexpr int kOuts[] = {0, 8, 4, 3, 3};
#endif

// Adds a block of n inputs to n_rows x n_outs outputs. The tiles of a row tile are stored one behind the other.
template <typename X, typename W, typename Next>
void add_block(const X* x, int n_rows, const W* w, int64_t ldw, int n_outs, int n, float* y, bool is_first, Next next) {
  for (int row = 0; row < n_rows; row += kTileRows) {
    const X* from = x + row * kDepth<X>;
    float* to = y + row * n_outs;
    switch (smaller(kTileRows, n_rows - row)) {
      case 1: add_tiles<1, kOuts[1]>(from, w, ldw, n_outs, n, to, is_first, next); break;
      case 2: add_tiles<2, kOuts[2]>(from, w, ldw, n_outs, n, to, is_first, next); break;
      case 3: add_tiles<3, kOuts[3]>(from, w, ldw, n_outs, n, to, is_first, next); break;
      case 4: add_tiles<4, kOuts[4]>(from, w, ldw, n_outs, n, to, is_first, next); break;
#if LEVEL >= 2
      case 5: add_tiles<5, kOuts[5]>(from, w, ldw, n_outs, n, to, is_first, next); break;
      case 6: add_tiles<6, kOuts[6]>(from, w, ldw, n_outs, n, to, is_first, next); break;
#endif
    }
  }
}

// ---- Packing: n inputs of an output from input `first` on, as floats or bfloat16, zeros up to n_padded.

// Vectors of codes to numbers.
template <bool is_signed>
struct Integers {
  inline V operator()(const uint8_t* codes) const {
#if LEVEL >= 2
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return (V)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif LEVEL == 1
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    return (V)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    V wide;
    for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(is_signed ? static_cast<int8_t>(codes[i]) : codes[i]);
    return wide;
#endif
  }
};
typedef Integers<true> Signed;
typedef Integers<false> Unsigned;
// Codes of 4 bits, each a place in a table of floats.
struct Table {
  const float* numbers;
  inline V operator()(const uint8_t* codes) const {
#if LEVEL >= 2
    const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    return (V)_mm512_permutexvar_ps(index, _mm512_loadu_ps(numbers));
#elif LEVEL == 1
    const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers), index);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers + 8), index);
    return (V)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(index, 28));
#else
    V wide;
    for (int i = 0; i < kLanes; ++i) wide[i] = numbers[codes[i]];
    return wide;
#endif
  }
};
// e4m3fn, moved to where float16 has sign, exponent and mantissa; its bias is smaller by 8, so the numbers are 256 times too
// small. Also right for subnormal numbers; the code of NaN gives 480 / 256.
struct Float8 {
  inline V operator()(const uint8_t* codes) const {
    typedef int16_t Pairs __attribute__((vector_size(2 * kLanes)));
    typedef int8_t Some __attribute__((vector_size(kLanes)));
    Some bytes;
    memcpy(&bytes, codes, kLanes);
    const Pairs bits = __builtin_convertvector(bytes, Pairs) << 7 & static_cast<int16_t>(0xbf80);
    Half halves[kLanes];
    memcpy(halves, &bits, sizeof(halves));
    const V x = load(halves);
    const VI size = (VI)x & 0x7fffffff;
    return (V)(size == bit_cast<int32_t>(1.875f) ? VI{} + 0x7fc00000 : (VI)(x * 256.0f));
  }
};

// A number whose upper half is x in bfloat16, rounded to even.
inline V rounding_to_bfloat16(V x) {
  const VI bits = (VI)x;
  return (V)(bits + 0x7fff + ((bits >> 16) & 1));
}

template <int dtype>
inline V rounded(V x) {
  if constexpr (dtype == kBFloat16) {
    return (V)((VI)rounding_to_bfloat16(x) & ~0xffff);
  } else if constexpr (dtype == kFloat16) {
    Half halves[kLanes];
    store(halves, x);
    return load(halves);
  }
  return x;
}

// (code - zero) * scale of n codes, rounded to a dtype; groups of `group` codes, of which the first has `left` to go.
template <int dtype, typename Numbers, typename P>
inline void scale_codes(Numbers numbers, const uint8_t* codes, int n, const float* scales, const float* zeros, int left,
                        int group, P* out) {
  for (int k = 0; k < n; left = group, ++scales, ++zeros) {
    const V scale = set1(*scales), zero = set1(*zeros);
    const int stop = smaller(n, k + left);
    for (; k + kLanes <= stop; k += kLanes) store(out + k, rounded<dtype>((numbers(codes + k) - zero) * scale));
    if (k < stop) {
      uint8_t last[kLanes] = {};
      for (int i = 0; k + i < stop; ++i) last[i] = codes[k + i];
      store_first(out + k, rounded<dtype>((numbers(last) - zero) * scale), stop - k);
      k = stop;
    }
  }
}

// The scale and zero point of each group that inputs [first, first + n) of an output belong to.
inline void groups_of(const Matrix& m, int64_t row, int64_t group, int n_groups, float* scales, float* zeros) {
  const bool is_transposed = m.kind == kColumns || m.kind == kAwq;
  const int64_t out = row / m.block_out;
  for (int i = 0; i < n_groups; ++i) {
    const int64_t grid_row = is_transposed ? group + i : out, grid_column = is_transposed ? out : group + i;
    scales[i] = number(m.scales, m.scale_dtype, grid_row * m.grid_columns + grid_column);
    zeros[i] = zero_at(m, grid_row, grid_column);
  }
}

template <int dtype, typename Numbers, typename P>
inline void scale_row(Numbers numbers, const Matrix& m, int64_t row, int64_t first, int n, const uint8_t* codes, P* out) {
  float scales[kLongestBlock + 1], zeros[kLongestBlock + 1];
  if (m.groups != nullptr) {
    for (int k = 0; k < n; ++k) groups_of(m, row, m.groups[first + k], 1, scales + k, zeros + k);
    scale_codes<dtype>(numbers, codes, n, scales, zeros, 1, 1, out);
    return;
  }
  const int64_t group = first / m.block_in, last = (first + n - 1) / m.block_in;
  groups_of(m, row, group, static_cast<int>(last - group + 1), scales, zeros);
  const int64_t left = (group + 1) * m.block_in - first;
  scale_codes<dtype>(numbers, codes, n, scales, zeros, static_cast<int>(smaller<int64_t>(left, n)),
                     static_cast<int>(smaller<int64_t>(m.block_in, n)), out);
}

template <typename Numbers, typename P>
inline void scale_row(Numbers numbers, const Matrix& m, int64_t row, int64_t first, int n, const uint8_t* codes, P* out) {
  if (m.product_dtype == kBFloat16) return scale_row<kBFloat16>(numbers, m, row, first, n, codes, out);
  if (m.product_dtype == kFloat16) return scale_row<kFloat16>(numbers, m, row, first, n, codes, out);
  scale_row<kFloat32>(numbers, m, row, first, n, codes, out);
}

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef Bytes UnalignedBytes __attribute__((aligned(1), may_alias));
inline Bytes load_bytes(const uint8_t* from) { return *reinterpret_cast<const UnalignedBytes*>(from); }
inline void store_bytes(uint8_t* to, Bytes bytes) { *reinterpret_cast<UnalignedBytes*>(to) = bytes; }

// Two codes of each byte, the low nibble first, or the high one.
inline void split_nibbles(const uint8_t* bytes, int n, bool is_low_first, uint8_t* codes) {
  int i = 0;
  for (; 2 * (i + 16) <= n; i += 16) {
    const Bytes both = load_bytes(bytes + i), low = both & 15, high = both >> 4;
    const Bytes a = is_low_first ? low : high, b = is_low_first ? high : low;
    store_bytes(codes + 2 * i, __builtin_shuffle(a, b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}));
    store_bytes(codes + 2 * i + 16,
                __builtin_shuffle(a, b, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}));
  }
  for (; 2 * i < n; ++i) {
    codes[2 * i] = bytes[i] >> (is_low_first ? 0 : 4) & 15;
    codes[2 * i + 1] = bytes[i] >> (is_low_first ? 4 : 0) & 15;
  }
}

typedef uint32_t Words __attribute__((vector_size(32)));

#include "blocks_cpu.h"

inline const uint8_t* grid_of(const Matrix& m) { return static_cast<const uint8_t*>(m.scales); }
inline bool is_gathered(const Matrix& m) { return m.bits == 4 && (m.kind == kColumns || m.kind == kAwq); }

// Transpose 8 x 8 words.
inline void transpose(Words* rows) {
  Words pairs[8], quads[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shuffle(rows[i], rows[i + 1], Words{0, 8, 1, 9, 4, 12, 5, 13});
    pairs[i + 1] = __builtin_shuffle(rows[i], rows[i + 1], Words{2, 10, 3, 11, 6, 14, 7, 15});
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      quads[i + 2 * j] = __builtin_shuffle(pairs[i + j], pairs[i + j + 2], Words{0, 1, 8, 9, 4, 5, 12, 13});
      quads[i + 2 * j + 1] = __builtin_shuffle(pairs[i + j], pairs[i + j + 2], Words{2, 3, 10, 11, 6, 7, 14, 15});
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = __builtin_shuffle(quads[i], quads[i + 4], Words{0, 1, 2, 3, 8, 9, 10, 11});
    rows[i + 4] = __builtin_shuffle(quads[i], quads[i + 4], Words{4, 5, 6, 7, 12, 13, 14, 15});
  }
}

// Load eight rows, `stride` bytes apart; zeros outside n_rows x nbytes. Constant places keep rows in registers.
template <typename W>
inline __attribute__((always_inline)) void load_rows(const uint8_t* from, int64_t stride, int n_rows, int nbytes, W* rows) {
  constexpr int size = sizeof(W);
  uint8_t padded[8][size];
  if (n_rows < 8 || nbytes < size) {
    memset(padded, 0, sizeof(padded));
    for (int i = 0; i < n_rows; ++i) memcpy(padded[i], from + i * stride, nbytes);
    from = padded[0], stride = size;
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) memcpy(&rows[i], from + i * stride, size);
}

// Store the first nbytes of n_rows of eight rows, `stride` words apart.
inline __attribute__((always_inline)) void store_rows(const Words* rows, uint32_t* to, int64_t stride, int n_rows, int nbytes) {
  if (n_rows >= 8 && nbytes >= 32) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) memcpy(to + i * stride, &rows[i], 32);
    return;
  }
  uint8_t padded[8][32];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) memcpy(padded[i], &rows[i], 32);
  for (int i = 0; i < n_rows; ++i) memcpy(to + i * stride, padded[i], nbytes);
}

// Input rows of a transposed matrix between the codes in use and the prefetched codes.
constexpr int kRowsAhead = 64;

// Words of one input and as many outputs as a vector has nibbles.
typedef uint32_t WideWords __attribute__((vector_size(4 * kLanes)));

// Read up to 64 inputs from input `first` on of up to 8 kLanes outputs in AWQ order. words[i][j] holds, in lane l, inputs
// [8 j, 8 j + 8) of output 8 l + i.
inline void gather_awq(const Matrix& m, int64_t first_out, int n_outs, int64_t first, int n, WideWords (*words)[8]) {
  for (int j = 0; j < (n + 7) / 8; ++j) {
    WideWords rows[8];
    const uint8_t* from = m.codes + (first + 8 * j) * m.row_nbytes + first_out / 2;
    for (int i = 0; i < 8; ++i) __builtin_prefetch(from + (kRowsAhead + i) * m.row_nbytes, 0, 2);
    load_rows(from, m.row_nbytes, smaller(8, n - 8 * j), (n_outs + 7) / 8 * 4, rows);
    // Transpose 8 x 8 nibbles in every lane.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const WideWords swapped = (rows[i] >> 16 ^ rows[i + 4]) & 0xffff;
      rows[i + 4] ^= swapped, rows[i] ^= swapped << 16;
    }
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      const int i = pair / 2 * 4 + pair % 2;
      const WideWords swapped = (rows[i] >> 8 ^ rows[i + 2]) & 0xff00ff;
      rows[i + 2] ^= swapped, rows[i] ^= swapped << 8;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      const WideWords swapped = (rows[i] >> 4 ^ rows[i + 1]) & 0xf0f0f0f;
      rows[i + 1] ^= swapped, rows[i] ^= swapped << 4;
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) words[i][j] = rows[kAwqNibbles[i]];
  }
}

// Copy the 4-bit codes of n inputs of a transposed matrix into words of eight inputs: words (n_outs, stride).
inline void gather(const Matrix& m, int64_t first_out, int n_outs, int64_t first, int n, int64_t stride, uint32_t* words) {
  const int n_words = (n + 7) / 8, width = m.kind == kAwq ? 8 * kLanes : 8;
  for (int w = 0; w < n_words; w += 8) {
    const int n_here = smaller(8, n_words - w);
    for (int out = 0; out < n_outs; out += width) {
      const int n_outs_here = smaller(width, n_outs - out);
      uint32_t* to = words + out * stride + w;
      if (m.kind == kAwq) {
        WideWords parts[8][8];
        gather_awq(m, first_out + out, n_outs_here, first + 8 * w, smaller(64, n - 8 * w), parts);
        for (int place = 0; place < n_outs_here; place += 64)
          for (int i = 0; i < 8; ++i) {
            Words rows[8];
            load_rows(reinterpret_cast<uint8_t*>(parts[i]) + place / 2, sizeof(WideWords), n_here, 32, rows);
            transpose(rows);
            store_rows(rows, to + (place + i) * stride, 8 * stride, smaller(8, (n_outs_here - place + 7 - i) / 8), 4 * n_here);
          }
      } else {
        Words rows[8];
        const uint8_t* from = m.codes + ((first / 8 + w) * m.n_out + first_out + out) * 4;
        for (int i = 0; i < 8; ++i) __builtin_prefetch(from + (kRowsAhead / 8 + i) * 4 * m.n_out);
        load_rows(from, 4 * m.n_out, n_here, 4 * n_outs_here, rows);
        transpose(rows);
        store_rows(rows, to, stride, n_outs_here, 4 * n_here);
      }
    }
  }
}

// bytes: the codes of the output from its first input on; of a gathered matrix from input `first` on.
template <typename P>
void unpack(const Matrix& m, const uint8_t* bytes, int64_t row, int64_t first, int n, int n_padded, P* out) {
  for (int k = n; k < n_padded; ++k) out[k] = P{};
  const auto dense = [&](auto type) {
    using T = decltype(type);
    const T* from = reinterpret_cast<const T*>(bytes) + first;
    if constexpr (__is_same(T, P)) {
      memcpy(out, from, n * sizeof(P));
    } else {
      int k = 0;
      for (; k + kLanes <= n; k += kLanes) store(out + k, load(from + k));
      if (k < n) store_first(out + k, load_first(from + k, n - k), n - k);
    }
  };
  // 16 more, because codes are read and written by whole vectors.
  uint8_t codes[kLongestBlock + 16];
  switch (m.kind) {
    case kDenseFloat32: return dense(float{});
    case kDenseBFloat16: return dense(BFloat16{});
    case kDenseFloat16: return dense(Half{});
    case kRows:
      if (m.bits == 4) {
        split_nibbles(bytes + first / 2, n, true, codes);
      } else if (m.bits == 8) {
        return scale_row(Unsigned(), m, row, first, n, bytes + first, out);
      } else {
        for (int k = 0; k < n; ++k) codes[k] = static_cast<uint8_t>(packed_code(bytes, 1, m.bits, first + k));
      }
      return scale_row(Unsigned(), m, row, first, n, codes, out);
    case kColumns: case kAwq:
      if (m.bits == 4) {
        split_nibbles(bytes, n, true, codes);
      } else {
        for (int k = 0; k < n; ++k)
          codes[k] = static_cast<uint8_t>(packed_code(m.codes + 4 * row, m.n_out, m.bits, first + k));
      }
      return scale_row(Unsigned(), m, row, first, n, codes, out);
    case kInt8: return scale_row(Signed(), m, row, first, n, bytes + first, out);
    case kFloat8: return scale_row(Float8(), m, row, first, n, bytes + first, out);
    case kE2m1:
      split_nibbles(bytes + first / 2, n, true, codes);
      return scale_row(Table{kE2m1Values}, m, row, first, n, codes, out);
    case kNf4:
      split_nibbles(bytes + first / 2, n, false, codes);
      return scale_row(Table{kNf4Values}, m, row, first, n, codes, out);
    default:
      return with_blocks(m.kind, [&]<int kind>() {
        unpack_blocks<kind>(grid_of(m), bytes + first / kBlock<kind>.n * kBlock<kind>.nbytes, n, out);
      });
  }
}

#include "nibbles_cpu.h"

// ---- Codes of 8 bits as blocks of 32 inputs whose scales lie elsewhere.

template <typename X>
inline bool has_bytes(const Matrix& m) {
  const bool is_rows = m.kind == kRows && m.bits == 8 && m.offset == 128;
  if (m.kind != kInt8 && m.kind != kFloat8 && !is_rows) return false;
  const bool is_even = m.n_in % 32 == 0 && (m.block_in % 32 == 0 || m.block_in >= m.n_in);
  return is_even && m.zeros == nullptr && m.groups == nullptr && (sizeof(X) == 4 || m.product_dtype != kFloat16);
}

// Call use.template operator()<kind, dtype of the weights>().
template <typename X, typename Use>
inline void with_bytes(const Matrix& m, Use use) {
  const auto with_kind = [&]<int product>() {
    if (m.kind == kInt8) return use.template operator()<kInt8, product>();
    if (m.kind == kFloat8) return use.template operator()<kFloat8, product>();
    use.template operator()<kRows, product>();
  };
  if constexpr (sizeof(X) == 4) {
    if (m.product_dtype == kBFloat16) return with_kind.template operator()<kBFloat16>();
    if (m.product_dtype == kFloat16) return with_kind.template operator()<kFloat16>();
  }
  with_kind.template operator()<kFloat32>();
}

inline void read_scales(const Matrix& m, int64_t row, int64_t first, int n, GroupScales& to) {
  const int64_t place = row / m.block_out * m.grid_columns;
  int64_t group = first / m.block_in, left = (group + 1) * m.block_in - first;
  for (int k = 0; k < n; ++group, left = m.block_in) {
    const V scale = set1(number(m.scales, m.scale_dtype, place + group) * (m.kind == kFloat8 ? 256.0f : 1.0f));
    const int stop = static_cast<int>(smaller<int64_t>(n, k + left));
    for (; k < stop; k += 32 * kLanes) store(to.scales + k / 32, scale);  // the next group overwrites what is too much
    k = stop;
  }
}

// ---- The product.

template <typename X>
constexpr int kStep = sizeof(X) == 2 ? 2 * kLanes : kLanes;

// Call use.template operator()<method>() for a method that decodes codes of 4 bits.
template <typename X, typename Use>
inline void with_method(Method method, Use use) {
  switch (method) {
    case kFloatTables:
      if constexpr (sizeof(X) == 4) use.template operator()<kFloatTables>();
      return;
    case kShortTables:
      if constexpr (sizeof(X) == 2 || LEVEL == 1) use.template operator()<kShortTables>();
      return;
    case kHalves: return use.template operator()<kHalves>();
    case kScaled: return use.template operator()<kScaled>();
    case kShifted: return use.template operator()<kShifted>();
    case kTwiceShifted: return use.template operator()<kTwiceShifted>();
  }
}

inline int round_up(int n, int step) { return (n + step - 1) / step * step; }

thread_local Memory panel_memory, input_memory;

constexpr int64_t kGatheredNbytes = kGatheredOuts * (kLongestBlock / 2 + 2 * 4 * kMostTables);

// The places of a panel of a transposed matrix in memory of kGatheredNbytes.
inline Gathered gathered_in(uint8_t* memory, int64_t first_out, int depth) {
  float* scales = reinterpret_cast<float*>(memory + kGatheredOuts * kLongestBlock / 2);
  return {reinterpret_cast<uint32_t*>(memory), depth / 8, scales, scales + kGatheredOuts * kMostTables, first_out};
}

// Prefetches as many bytes as n inputs have, some distance ahead of them: processors alone read ahead too little.
inline void prefetch_codes(const Matrix& m, const uint8_t* bytes, int64_t first, int n) {
  const uint8_t* from = bytes + first * m.row_nbytes / m.n_in + kAhead;
  for (int64_t i = 0, nbytes = n * m.row_nbytes / m.n_in; i < nbytes; i += 64) __builtin_prefetch(from + i);
}

// Add the bias to a row of outputs and write it. line: n_outs, readable by whole vectors.
template <typename T>
void write_line(const Matrix& m, float* line, int64_t first_out, int n_outs, T* to) {
  if (m.bias != nullptr)
    for (int j = 0; j < n_outs; ++j) line[j] += number(m.bias, m.bias_dtype, first_out + j);
  int j = 0;
  for (; j + kLanes <= n_outs; j += kLanes) store(to + j, load(line + j));
  if (j < n_outs) store_first(to + j, load(line + j), n_outs - j);
}

// Writes n_rows x n_outs outputs, whose tiles lie as `add_block` leaves them, to y.
template <typename T>
void write_tiles(const Matrix& m, const float* tiles, int n_rows, int64_t first_out, int n_outs, T* y, int64_t ldy) {
  float line[kLine];
  for (int row = 0; row < n_rows; ++row) {
    const int top = row / kTileRows * kTileRows, n_tile = smaller(kTileRows, n_rows - top), width = kOuts[n_tile];
    const float* from = tiles + top * n_outs;
    int j = 0;
    for (; j + width <= n_outs; j += width)
      for (int i = 0; i < width; ++i) line[j + i] = from[j * n_tile + (row - top) * width + i];
    for (; j < n_outs; ++j) line[j] = from[j * n_tile + row - top];
    write_line(m, line, first_out, n_outs, y + row * ldy + first_out);
  }
}

// Stands for weights that are unpacked to a panel.
struct Unpacked {};

// A panel of outputs for all rows. x: blocks of kDepth<X> inputs of all rows, one behind the other; next_out: first output
// of this thread's next panel.
template <typename X, typename W, typename T>
void multiply_panel(const Matrix& m, const Order<X>& order, const X* x, int n_rows, int64_t first_out, int n_outs, int64_t next_out,
                    T* y, int64_t ldy) {
  constexpr int depth = kDepth<X>;
  constexpr bool is_direct = !__is_same(W, Unpacked);
  uint8_t* memory = reinterpret_cast<uint8_t*>(panel_memory.reserve(kPanelOuts * (kBlockNbytes + kMostRows * 4) + kGatheredNbytes));
  X* panel = reinterpret_cast<X*>(memory);
  float* tiles = reinterpret_cast<float*>(memory + kPanelOuts * kBlockNbytes);
  const Gathered gathered = gathered_in(memory + kPanelOuts * (kBlockNbytes + kMostRows * 4), first_out, depth);
  // Fewer outputs are unpacked for more inputs, so that longer pieces of memory are read.
  const int64_t n_fill = is_gathered(m) || n_outs <= kTile ? 1 : kPanelOuts / n_outs;
  for (int64_t begin = 0; begin < m.n_in; begin += n_fill * depth) {
    const int64_t end = smaller(begin + n_fill * depth, m.n_in);
    // The next panel has the next inputs of these outputs, or the first inputs of the next outputs.
    const auto ahead_of = [&](int64_t first) {
      const int64_t next = first + n_fill * depth < m.n_in ? first + n_fill * depth : 0, out = next > 0 ? first_out : next_out;
      if (is_gathered(m) || out >= m.n_out) return Ahead{reinterpret_cast<const uint8_t*>(x), 0, 0, 0};
      const uint8_t* codes = m.codes + out * m.row_nbytes + next * m.row_nbytes / m.n_in;
      return Ahead{codes, m.row_nbytes, kStep<X> * m.row_nbytes / m.n_in, n_outs};
    };
    const auto padded = [&](int n) { return round_up(n, order.method == kNoMethod ? kStep<X> : kChunk<X>); };
    if constexpr (!is_direct) {
      if (is_gathered(m)) gather_panel(m, order.method != kNoMethod, n_outs, begin, static_cast<int>(end - begin), gathered);
      for (int j = 0; j < n_outs; ++j) {
        for (int64_t first = begin; first < end; first += depth) {
          const int n = static_cast<int>(smaller<int64_t>(depth, end - first));
          const uint8_t* bytes = m.codes + (first_out + j) * m.row_nbytes;
          if (!is_gathered(m)) prefetch_codes(m, bytes, first, n);
          else bytes = reinterpret_cast<uint8_t*>(gathered.words + j * gathered.stride);
          X* to = panel + (first - begin) * n_outs + j * depth;
          if (order.method == kNoMethod) unpack(m, bytes, first_out + j, first, n, padded(n), to);
          with_method<X>(order.method, [&]<Method method>() { unpack_chunks<method>(m, order, gathered, first_out + j, first, n, to); });
        }
      }
    }
    for (int64_t first = begin; first < end; first += depth) {
      const int n = static_cast<int>(smaller<int64_t>(depth, end - first));
      const X* block = x + first * n_rows;
      if constexpr (is_direct) {
        const W* w = reinterpret_cast<const W*>(m.codes + first_out * m.row_nbytes) + first;
        if (n_rows <= kFewRows) add_block(block, n_rows, w, m.n_in, n_outs, n, tiles, first == 0, NextTile{});
        else if constexpr (__is_same(W, X)) add_block(block, n_rows, w, m.n_in, n_outs, n, tiles, first == 0, ahead_of(first));
      } else {
        add_block(block, n_rows, panel + (first - begin) * n_outs, depth, n_outs, padded(n), tiles, first == 0, ahead_of(first));
      }
    }
  }
  write_tiles(m, tiles, n_rows, first_out, n_outs, y, ldy);
}

// Bytes between the codes of n outputs and those of later outputs, at least kAheadOuts.
inline int64_t ahead_of_outs(const Matrix& m, int64_t n) {
  const int64_t turn = n * m.row_nbytes;
  return (kAheadOuts + turn - 1) / turn * turn;
}

// Adds products of vectors of N outputs and of M rows, which lie one behind the other, to sums (N, M).
template <int N, int M, typename X, typename W>
inline __attribute__((always_inline)) void add_products(const W* values, const X* rows, V* sums) {
  const auto add = [&](int j, int row) __attribute__((always_inline)) {
    V& sum = sums[j * M + row];
    const X* numbers = rows + row * kDepth<X>;
#if LEVEL >= 3
    if constexpr (sizeof(X) == 2) sum = (V)_mm512_dpbf16_ps((__m512)sum, values[j], (__m512bh)_mm512_loadu_si512(numbers));
#endif
    if constexpr (sizeof(X) == 4) sum = fma(values[j], load(numbers), sum);
  };
  // Outputs share a loaded vector of a row; with few registers, it remains in memory.
#pragma GCC unroll 16
  for (int i = 0; i < M * N; ++i) LEVEL >= 2 ? add(i % N, i / N) : add(i / M, i % M);
}

// Adds a copy: sums whose address a function receives would be stored at each addition.
template <int n>
inline __attribute__((always_inline)) void add_sums_of(const V (&sums)[n], float* totals, bool is_first) {
  V copy[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) copy[i] = sums[i];
  add_sums(copy, n, totals, is_first);
}

// Outputs for few rows, whose weights are decoded in registers: lines (n_rows, kLine). The sums are those of `multiply_panel`.
template <int M, Method method, typename X>
void multiply_decoded(const Matrix& m, const Order<X>& order, const X* x, int n_rows, int64_t first_out, int n_outs, float* lines) {
  constexpr int depth = kDepth<X>;
  // As many sums as hide the latency of an addition, two outputs in turn; 64 tables at most stay in the L1 cache.
  constexpr bool has_tables = method == kFloatTables || method == kShortTables;
  constexpr int N = M == 1 ? (has_tables ? 4 : 8) : M == 2 ? 4 : 2;
  float totals[kGatheredOuts * M];
  const Gathered gathered = gathered_in(reinterpret_cast<uint8_t*>(panel_memory.reserve(kGatheredNbytes)), first_out, depth);
  const bool has_prefetch = !is_gathered(m);
  const int64_t ahead = ahead_of_outs(m, N), chunk_nbytes = kChunk<X> * m.row_nbytes / m.n_in;
  Nibbles nibbles[N];
  const auto add = [&](int64_t first, int out) {
    const int n = static_cast<int>(smaller<int64_t>(depth, m.n_in - first));
    const X* rows = x + first * n_rows;  // rows behind the last are memory without a meaning
    for (int j = 0; j < N; ++j) prepare<method>(m, gathered, first_out + smaller(out + j, n_outs - 1), first, n, nibbles[j]);
    V sums[N * M];
#pragma GCC unroll 16
    for (int i = 0; i < N * M; ++i) sums[i] = V{};
    for (int chunk = 0; chunk * kChunk<X> < n; ++chunk) {
      if (has_prefetch)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) __builtin_prefetch(nibbles[j].bytes + ahead + chunk * chunk_nbytes, 0, M == 1 ? 2 : 3);
#pragma GCC unroll 4
      for (int pair = 0; pair < N; pair += 2)
        decode<method, 2>(nibbles + pair, order, n < depth, chunk, [&](int i, const auto& values) __attribute__((always_inline)) {
          const X* numbers = rows + chunk * kChunk<X> + i * (sizeof(values[0]) / sizeof(X));
          add_products<2, M>(values, numbers, sums + pair * M);
        });
    }
    add_sums_of(sums, totals + out * M, first == 0);
  };
  if (is_gathered(m)) {
    for (int64_t first = 0; first < m.n_in; first += depth) {
      gather_panel(m, true, n_outs, first, static_cast<int>(smaller<int64_t>(depth, m.n_in - first)), gathered);
      for (int out = 0; out < n_outs; out += N) add(first, out);
    }
  } else {
    for (int out = 0; out < n_outs; out += N)
      for (int64_t first = 0; first < m.n_in; first += depth) add(first, out);
  }
  for (int row = 0; row < n_rows; ++row)
    for (int out = 0; out < n_outs; ++out) lines[row * kLine + out] = totals[out * M + row];
}

// The same for blocks of GGUF, and for codes of 8 bits, in the order of inputs. Weights are rounded to the dtype `product`.
template <int M, int kind, int product, typename X>
void multiply_blocks(const Matrix& m, const X* x, int n_rows, int64_t first_out, int n_outs, float* lines) {
  constexpr BlockShape shape = kBlock<kind>;
  constexpr int depth = kDepth<X>, N = M == 1 ? 4 : 2;
  float totals[kDecodedOuts * M];
  GroupScales scales[N];
  const int64_t ahead = ahead_of_outs(m, N);
  for (int out = 0; out < n_outs; out += N)
    for (int64_t first = 0; first < m.n_in; first += depth) {
      const int n = static_cast<int>(smaller<int64_t>(depth, m.n_in - first));
      const X* rows = x + first * n_rows;
      const uint8_t* blocks[N];
      for (int j = 0; j < N; ++j) {
        blocks[j] = m.codes + (first_out + smaller(out + j, n_outs - 1)) * m.row_nbytes + first / shape.n * shape.nbytes;
        if constexpr (kind >= kQ4_0) read_scales<kind>(blocks[j], n, scales[j]);
        else read_scales(m, first_out + smaller(out + j, n_outs - 1), first, n, scales[j]);
      }
      V sums[N * M];
#pragma GCC unroll 16
      for (int i = 0; i < N * M; ++i) sums[i] = V{};
      V tables[N];  // of values in bfloat16
      for (int part = 0; part < n / 32; part += shape.n / 32) {
#pragma GCC unroll 8
        for (int i = 0; i < shape.n / 32; ++i) {
          Codes codes[N];
#pragma GCC unroll 4
          for (int j = 0; j < N; ++j) codes[j] = codes_of<kind>(grid_of(m), blocks[j], i);
          const auto weights = [&](int j, int k) __attribute__((always_inline)) {
            return rounded<sizeof(X) == 2 ? kFloat32 : product>(weight_of<kind>(codes[j], blocks[j], scales[j], part + i, k));
          };
#if LEVEL >= 3
          if constexpr (sizeof(X) == 2) {
            __m512bh values[N];
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) {
              if constexpr (kValues<kind> > 0) {
                if (i % kTableParts<kind> == 0) tables[j] = table_of_values<kind>(scales[j], part + i);
                values[j] = value_of<kind>(blocks[j], i, tables[j]);
              } else values[j] = _mm512_cvtne2ps_pbh((__m512)weights(j, 1), (__m512)weights(j, 0));
            }
            add_products<N, M>(values, rows + (part + i) * 32, sums);
          }
#endif
          if constexpr (sizeof(X) == 4)
#pragma GCC unroll 4
            for (int k = 0; k < 32 / kLanes; ++k) {
              V values[N];
#pragma GCC unroll 4
              for (int j = 0; j < N; ++j) values[j] = weights(j, k);
              add_products<N, M>(values, rows + (part + i) * 32 + k * kLanes, sums);
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
          for (int i = 0; i < shape.nbytes; i += 64) __builtin_prefetch(blocks[j] + ahead + i, 0, 2);
          blocks[j] += shape.nbytes;
        }
      }
      add_sums_of(sums, totals + out * M, first == 0);
    }
  for (int row = 0; row < n_rows; ++row)
    for (int out = 0; out < n_outs; ++out) lines[row * kLine + out] = totals[out * M + row];
}

// Call use.template operator()<the rows of a tile>().
template <typename Use>
inline void with_rows(int n_rows, Use use) {
  if (n_rows == 1) return use.template operator()<1>();
  if (n_rows == 2) return use.template operator()<2>();
  if (n_rows <= 4) return use.template operator()<4>();
  use.template operator()<kDecodedRows>();
}

template <typename X>
void multiply_decoded(const Matrix& m, const Order<X>& order, const X* x, int n_rows, int64_t first_out, int n_outs, float* lines) {
  with_method<X>(order.method, [&]<Method method>() {
    with_rows(n_rows, [&]<int M>() { multiply_decoded<M, method>(m, order, x, n_rows, first_out, n_outs, lines); });
  });
  const auto use = [&]<int kind, int product = kFloat32>() {
    with_rows(n_rows, [&]<int M>() { multiply_blocks<M, kind, product>(m, x, n_rows, first_out, n_outs, lines); });
  };
  if constexpr (LEVEL >= 1)
    if (order.method == kNoMethod) m.kind >= kQ4_0 ? with_blocks(m.kind, use) : with_bytes<X>(m, use);
}

#include "rounded_cpu.h"

// One of the products of a call, at most kMostRows of its rows.
template <typename X>
struct Product {
  const Matrix* matrix;
  Order<X> order;
  int n_rows, n_threads;
  const X* x = nullptr;  // blocks of kDepth<X> inputs of all rows, one behind the other
  int64_t n_outs;        // of a task
  int64_t panel_outs;    // that are multiplied at a time
  int64_t first_task = 0;
  bool is_rounded, is_decoded, is_direct;

  Product(const Matrix& m, int64_t first_row, int n_threads)
      : matrix(&m), order(m), n_rows(static_cast<int>(smaller<int64_t>(kMostRows, m.n_rows - first_row))), n_threads(n_threads) {
    // Weights of the product's type are read in place. Few rows convert other dense weights at each use; for more rows a
    // panel is unpacked once.
    const bool is_few = n_rows <= kFewRows, is_same = m.kind == (sizeof(X) == 2 ? kDenseBFloat16 : kDenseFloat32);
    is_direct = m.n_in % kStep<X> == 0 && (is_same || (is_few && sizeof(X) == 4 && m.kind <= kDenseFloat16));
    const bool has_blocks = LEVEL >= 1 && (m.kind >= kQ4_0 || has_bytes<X>(m));
    is_rounded = ::is_rounded(m);
    is_decoded = is_rounded || (n_rows <= kDecodedRows && (order.method != kNoMethod || has_blocks));
    const bool is_tiled = is_few && (n_rows == 1 || !is_direct);
    n_outs = is_decoded ? kDecodedOuts : is_tiled ? kTiledOuts : is_few ? kFewOuts : kManyOuts;
    if (is_gathered(m)) n_outs = is_decoded ? kGatheredOuts : kPanelOuts;
    panel_outs = is_tiled && !is_gathered(m) ? kTile : n_outs;
    while (n_outs > 2 * kFewOuts && !is_gathered(m) && m.n_out < 4 * n_threads * n_outs) n_outs -= kFewOuts;
    while (n_outs > kPanelOuts && m.n_out < 2 * n_threads * n_outs) n_outs /= 2;
    panel_outs = smaller(panel_outs, n_outs);
  }

  int64_t blocks_nbytes() const { return (matrix->n_in + kDepth<X> - 1) / kDepth<X> * n_rows * kBlockNbytes; }

  bool has_inputs_of(const Product& other) const {
    const Matrix& m = *other.matrix;
    const bool is_same = is_rounded || other.is_rounded ? is_rounded == other.is_rounded : order.is_same(other.order);
    return is_same && matrix->x == m.x && matrix->n_rows == m.n_rows && matrix->n_in == m.n_in;
  }
};

// Convert n inputs to X, zeros up to the next multiple of kStep<X>.
template <typename X, typename T>
inline void convert_inputs(const T* from, int n, X* to) {
  int k = 0;
  for (; k + kLanes <= n; k += kLanes) store(to + k, load(from + k));
  if (k < n) store_first(to + k, load_first(from + k, n - k), n - k);
  for (k = n; k % kStep<X>; ++k) to[k] = X{};
}

// Convert the inputs of rows [first, last) to X, in the order of a product's weights.
template <typename X, typename T>
void arrange_inputs(const Order<X>& order, const T* x, int64_t ldx, int64_t n_in, int n_rows, int64_t first_row, int64_t last_row,
                    X* blocks) {
  constexpr int depth = kDepth<X>;
  for (int64_t row = first_row; row < last_row; ++row)
    for (int64_t first = 0; first < n_in; first += depth) {
      const int n = static_cast<int>(smaller<int64_t>(depth, n_in - first));
      const T* from = x + row * ldx + first;
      X* to = blocks + first * n_rows + row * depth;
      if (order.method == kNoMethod) {
        convert_inputs(from, n, to);
        continue;
      }
      for (int k = 0; k < n; k += kChunk<X>) {
        X chunk[kChunk<X>] = {};
        convert_inputs(from + k, smaller(kChunk<X>, n - k), chunk);
#if LEVEL >= 3
        if constexpr (sizeof(X) == 2) {
          for (int i = 0; i < 64; i += 32) {
            const auto places = [&](int j) { return _mm512_cvtepi32_epi16(_mm512_loadu_si512(order.inputs + i + j)); };
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(places(0)), places(16), 1);
            const __m512i low = _mm512_loadu_si512(chunk), high = _mm512_loadu_si512(chunk + 32);
            _mm512_storeu_si512(to + k + i, _mm512_permutex2var_epi16(low, both, high));
          }
          continue;
        }
#endif
        for (int i = 0; i < kChunk<X>; ++i) to[k + i] = chunk[order.inputs[i]];
      }
    }
}

// The outputs of one task for all rows.
template <typename X, typename T>
void multiply_task(const Product<X>& product, int64_t task, T* y) {
  const Matrix& m = *product.matrix;
  const int n_rows = product.n_rows;
  const int64_t first = (task - product.first_task) * product.n_outs, last = smaller(first + product.n_outs, m.n_out);
  if (product.is_rounded) return multiply_rounded(m, reinterpret_cast<const char*>(product.x), n_rows, first, last, y);
  if (product.is_decoded) {
    float lines[kDecodedRows * kLine];
    const int n = static_cast<int>(last - first);
    multiply_decoded(m, product.order, product.x, n_rows, first, n, lines);
    for (int row = 0; row < n_rows; ++row) write_line(m, lines + row * kLine, first, n, y + row * m.ldy + first);
    return;
  }
  const auto multiply_as = [&](auto type, int64_t out, int64_t stop) {
    const int64_t next_out = stop < last ? stop : first + product.n_threads * product.n_outs;  // threads take turns
    multiply_panel<X, decltype(type)>(m, product.order, product.x, n_rows, out, static_cast<int>(stop - out), next_out, y, m.ldy);
  };
  for (int64_t out = first; out < last; out += product.panel_outs) {
    const int64_t stop = smaller(out + product.panel_outs, last);
    if (!product.is_direct) {
      multiply_as(Unpacked{}, out, stop);
    } else if (m.kind == kDenseBFloat16) {
      multiply_as(BFloat16{}, out, stop);
    } else if constexpr (sizeof(X) == 4) {
      if (m.kind == kDenseFloat16) multiply_as(Half{}, out, stop);
      if (m.kind == kDenseFloat32) multiply_as(float{}, out, stop);
    }
  }
}

// Rows [first_row, first_row + kMostRows) of all products.
template <typename X, typename T>
void multiply(const Matrix* matrices, int n_matrices, int64_t first_row, int n_threads) {
  std::vector<Product<X>> products;
  products.reserve(n_matrices);
  int64_t nbytes = 0;
  for (int i = 0; i < n_matrices; ++i) {
    if (matrices[i].n_rows <= first_row) continue;
    products.emplace_back(matrices[i], first_row, n_threads);
    nbytes += products.back().blocks_nbytes();
  }
  X* blocks = reinterpret_cast<X*>(input_memory.reserve(nbytes + kDecodedRows * kBlockNbytes));
  int64_t n_tasks = 0, n_multiplied = 0;
  for (Product<X>& product : products) {
    const Matrix& m = *product.matrix;
    const T* x = static_cast<const T*>(m.x) + first_row * m.ldx;
    for (const Product<X>& earlier : products)
      if (earlier.x != nullptr && earlier.has_inputs_of(product)) product.x = earlier.x;
    if (product.x == nullptr) {
      team().run(product.n_rows * m.n_in < kSerialInputs ? 1 : n_threads, product.n_rows, 1, [&](int64_t first, int64_t last) {
        if (product.is_rounded) round_rows(x, m.ldx, m.n_in, first, last, reinterpret_cast<char*>(blocks));
        else arrange_inputs(product.order, x, m.ldx, m.n_in, product.n_rows, first, last, blocks);
      });
      product.x = blocks;
      blocks += product.blocks_nbytes() / sizeof(X);
    }
    product.first_task = n_tasks;
    n_tasks += (m.n_out + product.n_outs - 1) / product.n_outs;
    n_multiplied += m.n_in * m.n_out * product.n_rows;
  }
  // Adjacent tasks, because a thread prefetches the codes behind its own.
  const int64_t n_pieces = n_threads * (1 + smaller(n_multiplied / (n_threads * kPieceProducts), kMostPieces - 1));
  team().run(n_multiplied < kSerialProducts ? 1 : n_threads, n_tasks, (n_tasks + n_pieces - 1) / n_pieces, [&](int64_t first, int64_t last) {
    const Product<X>* product = products.data();
    for (int64_t task = first; task < last; ++task) {
      while (product + 1 < products.data() + products.size() && product[1].first_task <= task) ++product;
      multiply_task(*product, task, static_cast<T*>(product->matrix->y) + first_row * product->matrix->ldy);
    }
  });
}

inline void linear(const Matrix* matrices, int n_matrices, int dtype, int n_threads) {
  int64_t n_rows = 0;
  for (int i = 0; i < n_matrices; ++i) n_rows = matrices[i].n_rows > n_rows ? matrices[i].n_rows : n_rows;
  const auto run = [&](auto type, auto wide) {
    for (int64_t row = 0; row < n_rows; row += kMostRows)
      multiply<decltype(wide), decltype(type)>(matrices, n_matrices, row, n_threads);
  };
  if (dtype == kFloat32) return run(float{}, float{});
  if (dtype == kFloat16) return run(Half{}, float{});
#if LEVEL >= 3
  run(BFloat16{}, BFloat16{});
#else
  run(BFloat16{}, float{});
#endif
}

inline void unpack_rows(const Matrix& m, const int64_t* rows, int64_t n_rows, void* out, int dtype, int n_threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    // Codes of the transpose are read by columns, which neighbouring rows share.
    team().run(n_rows * m.n_in < kSerialInputs ? 1 : n_threads, n_rows, (n_rows + n_threads - 1) / n_threads, [&](int64_t begin, int64_t end) {
     for (int64_t i = begin; i < end; ++i)
      for (int64_t first = 0; first < m.n_in; first += kLongestBlock) {
        const int n = static_cast<int>(smaller<int64_t>(kLongestBlock, m.n_in - first));
        const int64_t row = rows == nullptr ? i : rows[i];
        const uint8_t* bytes = m.codes + row * m.row_nbytes;
        uint32_t words[8][kLongestBlock / 8];
        if (is_gathered(m)) {
          gather(m, row / 8 * 8, static_cast<int>(smaller<int64_t>(8, m.n_out - row / 8 * 8)), first, n, kLongestBlock / 8, words[0]);
          bytes = reinterpret_cast<uint8_t*>(words[0] + row % 8 * (kLongestBlock / 8));
        }
        unpack(m, bytes, row, first, n, n, static_cast<T*>(out) + i * m.n_in + first);
      }
    });
  };
  if (dtype == kFloat32) return run(float{});
  if (dtype == kFloat16) return run(Half{});
  run(BFloat16{});
}

inline double fma_chains(int64_t n_times, double* sink) {
  V sums[10];
  for (int i = 0; i < 10; ++i) sums[i] = set1(1.0f + 1e-3f * static_cast<float>(i));
  const V factor = set1(1.0f - 1e-7f), more = set1(1e-9f);
  for (int64_t t = 0; t < n_times; ++t)
#pragma GCC unroll 10
    for (int i = 0; i < 10; ++i) sums[i] = fma(sums[i], factor, more);
  for (int i = 0; i < 10; ++i) *sink += sums[i][0];
  return 2.0 * 10 * kLanes * static_cast<double>(n_times);
}
