// Codes and scales of GGUF blocks for one instruction set; included by linear_cpu.h.
//
// A weight is code * scale + minimum. `codes_of` returns 32 codes in the order of inputs, `block_scales` the other two.

typedef uint8_t Codes __attribute__((vector_size(32)));
typedef uint16_t CodePairs __attribute__((vector_size(32)));

// Inputs and bytes of a block, inputs with the same scale, offset of the codes, and whether there are minima.
struct BlockShape {
  int n, nbytes, group, codes;
  bool has_minima;
};
template <int kind>
constexpr BlockShape kBlock = {};
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
  const Bytes both = load_bytes(from);
  return __builtin_shufflevector(both & 15, both >> 4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}

// 16 in the bytes whose bit of a word is 1.
inline Codes fifth_bits(const uint8_t* from) {
#if LEVEL >= 2
  return (Codes)_mm256_maskz_set1_epi8(word_at(from, 0), 16);
#else
  typedef uint64_t Longs __attribute__((vector_size(32)));
  const Longs places = {0, 0x0101010101010101, 0x1212121212121212, 0x1313131313131313};
  const Codes bits = (Codes)(Longs{} + 0x8040201008040201);
  const Codes bytes = __builtin_shuffle((Codes)(Words{} + word_at(from, 0)), (Codes)places);
  return (Codes)((bytes & bits) == bits) & 16;
#endif
}

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

// The signed codes of part i of a block.
template <int kind>
inline __attribute__((always_inline)) Codes codes_of(const uint8_t* b, int i) {
  const uint8_t* codes = b + kBlock<kind>.codes;
  switch (kind) {
    case kQ4_0: return nibbles_of(codes) - 8;
    case kQ4_1: return nibbles_of(codes);
    case kQ5_0: return (nibbles_of(codes) | fifth_bits(b + 2)) - 16;
    case kQ5_1: return nibbles_of(codes) | fifth_bits(b + 4);
    case kQ8_0: return load_codes(codes);
    case kQ2_K: return bits_of<2>(load_codes(codes + i / 4 * 32), i % 4 * 2);
    case kQ3_K: return (bits_of<2>(load_codes(codes + i / 4 * 32), i % 4 * 2) | bits_of<1>(load_codes(b), i, 2)) - 4;
    case kQ4_K: return bits_of<4>(load_codes(codes + i / 2 * 32), i % 2 * 4);
    case kQ5_K: return bits_of<4>(load_codes(codes + i / 2 * 32), i % 2 * 4) | bits_of<1>(load_codes(b + 16), i, 4);
    case kQ6_K:
      return (bits_of<4>(load_codes(b + i / 4 * 64 + i % 2 * 32), i % 4 / 2 * 4) |
              bits_of<2>(load_codes(b + 128 + i / 4 * 32), i % 4 * 2, 4)) - 32;
    case kIq4Nl: return look_up(kIq4, nibbles_of(codes));
    default: return look_up(kIq4, nibbles_of(codes + 16 * i));
  }
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
  V numbers;
  for (int k = 0; k < kLanes; ++k) numbers[k] = static_cast<float>(static_cast<int8_t>(codes[i * kLanes + k]));
  return numbers;
#endif
}

// 16 unsigned codes as numbers times a factor.
inline void scale_bytes(Bytes codes, float factor, float* out) {
  uint8_t bytes[16];
  store_bytes(bytes, codes);
  for (int i = 0; i < 16; i += kLanes) store(out + i, Unsigned()(bytes + i) * factor);
}

