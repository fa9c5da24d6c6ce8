// Decoder layers, and the norms and activations between their products, for one instruction set; the compiler defines LEVEL (ops/build.py). Each number depends
// on its row alone: the same operations serve whole vectors and the last numbers of a row.

template <typename T>
inline V load_up_to(const T* from, int64_t n) {
  return n >= kLanes ? load(from) : load_first(from, static_cast<int>(n));
}
template <typename T>
inline void store_up_to(T* to, V value, int64_t n) {
  n >= kLanes ? store(to, value) : store_first(to, value, static_cast<int>(n));
}

template <typename T>
inline void add_row(T* x, const T* delta, int64_t dim) {
  for (int64_t c = 0; c < dim; c += kLanes) store_up_to(x + c, load_up_to(x + c, dim - c) + load_up_to(delta + c, dim - c), dim - c);
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

// Orders a head as halves, and norms it, if the rotation needs that: `x` or memory of this thread.
template <typename T>
inline const T* arranged_head(const Rotary& a, const T* x, const void* weight) {
  if (!a.has_pairs && weight == nullptr) return x;
  T* head = reinterpret_cast<T*>(head_memory.reserve(a.dim * sizeof(T)));
  for (int64_t c = 0; c < a.dim; ++c) head[c] = a.has_pairs ? x[c < a.dim / 2 ? 2 * c : 2 * c - a.dim + 1] : x[c];
  if (weight != nullptr) norm_row<T>(head, nullptr, static_cast<const T*>(weight), head, a.dim, a.eps);
  return head;
}

template <typename T>
void rotate_and_store(const Rotary& a, int n_threads) {
  const auto at = [](const void* from, int64_t i) { return static_cast<const T*>(from) + i; };
  run_rows(a.n, (a.n_heads + 2 * a.n_kv_heads) * a.dim, n_threads, [&](int64_t i) {
    const T *cos = at(a.cos, i * a.cos_row), *sin = at(a.sin, i * a.sin_row);
    for (int64_t h = 0; h < a.n_heads; ++h)
      rotate_head(arranged_head(a, at(a.q, i * a.q_row + h * a.q_head), a.q_norm), cos, sin,
                  static_cast<T*>(a.out) + (i * a.n_heads + h) * a.dim, a.dim);
    for (int64_t h = 0; h < a.n_kv_heads; ++h) {
      rotate_head(arranged_head(a, at(a.k, i * a.k_row + h * a.k_head), a.k_norm), cos, sin,
                  static_cast<T*>(a.keys) + h * a.key_head + i * a.key_row, a.dim);
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

// Applies layers to all rows, as models/native.py does, and gives the same numbers.
template <typename T>
void decode_layers(const Pass& p, int n_threads) {
  const Layer& first = **p.layers;
  const int64_t n = p.n, hidden = first.q.n_in, width = first.gate.n_out, n_q = p.n_heads * p.dim, n_kv = p.n_kv_heads * p.dim;
  T *normed, *qkv, *q, *out, *delta, *gates, *gated;
  float* lse;
  for (int64_t nbytes = 0, pass = 0; pass < 2; ++pass) {
    Cutter cutter{pass ? layer_memory.reserve(nbytes) : nullptr};
    normed = cutter.take<T>(n * hidden), delta = cutter.take<T>(n * hidden);
    qkv = cutter.take<T>(n * (n_q + 2 * n_kv)), q = cutter.take<T>(n * n_q), out = cutter.take<T>(n * n_q);
    gates = cutter.take<T>(n * 2 * width), gated = cutter.take<T>(n * width), lse = cutter.take<float>(n * p.n_heads);
    nbytes = cutter.used;
  }
  const auto multiply = [&](std::initializer_list<const Matrix*> matrices, const T* x, T* y, int64_t ldy) {
    Matrix products[3];
    int count = 0;
    for (const Matrix* matrix : matrices) {
      Matrix& product = products[count++] = *matrix;
      product.x = x, product.y = y, product.n_rows = n, product.ldx = product.n_in, product.ldy = ldy;
      y += product.n_out;
    }
    offload_rt_linear(products, count, p.dtype, n_threads);
  };
  const auto norm = [&](const T* added, const void* weight) {
    const Norm rows{p.x, added, weight, normed, n, 1, hidden, p.x_row, 0, hidden, p.eps, p.dtype};
    rms_norm<T>(rows, n_threads);
  };
  for (int64_t i = 0; i < p.n_layers; ++i) {
    const Layer& layer = *p.layers[i];
    norm(i ? delta : nullptr, layer.input_norm);
    const int64_t n_qkv = n_q + 2 * n_kv;
    multiply({&layer.q, &layer.k, &layer.v}, normed, qkv, n_qkv);
    int64_t row = 0;
    for (const Segment* s = p.segments; s < p.segments + p.n_segments; row += s++->n) {
      const T *from = qkv + row * n_qkv, *cos = static_cast<const T*>(p.cos) + row * p.cos_row;
      const T* sin = static_cast<const T*>(p.sin) + row * p.sin_row;
      T* keys = static_cast<T*>(s->keys) + layer.index * s->key_layer;
      T* values = static_cast<T*>(s->values) + layer.index * s->value_layer;
      const Rotary rotary{from, from + n_q, from + n_q + n_kv, cos, sin, q + row * n_q, keys + s->first * s->key_row,
                          values + s->first * s->value_row, s->n, p.n_heads, p.n_kv_heads, p.dim, p.dim, n_qkv, p.dim, n_qkv,
                          p.dim, n_qkv, p.dim, p.cos_row, p.sin_row, s->key_head, s->key_row, s->value_head, s->value_row,
                          p.dtype, static_cast<int32_t>(layer.has_pairs), layer.q_norm, layer.k_norm, p.eps};
      rotate_and_store<T>(rotary, n_threads);
      const TreeAttention attention{q + row * n_q, keys, values, out + row * n_q, lse, nullptr, s->bits, s->depths, s->n,
                                    p.n_heads, p.n_kv_heads, p.dim, p.dim, s->n_words, n_q, p.dim, s->key_head, s->key_row,
                                    s->value_head, s->value_row, s->n_before, s->n_tree, layer.window, p.scale, 0.0f, p.dtype};
      offload_rt_tree_attention(&attention, n_threads);
    }
    multiply({&layer.o}, out, delta, hidden);
    norm(delta, layer.output_norm);
    multiply({&layer.gate, &layer.up}, normed, gates, 2 * width);
    const Gate gate{gates, gates + width, gated, n, width, 2 * width, 2 * width, p.dtype};
    silu_mul<T>(gate, n_threads);
    multiply({&layer.down}, gated, delta, hidden);
  }
  for (int64_t row = 0; row < n; ++row)
    add_row(static_cast<T*>(p.x) + row * p.x_row, delta + row * hidden, hidden);
}

inline void decode_layers(const Pass& p, int n_threads) {
  if (p.dtype == kBFloat16) return decode_layers<BFloat16>(p, n_threads);
  if (p.dtype == kFloat16) return decode_layers<Half>(p, n_threads);
  decode_layers<float>(p, n_threads);
}
