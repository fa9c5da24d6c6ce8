// Tree attention for one instruction set, in an order that depends on nothing but what a row sees; the compiler defines LEVEL (ops/build.py).
//
// A row sees slots: slot i < n_before is key i, and slot n_before + r is its ancestor at depth r, itself included; a window hides
// the first ones. Slots [kBlock * b, kBlock * (b + 1)) are a block, wherever their keys lie. For each row
//   a score     is a sum over the dimensions in order,
//   a block     gives its largest score m, the sum l of exp(score - m), and the sum of these weights times values, slot by slot,
//   the output  joins m, l and sums of the row's blocks in order.
// Row tiles, chunks of rows and threads change which row is computed when, and never one of these sums.

// Slots of a block. Rows of scores are a vector longer, for the last one to be written whole.
constexpr int kBlock = 128, kScoreRow = kBlock + 16;
// Rows, one for each query head, for which keys and values of a block are packed once.
constexpr int kChunkRows = 96;
// Keys of a tree whose scores are computed for all rows of a chunk, most of which see few of them.
constexpr int kMostTogether = LEVEL >= 2 ? 256 : 128;
// Multiplications that one thread finishes before another wakes.
constexpr int64_t kSerialScores = 1 << 17;

typedef uint32_t VU __attribute__((vector_size(4 * kLanes)));

// Numbers of 16 bits are packed in pairs where they are widened after packing (keys), or multiplied in pairs (both).
template <typename T>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<BFloat16> = true;
template <typename T>
constexpr int kPair = LEVEL >= 3 && kIsBFloat16<T> ? 2 : 1;

inline V load_units(const float* row, int64_t first, int64_t n) {
  return n >= kLanes ? load(row + first) : load_first(row + first, static_cast<int>(n));
}
inline V load_units(const Half* row, int64_t first, int64_t n) {
  return n >= kLanes ? load(row + first) : load_first(row + first, static_cast<int>(n));
}
inline V load_units(const BFloat16* row, int64_t first, int64_t n) {
  float pairs[kLanes] = {};
  if (n >= kLanes) return load(reinterpret_cast<const float*>(row) + first);
  memcpy(pairs, row + 2 * first, 4 * n);
  return load(pairs);
}

// Lane i of vector j becomes lane j of vector i.
inline void transpose(V* x) {
#if LEVEL >= 2
  __m512 a[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512 x0 = (__m512)x[i], x1 = (__m512)x[i + 1], x2 = (__m512)x[i + 2], x3 = (__m512)x[i + 3];
    const __m512d low0 = (__m512d)_mm512_unpacklo_ps(x0, x1), high0 = (__m512d)_mm512_unpackhi_ps(x0, x1);
    const __m512d low1 = (__m512d)_mm512_unpacklo_ps(x2, x3), high1 = (__m512d)_mm512_unpackhi_ps(x2, x3);
    a[i] = (__m512)_mm512_unpacklo_pd(low0, low1), a[i + 1] = (__m512)_mm512_unpackhi_pd(low0, low1);
    a[i + 2] = (__m512)_mm512_unpacklo_pd(high0, high1), a[i + 3] = (__m512)_mm512_unpackhi_pd(high0, high1);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 even0 = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), odd0 = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
    const __m512 even1 = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
    const __m512 odd1 = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    x[i] = (V)_mm512_shuffle_f32x4(even0, even1, 0x88), x[i + 8] = (V)_mm512_shuffle_f32x4(even0, even1, 0xdd);
    x[i + 4] = (V)_mm512_shuffle_f32x4(odd0, odd1, 0x88), x[i + 12] = (V)_mm512_shuffle_f32x4(odd0, odd1, 0xdd);
  }
