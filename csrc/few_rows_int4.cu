// x w^T for few rows and a w of 4-bit integers, packed along the inputs, with scales and zero points of a float16 dtype.
//
// A lane copies the codes that it multiplies to its own part of shared memory, two or three steps ahead and 16 bytes at a time.
// No other lane reads them, so nothing waits for a barrier. The warps of a block divide the inputs: neither codes nor x are read
// twice by a block, and a block of 64 outputs reads x a quarter as often as one of 16.
// A code is or-ed into the fraction of 2^10, or 2^7 in bfloat16. Two subtractions at once are exact, two products round once.
#include <type_traits>

#include "few_rows.cuh"

namespace offload_rt {
namespace {

// Inputs of an output in a step of a lane: a word of eight codes each for four pairs of products.
constexpr int kChunks = 4, kLaneInputs = 8 * kChunks, kWarpInputs = 4 * kLaneInputs, kStepInputs = kFewWarps * kWarpInputs;

template <typename S>
constexpr uint32_t kMagic = std::is_same_v<S, Half> ? 0x64006400u : 0x43004300u;

// Codes i and i + 4 of a word as pair i, less a zero point and times a scale: S in both halves of `zero` and `scale`.
template <typename T, typename S>
__device__ __forceinline__ void decode(uint32_t word, uint32_t zero, uint32_t scale, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t codes = and_or(word >> 4 * i, 0x000f000fu, kMagic<S>);
    pairs[i] = multiply_pair<S>(subtract_pair<S>(codes, zero), scale);
    if constexpr (!std::is_same_v<T, S>) {
      const float2 wide = unpack<S>(pairs[i]);
      pairs[i] = pack<T>(wide.x, wide.y);
    }
  }
}

// Eight numbers in the order of the decoded pairs.
__device__ __forceinline__ uint4 by_pairs(uint4 x) {
  return {x.x & 0xffffu | x.z << 16, x.x >> 16 | x.z & 0xffff0000u, x.y & 0xffffu | x.w << 16, x.y >> 16 | x.w & 0xffff0000u};
}

// What a lane reads of the matrix of a block: kOuts / 8 outputs.
template <typename S, bool by_columns, int kOuts>
struct Weights {
  static constexpr int kLaneOuts = kOuts / 8, kStages = kOuts == 32 ? 3 : 2;
  static constexpr int kRingBytes = kStages * kLaneOuts * kFewThreads * 16;
  static constexpr int kZeroWords = by_columns ? kLaneOuts / 4 : kLaneOuts;
  // Of one step, as stored.
  struct Grid {
    uint16_t scales[kLaneOuts];
    uint32_t zeros[kZeroWords];
  };

  const uint32_t* codes;
  const uint16_t* scales;
  const uint32_t* zeros;
  int group = threadIdx.x % 32 / 4, first_out;

  __device__ Weights(const FewRows& args, int matrix, int first_out)
      : codes(reinterpret_cast<const uint32_t*>(static_cast<const char*>(args.codes) + matrix * args.code_stride)),
        scales(static_cast<const uint16_t*>(args.scales) + matrix * args.scale_stride),
        zeros(args.zeros ? reinterpret_cast<const uint32_t*>(static_cast<const char*>(args.zeros) + matrix * args.zero_stride)
                         : nullptr),
        first_out(first_out) {}

  // Output i of a lane, from first_out on. Words of columns hold four neighbouring outputs in 16 bytes.
  static __device__ __forceinline__ int out_of(int i, int group) {
    return by_columns ? i / 4 * 32 + 4 * group + i % 4 : 8 * i + group;
  }

  __device__ __forceinline__ uint4* slot(int stage, int i) const {
    return reinterpret_cast<uint4*>(shared_memory()) + (stage * kLaneOuts + i) * kFewThreads + threadIdx.x;
  }

  __device__ __forceinline__ void copy(const FewRows& args, int stage, int input) const {
    const bool has_inputs = input < args.n_in;
#pragma unroll
    for (int i = 0; i < kLaneOuts; ++i) {
      const int out = first_out + (by_columns ? out_of(i / kChunks * 4, group) : out_of(i, group));
      const int64_t word = by_columns ? static_cast<int64_t>(input / 8 + i % kChunks) * args.n_out + out
                                      : static_cast<int64_t>(out) * (args.n_in / 8) + input / 8;
      cp_async_16(slot(stage, i), codes + word, has_inputs && out < args.n_out);
    }
    cp_async_commit();
  }

  // Word of output i and a chunk of eight inputs.
  __device__ __forceinline__ uint32_t word(int stage, int i, int chunk) const {
    const uint4* four = by_columns ? slot(stage, i / 4 * kChunks + chunk) : slot(stage, i);
    return reinterpret_cast<const uint32_t*>(four)[by_columns ? i % 4 : chunk];
  }

  // Zeros where there are no weights.
  __device__ __forceinline__ Grid grid(const FewRows& args, int input) const {
    Grid grid{};
    if (input >= args.n_in) return grid;
    const int block = quotient(input, args.by_block_in), n_scales = args.n_scales;
    // The words of zero points hold eight outputs.
    const int first = first_out + out_of(0, group);
    const int at = by_columns ? block * n_scales + first : first * n_scales + block;
    const int zeros_at = by_columns ? block * ((n_scales + 7) / 8) + first / 8 : first / 8 * n_scales + block;
#pragma unroll
    for (int i = 0; i < kLaneOuts; ++i) {
      const int further = out_of(i, group) - out_of(0, group);
      if (first + further >= args.n_out) continue;
      grid.scales[i] = scales[at + further * (by_columns ? 1 : n_scales)];
      if (zeros && i % (kLaneOuts / kZeroWords) == 0)
        grid.zeros[i * kZeroWords / kLaneOuts] = zeros[zeros_at + further / 8 * (by_columns ? 1 : n_scales)];
    }
    return grid;
  }

