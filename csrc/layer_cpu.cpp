// Decoder layers, norms and activations on a CPU, for ctypes; see layer_cpu.h.
#include <cstdlib>
#include <initializer_list>

#include "cpu.h"
#include "threads_cpu.h"

namespace {

// Rows (n, n_heads, dim) of x, which becomes x + delta, and their norms; see ops/layer_cpu.py.
struct Norm {
  void* x;
  const void *delta, *weight;  // (n, dim) with n_heads 1, or null; (dim,)
  void* out;                   // dense
  int64_t n, n_heads, dim, x_row, x_head, delta_row;
  float eps;
  int32_t dtype;
};

// SiLU of `gate` times `up`, (n, dim) each.
struct Gate {
  const void *gate, *up;
  void* out;  // dense
  int64_t n, dim, gate_row, up_row;
  int32_t dtype;
};

// Rotary embedding of q (n, n_heads, dim) and k (n, n_kv_heads, dim), which is stored in a cache with v (n, n_kv_heads, v_dim).
struct Rotary {
  const void *q, *k, *v, *cos, *sin;  // cos, sin (n, dim)
  void *out, *keys, *values;          // (n, n_heads, dim) dense, (n_kv_heads, n, dim), (n_kv_heads, n, v_dim)
  int64_t n, n_heads, n_kv_heads, dim, v_dim;
  int64_t q_row, q_head, k_row, k_head, v_row, v_head, cos_row, sin_row, key_head, key_row, value_head, value_row;
  int32_t dtype, has_pairs;          // the partners of a rotation are neighbours, else half a head apart
  const void *q_norm, *k_norm;       // (dim,) of the heads, or null
  float eps;
};

// Weights of a decoder layer; see ops/decoder_cpu.py.
struct Layer {
  const void *input_norm, *output_norm;  // (hidden,)
  const void *q_norm, *k_norm;           // as in Rotary
  int64_t index, window, has_pairs;      // index of its cache; window 0: none
  Matrix q, k, v, o, gate, up, down;
};

// Rows of one sequence, which follow one another, and its cache.
struct Segment {
  void *keys, *values;  // of all layers
  const int32_t *bits, *depths;
  int64_t n, first, n_words, n_before, n_tree;  // row `first` of the cache is the first; the others as in TreeAttention
  int64_t key_layer, key_head, key_row, value_layer, value_head, value_row;
};

// Rows that pass layers, in place.
struct Pass {
  void* x;  // (n, hidden)
  const void *cos, *sin;
  const Layer* const* layers;
  const Segment* segments;
  int64_t n, n_layers, n_segments, x_row, cos_row, sin_row, n_heads, n_kv_heads, dim;
  float eps, scale;
  int32_t dtype;
};

// Numbers that one thread computes sooner than several are woken.
constexpr int64_t kSerial = 1 << 14;

thread_local Memory layer_memory, head_memory;

#include "vectors_cpu.h"
#include "layer_cpu.h"

}  // namespace

EXPORT void offload_rt_rms_norm(const Norm* norm, int n_threads) {
  rms_norm(*norm, n_threads);
}

EXPORT void offload_rt_rotate_and_store(const Rotary* rotary, int n_threads) {
  rotate_and_store(*rotary, n_threads);
}

EXPORT void offload_rt_silu_mul(const Gate* gate, int n_threads) {
  silu_mul(*gate, n_threads);
}

EXPORT void offload_rt_decode_layers(const Pass* pass, int n_threads) {
  decode_layers(*pass, n_threads);
}
