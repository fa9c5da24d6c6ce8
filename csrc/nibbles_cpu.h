// Decoding of 4-bit codes in registers for one instruction set; included by linear_cpu.h.
//
// A chunk is one vector of codes, or half of one for bfloat16. Its values are vectors in the order of decoding, not in the
// order of inputs, which avoids shuffles. `chunk_order` states the input of each value, and products permute x likewise.
// Every value equals that of `unpack`. Parts of a chunk beyond the last input repeat the last part; their x is 0.

// Codes of a chunk that multiplies numbers of type X, and inputs with the codes of 16 bytes.
template <typename X>
constexpr int kChunk = sizeof(X) == 2 ? 64 : 8 * kLanes;
constexpr int kLongestChunk = kChunk<float>, kPart = 32;
constexpr int kMostParts = kLongestBlock / kPart, kMostTables = kLongestBlock / 64;

// Outputs between the scales that are read and those that are prefetched.
constexpr int kScalesAhead = 16;

// How a matrix is decoded.
enum Method {
  kNoMethod,     // by `unpack`, in the order of inputs
  kFloatTables,  // table of 16 products per group, float32
  kShortTables,  // the same in bfloat16: AVX2, or products of bfloat16
  kHalves,       // a fixed table, then the scale in the two bytes before every kPart inputs, float32
  kScaled,       // the same with prepared scales
  kShifted,      // the same and a minimum
  kTwiceShifted, // the same; 32 bytes have the low nibbles of a part and the high nibbles of the next
};

template <Method method>
constexpr bool has_minima = method == kShifted || method == kTwiceShifted;

// Codes of an output for at most kLongestBlock inputs, and the numbers that decode them.
struct Nibbles {
  const uint8_t* bytes;
  int tables_shift;                      // log2 of the 64s of inputs that share a table
  alignas(64) float scales[kMostParts];
  float minima[kMostParts];              // added
  uint8_t tables[kMostTables][64];
};

// Codes, scales and zero points of some outputs and inputs of a transposed matrix.
struct Gathered {
  uint32_t* words;  // (kGatheredOuts, stride), eight inputs each
  int stride;
  float *scales, *zeros;  // (groups, kGatheredOuts)
  int64_t first_out;
};

template <typename X>
Method method_of(const Matrix& m) {
  switch (m.kind) {
    case kQ4_0: case kIq4Nl: return sizeof(X) == 2 ? kScaled : kHalves;
    case kIq4Xs: return kScaled;
    case kQ4_1: return kShifted;
    case kQ4_K: return kTwiceShifted;
    case kE2m1: {
      const bool has_parts = m.block_in == kPart && m.block_out == 1 && m.n_in % kPart == 0;
      return m.scale_dtype == kExponent8 && has_parts ? kScaled : kNoMethod;
    }
    case kRows: case kColumns: case kAwq: case kNf4: break;
    default: return kNoMethod;
  }
  const bool is_even = m.block_in % 64 == 0 && (m.block_in % kLongestBlock == 0 || kLongestBlock % m.block_in == 0);
  if (m.n_in % kChunk<X> != 0 || m.bits != 4 || m.groups != nullptr || !is_even || m.block_out != 1) return kNoMethod;
  if (sizeof(X) == 2 || (LEVEL == 1 && m.product_dtype == kBFloat16 && m.kind != kNf4)) return kShortTables;
  return kFloatTables;
}

// The input of each value of a chunk.
template <typename X>
void chunk_order(const Matrix& m, Method method, int* inputs) {
  for (int k = 0; k < kChunk<X>; ++k) {
    const int vector = k / kLanes % 4, lane = k % kLanes, half = k / (kChunk<X> / 2);
    int byte = sizeof(X) == 2 ? k % kPart : 4 * lane + vector;
#if LEVEL == 1
    if (method != kFloatTables) byte = lane / 4 * 16 + vector / 2 * 8 + lane % 4 * 2 + vector % 2;
#endif
    const int width = m.kind == kQ4_K ? 32 : 16;
    if (m.kind == kNf4) inputs[k] = 2 * byte + 1 - half;
    else if (method == kFloatTables || method == kShortTables || m.kind == kE2m1) inputs[k] = 2 * byte + half;
    else inputs[k] = byte / width * 2 * width + half * width + byte % width;
  }
}