// The scale and minimum of each group of a block of 256 inputs.
template <int kind>
inline void block_scales(const uint8_t* b, float* scales, float* minima) {
  switch (kind) {
    case kQ4_K: case kQ5_K: {
      const uint32_t low = word_at(b + 4, 0), middle = word_at(b + 4, 1), high = word_at(b + 4, 2);
      const uint32_t words[4] = {low & 0x3f3f3f3f, (high & 0x0f0f0f0f) | (low >> 2 & 0x30303030), middle & 0x3f3f3f3f,
                                 (high >> 4 & 0x0f0f0f0f) | (middle >> 2 & 0x30303030)};
      float numbers[16];
      scale_bytes(load_bytes(reinterpret_cast<const uint8_t*>(words)), 1.0f, numbers);
      const float scale = half_at(b), minimum = -half_at(b + 2);
      for (int i = 0; i < 8; ++i) scales[i] = numbers[i] * scale, minima[i] = numbers[8 + i] * minimum;
      return;
    }
    case kQ2_K: {
      const Bytes both = load_bytes(b);
      scale_bytes(both & 15, half_at(b + 80), scales);
      scale_bytes(both >> 4, -half_at(b + 82), minima);
      return;
    }
    case kQ3_K: {
      const uint32_t a = word_at(b + 96, 0), c = word_at(b + 96, 1), high = word_at(b + 96, 2);
      const auto join = [](uint32_t low, uint32_t pairs) { return (low & 0x0f0f0f0f) | (pairs & 0x03030303) << 4; };
      const uint32_t words[4] = {join(a, high), join(c, high >> 2), join(a >> 4, high >> 4), join(c >> 4, high >> 6)};
      uint8_t codes[16];
      store_bytes(codes, load_bytes(reinterpret_cast<const uint8_t*>(words)) - 32);
      for (int i = 0; i < 16; i += kLanes) store(scales + i, Signed()(codes + i) * half_at(b + 108));
      return;
    }
    case kQ6_K:
      for (int i = 0; i < 16; i += kLanes) store(scales + i, Signed()(b + 192 + i) * half_at(b + 208));
      return;
    case kIq4Xs:
      for (int i = 0; i < 8; ++i) {
        const int low = b[4 + i / 2] >> (i % 2 * 4) & 15, high = b[2 + i / 4] >> (i % 4 * 2) & 3;
        scales[i] = half_at(b) * static_cast<float>((low | high << 4) - 32);
      }
      return;
  }
}

// Convert the float16 numbers at the start of n blocks, eight at a time.
template <int nbytes>
inline void read_halves(const uint8_t* blocks, int n, float* out) {
  const auto read = [&](int i, bool is_full) __attribute__((always_inline)) {
    const auto bits = [&](int j) {
      uint16_t half = 0;
      if (is_full || i + j < n) memcpy(&half, blocks + nbytes * j, 2);
      return static_cast<int16_t>(half);
    };
#if LEVEL >= 1
    const __m128i halves = _mm_setr_epi16(bits(0), bits(1), bits(2), bits(3), bits(4), bits(5), bits(6), bits(7));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
#else
    for (int j = 0; j < 8; ++j) out[i + j] = to_float(Half{static_cast<uint16_t>(bits(j))});
#endif
  };
  for (int i = 0; i < n; i += 8, blocks += 8 * nbytes) n - i >= 8 ? read(i, true) : read(i, false);
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

// Vector i of part `part` of the inputs of `scales`.
template <int kind>
inline __attribute__((always_inline)) V weight_of(Codes codes, const GroupScales& scales, int part, int i) {
  const int group = (part * 32 + i * kLanes) / kBlock<kind>.group;
  const V scale = set1(scales.scales[group]), number = number_of(codes, i);
  // The product is exact in float32 where there is a minimum.
  if constexpr (kBlock<kind>.has_minima) return fma(number, scale, set1(scales.minima[group]));
  return number * scale;
}

// Parts of a block whose code is compiled separately: without vectors of bytes they take minutes to compile.
constexpr int kUnrolled = LEVEL >= 1 ? 8 : 1;

// n inputs, whole blocks. P: their type.
template <int kind, typename P>
inline void unpack_blocks(const uint8_t* blocks, int n, P* out) {
  constexpr BlockShape shape = kBlock<kind>;
  GroupScales scales;
  read_scales<kind>(blocks, n, scales);
  for (int first = 0; first < n; first += shape.n, blocks += shape.nbytes)
#pragma GCC unroll kUnrolled
    for (int i = 0; i < shape.n / 32; ++i) {
      const Codes codes = codes_of<kind>(blocks, i);
#pragma GCC unroll 4
      for (int k = 0; k < 32 / kLanes; ++k)
        store(out + first + i * 32 + k * kLanes, weight_of<kind>(codes, scales, first / 32 + i, k));
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
  }
}
