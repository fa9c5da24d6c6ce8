// Codes and scales of GGUF blocks for one instruction set; included by linear_cpu.h.
//
// Of 8-bit codes with scales elsewhere as well: kRows (less 128), kInt8, kFloat8. A weight is code * scale + minimum. `codes_of` returns 32 codes in the order of inputs, `block_scales` the other two. Types
// with IQ1 to IQ3 in their names look codes up in a grid, four (IQ3) or eight at a time.

typedef uint8_t Codes __attribute__((vector_size(32)));
typedef uint16_t CodePairs __attribute__((vector_size(32)));

// Inputs and bytes of a block, inputs with the same scale, offset of the codes, and whether there are minima.
struct BlockShape {
  int n, nbytes, group, codes;
  bool has_minima;
};
template <int kind>
constexpr BlockShape kBlock = {32, 32, 32, 0, false};  // codes of 8 bits with scales elsewhere
template <> constexpr BlockShape kBlock<kQ4_0> = {32, 18, 32, 2, false};
template <> constexpr BlockShape kBlock<kQ4_1> = {32, 20, 32, 4, true};
template <> constexpr BlockShape kBlock<kQ5_0> = {32, 22, 32, 6, false};
template <> constexpr BlockShape kBlock<kQ5_1> = {32, 24, 32, 8, true};
template <> constexpr BlockShape kBlock<kQ8_0> = {32, 34, 32, 2, false};
template <> constexpr BlockShape kBlock<kQ2_K> = {256, 84, 16, 16, true};
template <> constexpr BlockShape kBlock<kQ3_K> = {256, 110, 16, 32, false};
template <> constexpr BlockShape kBlock<kQ4_K> = {256, 144, 32, 16, true};
template <> constexpr BlockShape kBlock<kQ5_K> = {256, 176, 32, 48, true};
template <> constexpr BlockShape kBlock<kQ6_K> = {256, 210, 16, 0, false};
template <> constexpr BlockShape kBlock<kIq4Nl> = {32, 18, 32, 2, false};
template <> constexpr BlockShape kBlock<kIq4Xs> = {256, 136, 32, 8, false};
template <> constexpr BlockShape kBlock<kIq2Xxs> = {256, 66, 32, 2, false};
template <> constexpr BlockShape kBlock<kIq2Xs> = {256, 74, 16, 2, false};
template <> constexpr BlockShape kBlock<kIq3Xxs> = {256, 98, 32, 2, false};
template <> constexpr BlockShape kBlock<kIq1S> = {256, 50, 32, 2, false};
template <> constexpr BlockShape kBlock<kIq3S> = {256, 110, 32, 2, false};
template <> constexpr BlockShape kBlock<kIq2S> = {256, 82, 16, 2, false};
template <> constexpr BlockShape kBlock<kIq1M> = {256, 56, 16, 0, false};

inline Codes load_codes(const uint8_t* from) {
  Codes codes;
  memcpy(&codes, from, 32);
  return codes;
}

// Bits [from, from + n) of every byte, moved to bit `to`.
template <int n>
inline __attribute__((always_inline)) Codes bits_of(Codes bytes, int from, int to = 0) {
  const CodePairs pairs = (CodePairs)bytes;
  return (Codes)(from > to ? pairs >> (from - to) : pairs << (to - from)) & static_cast<uint8_t>(((1 << n) - 1) << to);
}

// Low nibbles of 16 bytes, then their high nibbles.
inline Codes nibbles_of(const uint8_t* from) {
#if LEVEL >= 1
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return (Codes)_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4)) & 15;
#else
  const Bytes both = load_bytes(from);
  return __builtin_shufflevector(both & 15, both >> 4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
#endif
}

typedef uint64_t Longs __attribute__((vector_size(32)));

// `number` in the bytes whose bit of a word is 1.
inline Codes bytes_where(uint32_t word, uint8_t number) {
#if LEVEL >= 2
  return (Codes)_mm256_maskz_set1_epi8(word, static_cast<char>(number));
#else
  const Longs places = {0, 0x0101010101010101, 0x1212121212121212, 0x1313131313131313};
  const Codes bits = (Codes)(Longs{} + 0x8040201008040201);
  const Codes bytes = __builtin_shuffle((Codes)(Words{} + word), (Codes)places);
  return (Codes)((bytes & bits) == bits) & number;
#endif
}
inline Codes fifth_bits(const uint8_t* from) { return bytes_where(word_at(from, 0), 16); }

