// Products of inputs that are rounded to 8 bits, as in llama.cpp, for one instruction set; included by linear_cpu.h.
//
// 32 inputs share a scale, their largest size / 127. The integer products of the codes of a group of weights are exact; their
// sums, multiplied by both scales, are added in float32 and in order. The minima of weights multiply the sums of inputs. A row's
// result does not depend on its neighbours.

// Rows and outputs of a register tile, outputs that are written at a time, and inputs between two sums of the lanes.
// Sums of more outputs than kSummedOuts of four rows do not fit into the registers.
constexpr int kRoundedRows = 4, kRoundedOuts = 4, kSummedOuts = LEVEL >= 2 ? 4 : 2, kRoundedLine = 16 + kLanes, kRoundedDepth = kLongestBlock;

inline bool is_rounded(const Matrix& m) {
  return m.rounds_inputs && m.kind != kFloat8 && (m.kind >= kQ4_0 || has_bytes<float>(m));
}

// A rounded row: codes (n_in), the scale and the sum of every 32 inputs and the sum of every 16, zeros behind them.
struct RoundedRow {
  uint8_t* codes;
  float *scales, *sums, *half_sums;

  static int64_t padded(int64_t n_in) { return (n_in + 255) / 256 * 256; }
  static int64_t nbytes(int64_t n_in) { return padded(n_in) * 3 / 2; }

  RoundedRow(char* memory, int64_t n_in) {
    const int64_t n = padded(n_in);
    codes = reinterpret_cast<uint8_t*>(memory);
    scales = reinterpret_cast<float*>(memory + n);
    sums = scales + n / 32, half_sums = sums + n / 32;
  }
};

// Round a row of n_in inputs, a multiple of 32.
template <typename T>
void round_row(const T* x, int64_t n_in, const RoundedRow& to) {
  typedef int8_t Some __attribute__((vector_size(kLanes)));
  const V magic = set1(0x1.8p23f);  // rounds to an integer, which then stands in the last bits
  for (int64_t part = 0; part < RoundedRow::padded(n_in) / 32; ++part) {
    V numbers[32 / kLanes], largest = {}, poison = {};
    for (int i = 0; i < 32 / kLanes; ++i) {
      numbers[i] = 32 * part < n_in ? load(x + 32 * part + i * kLanes) : V{};
      const V size = (V)((VI)numbers[i] & 0x7fffffff);
      largest = size > largest ? size : largest;
      poison += numbers[i] - numbers[i];  // NaN if one is NaN or infinite
    }
    const float scale = max_of(largest) / 127.0f + sum_of(poison);
    const V inverse = set1(scale >= 0x1p-126f ? 1.0f / scale : 0.0f);
    int8_t codes[32];
    for (int i = 0; i < 32 / kLanes; ++i) {
      const Some some = __builtin_convertvector((VI)(numbers[i] * inverse + magic) - (VI)magic, Some);
      memcpy(codes + i * kLanes, &some, kLanes);
    }
    int sums[2] = {};
    for (int i = 0; i < 32; ++i) sums[i / 16] += codes[i];
    memcpy(to.codes + 32 * part, codes, 32);
    to.scales[part] = scale, to.sums[part] = scale * static_cast<float>(sums[0] + sums[1]);
    for (int i = 0; i < 2; ++i) to.half_sums[2 * part + i] = scale * static_cast<float>(sums[i]);
  }
}

// Round rows [first, last), one behind the other.
template <typename T>
void round_rows(const T* x, int64_t ldx, int64_t n_in, int64_t first, int64_t last, char* out) {
  for (int64_t i = first; i < last; ++i) round_row(x + i * ldx, n_in, RoundedRow(out + i * RoundedRow::nbytes(n_in), n_in));
}

inline Floats fma8(Floats a, Floats b, Floats c) {
#if LEVEL >= 1
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
inline Floats load8(const float* from) {
  Floats numbers;
  memcpy(&numbers, from, sizeof(numbers));
  return numbers;
}

// The sum of eight lanes: halves first, then quarters, and so on.
inline float sum8(Floats x) {
  const Floats halves = x + __builtin_shuffle(x, Words{4, 5, 6, 7, 0, 1, 2, 3});
  const Floats quarters = halves + __builtin_shuffle(halves, Words{2, 3, 0, 1, 6, 7, 4, 5});
  return quarters[0] + quarters[1];
}

// Whether stored codes are unsigned and below 128; their offset counts as a minimum.
template <int kind>
constexpr bool is_unsigned = kBlock<kind>.has_minima || kOffset<kind> > 0;

// Sums of four neighbouring products of codes of weights and signed codes from -127 on, as floats.
template <bool is_unsigned>
inline __attribute__((always_inline)) Floats multiply_codes(Codes w, Codes x) {
#if LEVEL >= 1
  const __m256i sizes = is_unsigned ? (__m256i)w : _mm256_abs_epi8((__m256i)w);
  const __m256i signed_x = is_unsigned ? (__m256i)x : _mm256_sign_epi8((__m256i)x, (__m256i)w);
#if LEVEL >= 3
  const __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), sizes, signed_x);
