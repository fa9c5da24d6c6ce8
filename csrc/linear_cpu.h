// Products y = x w^T for one instruction set; included by every_isa.h.
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
// Outputs of a panel of few and of many rows, multiples of every tile's outputs; rows that a panel is unpacked for.
constexpr int kFewOuts = 24, kManyOuts = 96, kRowsOfPanel = 384;
constexpr int64_t kBlockNbytes = 2048;
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

// Adds a block of n inputs to M x N outputs of y, whose tiles are stored densely: y (M * N).
template <int M, int N, typename X, typename W>
inline void add_tile(const X* x, int64_t ldx, const W* w, int64_t ldw, int n, float* y, bool is_first) {
  V sums[M * N];
#pragma GCC unroll 24
  for (int i = 0; i < M * N; ++i) sums[i] = V{};
#if LEVEL >= 3
  if constexpr (sizeof(X) == 2) {
    for (int k = 0; k < n; k += 2 * kLanes) {
      __m512bh b[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        b[j] = (__m512bh)_mm512_loadu_si512(w + j * ldw + k);
        __builtin_prefetch(w + (N + j) * ldw + k);
      }
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
      __builtin_prefetch(w + (N + j) * ldw + k);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const V a = load(x + i * ldx + k);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sums[i * N + j] = fma(a, b[j], sums[i * N + j]);
    }
  }
  add_sums(sums, M * N, y, is_first);
}

template <int M, int N, typename X, typename W>
inline void add_tiles(const X* x, const W* w, int64_t ldw, int n_outs, int n, float* y, bool is_first) {
  int j = 0;
  for (; j + N <= n_outs; j += N) add_tile<M, N>(x, kDepth<X>, w + j * ldw, ldw, n, y + j * M, is_first);
  for (; j < n_outs; ++j) add_tile<M, 1>(x, kDepth<X>, w + j * ldw, ldw, n, y + j * M, is_first);
}

// Outputs of a tile by its rows: as many as registers hold the sums of.
#if LEVEL >= 2
constexpr int kOuts[] = {0, 8, 8, 6, 6, 4, 4};
#else
constexpr int kOuts[] = {0, 8, 4, 3, 3};
#endif

// Adds a block of n inputs to n_rows x n_outs outputs. The tiles of a row tile are stored one behind the other.
template <typename X, typename W>
void add_block(const X* x, int n_rows, const W* w, int64_t ldw, int n_outs, int n, float* y, bool is_first) {
  for (int row = 0; row < n_rows; row += kTileRows) {
    const X* from = x + row * kDepth<X>;
    float* to = y + row * n_outs;
    switch (smaller(kTileRows, n_rows - row)) {
      case 1: add_tiles<1, kOuts[1]>(from, w, ldw, n_outs, n, to, is_first); break;
      case 2: add_tiles<2, kOuts[2]>(from, w, ldw, n_outs, n, to, is_first); break;
      case 3: add_tiles<3, kOuts[3]>(from, w, ldw, n_outs, n, to, is_first); break;
      case 4: add_tiles<4, kOuts[4]>(from, w, ldw, n_outs, n, to, is_first); break;
#if LEVEL >= 2
      case 5: add_tiles<5, kOuts[5]>(from, w, ldw, n_outs, n, to, is_first); break;
      case 6: add_tiles<6, kOuts[6]>(from, w, ldw, n_outs, n, to, is_first); break;
#endif
    }
  }
}

// ---- Packing: n inputs of an output from input `first` on, as floats or bfloat16, zeros up to n_padded.

// Vectors of codes to numbers.
struct Signed {
  inline V operator()(const uint8_t* codes) const {
#if LEVEL >= 2
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
#elif LEVEL == 1
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
#else
    V wide;
    for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(static_cast<int8_t>(codes[i]));
    return wide;
#endif
  }
};
struct Unsigned {
  inline V operator()(const uint8_t* codes) const {
#if LEVEL >= 2
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
#elif LEVEL == 1
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
#else
    V wide;
    for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(codes[i]);
    return wide;
#endif
  }
};
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
struct Float8 {
  inline V operator()(const uint8_t* codes) const {
    // e4m3fn, moved to where float16 has exponent and mantissa; its bias is smaller by 8. Also right for subnormal numbers.
    Half halves[kLanes];
    for (int i = 0; i < kLanes; ++i) halves[i].bits = (codes[i] & 0x80) << 8 | (codes[i] & 0x7f) << 7;
    const V x = load(halves) * 256.0f;
    return ((x == 480.0f) | (x == -480.0f)) ? set1(__builtin_nanf("")) : x;  // only the code of NaN gives 480
  }
};