// Numbers that a table of 16 has in the place of codes.
inline Codes look_up(const int8_t* table, Codes codes) {
#if LEVEL >= 1
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Codes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), (__m256i)codes);
#else
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(table[codes[i]]);
  return codes;
#endif
}

// Numbers of a grid at eight places of four codes: bytes, and with nine bits. Zen 4 gathers at half of the rate of single loads.
inline Codes points4(const uint8_t* grid, const uint8_t* places) {
  const auto at = [&](int k) { return word_at(grid, places[k]); };
  return (Codes)Words{at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)};
}
inline Codes points4(const uint8_t* grid, const uint8_t* low, uint32_t high) {
  const auto at = [&](int k) { return word_at(grid, low[k] | (high >> k & 1) << 8); };
  return (Codes)Words{at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)};
}
// Numbers of a grid at four places of eight codes.
inline Codes points8(const uint8_t* grid, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const auto at = [&](uint32_t place) {
    uint64_t point;
    memcpy(&point, grid + 8 * place, 8);
    return point;
  };
  return (Codes)Longs{at(a), at(b), at(c), at(d)};
}

// Codes with the signs of the bits of a word.
inline Codes with_signs(Codes codes, uint32_t signs) {
  const Codes negative = bytes_where(signs, 0xff);
  return (codes ^ negative) - negative;
}
// The signs of four bytes, of which each has seven bits and the eighth makes the number of ones even.
inline uint32_t even_signs(uint32_t bits) {
  uint32_t parity = bits ^ bits >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return bits | (parity & 0x01010101) << 7;
}
// Four numbers of seven bits, moved to bytes.
inline uint32_t spread_sevens(uint32_t bits) {
  return (bits & 0x7f) | (bits << 1 & 0x7f00) | (bits << 2 & 0x7f0000) | (bits << 3 & 0x7f000000);
}

inline uint32_t pair_at(const uint8_t* bytes) {
  uint16_t pair;
  memcpy(&pair, bytes, 2);
  return pair;
}

// What `codes_of` subtracts from the stored codes, which are unsigned then.
template <int kind>
constexpr int kOffset = kind == kQ4_0 ? 8 : kind == kQ5_0 ? 16 : kind == kQ3_K ? 4 : kind == kQ6_K ? 32 : 0;

// The codes of part i of a block, before the offset. grid: of the types that have one.
template <int kind>
inline __attribute__((always_inline)) Codes stored_codes(const uint8_t* grid, const uint8_t* b, int i) {
  const uint8_t* codes = b + kBlock<kind>.codes;
  switch (kind) {
    case kQ4_0: case kQ4_1: return nibbles_of(codes);
    case kQ5_0: return nibbles_of(codes) | fifth_bits(b + 2);
    case kQ5_1: return nibbles_of(codes) | fifth_bits(b + 4);
    case kInt8: case kFloat8: case kQ8_0: return load_codes(codes);
    case kRows: return load_codes(codes) ^ 0x80;
    case kQ2_K: return bits_of<2>(load_codes(codes + i / 4 * 32), i % 4 * 2);
    case kQ3_K: return bits_of<2>(load_codes(codes + i / 4 * 32), i % 4 * 2) | bits_of<1>(load_codes(b), i, 2);
    case kQ4_K: return bits_of<4>(load_codes(codes + i / 2 * 32), i % 2 * 4);
    case kQ5_K: return bits_of<4>(load_codes(codes + i / 2 * 32), i % 2 * 4) | bits_of<1>(load_codes(b + 16), i, 4);
    case kQ6_K:
      return bits_of<4>(load_codes(b + i / 4 * 64 + i % 2 * 32), i % 4 / 2 * 4) |
             bits_of<2>(load_codes(b + 128 + i / 4 * 32), i % 4 * 2, 4);
    case kIq4Nl: return look_up(kIq4, nibbles_of(codes));
    case kIq4Xs: return look_up(kIq4, nibbles_of(codes + 16 * i));
    case kIq2Xxs: {
      const uint8_t* low = codes + 8 * i;
      const uint32_t signs = even_signs(spread_sevens(word_at(low, 1)));
      return with_signs(points8(grid, low[0], low[1], low[2], low[3]), signs);
    }
    case kIq2Xs: {
      const auto pair = [&](int k) { return pair_at(codes + 8 * i + 2 * k); };
      const uint32_t signs = pair(0) >> 9 | pair(1) >> 9 << 8 | pair(2) >> 9 << 16 | pair(3) >> 9 << 24;
      return with_signs(points8(grid, pair(0) & 511, pair(1) & 511, pair(2) & 511, pair(3) & 511), even_signs(signs));
    }
    case kIq2S: {
      const uint32_t high = b[66 + i];
      const auto place = [&](int k) { return codes[4 * i + k] | (high >> 2 * k & 3) << 8; };
      return with_signs(points8(grid, place(0), place(1), place(2), place(3)), word_at(b + 34, i));
    }
    case kIq3Xxs: return with_signs(points4(grid, codes + 8 * i), even_signs(spread_sevens(word_at(b + 66, i))));
    case kIq3S: return with_signs(points4(grid, codes + 8 * i, b[66 + i]), word_at(b + 74, i));
    case kIq1S: {  // eighths, because a constant eighth is added to -1, 0 and 1
      const uint32_t high = pair_at(b + 34 + 2 * i);
      const auto place = [&](int k) { return codes[4 * i + k] | (high >> 3 * k & 7) << 8; };
      const uint8_t eighth = high & 0x8000 ? 0xff : 1;
      return points8(grid, place(0), place(1), place(2), place(3)) + eighth;
    }
    default: {  // IQ1_M: a bit for the sign of the eighth of every eight codes
      const uint32_t high = pair_at(b + 32 + 2 * i);
      const auto place = [&](int k) { return codes[4 * i + k] | (high >> 4 * k & 7) << 8; };
      const auto eighths = [&](int k) -> uint64_t { return (high >> 4 * k & 8 ? 0xffull : 1ull) * 0x0101010101010101; };
      return points8(grid, place(0), place(1), place(2), place(3)) +
             (Codes)Longs{eighths(0), eighths(1), eighths(2), eighths(3)};
    }
  }
}