#else
  const __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, signed_x), _mm256_set1_epi16(1));
#endif
  return (Floats)_mm256_cvtepi32_ps(sums);
#else
  Ints sums;
  for (int i = 0; i < 8; ++i) {
    sums[i] = 0;
    for (int k = 4 * i; k < 4 * i + 4; ++k) sums[i] += static_cast<int8_t>(w[k]) * static_cast<int8_t>(x[k]);
  }
  return __builtin_convertvector(sums, Floats);
#endif
}

// A number in eight lanes; `number - Floats{}` becomes a scalar product and a shuffle.
inline Floats repeat8(const float* number) {
#if LEVEL >= 1
  return (Floats)_mm256_broadcast_ss(number);
#else
  return *number - Floats{};
#endif
}

// The scales of the weights of a part, one or two, in the lanes of `multiply_codes`.
template <int kind>
inline __attribute__((always_inline)) Floats part_scales(const GroupScales& scales, int part) {
  if constexpr (kBlock<kind>.group == 32) return repeat8(scales.scales + part);
  const float* both = scales.scales + 2 * part;
  return __builtin_shuffle(repeat8(both), repeat8(both + 1), Words{0, 1, 2, 3, 12, 13, 14, 15});
}

// Codes and scales of a tile of outputs.
struct RoundedTile {
  const uint8_t* blocks[kRoundedOuts];
  GroupScales scales[kRoundedOuts];
  Codes codes[kRoundedOuts][kRoundedDepth / 32];
};

// Adds n inputs from input `first` on to M rows and N outputs of a tile from output `from` on: lines (M, kRoundedLine). Codes
// are those of the tile, or are read from blocks, with prefetches `ahead` bytes behind them.
template <int kind, int M, int N, bool is_stored>
void add_rounded(const uint8_t* grid, const RoundedTile& tile, int from, const RoundedRow* rows, int64_t first, int n, int64_t ahead,
                 float* lines) {
  constexpr BlockShape shape = kBlock<kind>;
  constexpr int step = is_stored ? 1 : shape.n / 32;
  const uint8_t* blocks[N];
  for (int j = 0; j < N; ++j) blocks[j] = tile.blocks[from + j];
  const int64_t first_part = first / 32;
  Floats sums[M * N] = {};
  for (int part = 0; part < n / 32; part += step) {
#pragma GCC unroll 8
    for (int i = 0; i < step; ++i) {
      Codes x[M];
#pragma GCC unroll 4
      for (int row = 0; row < M; ++row) x[row] = load_codes(rows[row].codes + first + (part + i) * 32);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        const Codes w = is_stored ? tile.codes[from + j][part] : stored_codes<kind>(grid, blocks[j], i);
        const Floats scale = part_scales<kind>(tile.scales[from + j], part + i);
#pragma GCC unroll 4
        for (int row = 0; row < M; ++row) {
          const Floats both = scale * repeat8(rows[row].scales + first_part + part + i);
          sums[row * N + j] = fma8(multiply_codes<is_unsigned<kind>>(w, x[row]), both, sums[row * N + j]);
        }
      }
    }
    if constexpr (!is_stored)
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        for (int i = 0; i < shape.nbytes; i += 64) __builtin_prefetch(blocks[j] + ahead + i, 0, 2);
        blocks[j] += shape.nbytes;
      }
  }
#pragma GCC unroll 4
  for (int row = 0; row < M; ++row)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      Floats sum = sums[row * N + j];
      if constexpr (is_unsigned<kind>) {
        const float* numbers = shape.group == 32 ? rows[row].sums + first_part : rows[row].half_sums + 2 * first_part;
        for (int i = 0; i < n / shape.group; i += 8) sum = fma8(load8(tile.scales[from + j].minima + i), load8(numbers + i), sum);
      }
      float& total = lines[row * kRoundedLine + from + j];
      total = (first == 0 ? 0.0f : total) + sum8(sum);
    }
}