// Offset of the codes of part i of a block.
inline int part_offset(const Matrix& m, int i) {
  switch (m.kind) {
    case kQ4_0: case kIq4Nl: return 18 * i + 2;
    case kQ4_1: return 20 * i + 4;
    case kQ4_K: return i / 8 * 144 + 16 + i % 8 * 16;
    case kIq4Xs: return i / 8 * 136 + 8 + i % 8 * 16;
    default: return 16 * i;
  }
}

// Bytes before the block of input `first`.
inline int64_t block_offset(const Matrix& m, int64_t first) {
  switch (m.kind) {
    case kColumns: case kAwq: return 0;  // gathered
    case kQ4_0: case kIq4Nl: return first / 32 * 18;
    case kQ4_1: return first / 32 * 20;
    case kQ4_K: return first / 256 * 144;
    case kIq4Xs: return first / 256 * 136;
    default: return first / 2;
  }
}

// The upper halves of 16 numbers, as `decode` of AVX2 reads them.
#if LEVEL == 1
inline void write_table(V first, V second, uint8_t* table) {
  const __m256i a = _mm256_srli_epi32((__m256i)first, 16), b = _mm256_srli_epi32((__m256i)second, 16);
  const __m256i split = _mm256_shuffle_epi8(_mm256_packus_epi32(a, b),
                                            _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,  //
                                                             0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(table), _mm256_permutevar8x32_epi32(split, order));
}
#endif

constexpr float kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float kSignedCodes[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr float kUnsignedCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline const float* table_of(const Matrix& m) {
  if (m.kind == kE2m1) return kE2m1Values;
  if (m.kind == kNf4) return kNf4Values;
  if (m.kind == kQ4_0) return kSignedCodes;
  return m.kind == kIq4Nl || m.kind == kIq4Xs ? kIq4Values : kUnsignedCodes;
}

// How a matrix is decoded for products with numbers of type X.
template <typename X>
struct Order {
  Method method;
  int inputs[kLongestChunk];
  int offsets[2][kMostParts];  // of the parts of a block, and of the last block
  alignas(64) uint8_t table[64];

  explicit Order(const Matrix& m) : method(method_of<X>(m)) {
    if (method == kNoMethod) return;
    chunk_order<X>(m, method, inputs);
    const int n_last = static_cast<int>((m.n_in - 1) % kDepth<X> / kPart);
    for (int i = 0; i < kMostParts; ++i) {
      offsets[0][i] = part_offset(m, i);
      offsets[1][i] = part_offset(m, smaller(i, n_last));
    }
    const float* numbers = table_of(m);
#if LEVEL == 1
    if (method != kFloatTables) {
      write_table(load(numbers), load(numbers + 8), table);
      return;
    }
#endif
    memcpy(table, numbers, 64);
  }

  // Whether both read the inputs in the same order.
  bool is_same(const Order& other) const {
    if (method == kNoMethod || other.method == kNoMethod) return method == other.method;
    return memcmp(inputs, other.inputs, sizeof(int) * kChunk<X>) == 0;
  }
};

// Convert n numbers from place `first` on. out: writable by whole vectors.
inline void read_numbers(const void* from, int dtype, int64_t first, int n, float* out) {
  int i = 0;
  const auto read = [&](auto type) {
    const auto* numbers = static_cast<const decltype(type)*>(from) + first;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load(numbers + i));
#if LEVEL >= 2
    if (i < n) store(out + i, load_first(numbers + i, n - i)), i = n;
#endif
  };
  if (dtype == kBFloat16) read(BFloat16{});
  if (dtype == kFloat16) read(Half{});
  for (; i < n; ++i) out[i] = number(from, dtype, first + i);
}