#elif LEVEL == 1
  __m256 a[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 4) {
    const __m256 x0 = (__m256)x[i], x1 = (__m256)x[i + 1], x2 = (__m256)x[i + 2], x3 = (__m256)x[i + 3];
    const __m256d low0 = (__m256d)_mm256_unpacklo_ps(x0, x1), high0 = (__m256d)_mm256_unpackhi_ps(x0, x1);
    const __m256d low1 = (__m256d)_mm256_unpacklo_ps(x2, x3), high1 = (__m256d)_mm256_unpackhi_ps(x2, x3);
    a[i] = (__m256)_mm256_unpacklo_pd(low0, low1), a[i + 1] = (__m256)_mm256_unpackhi_pd(low0, low1);
    a[i + 2] = (__m256)_mm256_unpacklo_pd(high0, high1), a[i + 3] = (__m256)_mm256_unpackhi_pd(high0, high1);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = (V)_mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
    x[i + 4] = (V)_mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
  }
#else
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      const float other = x[i][j];
      x[i][j] = x[j][i];
      x[j][i] = other;
    }
#endif
}

// Rows that are read next. Memory delivers them while others are multiplied.
struct Ahead {
  const char* rows = nullptr;
  int64_t stride = 0, nbytes = 0;

  void fetch(int row) const {
    for (int64_t line = 0; line < nbytes; line += 64) __builtin_prefetch(rows + row * stride + line, 0, 2);
  }
};

// Vectors of keys, lanes across keys: unit u of key vector i at (i * n_units + u) * kLanes. A unit is a number of float32, or a
// pair of bfloat16. `rows` has whole vectors of keys.
template <typename T>
inline void pack_keys(const T* const* rows, int n_vectors, int64_t n_units, float* panel, Ahead ahead = {}) {
  for (int i = 0; i < n_vectors; ++i, rows += kLanes, panel += n_units * kLanes) {
    for (int j = 0; j < kLanes; ++j) ahead.fetch(i * kLanes + j);
    int64_t first = 0;
    for (; first + kLanes <= n_units; first += kLanes) {
      V x[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) x[j] = load_units(rows[j], first, kLanes);
      transpose(x);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) store(panel + (first + j) * kLanes, x[j]);
    }
    if (first < n_units) {
      V x[kLanes];
      for (int j = 0; j < kLanes; ++j) x[j] = load_units(rows[j], first, n_units - first);
      transpose(x);
      for (int64_t j = 0; j < n_units - first; ++j) store(panel + (first + j) * kLanes, x[j]);
    }
  }
}

// Values of n slots, a multiple of kPair<T>, widened; or pairs of slots, number by number. Steps are `width` units apart.
template <typename T>
inline void pack_values(const T* const* rows, int n, int64_t dim, int64_t width, float* panel, Ahead ahead = {}) {
  const auto numbers = [&](int i, int64_t c) {
    return dim - c >= kLanes ? load(rows[i] + c) : load_first(rows[i] + c, static_cast<int>(dim - c));
  };
  for (int i = 0; i < n; i += kPair<T>, panel += width) {
    for (int j = 0; j < kPair<T>; ++j) ahead.fetch(i + j);
    for (int64_t c = 0; c < width; c += kLanes) {
      if constexpr (kPair<T> == 2) {
        store(panel + c, (V)((VU)numbers(i + 1, c) | (VU)numbers(i, c) >> 16));
      } else {
        store(panel + c, numbers(i, c));
      }
    }
  }
}

// sum + a * b, where a and b are pairs of bfloat16 for kPair 2.
template <int pair>
inline V add_product(V a, V b, V sum) {
#if LEVEL >= 3
  if constexpr (pair == 2) return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
  return fma(a, b, sum);
}