// The signed codes of part i of a block.
template <int kind>
inline __attribute__((always_inline)) Codes codes_of(const uint8_t* grid, const uint8_t* b, int i) {
  return stored_codes<kind>(grid, b, i) - static_cast<uint8_t>(kOffset<kind>);
}

// Vector i of 32 signed codes as numbers.
inline __attribute__((always_inline)) V number_of(Codes codes, int i) {
#if LEVEL >= 2
  const __m256i all = (__m256i)codes;
  return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(i ? _mm256_extracti128_si256(all, 1) : _mm256_castsi256_si128(all)));
#elif LEVEL == 1
  const __m256i all = (__m256i)codes;
  const __m128i half = i / 2 ? _mm256_extracti128_si256(all, 1) : _mm256_castsi256_si128(all);
  return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(i % 2 ? _mm_unpackhi_epi64(half, half) : half));
#else
  return Signed()(reinterpret_cast<const uint8_t*>(&codes) + i * kLanes);
#endif
}

// Vector i of 32 codes of float8, divided by 256.
inline __attribute__((always_inline)) V small_float_of(Codes codes, int i) {
#if LEVEL >= 2
  const __m512i exponent = _mm512_set1_epi16(0x3f80);
  const __m512i bits = _mm512_slli_epi16(_mm512_cvtepi8_epi16((__m256i)codes), 7), sizes = _mm512_and_si512(bits, exponent);
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(sizes, exponent);
  const __m512i finite = _mm512_and_si512(bits, _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m512i halves = _mm512_mask_mov_epi16(finite, is_nan, _mm512_set1_epi16(0x7e00));
  return (V)_mm512_cvtph_ps(i ? _mm512_extracti64x4_epi64(halves, 1) : _mm512_castsi512_si256(halves));
#else
  return Float8()(reinterpret_cast<const uint8_t*>(&codes) + i * kLanes) * 0x1p-8f;
#endif
}

// 16 unsigned codes as numbers times a factor.
inline void scale_bytes(Bytes codes, float factor, float* out) {
  uint8_t bytes[16];
  store_bytes(bytes, codes);
  for (int i = 0; i < 16; i += kLanes) store(out + i, Unsigned()(bytes + i) * factor);
}

typedef uint32_t Quad __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
inline void store8(float* to, Floats numbers) { memcpy(to, &numbers, sizeof(numbers)); }

// The eight nibbles of a word, the lowest first, and signed words as numbers.
inline Words nibbles8(uint32_t word) { return (word - Words{}) >> Words{0, 4, 8, 12, 16, 20, 24, 28} & 15; }
inline Floats as_floats(Words words) { return __builtin_convertvector((Ints)words, Floats); }

// The scale and minimum of each group of a block of 256 inputs.
template <int kind>
inline void block_scales(const uint8_t* b, float* scales, float* minima) {
  switch (kind) {
    case kQ4_K: case kQ5_K: {
      // Two float16, then the scales and the minima of four groups, then four bits of the other scales and minima.
      const Quad words = (Quad)load_bytes(b), ends = __builtin_shuffle(words, Quad{1, 3, 2, 3}) >> Quad{0, 0, 0, 4};
      const Quad tops = __builtin_shuffle(words, Quad{1, 1, 2, 2}) >> 2 & Quad{0, 0x30303030, 0, 0x30303030};
      Floats numbers[2];
      scale_bytes((Bytes)((ends & Quad{0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f}) | tops), 1.0f, reinterpret_cast<float*>(numbers));
      store8(scales, numbers[0] * half_at(b));
      store8(minima, numbers[1] * -half_at(b + 2));
      return;
    }
    case kQ2_K: {
      const Bytes both = load_bytes(b);
      scale_bytes(both & 15, half_at(b + 80), scales);
      scale_bytes(both >> 4, -half_at(b + 82), minima);
      return;
    }
    case kQ3_K: {
      const uint32_t a = word_at(b + 96, 0), c = word_at(b + 96, 1);
      const Quad low = Quad{a, c, a, c} >> Quad{0, 0, 4, 4} & 0x0f0f0f0f;
      const Quad high = (word_at(b + 96, 2) - Quad{}) >> Quad{0, 2, 4, 6} & 0x03030303;
      uint8_t codes[16];
      store_bytes(codes, (Bytes)(low | high << 4) - 32);
      for (int i = 0; i < 16; i += kLanes) store(scales + i, Signed()(codes + i) * half_at(b + 108));
      return;
    }
    case kQ6_K:
      for (int i = 0; i < 16; i += kLanes) store(scales + i, Signed()(b + 192 + i) * half_at(b + 208));
      return;
    case kIq4Xs: {
      const Words high = (pair_at(b + 2) - Words{}) >> Words{0, 2, 4, 6, 8, 10, 12, 14} & 3;
      store8(scales, half_at(b) * as_floats((nibbles8(word_at(b + 4, 0)) | high << 4) - 32));
      return;
    }
    case kIq2Xxs: case kIq3Xxs:
      for (int i = 0; i < 8; ++i) {
        const uint32_t code = (kind == kIq2Xxs ? word_at(b + 2 + 8 * i, 1) : word_at(b + 66, i)) >> 28;
        scales[i] = half_at(b) * (0.5f + static_cast<float>(code)) * (kind == kIq2Xxs ? 0.25f : 0.5f);
      }
      return;
    case kIq2Xs: case kIq2S:
      for (int i = 0; i < 2; ++i) {
        const Floats codes = as_floats(nibbles8(word_at(b + (kind == kIq2Xs ? 66 : 74), i)));
        store8(scales + 8 * i, half_at(b) * (0.5f + codes) * 0.25f);
      }
      return;
    case kIq3S: return store8(scales, half_at(b) * as_floats(1 + 2 * nibbles8(word_at(b + 106, 0))));
    case kIq1S:
      for (int i = 0; i < 8; ++i)
        scales[i] = half_at(b) * static_cast<float>(2 * (pair_at(b + 34 + 2 * i) >> 12 & 7) + 1) * 0.125f;
      return;
    case kIq1M: {
      uint8_t bytes[2] = {};  // of the scale, in the highest four bits of four words
      for (int i = 0; i < 4; ++i) bytes[i / 2] |= b[49 + 2 * i] >> 4 << (i % 2 * 4);
      for (int i = 0; i < 16; ++i)
        scales[i] = half_at(bytes) * static_cast<float>(2 * (pair_at(b + 48 + i / 4 * 2) >> (i % 4 * 3) & 7) + 1) * 0.125f;
      return;
    }
  }
}

// Convert the float16 numbers at the start of n blocks, several at a time; zeros follow the last.
template <int nbytes>
inline void read_halves(const uint8_t* blocks, int n, float* out) {
#if LEVEL >= 2
  // The numbers of four or eight blocks are among the 64 words of two vectors.
  constexpr int step = nbytes / 2, n_blocks = 7 * step < 64 ? 8 : 4;
  static_assert(nbytes % 2 == 0 && (n_blocks - 1) * step < 64);
  const __m512i places = _mm512_castsi128_si512(
      _mm_setr_epi16(0, step, 2 * step, 3 * step, 4 * step & 63, 5 * step & 63, 6 * step & 63, 7 * step & 63));
  const auto read = [&](int i, int n_here) __attribute__((always_inline)) {
    const uint64_t mask = ~uint64_t{0} >> (63 - (n_here - 1) * step);
    const __m512i low = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), blocks);
    const __m512i high = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32), blocks + 64);
    const __m128i halves = _mm512_castsi512_si128(_mm512_permutex2var_epi16(low, places, high));
    if constexpr (n_blocks == 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
    else _mm_storeu_ps(out + i, _mm_cvtph_ps(halves));
  };
  for (int i = 0; i < n; i += n_blocks, blocks += n_blocks * nbytes)
    n - i >= n_blocks ? read(i, n_blocks) : read(i, n - i);