template <Method method, int dtype>
void write_group_tables(const Matrix& m, const Gathered& gathered, int64_t row, int64_t first, int n, Nibbles& to) {
  // A power of two, or several kLongestBlock. Divisions take as long as a table.
  const int group = static_cast<int>(smaller<int64_t>(m.block_in, kLongestBlock)), shift = __builtin_ctz(group);
  const int n_groups = (n + group - 1) >> shift;
  const int64_t first_group = m.block_in == group ? first >> shift : first / m.block_in;
  float own_scales[kMostTables + kLanes], own_zeros[kMostTables + kLanes];
  const float offset = static_cast<float>(m.offset), *scales = own_scales, *zeros = &offset;
  int stride = 1, zero_stride = 0;
  if (m.kind == kColumns || m.kind == kAwq) {
    scales = gathered.scales + row - gathered.first_out, zeros = gathered.zeros + row - gathered.first_out;
    stride = zero_stride = kGatheredOuts;
  } else {
    const int64_t place = row * m.grid_columns + first_group, itemsize = m.scale_dtype == kFloat32 ? 4 : 2;
    read_numbers(m.scales, m.scale_dtype, place, n_groups, own_scales);
    __builtin_prefetch(static_cast<const char*>(m.scales) + (place + kScalesAhead * m.grid_columns) * itemsize);
    if (m.zeros != nullptr) {
      // Zero points that are packed along outputs have the same place in adjacent words.
      const uint8_t* words = m.zeros + 4 * (row / 8 * m.grid_columns + first_group);
      const auto zero = [&](int g) { return ((word_at(words, g) >> row % 8 * 4) + static_cast<uint32_t>(m.zero_plus)) & 15; };
      for (int g = 0; g < n_groups; ++g)
        own_zeros[g] = m.zero_order == kColumns ? static_cast<float>(zero(g)) : zero_at(m, row, first_group + g);
      zeros = own_zeros, zero_stride = 1;
    }
  }
  const float* codes = table_of(m);
  for (int g = 0; g < n_groups; ++g) {
    const V scale = set1(scales[g * stride]), zero = set1(zeros[g * zero_stride]);
    const auto values = [&](int k) { return (load(codes + k) - zero) * scale; };
#if LEVEL == 1
    if constexpr (method == kShortTables) {
      write_table(rounding_to_bfloat16(values(0)), rounding_to_bfloat16(values(8)), to.tables[g]);
      continue;
    }
#elif LEVEL >= 3
    if constexpr (method == kShortTables) {  // twice: the fifth bit of a place is another code's
      const V numbers = dtype == kFloat16 ? rounded<dtype>(values(0)) : values(0);
      // Subnormal values become 0, as in `_mm512_dpbf16_ps`.
      const __m512bh table = _mm512_cvtne2ps_pbh((__m512)numbers, (__m512)numbers);
      memcpy(to.tables[g], &table, 64);
      continue;
    }
#endif
    float* table = reinterpret_cast<float*>(to.tables[g]);
    for (int k = 0; k < 16; k += kLanes) store(table + k, rounded<dtype>(values(k)));
  }
  to.tables_shift = shift - 6;
}

inline void write_scales(const Matrix& m, int64_t row, int64_t first, int n, Nibbles& to) {
  const int n_parts = n / kPart;
  // Numbers of parts beyond the last input.
  for (int i = n_parts; i % (kLongestChunk / kPart); ++i) to.scales[i] = to.minima[i] = 0.0f;
  switch (m.kind) {
    case kE2m1: {
      const uint8_t* exponents = static_cast<const uint8_t*>(m.scales) + row * m.grid_columns + first / kPart;
      for (int i = 0; i < n_parts; ++i) to.scales[i] = number(exponents, kExponent8, i);
      return;
    }
    case kQ4_0: case kIq4Nl: read_halves<18>(to.bytes, n_parts, to.scales); return;
    case kQ4_1:
      read_halves<20>(to.bytes, n_parts, to.scales);
      read_halves<20>(to.bytes + 2, n_parts, to.minima);
      return;
    case kQ4_K:
      for (int i = 0; i < n_parts; i += 8) block_scales<kQ4_K>(to.bytes + i / 8 * 144, to.scales + i, to.minima + i);
      return;
    case kIq4Xs:
      for (int i = 0; i < n_parts; i += 8) block_scales<kIq4Xs>(to.bytes + i / 8 * 136, to.scales + i, to.minima + i);
      return;
  }
}