// Scores of R rows of queries and N vectors of keys. A row of queries is n_units pairs, or numbers.
template <int R, int N, typename T>
inline void score_tile(const float* q, int64_t q_row, const float* panel, int64_t n_units, float* scores) {
  constexpr bool is_widened = kIsBFloat16<T> && kPair<T> == 1;
  V sums[R * N];
  for (int i = 0; i < R * N; ++i) sums[i] = V{};
  for (int64_t u = 0; u < n_units; ++u) {
    V k[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) k[j] = load(panel + (j * n_units + u) * kLanes);
    if constexpr (is_widened) {
      V low[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) low[j] = (V)((VU)k[j] << 16), k[j] = (V)((VU)k[j] & 0xffff0000u);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) {
        const V a = set1(q[i * q_row + 2 * u]);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) sums[i * N + j] = fma(a, low[j], sums[i * N + j]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const V a = set1(q[i * q_row + (is_widened ? 2 * u + 1 : u)]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sums[i * N + j] = add_product<kPair<T>>(a, k[j], sums[i * N + j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(scores + i * kScoreRow + j * kLanes, sums[i * N + j]);
}

// Adds to R rows of N vectors the weights times values of steps [first, stop), in order.
template <int R, int N, typename T>
inline void value_tile(const float* weights, const float* panel, int64_t width, int first, int stop, float* to) {
  V sums[R * N];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sums[i * N + j] = load(to + i * width + j * kLanes);
  for (int step = first; step < stop; ++step) {
    V v[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) v[j] = load(panel + step * width + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const V a = set1(weights[i * kScoreRow + step]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sums[i * N + j] = add_product<kPair<T>>(a, v[j], sums[i * N + j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(to + i * width + j * kLanes, sums[i * N + j]);
}

// Vectors of a tile by its rows: as many as registers hold the sums of.
template <int R>
constexpr int kVectors = LEVEL >= 2 ? (R >= 4 ? 4 : 8) : (R >= 4 ? 2 : R == 2 ? 4 : 8);

template <int R, typename T>
inline void score_rows(const float* q, int64_t q_row, const float* panel, int64_t n_units, int n_vectors, float* scores) {
  int i = 0;
  const int64_t size = n_units * kLanes;
  for (; i + kVectors<R> <= n_vectors; i += kVectors<R>)
    score_tile<R, kVectors<R>, T>(q, q_row, panel + i * size, n_units, scores + i * kLanes);
  for (; i < n_vectors; ++i) score_tile<R, 1, T>(q, q_row, panel + i * size, n_units, scores + i * kLanes);
}

template <int R, typename T>
inline void value_rows(const float* weights, const float* panel, int64_t width, int first, int stop, float* to) {
  int64_t c = 0;
  constexpr int kWide = kVectors<R> * kLanes;
  for (; c + kWide <= width; c += kWide) value_tile<R, kVectors<R>, T>(weights, panel + c, width, first, stop, to + c);
  for (; kVectors<R> > 4 && c + 4 * kLanes <= width; c += 4 * kLanes)
    value_tile<R, 4, T>(weights, panel + c, width, first, stop, to + c);
  for (; c < width; c += kLanes) value_tile<R, 1, T>(weights, panel + c, width, first, stop, to + c);
}

// Calls `tile` with constants 6, 4, 2 or 1 and the first row of each tile of n rows.
template <int n>
struct Rows {
  static constexpr int value = n;
};
template <typename Tile>
inline void for_tiles(int64_t n, Tile tile) {
  int64_t row = 0;
  for (; row + 6 <= n; row += 6) tile(Rows<6>(), row);
  for (; row + 4 <= n; row += 4) tile(Rows<4>(), row);
  for (; row + 2 <= n; row += 2) tile(Rows<2>(), row);
  for (; row < n; ++row) tile(Rows<1>(), row);
}

// What the rows of a chunk see.
struct Seen {
  int64_t first, n;      // rows of the tree; each is a row for each head of a group
  int64_t n_common;      // slots that are the same keys for all rows
  int64_t *lows, *highs; // (n,) slots [low, high) are seen
  int32_t* own;          // (n, n_tree) keys of the slots from n_common on
  int64_t first_block, stop_block;
};

inline void see(const TreeAttention& a, int64_t first, int64_t n, Seen& s) {
  s.first = first, s.n = n, s.first_block = a.n_before + a.n_tree, s.stop_block = 0;
  int64_t n_shared = a.n_tree;
  // A part of the keys may lack those of the tree, whose bits are there all the same.
  const auto word_of = [&](int64_t i, int64_t word) {
    const int64_t n_bits = a.n_tree - word * 32;
    return static_cast<uint32_t>(a.bits[(first + i) * a.n_words + word]) & (n_bits >= 32 ? ~0u : (1u << n_bits) - 1);
  };
  for (int64_t i = 0; i < n; ++i)
    for (int64_t word = 0; word * 32 < n_shared; ++word)
      if (const uint32_t hidden = ~word_of(i, word)) n_shared = smaller<int64_t>(n_shared, word * 32 + __builtin_ctz(hidden));
  s.n_common = a.n_before + n_shared;
  for (int64_t i = 0; i < n; ++i) {
    int32_t* own = s.own + i * a.n_tree;
    for (int64_t word = n_shared / 32; word * 32 < a.n_tree; ++word) {
      uint32_t left = word_of(i, word);
      if (word == n_shared / 32) left &= ~0u << n_shared % 32;
      for (; left; left &= left - 1) *own++ = static_cast<int32_t>(word * 32 + __builtin_ctz(left));
    }
    s.highs[i] = s.n_common + (own - (s.own + i * a.n_tree));
    const int64_t low = a.window ? a.n_before + a.depths[first + i] + 1 - a.window : 0;
    s.lows[i] = smaller(low > 0 ? low : 0, s.highs[i]);
    s.first_block = smaller(s.first_block, s.lows[i] / kBlock);
    const int64_t stop = (s.highs[i] + kBlock - 1) / kBlock;
    s.stop_block = s.stop_block > stop ? s.stop_block : stop;
  }
}

// Memory of a thread. Rows are (row of the tree, head of the group).
struct Work {
  Seen seen;
  float *q, *keys, *values, *scores, *own_scores;  // queries and scores of rows; packed keys and values
  float *largest, *totals, *sums;     // of a block: (rows), (rows), (rows, width)
  float *all_largest, *all_totals, *all_sums;
  const char* zeros;                  // as a row of keys or values
};

template <typename T>
struct Sizes {
  int64_t group, rows_q, n_rows, n_units, q_row, width;

  explicit Sizes(const TreeAttention& a) {
    group = a.n_heads / a.n_kv_heads;
    rows_q = smaller(a.n, group < kChunkRows ? kChunkRows / group : 1);
    n_rows = rows_q * group;
    n_units = kIsBFloat16<T> ? a.k_dim / 2 : a.k_dim;
    q_row = kPair<T> == 2 ? n_units : a.k_dim;
    width = (a.v_dim + kLanes - 1) / kLanes * kLanes;
  }
  void cut(const TreeAttention& a, Cutter& cutter, Work& w) const {
    w.seen.lows = cutter.take<int64_t>(rows_q), w.seen.highs = cutter.take<int64_t>(rows_q);
    w.seen.own = cutter.take<int32_t>(rows_q * a.n_tree);
    w.q = cutter.take<float>(n_rows * q_row);
    w.keys = cutter.take<float>(n_units * kBlock), w.values = cutter.take<float>(width * kBlock / kPair<T>);
    w.scores = cutter.take<float>(n_rows * kScoreRow), w.own_scores = cutter.take<float>(n_rows * kScoreRow);
    w.largest = cutter.take<float>(n_rows), w.totals = cutter.take<float>(n_rows);
    w.all_largest = cutter.take<float>(n_rows), w.all_totals = cutter.take<float>(n_rows);
    w.sums = cutter.take<float>(n_rows * width), w.all_sums = cutter.take<float>(n_rows * width);
    char* zeros = cutter.take<char>(4 * (a.k_dim > a.v_dim ? a.k_dim : a.v_dim));
    if (zeros != nullptr) memset(zeros, 0, 4 * (a.k_dim > a.v_dim ? a.k_dim : a.v_dim));
    w.zeros = zeros;
  }
};

// The queries of a chunk for one head of keys, as `score_tile` reads them.
template <typename T>
inline void pack_queries(const TreeAttention& a, const Sizes<T>& sizes, int64_t kv_head, const Work& w) {
  float* to = w.q;
  for (int64_t i = 0; i < w.seen.n; ++i)
    for (int64_t h = 0; h < sizes.group; ++h, to += sizes.q_row) {
      const T* from = static_cast<const T*>(a.q) + (w.seen.first + i) * a.q_row + (kv_head * sizes.group + h) * a.q_head;
      if constexpr (kPair<T> == 2) {
        memcpy(to, from, 2 * a.k_dim);
      } else {
        for (int64_t c = 0; c < a.k_dim; ++c) to[c] = to_float(from[c]);
      }
    }
}

// Scores of slots [low, high) to weights exp(score - largest), zeros around them; gives the largest and the sum.
template <typename T>
inline void weigh(const TreeAttention& a, float* scores, int low, int high, float* largest, float* total) {
  const int first = low / kLanes * kLanes;
  V most = set1(-__builtin_inff()), sum = {};
  VI lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  for (int j = first; j < high; j += kLanes) {
    V x = load(scores + j) * a.scale;
    if (a.softcap != 0.0f) {
      const V size = (V)((VI)x & 0x7fffffff) / a.softcap, e = exp(size * -2.0f);
      const V capped = (1.0f - e) / (1.0f + e) * a.softcap;
      x = (V)((VI)capped | ((VI)x & static_cast<int32_t>(0x80000000u)));
    }
    const VI slots = lanes + j;
    x = (slots >= low) & (slots < high) ? x : set1(-__builtin_inff());
    most = most > x ? most : x;
    store(scores + j, x);
  }
  *largest = max_of(most);
  for (int j = first; j < high; j += kLanes) {
    const V weights = exp(load(scores + j) - *largest);
    sum += weights;
    // Written behind what is read.
    if constexpr (kPair<T> == 2) {
      store(reinterpret_cast<BFloat16*>(scores) + j, weights);
    } else {
      store(scores + j, weights);
    }
  }
  *total = sum_of(sum);
}

// One block of slots for all rows of a chunk: largest scores, totals and sums of weighted values.
template <typename T>
void attend_block(const TreeAttention& a, const Sizes<T>& sizes, int64_t kv_head, int64_t block, const Work& w,
                  float* largest, float* totals, float* sums) {
  constexpr int pair = kPair<T>;
  const Seen& s = w.seen;
  const T* k = static_cast<const T*>(a.k) + kv_head * a.k_head;
  const T* v = static_cast<const T*>(a.v) + kv_head * a.v_head;
  const int64_t base = block * kBlock, n_rows = s.n * sizes.group;
  const auto within = [&](int64_t slot) { return static_cast<int>(slot < base ? 0 : smaller<int64_t>(slot - base, kBlock)); };
  const int n_common = within(s.n_common);
  int first = kBlock;
  for (int64_t i = 0; i < s.n; ++i) first = smaller(first, within(s.lows[i]));
  first = first / kLanes * kLanes;
  const T* rows[kBlock + kLanes];
  const T* none = reinterpret_cast<const T*>(w.zeros);
  // Slots [from, to) of row i, or those that are common to all, and zeros up to a multiple of n.
  const auto find = [&](const T* keys, int64_t row, int64_t i, int from, int to, int n) {
    int count = 0;
    for (int slot = from; slot < to; ++slot)
      rows[count++] = keys + row * (slot < n_common ? base + slot : a.n_before + s.own[i * a.n_tree + base + slot - s.n_common]);
    while (count % n) rows[count++] = none;
    return count;
  };

  const auto ahead = [](const T* from, int64_t row, int64_t dim, int64_t slot) {
    const int64_t size = sizeof(T);
    return Ahead{reinterpret_cast<const char*>(from) + slot * row * size, row * size, dim * size};
  };
  if (first < n_common) {
    const int n = find(k, a.k_row, 0, first, n_common, kLanes) / kLanes;
    pack_keys(rows, n, sizes.n_units, w.keys, ahead(v, a.v_row, a.v_dim, base + first));
    for_tiles(n_rows, [&](auto r, int64_t row) {
      score_rows<decltype(r)::value, T>(w.q + row * sizes.q_row, sizes.q_row, w.keys, sizes.n_units, n,
                                        w.scores + row * kScoreRow + first);
    });
  }
  // Keys of the other slots: of all rows together where they are few, else row by row.
  const auto own_from = [&](int64_t i) { return within(s.lows[i] > s.n_common ? s.lows[i] : s.n_common); };
  const auto own_of = [&](int64_t i) { return s.own + i * a.n_tree + base - s.n_common; };
  int64_t key = a.n_tree, stop_key = 0;
  for (int64_t i = 0; i < s.n; ++i)
    if (const int from = own_from(i), high = within(s.highs[i]); from < high) {
      key = smaller<int64_t>(key, own_of(i)[from]);
      stop_key = stop_key > own_of(i)[high - 1] ? stop_key : own_of(i)[high - 1] + 1;
    }
  const bool is_together = stop_key - key <= kMostTogether;
  for (; is_together && key < stop_key; key += kBlock) {
    const int n_keys = static_cast<int>(smaller<int64_t>(stop_key - key, kBlock));
    int count = 0;
    for (; count < n_keys; ++count) rows[count] = k + a.k_row * (a.n_before + key + count);
    for (; count % kLanes; ++count) rows[count] = none;
    pack_keys(rows, count / kLanes, sizes.n_units, w.keys);
    for_tiles(n_rows, [&](auto r, int64_t row) {
      score_rows<decltype(r)::value, T>(w.q + row * sizes.q_row, sizes.q_row, w.keys, sizes.n_units, count / kLanes,
                                        w.own_scores + row * kScoreRow);
    });
    for (int64_t i = 0; i < s.n; ++i)
      for (int slot = own_from(i), high = within(s.highs[i]); slot < high; ++slot)
        if (const int64_t place = own_of(i)[slot] - key; place >= 0 && place < n_keys)
          for (int64_t row = i * sizes.group; row < (i + 1) * sizes.group; ++row)
            w.scores[row * kScoreRow + slot] = w.own_scores[row * kScoreRow + place];
  }
  for (int64_t i = 0; i < s.n; ++i) {
    const int low = within(s.lows[i]), high = within(s.highs[i]), from = own_from(i);
    if (!is_together && from < high) {
      const int n = find(k, a.k_row, i, from, high, kLanes) / kLanes;
      pack_keys(rows, n, sizes.n_units, w.keys);
      for_tiles(sizes.group, [&](auto r, int64_t h) {
        const int64_t row = i * sizes.group + h;
        score_rows<decltype(r)::value, T>(w.q + row * sizes.q_row, sizes.q_row, w.keys, sizes.n_units, n,
                                          w.scores + row * kScoreRow + from);
      });
    }
    for (int64_t row = i * sizes.group; row < (i + 1) * sizes.group; ++row) {
      largest[row] = -__builtin_inff(), totals[row] = 0.0f;
      if (low < high) weigh<T>(a, w.scores + row * kScoreRow, low, high, largest + row, totals + row);
    }
  }

  memset(sums, 0, n_rows * sizes.width * sizeof(float));
  const int stop = n_common / pair * pair;
  // Adds slots [from, to) of row i, which are packed for it alone.
  const auto add_own = [&](int64_t i, int from, int to) {
    if (from >= to) return;
    const int lead = from % pair;
    rows[0] = none;
    const T** all = rows;
    int count = lead;
    for (int slot = from; slot < to; ++slot)
      all[count++] = v + a.v_row * (slot < n_common ? base + slot : a.n_before + s.own[i * a.n_tree + base + slot - s.n_common]);
    while (count % pair) all[count++] = none;
    pack_values(all, count, a.v_dim, sizes.width, w.values);
    for_tiles(sizes.group, [&](auto r, int64_t h) {
      const int64_t row = i * sizes.group + h;
      value_rows<decltype(r)::value, T>(w.scores + row * kScoreRow + from / pair, w.values, sizes.width, 0, count / pair,
                                        sums + row * sizes.width);
    });
  };
  for (int64_t i = 0; i < s.n; ++i) {
    const int low = within(s.lows[i]);
    if (low % pair && low < stop) add_own(i, low, smaller(low + 1, within(s.highs[i])));
  }
  if (first < stop) {
    find(v, a.v_row, 0, first, stop, 1);
    pack_values(rows, stop - first, a.v_dim, sizes.width, w.values, ahead(k, a.k_row, a.k_dim, base + kBlock));
    for_tiles(n_rows, [&](auto r, int64_t row) {
      constexpr int R = decltype(r)::value;
      int lows[R], most = 0;
      for (int i = 0; i < R; ++i) {
        lows[i] = (within(s.lows[(row + i) / sizes.group]) + pair - 1) / pair * pair;
        most = most > lows[i] ? most : lows[i];
      }
      most = smaller(most, stop);
      const float* weights = w.scores + row * kScoreRow + first / pair;
      float* to = sums + row * sizes.width;
      for (int i = 0; i < R; ++i)
        if (lows[i] < most)
          value_rows<1, T>(weights + i * kScoreRow, w.values, sizes.width, (lows[i] - first) / pair, (most - first) / pair,
                           to + i * sizes.width);
      value_rows<R, T>(weights, w.values, sizes.width, (most - first) / pair, (stop - first) / pair, to);
    });
  }
  for (int64_t i = 0; i < s.n; ++i) {
    const int low = within(s.lows[i]);
    add_own(i, low > stop ? low : stop, within(s.highs[i]));
  }
}

// Joins a block of a row to those before it.
inline void join(float largest, float total, const float* sums, int64_t width, float* all_largest, float* all_total,
                 float* all_sums) {
  if (total == 0.0f) return;  // it sees nothing of the block; scores that are NaN give a total that is NaN
  const float most = largest > *all_largest ? largest : *all_largest;
  V parts = {};
  parts[0] = *all_largest - most, parts[1] = largest - most;
  parts = exp(parts);
  const V before = set1(parts[0]), now = set1(parts[1]);
  *all_total = *all_total * parts[0] + total * parts[1];
  *all_largest = most;
  for (int64_t c = 0; c < width; c += kLanes)
    store(all_sums + c, fma(load(all_sums + c), before, load(sums + c) * now));
}

// Writes the output of a row, zeros where it sees nothing.
template <typename T>
inline void finish(const TreeAttention& a, int64_t row, int64_t head, float largest, float total, const float* sums) {
  T* out = static_cast<T*>(a.out) + (row * a.n_heads + head) * a.v_dim;
  a.lse[row * a.n_heads + head] = largest + __builtin_logf(total);
  float factor = total == 0.0f ? 0.0f : 1.0f / total;
  if (a.sinks != nullptr) {
    const float sink = a.sinks[head], most = sink > largest ? sink : largest;
    V parts = {};
    parts[0] = largest - most, parts[1] = sink - most;
    parts = exp(parts);
    factor = parts[0] / (total * parts[0] + parts[1]);
  }
  for (int64_t c = 0; c < a.v_dim; c += kLanes) {
    const V x = load(sums + c) * factor;
    if (a.v_dim - c >= kLanes) {
      store(out + c, x);
    } else {
      store_first(out + c, x, static_cast<int>(a.v_dim - c));
    }
  }
}

// All blocks of a chunk of rows for one head of keys.
template <typename T>
void attend_chunk(const TreeAttention& a, const Sizes<T>& sizes, int64_t kv_head, const Work& w) {
  const int64_t n_rows = w.seen.n * sizes.group;
  pack_queries(a, sizes, kv_head, w);
  memset(w.all_sums, 0, n_rows * sizes.width * sizeof(float));
  for (int64_t row = 0; row < n_rows; ++row) w.all_largest[row] = -__builtin_inff(), w.all_totals[row] = 0.0f;
  for (int64_t block = w.seen.first_block; block < w.seen.stop_block; ++block) {
    attend_block(a, sizes, kv_head, block, w, w.largest, w.totals, w.sums);
    for (int64_t row = 0; row < n_rows; ++row)
      join(w.largest[row], w.totals[row], w.sums + row * sizes.width, sizes.width, w.all_largest + row, w.all_totals + row,
           w.all_sums + row * sizes.width);
  }
  for (int64_t row = 0; row < n_rows; ++row)
    finish<T>(a, w.seen.first + row / sizes.group, kv_head * sizes.group + row % sizes.group, w.all_largest[row],
              w.all_totals[row], w.all_sums + row * sizes.width);
}

template <typename T>
Work work_of(const TreeAttention& a, const Sizes<T>& sizes) {
  Work w;
  Cutter count{nullptr};
  sizes.cut(a, count, w);
  Cutter cutter{thread_scratch.reserve(count.used)};
  sizes.cut(a, cutter, w);
  return w;
}

// Few rows: threads divide the blocks of all heads, and join them once all are there.
template <typename T>
void attend_few(const TreeAttention& a, const Sizes<T>& sizes, int n_threads) {
  int64_t n_blocks = 0, first_block = 0;
  {
    Work w = work_of(a, sizes);
    see(a, 0, a.n, w.seen);
    first_block = w.seen.first_block, n_blocks = w.seen.stop_block - first_block;
  }
  const int64_t n_rows = sizes.n_rows, n_units = a.n_kv_heads * n_blocks, row_size = sizes.width + 2;
  float* found = reinterpret_cast<float*>(shared_scratch.reserve(4 * n_units * n_rows * row_size));
  float *largest = found, *totals = largest + n_units * n_rows, *sums = totals + n_units * n_rows;
  team().run(n_threads, n_units, (n_units + n_threads - 1) / n_threads, [&](int64_t first, int64_t last) {
    Work w = work_of(a, sizes);
    see(a, 0, a.n, w.seen);
    int64_t packed = -1;
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t kv_head = unit / n_blocks;
      if (kv_head != packed) pack_queries(a, sizes, packed = kv_head, w);
      attend_block(a, sizes, kv_head, first_block + unit % n_blocks, w, largest + unit * n_rows, totals + unit * n_rows,
                   sums + unit * n_rows * sizes.width);
    }
  });
  for (int64_t i = 0; i < a.n_kv_heads * n_rows; ++i) {
    const int64_t kv_head = i / n_rows, row = i % n_rows;
    float all_largest = -__builtin_inff(), all_total = 0.0f;
    float* all_sums = reinterpret_cast<float*>(thread_scratch.reserve(4 * sizes.width));
    memset(all_sums, 0, sizes.width * sizeof(float));
    for (int64_t unit = kv_head * n_blocks; unit < (kv_head + 1) * n_blocks; ++unit)
      join(largest[unit * n_rows + row], totals[unit * n_rows + row], sums + (unit * n_rows + row) * sizes.width, sizes.width,
           &all_largest, &all_total, all_sums);
    finish<T>(a, row / sizes.group, kv_head * sizes.group + row % sizes.group, all_largest, all_total, all_sums);
  }
}

template <typename T>
void attend_typed(const TreeAttention& a, int n_threads) {
  const Sizes<T> sizes(a);
  if (a.n * a.n_heads * (a.n_before + a.n_tree) * (a.k_dim + a.v_dim) < kSerialScores) n_threads = 1;
  const int64_t n_chunks = (a.n + sizes.rows_q - 1) / sizes.rows_q, n_tasks = a.n_kv_heads * n_chunks;
  if (n_chunks == 1 && n_threads > 1 && n_tasks < 4 * n_threads) return attend_few<T>(a, sizes, n_threads);
  team().run(n_threads, n_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      Work w = work_of(a, sizes);
      const int64_t first = task % n_chunks * sizes.rows_q;
      see(a, first, smaller(sizes.rows_q, a.n - first), w.seen);
      attend_chunk<T>(a, sizes, task / n_chunks, w);
    }
  });
}

inline void attend(const TreeAttention& a, int n_threads) {
  if (a.dtype == kBFloat16) return attend_typed<BFloat16>(a, n_threads);
  if (a.dtype == kFloat16) return attend_typed<Half>(a, n_threads);
  attend_typed<float>(a, n_threads);
}