#else
  const auto read = [&](int i, bool is_full) __attribute__((always_inline)) {
    const auto bits = [&](int j) {
      uint16_t half = 0;
      if (is_full || i + j < n) memcpy(&half, blocks + nbytes * j, 2);
      return static_cast<int16_t>(half);
    };
#if LEVEL == 1
    const __m128i halves = _mm_setr_epi16(bits(0), bits(1), bits(2), bits(3), bits(4), bits(5), bits(6), bits(7));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
#else
    for (int j = 0; j < 8; ++j) out[i + j] = to_float(Half{static_cast<uint16_t>(bits(j))});
#endif
  };
  for (int i = 0; i < n; i += 8, blocks += 8 * nbytes) n - i >= 8 ? read(i, true) : read(i, false);
#endif
}

// Scales and minima of the groups of n inputs, at most kLongestBlock.
struct GroupScales {
  alignas(64) float scales[kLongestBlock / 16], minima[kLongestBlock / 16];
};

template <int kind>
inline void read_scales(const uint8_t* blocks, int n, GroupScales& to) {
  constexpr BlockShape shape = kBlock<kind>;
  if constexpr (shape.n == 32) {
    read_halves<shape.nbytes>(blocks, n / 32, to.scales);
    if constexpr (shape.has_minima) read_halves<shape.nbytes>(blocks + 2, n / 32, to.minima);
  } else {
    for (int k = 0; k < n; k += shape.n, blocks += shape.nbytes)
      block_scales<kind>(blocks, to.scales + k / shape.group, to.minima + k / shape.group);
  }
}

