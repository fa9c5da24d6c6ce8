// The most probable tokens of rows of logits on a CPU, for ctypes; see ops/top_cpu.py.
#include <cstdlib>

#include "cpu.h"
#include "threads_cpu.h"

namespace {

// Rows (n, width) of logits, and the k largest numbers of each, in descending order; of equal ones the first.
struct Top {
  const void* logits;
  float* values;    // (n, k)
  int64_t* tokens;  // (n, k)
  int64_t n, width, row, k;
  float rate;       // inverse temperature of probabilities; 0 for logits
  int32_t dtype;
};

#include "vectors_cpu.h"

// Vectors that are compared with the smallest kept number at once.
constexpr int64_t kBlock = 8 * kLanes;

template <typename T>
inline float number(const T* from) { return to_float(*from); }

// The first value is NaN if the row contains NaN.
template <typename T>
void top_of(const T* logits, int64_t width, int64_t k, float rate, float* values, int64_t* tokens) {
  int64_t n_kept = 0;
  const auto keep = [&](float value, int64_t token) {
    if (n_kept == k && !(value > values[k - 1])) return;
    int64_t place = n_kept < k ? n_kept++ : k - 1;
    for (; place > 0 && value > values[place - 1]; --place) values[place] = values[place - 1], tokens[place] = tokens[place - 1];
    values[place] = value, tokens[place] = token;
  };
  VI is_nan = {};
  float least = 0.0f;
  bool has_nan = false;
  int64_t i = 0;
  for (; i < width; i += kBlock) {
    const int64_t n = smaller(kBlock, width - i);
    if (n_kept == k && n == kBlock) {
      V most = load(logits + i);
      is_nan |= most != most;
      for (int64_t c = kLanes; c < kBlock; c += kLanes) {
        const V x = load(logits + i + c);
        is_nan |= x != x;
        most = x > most ? x : most;
      }
      if (!(max_of(most) > least)) continue;
    }
    for (int64_t c = 0; c < n; ++c) {
      const float value = number(logits + i + c);
      has_nan |= value != value;
      keep(value, i + c);
    }
    least = values[k - 1];
  }
  for (int lane = 0; lane < kLanes; ++lane) has_nan |= is_nan[lane] != 0;
  if (has_nan) values[0] = __builtin_nanf("");
  if (rate == 0.0f) return;
  const float best = values[0];
  V sums[4] = {};
  for (i = 0; i + kLanes <= width; i += kLanes) sums[i / kLanes % 4] += exp((load(logits + i) - best) * rate);
  float total = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < width; ++i) total += exp(set1((number(logits + i) - best) * rate))[0];
  for (int64_t place = 0; place < k; ++place) {
    const float probability = exp(set1((values[place] - best) * rate))[0] / total;
    values[place] = probability < 0x1p-126f ? 0.0f : probability;  // a denormal number is 0; a NaN stays one
  }
}

template <typename T>
void top(const Top& a, int n_threads) {
  team().run(n_threads, a.n, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      top_of(static_cast<const T*>(a.logits) + i * a.row, a.width, a.k, a.rate, a.values + i * a.k, a.tokens + i * a.k);
  });
}

}  // namespace

EXPORT void offload_rt_top(const Top* a, int n_threads) {
  if (a->dtype == kBFloat16) return top<BFloat16>(*a, n_threads);
  if (a->dtype == kFloat16) return top<Half>(*a, n_threads);
  top<float>(*a, n_threads);
}