// Unpacks the codes of n inputs of a tile.
template <int kind>
inline void unpack_codes(const uint8_t* grid, RoundedTile& tile, int n, int64_t ahead) {
  constexpr int step = kBlock<kind>.n / 32;
  for (int j = 0; j < kRoundedOuts; ++j)
    for (int part = 0; part < n / 32; part += step, tile.blocks[j] += kBlock<kind>.nbytes) {
      for (int i = 0; i < kBlock<kind>.nbytes; i += 64) __builtin_prefetch(tile.blocks[j] + ahead + i, 0, 2);
#pragma GCC unroll kUnrolled
      for (int i = 0; i < step; ++i) tile.codes[j][part + i] = stored_codes<kind>(grid, tile.blocks[j], i);
    }
}

// Outputs [first_out, last_out) of all rows. x: rounded rows, one behind the other.
template <int kind, typename T>
void multiply_rounded(const Matrix& m, const char* x, int n_rows, int64_t first_out, int64_t last_out, T* y) {
  constexpr BlockShape shape = kBlock<kind>;
  // A kind with the same groups, whose code multiplies the tile's codes.
  constexpr int like = shape.group == 32 ? (is_unsigned<kind> ? kQ4_1 : kQ8_0) : (is_unsigned<kind> ? kQ2_K : kIq2S);
  float* lines = reinterpret_cast<float*>(panel_memory.reserve(kMostRows * kRoundedLine * sizeof(float)));
  const int64_t ahead = ahead_of_outs(m, kRoundedOuts), row_nbytes = RoundedRow::nbytes(m.n_in);
  const auto row_at = [&](int row) { return RoundedRow(const_cast<char*>(x) + row * row_nbytes, m.n_in); };
  RoundedTile tile;
  for (int64_t line_out = first_out; line_out < last_out; line_out += 16) {
    const int n_outs = static_cast<int>(smaller<int64_t>(16, last_out - line_out));
    for (int out = 0; out < n_outs; out += kRoundedOuts)
      for (int64_t first = 0; first < m.n_in; first += kRoundedDepth) {
        const int n = static_cast<int>(smaller<int64_t>(kRoundedDepth, m.n_in - first));
        for (int j = 0; j < kRoundedOuts; ++j) {
          const int64_t row = line_out + smaller(out + j, n_outs - 1);
          tile.blocks[j] = m.codes + row * m.row_nbytes + first / shape.n * shape.nbytes;
          if constexpr (kind >= kQ4_0) read_scales<kind>(tile.blocks[j], n, tile.scales[j]);
          else read_scales(m, row, first, n, tile.scales[j]);
          if constexpr (is_unsigned<kind>) {
            GroupScales& numbers = tile.scales[j];
            if constexpr (!shape.has_minima)
              for (int i = 0; i < n / shape.group; ++i) numbers.minima[i] = numbers.scales[i] * -kOffset<kind>;
            for (int i = n / shape.group; i % 8; ++i) numbers.minima[i] = 0.0f;
          }
        }
        if (n_rows == 1) {
          const RoundedRow row = row_at(0);
          add_rounded<kind, 1, kRoundedOuts, false>(grid_of(m), tile, 0, &row, first, n, ahead, lines + out);
          continue;
        }
        unpack_codes<kind>(grid_of(m), tile, n, ahead);
        for (int i = 0; i < n_rows; i += kRoundedRows) {
          const RoundedRow rows[] = {row_at(i), row_at(smaller(i + 1, n_rows - 1)), row_at(smaller(i + 2, n_rows - 1)),
                                     row_at(smaller(i + 3, n_rows - 1))};
          float* to = lines + i * kRoundedLine + out;
          for (int j = 0; j < kRoundedOuts; j += kSummedOuts) switch (smaller(kRoundedRows, n_rows - i)) {
              case 1: add_rounded<like, 1, kSummedOuts, true>(nullptr, tile, j, rows, first, n, 0, to); break;
              case 2: add_rounded<like, 2, kSummedOuts, true>(nullptr, tile, j, rows, first, n, 0, to); break;
              case 3: add_rounded<like, 3, kSummedOuts, true>(nullptr, tile, j, rows, first, n, 0, to); break;
              default: add_rounded<like, 4, kSummedOuts, true>(nullptr, tile, j, rows, first, n, 0, to);
            }
        }
      }
    for (int row = 0; row < n_rows; ++row) write_line(m, lines + row * kRoundedLine, line_out, n_outs, y + row * m.ldy + line_out);
  }
}

template <typename T>
void multiply_rounded(const Matrix& m, const char* x, int n_rows, int64_t first_out, int64_t last_out, T* y) {
  const auto use = [&]<int kind, int product = kFloat32>() { multiply_rounded<kind>(m, x, n_rows, first_out, last_out, y); };
  if (m.kind >= kQ4_0) return with_blocks(m.kind, use);
  if (m.kind == kInt8) return use.template operator()<kInt8>();
  use.template operator()<kRows>();
}