// Read the scales and zero points of n_groups groups of n_outs outputs of a transposed matrix.
inline void gather_groups(const Matrix& m, int64_t group, int n_groups, int n_outs, const Gathered& to) {
  for (int g = 0; g < n_groups; ++g) {
    const int64_t place = (group + g) * m.grid_columns + to.first_out;
    read_numbers(m.scales, m.scale_dtype, place, n_outs, to.scales + g * kGatheredOuts);
    float* zeros = to.zeros + g * kGatheredOuts;
    const bool is_packed = m.zeros != nullptr && m.bits == 4 && (m.zero_order == kRows || m.zero_order == kAwq);
    if (!is_packed) {
      for (int i = 0; i < n_outs; ++i) zeros[i] = zero_at(m, group + g, to.first_out + i);
      continue;
    }
    const Words shifts = m.zero_order == kAwq ? Words{0, 16, 4, 20, 8, 24, 12, 28} : Words{0, 4, 8, 12, 16, 20, 24, 28};
    const int64_t first = (group + g) * ((m.grid_columns + 7) / 8) + to.first_out / 8;
    for (int i = 0; i < n_outs; i += 8) {
      const Words word = word_at(m.zeros, first + i / 8) - Words{};
      store8(zeros + i, as_floats(((word >> shifts) + static_cast<uint32_t>(m.zero_plus)) & 15));
    }
  }
}

inline void gather_panel(const Matrix& m, bool has_groups, int n_outs, int64_t first, int n, const Gathered& to) {
  gather(m, to.first_out, n_outs, first, n, to.stride, to.words);
  const int64_t group = first / m.block_in;
  if (has_groups) gather_groups(m, group, static_cast<int>((first + n - 1) / m.block_in - group + 1), n_outs, to);
}

// Prepare the codes of n inputs of an output from input `first` on.
template <Method method>
inline void prepare(const Matrix& m, const Gathered& gathered, int64_t row, int64_t first, int n, Nibbles& to) {
  if (m.kind == kColumns || m.kind == kAwq)
    to.bytes = reinterpret_cast<uint8_t*>(gathered.words + (row - gathered.first_out) * gathered.stride);
  else
    to.bytes = m.codes + row * m.row_nbytes + block_offset(m, first);
  if constexpr (method == kScaled || has_minima<method>) {
    write_scales(m, row, first, n, to);
  } else if constexpr (method != kHalves) {
    if (m.product_dtype == kBFloat16) return write_group_tables<method, kBFloat16>(m, gathered, row, first, n, to);
    if constexpr (method == kFloatTables || LEVEL >= 3) {
      if (m.product_dtype == kFloat16) return write_group_tables<method, kFloat16>(m, gathered, row, first, n, to);
      write_group_tables<method, kFloat32>(m, gathered, row, first, n, to);
    }
  }
}

// The words of a chunk: as many 16-byte parts as a vector holds.
inline auto load_words(const uint8_t* bytes, const int* offsets) {
#if LEVEL >= 1
  const auto part = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + offsets[i])); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(part(0)), part(1), 1);
#if LEVEL >= 2
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(part(2)), part(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#else
  return low;
#endif
#else
  Words words;
  for (int i = 0; i < 2; ++i) memcpy(reinterpret_cast<uint8_t*>(&words) + 16 * i, bytes + offsets[i], 16);
  return words;
#endif
}