// code * scale + minimum, of which the product is exact. Without AVX-512 a broadcast number is a register.
inline __attribute__((always_inline)) V scale_and_shift(V codes, float scale, float minimum) {
  return LEVEL >= 2 ? codes * set1(scale) + set1(minimum) : fma(codes, set1(scale), set1(minimum));
}

// Vector i of part `part` of the inputs of `scales`. block: of the codes.
template <int kind>
inline __attribute__((always_inline)) V weight_of(Codes codes, const uint8_t* block, const GroupScales& scales, int part, int i) {
  const int group = part * (32 / kBlock<kind>.group) + i * kLanes / kBlock<kind>.group;
  // Vectors of a group load its scale again: AVX-512 broadcasts a factor in memory without an instruction, and 16 scales of
  // a block are too many for the registers of AVX2. Lookups in a grid need these registers.
  const GroupScales* from = &scales;
  const bool loads_again = LEVEL >= 2 ? kind < kIq2Xxs : kBlock<kind>.group == 16;
  if (loads_again && i * kLanes % kBlock<kind>.group != 0) asm("" : "+r"(from));
  V number;
  if constexpr (kind == kInt8 || kind == kQ8_0) number = Signed()(block + kBlock<kind>.codes + i * kLanes);
  else number = kind == kFloat8 ? small_float_of(codes, i) : number_of(codes, i);
  if constexpr (kBlock<kind>.has_minima) return scale_and_shift(number, from->scales[group], from->minima[group]);
  return number * set1(from->scales[group]);
}