template <int dtype>
inline V rounded(V x) {
  if constexpr (dtype == kBFloat16) {
    const VI bits = (VI)x;
    return (V)((bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffff);
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

// Two codes of each byte, the low nibble first, or the high one.
inline void split_nibbles(const uint8_t* bytes, int n, bool is_low_first, uint8_t* codes) {
  const int first = is_low_first ? 0 : 4;
  for (int i = 0; i < (n + 1) / 2; ++i) {
    codes[2 * i] = bytes[i] >> first & 15;
    codes[2 * i + 1] = bytes[i] >> (4 - first) & 15;
  }
}

// Replaces codes by what a table of 16 numbers has in their place.
inline void look_up(const int8_t* table, int n, uint8_t* codes) {
#if LEVEL >= 1
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  for (int i = 0; i < n; i += 16) {
    __m128i* place = reinterpret_cast<__m128i*>(codes + i);
    _mm_storeu_si128(place, _mm_shuffle_epi8(numbers, _mm_loadu_si128(place)));
  }
#else
  for (int i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(table[codes[i]]);
#endif
}

// The codes of a block of GGUF, less what all of them are lowered by.
inline void block_codes(int kind, const uint8_t* block, uint8_t* codes) {
  const auto nibbles = [&](const uint8_t* bytes, int n, int width, int less) {
    for (int first = 0; first < n / 2; first += width)
      for (int k = 0; k < width; ++k) {
        codes[2 * first + k] = static_cast<uint8_t>((bytes[first + k] & 15) - less);
        codes[2 * first + width + k] = static_cast<uint8_t>((bytes[first + k] >> 4) - less);
      }
  };
  // The four pairs of bits of 32 bytes, low ones first, and so on; likewise single bits.
  const auto add_pairs = [&](const uint8_t* bytes, int factor) {
    for (int j = 0; j < 8; ++j)
      for (int k = 0; k < 32; ++k)
        codes[32 * j + k] = static_cast<uint8_t>(codes[32 * j + k] + factor * (bytes[j / 4 * 32 + k] >> j % 4 * 2 & 3));
  };
  const auto add_bits = [&](const uint8_t* bytes, int factor) {
    for (int j = 0; j < 8; ++j)
      for (int k = 0; k < 32; ++k)
        codes[32 * j + k] = static_cast<uint8_t>(codes[32 * j + k] + factor * (bytes[k] >> j & 1));
  };
  const auto add_fifth = [&](const uint8_t* bits) {
    for (int k = 0; k < 32; ++k) codes[k] = static_cast<uint8_t>(codes[k] + 16 * (bits[k / 8] >> k % 8 & 1));
  };
  switch (kind) {
    case kQ4_0: return nibbles(block + 2, 32, 16, 8);
    case kQ4_1: return nibbles(block + 4, 32, 16, 0);
    case kQ5_0: return nibbles(block + 6, 32, 16, 16), add_fifth(block + 2);
    case kQ5_1: return nibbles(block + 8, 32, 16, 0), add_fifth(block + 4);
    case kQ8_0: memcpy(codes, block + 2, 32); return;
    case kQ2_K: memset(codes, 0, 256); return add_pairs(block + 16, 1);
    case kQ3_K: memset(codes, -4, 256); return add_pairs(block + 32, 1), add_bits(block, 4);
    case kQ4_K: return nibbles(block + 16, 256, 32, 0);
    case kQ5_K: return nibbles(block + 48, 256, 32, 0), add_bits(block + 16, 16);
    case kQ6_K: return nibbles(block, 256, 64, 32), add_pairs(block + 128, 16);
    case kIq4Nl: return nibbles(block + 2, 32, 16, 0), look_up(kIq4, 32, codes);
    case kIq4Xs: return nibbles(block + 8, 256, 16, 0), look_up(kIq4, 256, codes);
  }
}

// What the codes of each group of a block are multiplied with, and what is then subtracted.
inline void block_scales(int kind, const uint8_t* b, float* scales, float* minima) {
  for (int i = 0; i < 16; ++i) minima[i] = 0.0f;
  switch (kind) {
    case kQ4_1: case kQ5_1: minima[0] = -half_at(b + 2); [[fallthrough]];
    case kQ4_0: case kQ5_0: case kQ8_0: case kIq4Nl: scales[0] = half_at(b); return;
    case kQ4_K: case kQ5_K: {
      const float scale = half_at(b), minimum = half_at(b + 2);
      for (int i = 0; i < 4; ++i) {
        const int low = b[4 + i], middle = b[8 + i], high = b[12 + i];
        scales[i] = scale * static_cast<float>(low & 63), minima[i] = minimum * static_cast<float>(middle & 63);
        scales[i + 4] = scale * static_cast<float>((high & 15) | low >> 6 << 4);
        minima[i + 4] = minimum * static_cast<float>(high >> 4 | middle >> 6 << 4);
      }
      return;
    }
    case kQ2_K: {
      const float scale = half_at(b + 80), minimum = half_at(b + 82);
      for (int i = 0; i < 16; ++i) {
        scales[i] = scale * static_cast<float>(b[i] & 15);
        minima[i] = minimum * static_cast<float>(b[i] >> 4);
      }
      return;
    }
    case kQ3_K:
      for (int i = 0; i < 16; ++i) {
        const int low = b[96 + i % 8] >> (i / 8 * 4) & 15, high = b[104 + i % 4] >> (i / 4 * 2) & 3;
        scales[i] = half_at(b + 108) * static_cast<float>((low | high << 4) - 32);
      }
      return;
    case kQ6_K:
      for (int i = 0; i < 16; ++i) scales[i] = half_at(b + 208) * static_cast<float>(static_cast<int8_t>(b[192 + i]));
      return;
    case kIq4Xs:
      for (int i = 0; i < 8; ++i) {
        const int low = b[4 + i / 2] >> (i % 2 * 4) & 15, high = b[2 + i / 4] >> (i % 4 * 2) & 3;
        scales[i] = half_at(b) * static_cast<float>((low | high << 4) - 32);
      }
      return;
  }
}

template <int kind, int n_codes, int nbytes, int group, typename P>
inline void unpack_blocks(const uint8_t* blocks, int n, P* out) {
  for (int done = 0; done < n; done += n_codes, blocks += nbytes) {
    uint8_t codes[n_codes];
    float scales[16], minima[16];
    block_codes(kind, blocks, codes);
    block_scales(kind, blocks, scales, minima);
    for (int k = 0; k < n_codes; k += kLanes) {
      // The product is exact in float32 where there is a minimum.
      store(out + done + k, fma(Signed()(codes + k), set1(scales[k / group]), set1(-minima[k / group])));
    }
  }
}

template <typename P>
void unpack(const Matrix& m, int64_t row, int64_t first, int n, int n_padded, P* out) {
  for (int k = n; k < n_padded; ++k) out[k] = P{};
  const uint8_t* bytes = m.codes + row * m.row_nbytes;
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
    case kColumns:
      if (m.bits == 4) {
        const uint8_t* words = m.codes + 4 * row;
        for (int k = 0; k < n; k += 8) {
          const uint32_t word = word_at(words, (first + k) / 8 * m.n_out);
          for (int i = 0; i < 8; ++i) codes[k + i] = word >> (4 * i) & 15;
        }
      } else {
        for (int k = 0; k < n; ++k)
          codes[k] = static_cast<uint8_t>(packed_code(m.codes + 4 * row, m.n_out, m.bits, first + k));
      }
      return scale_row(Unsigned(), m, row, first, n, codes, out);
    case kAwq: {
      const uint8_t* words = m.codes + first * m.row_nbytes + row / 8 * 4;
      const int shift = 4 * kAwqNibbles[row % 8];
      for (int k = 0; k < n; ++k) codes[k] = word_at(words + k * m.row_nbytes, 0) >> shift & 15;
      return scale_row(Unsigned(), m, row, first, n, codes, out);
    }
    case kInt8: return scale_row(Signed(), m, row, first, n, bytes + first, out);
    case kFloat8: return scale_row(Float8(), m, row, first, n, bytes + first, out);
    case kE2m1:
      split_nibbles(bytes + first / 2, n, true, codes);
      return scale_row(Table{kE2m1Values}, m, row, first, n, codes, out);
    case kNf4:
      split_nibbles(bytes + first / 2, n, false, codes);
      return scale_row(Table{kNf4Values}, m, row, first, n, codes, out);
    case kQ4_0: return unpack_blocks<kQ4_0, 32, 18, 32>(bytes + first / 32 * 18, n, out);
    case kQ4_1: return unpack_blocks<kQ4_1, 32, 20, 32>(bytes + first / 32 * 20, n, out);
    case kQ5_0: return unpack_blocks<kQ5_0, 32, 22, 32>(bytes + first / 32 * 22, n, out);
    case kQ5_1: return unpack_blocks<kQ5_1, 32, 24, 32>(bytes + first / 32 * 24, n, out);
    case kQ8_0: return unpack_blocks<kQ8_0, 32, 34, 32>(bytes + first / 32 * 34, n, out);
    case kQ2_K: return unpack_blocks<kQ2_K, 256, 84, 16>(bytes + first / 256 * 84, n, out);
    case kQ3_K: return unpack_blocks<kQ3_K, 256, 110, 16>(bytes + first / 256 * 110, n, out);
    case kQ4_K: return unpack_blocks<kQ4_K, 256, 144, 32>(bytes + first / 256 * 144, n, out);
    case kQ5_K: return unpack_blocks<kQ5_K, 256, 176, 32>(bytes + first / 256 * 176, n, out);
    case kQ6_K: return unpack_blocks<kQ6_K, 256, 210, 16>(bytes + first / 256 * 210, n, out);
    case kIq4Nl: return unpack_blocks<kIq4Nl, 32, 18, 32>(bytes + first / 32 * 18, n, out);
    case kIq4Xs: return unpack_blocks<kIq4Xs, 256, 136, 32>(bytes + first / 256 * 136, n, out);
  }
}

// ---- The product.

template <typename X>
constexpr int kStep = sizeof(X) == 2 ? 2 * kLanes : kLanes;

// Memory of a thread, kept for its next product.
inline uint8_t* scratch(int64_t nbytes) {
  struct Block {
    uint8_t* bytes = nullptr;
    int64_t size = 0;
    ~Block() { free(bytes); }
  };
  static thread_local Block block;
  if (block.size < nbytes) {
    free(block.bytes);
    block.size = (nbytes + 63) / 64 * 64;
    block.bytes = static_cast<uint8_t*>(aligned_alloc(64, block.size));
  }
  return block.bytes;
}

// The codes of n inputs of an output; short rows are over before the processor has found out to read ahead.
inline void prefetch_row(const Matrix& m, int64_t row, int64_t first, int n) {
  if (m.kind == kColumns || m.kind == kAwq || row >= m.n_out) return;
  const uint8_t* from = m.codes + row * m.row_nbytes + first * m.row_nbytes / m.n_in;
  for (int64_t i = 0; i < n * m.row_nbytes / m.n_in; i += 64) __builtin_prefetch(from + i);
}

// Writes n_rows x n_outs outputs, whose tiles lie as `add_block` leaves them, to y.
template <typename T>
void write_tiles(const Matrix& m, const float* tiles, int n_rows, int64_t first_out, int n_outs, T* y, int64_t ldy) {
  float line[kManyOuts + kLanes];
  for (int row = 0; row < n_rows; ++row) {
    const int top = row / kTileRows * kTileRows, n_tile = smaller(kTileRows, n_rows - top), width = kOuts[n_tile];
    const float* from = tiles + top * n_outs;
    int j = 0;
    for (; j + width <= n_outs; j += width)
      for (int i = 0; i < width; ++i) line[j + i] = from[j * n_tile + (row - top) * width + i];
    for (; j < n_outs; ++j) line[j] = from[j * n_tile + row - top];
    if (m.bias != nullptr)
      for (j = 0; j < n_outs; ++j) line[j] += number(m.bias, m.bias_dtype, first_out + j);
    T* to = y + row * ldy + first_out;
    for (j = 0; j + kLanes <= n_outs; j += kLanes) store(to + j, load(line + j));
    if (j < n_outs) store_first(to + j, load(line + j), n_outs - j);
  }
}

// A panel of outputs for all rows. x: blocks of kDepth<X> inputs of all rows, one behind the other.
template <typename X, typename W, typename T>
void multiply_panel(const Matrix& m, const X* x, int64_t n_rows, int64_t first_out, int n_outs, T* y, int64_t ldy) {
  constexpr int depth = kDepth<X>;
  constexpr bool is_direct = !__is_same(W, void);
  float* tiles = reinterpret_cast<float*>(scratch(kManyOuts * (kBlockNbytes + kRowsOfPanel * 4)) + kManyOuts * kBlockNbytes);
  X* panel = reinterpret_cast<X*>(scratch(0));
  for (int64_t row = 0; row < n_rows; row += kRowsOfPanel) {
    const int rows = static_cast<int>(smaller<int64_t>(kRowsOfPanel, n_rows - row));
    for (int64_t first = 0; first < m.n_in; first += depth) {
      const int n = static_cast<int>(smaller<int64_t>(depth, m.n_in - first));
      const int n_padded = (n + kStep<X> - 1) / kStep<X> * kStep<X>;
      const X* block = x + first * n_rows + row * depth;
      if constexpr (is_direct) {
        const W* w = reinterpret_cast<const W*>(m.codes + first_out * m.row_nbytes) + first;
        add_block(block, rows, w, m.n_in, n_outs, n, tiles, first == 0);
      } else {
        for (int j = 0; j < n_outs; ++j) {
          prefetch_row(m, first_out + j + 4, first, n);
          unpack(m, first_out + j, first, n, n_padded, panel + j * depth);
        }
        add_block(block, rows, panel, depth, n_outs, n_padded, tiles, first == 0);
      }
    }
    write_tiles(m, tiles, rows, first_out, n_outs, y + row * ldy, ldy);
  }
}

template <typename X, typename T>
void multiply(const Matrix& m, const T* x, int64_t n_rows, int64_t ldx, T* y, int64_t ldy, int n_threads) {
  constexpr int depth = kDepth<X>;
  const int64_t n_blocks = (m.n_in + depth - 1) / depth;
  X* blocks = static_cast<X*>(aligned_alloc(64, n_blocks * n_rows * kBlockNbytes));
  // Few rows read a dense matrix as it lies; for more of them a panel is unpacked once.
  const bool is_few = n_rows <= 4 * kTileRows, is_direct = is_few && m.n_in % kStep<X> == 0;
  int64_t n_outs = is_few ? kFewOuts : kManyOuts;
  while (n_outs > kFewOuts && m.n_out < 4 * n_threads * n_outs) n_outs -= kFewOuts;
  if (n_rows * m.n_in * m.n_out < 1 << 17) n_threads = 1;
#pragma omp parallel num_threads(n_threads)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < n_rows; ++row)
      for (int64_t first = 0; first < m.n_in; first += depth) {
        const int n = static_cast<int>(smaller<int64_t>(depth, m.n_in - first));
        const T* from = x + row * ldx + first;
        X* to = blocks + first * n_rows + row * depth;
        int k = 0;
        for (; k + kLanes <= n; k += kLanes) store(to + k, load(from + k));
        if (k < n) store_first(to + k, load_first(from + k, n - k), n - k);
        for (k = n; k % kStep<X>; ++k) to[k] = X{};
      }
#pragma omp for schedule(dynamic)
    for (int64_t out = 0; out < m.n_out; out += n_outs) {
      const int n = static_cast<int>(smaller<int64_t>(n_outs, m.n_out - out));
      if (is_direct && m.kind == kDenseBFloat16) {
        multiply_panel<X, BFloat16>(m, blocks, n_rows, out, n, y, ldy);
        continue;
      }
      if constexpr (sizeof(X) == 4) {
        if (is_direct && m.kind == kDenseFloat16) {
          multiply_panel<X, Half>(m, blocks, n_rows, out, n, y, ldy);
          continue;
        }
        if (is_direct && m.kind == kDenseFloat32) {
          multiply_panel<X, float>(m, blocks, n_rows, out, n, y, ldy);
          continue;
        }
      }
      multiply_panel<X, void>(m, blocks, n_rows, out, n, y, ldy);
    }
  }
  free(blocks);
}

inline void linear(const Matrix& m, const void* x, int64_t n_rows, int64_t ldx, void* y, int64_t ldy, int dtype,
                   int n_threads) {
  const auto run = [&](auto type, auto wide) {
    using T = decltype(type);
    multiply<decltype(wide)>(m, static_cast<const T*>(x), n_rows, ldx, static_cast<T*>(y), ldy, n_threads);
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
#pragma omp parallel for schedule(static) num_threads(n_threads)
    for (int64_t i = 0; i < n_rows; ++i)
      for (int64_t first = 0; first < m.n_in; first += kLongestBlock) {
        const int n = static_cast<int>(smaller<int64_t>(kLongestBlock, m.n_in - first));
        unpack(m, rows == nullptr ? i : rows[i], first, n, n, static_cast<T*>(out) + i * m.n_in + first);
      }
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