// One number for each part of a chunk; of kTwiceShifted for those with low or high nibbles.
template <Method method>
inline V widen_parts(const float* parts, int half) {
  constexpr bool is_twice = method == kTwiceShifted;
#if LEVEL >= 2
  const VI pairs = VI{0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2} + half;
  const VI lanes = is_twice ? pairs : VI{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  return (V)_mm512_permutexvar_ps((__m512i)lanes, _mm512_castps128_ps512(_mm_loadu_ps(parts)));
#else
  if constexpr (is_twice) return set1(parts[half]);
#if LEVEL == 1
  return (V)_mm256_blend_ps(_mm256_broadcast_ss(parts), _mm256_broadcast_ss(parts + 1), 0xf0);
#else
  V wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = parts[i / 4];
  return wide;
#endif
#endif
}

// The numbers of the parts of a chunk that multiply its codes.
template <Method method>
inline V scales_of(const Nibbles& nibbles, int half, int part, const int* offsets) {
  if constexpr (method != kHalves) return widen_parts<method>(nibbles.scales + part, half);
  const auto bits = [&](int i) {
    int16_t scale;
    memcpy(&scale, nibbles.bytes + offsets[i] - 2, 2);
    return scale;
  };
#if LEVEL >= 2
  const auto pair = [&](int i) { return _mm_unpacklo_epi64(_mm_set1_epi16(bits(i)), _mm_set1_epi16(bits(i + 1))); };
  return (V)_mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(pair(0)), pair(2), 1));
#elif LEVEL == 1
  return (V)_mm256_cvtph_ps(_mm_unpacklo_epi64(_mm_set1_epi16(bits(0)), _mm_set1_epi16(bits(1))));
#else
  const float both[2] = {to_float(Half{static_cast<uint16_t>(bits(0))}), to_float(Half{static_cast<uint16_t>(bits(1))})};
  return widen_parts<method>(both, half);
#endif
}

// Pass vectors i of the values of a chunk of N outputs to use(i, values), in order. Outputs take turns: the sums of an output
// wait for each other.
template <Method method, int N, typename Use>
inline __attribute__((always_inline)) void decode(const Nibbles* nibbles, const Order<float>& order, bool is_last, int chunk,
                                                  Use use) {
  constexpr bool is_scaled = method == kHalves || method == kScaled || has_minima<method>;
  const int part = chunk * (kChunk<float> / kPart), *offsets = order.offsets[is_last] + part;
  decltype(load_words(nullptr, nullptr)) words[N];
  V scales[N], minima[N];
  const uint8_t* tables[N];
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) {
    words[j] = load_words(nibbles[j].bytes, offsets);
    tables[j] = is_scaled ? order.table : nibbles[j].tables[chunk * (kChunk<float> / 64) >> nibbles[j].tables_shift];
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      if (half > 0 && method != kTwiceShifted) continue;
      if (is_scaled) scales[j] = scales_of<method>(nibbles[j], half, part, offsets);
      if (has_minima<method>) minima[j] = widen_parts<method>(nibbles[j].minima + part, half);
    }
    const auto scaled = [&](int j, V value) __attribute__((always_inline)) {
      if constexpr (method == kHalves || method == kScaled) return value * scales[j];
      if constexpr (has_minima<method>) return fma(value, scales[j], minima[j]);
      return value;
    };
#if LEVEL == 1
    if constexpr (method != kFloatTables) {
      const __m256i mask = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
      __m256i halves[N][2];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        const __m128i* table = reinterpret_cast<const __m128i*>(tables[j]);
        const __m256i nibble = _mm256_and_si256(half ? _mm256_srli_epi16(words[j], 4) : words[j], mask);
        const __m256i a = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table)), nibble);
        const __m256i b = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table + 1)), nibble);
        halves[j][0] = _mm256_unpacklo_epi8(a, b), halves[j][1] = _mm256_unpackhi_epi8(a, b);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        V values[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
          const __m256i both = halves[j][i / 2];
          values[j] = scaled(j, (V)(i % 2 ? _mm256_and_si256(both, upper) : _mm256_slli_epi32(both, 16)));
        }
        use(4 * half + i, values);
      }
      continue;
    }