#if LEVEL >= 3
// Values of the codes of a group, where 32 values of one or several groups are a table in a register; parts of a table.
template <int kind>
constexpr int kValues = kind == kQ2_K ? 4 : kind == kQ3_K ? 8 : kind == kQ5_0 || kind == kQ5_1 || kind == kQ5_K ? 32 : 0;
template <int kind>
constexpr int kTableParts = kBlock<kind>.group / kValues<kind>;

// The values of the groups from part `part` on, in bfloat16.
template <int kind>
inline __attribute__((always_inline)) V table_of_values(const GroupScales& scales, int part) {
  const auto values = [&](int first) __attribute__((always_inline)) {
    const VI places = VI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
    const V codes = (V)_mm512_cvtepi32_ps((__m512i)(places % kValues<kind> - kOffset<kind>));
    const auto spread = [&](const float* from) {
      from += part * (32 / kBlock<kind>.group);
      if (kValues<kind> == 32) return set1(*from);
      return (V)_mm512_permutexvar_ps((__m512i)(places / kValues<kind>), _mm512_castps256_ps512(_mm256_loadu_ps(from)));
    };
    const V products = codes * spread(scales.scales);
    return (__m512)(kBlock<kind>.has_minima ? products + spread(scales.minima) : products);
  };
  return (V)_mm512_cvtne2ps_pbh(values(16), values(0));
}

// The values of part i of a block. table: of its groups among others.
template <int kind>
inline __attribute__((always_inline)) __m512bh value_of(const uint8_t* block, int i, V table) {
  const int first = i % kTableParts<kind> * (32 / kTableParts<kind>), second = kBlock<kind>.group == 16 ? kValues<kind> : 0;
  const __m512i groups = _mm512_inserti64x4(_mm512_set1_epi16(first), _mm256_set1_epi16(first + second), 1);
  const __m512i places = _mm512_cvtepu8_epi16((__m256i)stored_codes<kind>(nullptr, block, i));
  return (__m512bh)_mm512_permutexvar_epi16(_mm512_or_si512(places, groups), (__m512i)table);
}
#endif

// Parts of a block whose code is compiled separately: without vectors of bytes they take minutes to compile.
constexpr int kUnrolled = LEVEL >= 1 ? 8 : 1;

// n inputs, whole blocks. P: their type.
template <int kind, typename P>
inline void unpack_blocks(const uint8_t* grid, const uint8_t* blocks, int n, P* out) {
  constexpr BlockShape shape = kBlock<kind>;
  GroupScales scales;
  read_scales<kind>(blocks, n, scales);
  for (int first = 0; first < n; first += shape.n, blocks += shape.nbytes)
#pragma GCC unroll kUnrolled
    for (int i = 0; i < shape.n / 32; ++i) {
      const Codes codes = codes_of<kind>(grid, blocks, i);
#pragma GCC unroll 4
      for (int k = 0; k < 32 / kLanes; ++k)
        store(out + first + i * 32 + k * kLanes, weight_of<kind>(codes, blocks, scales, first / 32 + i, k));
    }
}

// Call use.template operator()<kind>() for the kind of a matrix of blocks.
template <typename Use>
inline void with_blocks(int kind, Use use) {
  switch (kind) {
    case kQ4_0: return use.template operator()<kQ4_0>();
    case kQ4_1: return use.template operator()<kQ4_1>();
    case kQ5_0: return use.template operator()<kQ5_0>();
    case kQ5_1: return use.template operator()<kQ5_1>();
    case kQ8_0: return use.template operator()<kQ8_0>();
    case kQ2_K: return use.template operator()<kQ2_K>();
    case kQ3_K: return use.template operator()<kQ3_K>();
    case kQ4_K: return use.template operator()<kQ4_K>();
    case kQ5_K: return use.template operator()<kQ5_K>();
    case kQ6_K: return use.template operator()<kQ6_K>();
    case kIq4Nl: return use.template operator()<kIq4Nl>();
    case kIq4Xs: return use.template operator()<kIq4Xs>();
    case kIq2Xxs: return use.template operator()<kIq2Xxs>();
    case kIq2Xs: return use.template operator()<kIq2Xs>();
    case kIq3Xxs: return use.template operator()<kIq3Xxs>();
    case kIq1S: return use.template operator()<kIq1S>();
    case kIq3S: return use.template operator()<kIq3S>();
    case kIq2S: return use.template operator()<kIq2S>();
    case kIq1M: return use.template operator()<kIq1M>();
  }
}
