// Norms and activations on a CPU, for ctypes; see layer_cpu.h.
#include "cpu.h"

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

// Numbers that one thread computes sooner than several are woken.
constexpr int64_t kSerial = 1 << 14;

#include "vectors_cpu.h"
#include "layer_cpu.h"

}  // namespace

EXPORT void offload_rt_rms_norm(const Norm* norm, int n_threads) {
  rms_norm(*norm, n_threads);
}

EXPORT void offload_rt_silu_mul(const Gate* gate, int n_threads) {
  silu_mul(*gate, n_threads);
}
