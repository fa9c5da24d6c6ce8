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

// Call row(i) for n rows of `width` numbers.
template <typename Row>
void run_rows(int64_t n, int64_t width, int n_threads, Row row) {
  const int n_useful = n * width > kSerial ? n_threads : 1;
  team().run(n_useful, n, (n + n_useful - 1) / n_useful, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) row(i);
  });
}

template <typename T>
void rms_norm(const Norm& a, int n_threads) {
  run_rows(a.n * a.n_heads, a.dim, n_threads, [&](int64_t i) {
    T* x = static_cast<T*>(a.x) + i / a.n_heads * a.x_row + i % a.n_heads * a.x_head;
    const T* delta = a.delta == nullptr ? nullptr : static_cast<const T*>(a.delta) + i * a.delta_row;
    norm_row(x, delta, static_cast<const T*>(a.weight), static_cast<T*>(a.out) + i * a.dim, a.dim, a.eps);
  });
}

template <typename T>
void silu_mul(const Gate& a, int n_threads) {
  run_rows(a.n, a.dim, n_threads, [&](int64_t i) {
    const T* gate = static_cast<const T*>(a.gate) + i * a.gate_row;
    const T* up = static_cast<const T*>(a.up) + i * a.up_row;
    T* out = static_cast<T*>(a.out) + i * a.dim;
    for (int64_t c = 0; c < a.dim; c += kLanes) {
      const V x = load_up_to(gate + c, a.dim - c);
      store_up_to(out + c, x / (1.0f + exp(-x)), a.dim - c);
      store_up_to(out + c, load_up_to(out + c, a.dim - c) * load_up_to(up + c, a.dim - c), a.dim - c);
    }
  });
}

template <typename T>
inline V rounded_to(V x) {
  T numbers[kLanes];
  store(numbers, x);
  return load(numbers);
}

// Rotates a head in the half-split layout, with the roundings of ops/reference.py.
template <typename T>
inline void rotate_head(const T* x, const T* cos, const T* sin, T* out, int64_t dim) {
  const auto half = [&](int64_t first, int64_t partner, float sign) {
    for (int64_t c = 0; c < dim / 2; c += kLanes) {
      const int64_t left = dim / 2 - c;
      const auto at = [&](const T* from, int64_t offset) { return load_up_to(from + offset + c, left); };
      const V straight = rounded_to<T>(at(x, first) * at(cos, first));
      const V crossed = rounded_to<T>(sign * at(x, partner) * at(sin, first));
      store_up_to(out + first + c, straight + crossed, left);
    }
  };
  half(0, dim / 2, -1.0f);
  half(dim / 2, 0, 1.0f);
}

template <typename T>
void rotate_and_store(const Rotary& a, int n_threads) {
  const auto at = [](const void* from, int64_t i) { return static_cast<const T*>(from) + i; };
  run_rows(a.n, (a.n_heads + 2 * a.n_kv_heads) * a.dim, n_threads, [&](int64_t i) {
    const T *cos = at(a.cos, i * a.cos_row), *sin = at(a.sin, i * a.sin_row);
    for (int64_t h = 0; h < a.n_heads; ++h)
      rotate_head(at(a.q, i * a.q_row + h * a.q_head), cos, sin, static_cast<T*>(a.out) + (i * a.n_heads + h) * a.dim, a.dim);
    for (int64_t h = 0; h < a.n_kv_heads; ++h) {
      rotate_head(at(a.k, i * a.k_row + h * a.k_head), cos, sin, static_cast<T*>(a.keys) + h * a.key_head + i * a.key_row, a.dim);
      memcpy(static_cast<T*>(a.values) + h * a.value_head + i * a.value_row, at(a.v, i * a.v_row + h * a.v_head),
             a.v_dim * sizeof(T));
    }
  });
}

inline void rotate_and_store(const Rotary& a, int n_threads) {
  if (a.dtype == kBFloat16) return rotate_and_store<BFloat16>(a, n_threads);
  if (a.dtype == kFloat16) return rotate_and_store<Half>(a, n_threads);
  rotate_and_store<float>(a, n_threads);
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
