// Tree attention on a CPU, for ctypes; see attention_cpu.h.
#include <cstdlib>

#include "cpu.h"
#include "threads_cpu.h"

namespace {

// Keys and values of one layer, queries of rows of a tree, and what the rows see; see ops/attention_cpu.py.
struct TreeAttention {
  const void *q, *k, *v;  // (n, n_heads, k_dim), (n_kv_heads, n_before + n_tree, k_dim or v_dim)
  void* out;              // (n, n_heads, v_dim), dense
  float* lse;             // (n, n_heads)
  const float* sinks;     // (n_heads,) or null
  const int32_t *bits, *depths;
  int64_t n, n_heads, n_kv_heads, k_dim, v_dim, n_words;
  int64_t q_row, q_head, k_head, k_row, v_head, v_row;  // strides in numbers
  int64_t n_before, n_tree, window;                     // window 0: none
  float scale, softcap;                                 // softcap 0: none
  int32_t dtype;
};

thread_local Memory thread_scratch, shared_scratch;

// Cuts memory into arrays that begin at multiples of 64 bytes; counts alone where there is none.
struct Cutter {
  char* bytes;
  int64_t used = 0;

  template <typename T>
  T* take(int64_t n) {
    T* found = bytes == nullptr ? nullptr : reinterpret_cast<T*>(bytes + used);
    used += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return found;
  }
};

#include "vectors_cpu.h"
#include "attention_cpu.h"

}  // namespace

EXPORT void offload_rt_tree_attention(const TreeAttention* attention, int n_threads) {
  attend(*attention, n_threads);
}