#endif
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      V values[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        const float* numbers = reinterpret_cast<const float*>(tables[j]);
        const int shift = 8 * i + 4 * half;
#if LEVEL >= 2
        const __m512i index = _mm512_srli_epi32(words[j], shift);
        __m512 value = _mm512_permutexvar_ps(index, _mm512_loadu_ps(numbers));
        if constexpr (!is_scaled) {  // the upper eight lanes may be of the next group
          const uint8_t* next = nibbles[j].tables[(chunk * 2 + 1) >> nibbles[j].tables_shift];
          value = _mm512_mask_permutexvar_ps(value, 0xff00, index, _mm512_loadu_ps(next));
        }
        values[j] = scaled(j, (V)value);
#elif LEVEL == 1
        const __m256i index = _mm256_srli_epi32(words[j], shift);
        const __m256 low = _mm256_permutevar8x32_ps((__m256)load(numbers), index);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)load(numbers + 8), index);
        values[j] = scaled(j, (V)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(words[j], 28 - shift)));
#else
        V value;
        for (int lane = 0; lane < kLanes; ++lane) value[lane] = numbers[words[j][lane] >> shift & 15];
        values[j] = scaled(j, value);
#endif
      }
      use(4 * half + i, values);
    }
  }
}

#if LEVEL >= 3
// The same for products of bfloat16: two vectors of 32 values.
template <Method method, int N, typename Use>
inline __attribute__((always_inline)) void decode(const Nibbles* nibbles, const Order<BFloat16>& order, bool is_last, int chunk,
                                                  Use use) {
  const int part = 2 * chunk, *offsets = order.offsets[is_last] + part;
  // A table has 16 values of each of two parts. The second part, or the high nibbles, look up in its upper half.
  const __m512i mask = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm512_castsi512_si256(upper), 1);
  __m512i tables[N], places[2][N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    const auto codes = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles[j].bytes + offsets[i])); };
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(codes(0)), codes(1), 1));
    const __m512i high = _mm512_srli_epi16(words, 4);
    if constexpr (method == kShortTables) {
      tables[j] = _mm512_loadu_si512(nibbles[j].tables[chunk >> nibbles[j].tables_shift]);
      places[0][j] = words, places[1][j] = high;
      continue;
    }
    const auto values = [&](int i) {
      const V numbers = load(reinterpret_cast<const float*>(order.table));
      const float scale = nibbles[j].scales[part + i];
      if constexpr (has_minima<method>) return (__m512)scale_and_shift(numbers, scale, nibbles[j].minima[part + i]);
      return (__m512)(numbers * set1(scale));
    };
    // Subnormal values become 0, as in `_mm512_dpbf16_ps`.
    tables[j] = (__m512i)_mm512_cvtne2ps_pbh(values(1), values(0));
    const __m512i low = _mm512_and_si512(words, mask);
    places[0][j] = method == kTwiceShifted ? low : _mm512_or_si512(low, second);
    places[1][j] = _mm512_or_si512(high, method == kTwiceShifted ? upper : second);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m512bh values[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) values[j] = (__m512bh)_mm512_permutexvar_epi16(places[half][j], tables[j]);
    use(half, values);
  }
}
#endif

// Unpack n inputs of an output in the order of decoding.
template <Method method, typename X>
inline void unpack_chunks(const Matrix& m, const Order<X>& order, const Gathered& gathered, int64_t row, int64_t first, int n,
                          X* out) {
  Nibbles nibbles;
  prepare<method>(m, gathered, row, first, n, nibbles);
  for (int chunk = 0; chunk * kChunk<X> < n; ++chunk)
    decode<method, 1>(&nibbles, order, first + kDepth<X> > m.n_in, chunk, [&](int i, const auto& values) __attribute__((always_inline)) {
      memcpy(out + chunk * kChunk<X> + i * (sizeof(values) / sizeof(X)), values, sizeof(values));
    });
}
