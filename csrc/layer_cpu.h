// Norms and activations between the products of a layer, for one instruction set; the compiler defines LEVEL (ops/build.py). Each number depends
// on its row alone: the same operations serve whole vectors and the last numbers of a row.

template <typename T>
inline V load_up_to(const T* from, int64_t n) {
  return n >= kLanes ? load(from) : load_first(from, static_cast<int>(n));
}
template <typename T>
inline void store_up_to(T* to, V value, int64_t n) {
  n >= kLanes ? store(to, value) : store_first(to, value, static_cast<int>(n));
}

// Norms a row, to which `delta` is added first, with the roundings of ops/reference.py.
template <typename T>
inline void norm_row(T* x, const T* delta, const T* weight, T* out, int64_t dim, float eps) {
  constexpr int kSums = 4;
  V sums[kSums] = {};
  for (int64_t c = 0; c < dim; c += kLanes) {
    if (delta != nullptr) store_up_to(x + c, load_up_to(x + c, dim - c) + load_up_to(delta + c, dim - c), dim - c);
    const V numbers = load_up_to(x + c, dim - c);
    V& sum = sums[c / kLanes % kSums];
    sum = fma(numbers, numbers, sum);
  }
  const float mean = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(dim);
  const V factor = set1(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t c = 0; c < dim; c += kLanes) {
    store_up_to(out + c, load_up_to(x + c, dim - c) * factor, dim - c);
    store_up_to(out + c, load_up_to(out + c, dim - c) * load_up_to(weight + c, dim - c), dim - c);
  }
}

template <typename T>
void rms_norm(const Norm& a, int n_threads) {
#pragma omp parallel for num_threads(n_threads) schedule(static) if (a.n * a.n_heads * a.dim > kSerial)
  for (int64_t i = 0; i < a.n * a.n_heads; ++i) {
    T* x = static_cast<T*>(a.x) + i / a.n_heads * a.x_row + i % a.n_heads * a.x_head;
    const T* delta = a.delta == nullptr ? nullptr : static_cast<const T*>(a.delta) + i * a.delta_row;
    norm_row(x, delta, static_cast<const T*>(a.weight), static_cast<T*>(a.out) + i * a.dim, a.dim, a.eps);
  }
}

template <typename T>
void silu_mul(const Gate& a, int n_threads) {
#pragma omp parallel for num_threads(n_threads) schedule(static) if (a.n * a.dim > kSerial)
  for (int64_t i = 0; i < a.n; ++i) {
    const T* gate = static_cast<const T*>(a.gate) + i * a.gate_row;
    const T* up = static_cast<const T*>(a.up) + i * a.up_row;
    T* out = static_cast<T*>(a.out) + i * a.dim;
    for (int64_t c = 0; c < a.dim; c += kLanes) {
      const V x = load_up_to(gate + c, a.dim - c);
      store_up_to(out + c, x / (1.0f + exp(-x)), a.dim - c);
      store_up_to(out + c, load_up_to(out + c, a.dim - c) * load_up_to(up + c, a.dim - c), a.dim - c);
    }
  }
}

inline void rms_norm(const Norm& a, int n_threads) {
  if (a.dtype == kBFloat16) return rms_norm<BFloat16>(a, n_threads);
  if (a.dtype == kFloat16) return rms_norm<Half>(a, n_threads);
  rms_norm<float>(a, n_threads);
}

inline void silu_mul(const Gate& a, int n_threads) {
  if (a.dtype == kBFloat16) return silu_mul<BFloat16>(a, n_threads);
  if (a.dtype == kFloat16) return silu_mul<Half>(a, n_threads);
  silu_mul<float>(a, n_threads);
}