  // In both halves, with the magic of the codes.
  __device__ __forceinline__ uint32_t zero(const FewRows& args, const Grid& grid, int i) const {
    uint32_t zero = static_cast<uint32_t>(args.offset);
    if (zeros) zero += grid.zeros[i * kZeroWords / kLaneOuts] >> out_of(i, group) % 8 * 4;
    return (zero & 15u) * 0x10001u | kMagic<S>;
  }
};

template <typename T, typename S, bool by_columns, int kTiles, int kOuts>
__global__ void __launch_bounds__(kFewThreads, kOuts == 32 ? 2 : 1) few_rows_int4_kernel(FewRows args) {
  using Matrix = Weights<S, by_columns, kOuts>;
  const int first_out = blockIdx.y * kOuts, lane_input = static_cast<int>(threadIdx.x) % 4 * kLaneInputs;
  const RowTile tile = tile_of(args, blockIdx.x, 8 * kTiles);
  const Inputs<kTiles> inputs(args, tile);
  float sums[kOuts / 16][kTiles][4] = {};
  if (tile.matrix < args.n_matrices) {
    const Matrix weights(args, tile.matrix, first_out);
    int base = static_cast<int>(threadIdx.x) / 32 * kWarpInputs, stage = 0;
#pragma unroll
    for (int ahead = 0; ahead < Matrix::kStages - 1; ++ahead) weights.copy(args, ahead, base + lane_input + ahead * kStepInputs);
    for (; base < args.n_in; base += kStepInputs) {
      const int input = base + lane_input, filled = stage ? stage - 1 : Matrix::kStages - 1;
      // Scales arrive during the wait for the codes.
      const typename Matrix::Grid grid = weights.grid(args, input);
      weights.copy(args, filled, input + (Matrix::kStages - 1) * kStepInputs);
      cp_async_wait<Matrix::kStages - 1>();
      // All four chunks at once need more registers than there are with 32 rows.
#pragma unroll(kTiles == 4 ? 2 : kChunks)
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        uint4 x[kTiles];
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
          x[t] = by_pairs(input < args.n_in ? inputs.eight(t, input + 8 * chunk) : uint4{});
#pragma unroll
        for (int m = 0; m < kOuts / 16; ++m) {
          uint32_t w[2][4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = 2 * m + half;
            decode<T, S>(weights.word(stage, i, chunk), weights.zero(args, grid, i), grid.scales[i] * 0x10001u, w[half]);
          }
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            mma_m16n8k16<T>(sums[m][t], {w[0][0], w[1][0], w[0][1], w[1][1]}, x[t].x, x[t].y);
            mma_m16n8k16<T>(sums[m][t], {w[0][2], w[1][2], w[0][3], w[1][3]}, x[t].z, x[t].w);
          }
        }
      }
      stage = stage + 1 == Matrix::kStages ? 0 : stage + 1;
    }
    // The sums take the place of the codes, also of copies past the last input.
    cp_async_wait<0>();
  }
  sync_block();
  store_sums<kOuts, kTiles>(args, tile, inputs.n_rows, first_out, sums,
                            [](int m, int row) { return Matrix::out_of(2 * m + row / 8, row % 8); });
}

template <typename T, typename S, bool by_columns, int kTiles, int kOuts>
void start(const FewRows& args, cudaStream_t stream) {
  launch_few_rows(few_rows_int4_kernel<T, S, by_columns, kTiles, kOuts>, args, kTiles, kOuts,
                  Weights<S, by_columns, kOuts>::kRingBytes, stream);
}

// Few rows wait for codes: two blocks of 32 outputs fit on every multiprocessor. Further rows read x less often.
template <typename T, typename S, bool by_columns>
void start(const FewRows& args, cudaStream_t stream) {
  switch (tiles_of(args)) {
    case 1: return start<T, S, by_columns, 1, 32>(args, stream);
    case 2: return start<T, S, by_columns, 2, 64>(args, stream);
    default: return start<T, S, by_columns, 4, 64>(args, stream);
  }
}

template <typename T, typename S>
void start(const FewRows& args, cudaStream_t stream) {
  args.kind == CodeKind::kColumns ? start<T, S, true>(args, stream) : start<T, S, false>(args, stream);
}

template <typename T>
void start(const FewRows& args, cudaStream_t stream) {
  args.scale_kind == FloatKind::kHalf ? start<T, Half>(args, stream) : start<T, BFloat16>(args, stream);
}

}  // namespace

bool serves_int4(const FewRows& args) {
  const bool is_integer = args.kind == CodeKind::kRows || (args.kind == CodeKind::kColumns && args.n_out % 4 == 0);
  const bool has_halves = args.scale_kind == FloatKind::kHalf || args.scale_kind == FloatKind::kBFloat16;
  const bool has_groups = args.block_out == 1 && (args.block_in % kLaneInputs == 0 || args.block_in >= args.n_in);
  const bool is_aligned = reinterpret_cast<uintptr_t>(args.codes) % 16 == 0 && args.code_stride % 16 == 0;
  return is_integer && has_halves && has_groups && is_aligned && 0 <= args.offset && args.offset < 16;
}

void few_rows_int4(const FewRows& args, cudaStream_t stream) {
  args.kind_of_x == FloatKind::kHalf ? start<Half>(args, stream) : start<BFloat16>(args, stream);
}

}  // namespace offload_rt
