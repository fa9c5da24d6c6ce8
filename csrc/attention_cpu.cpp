// Tree attention on a CPU, for ctypes; see attention_cpu.h.
#include <cstdlib>

#include "cpu.h"
#include "threads_cpu.h"

namespace {

thread_local Memory thread_scratch, shared_scratch;

#include "vectors_cpu.h"
#include "attention_cpu.h"

}  // namespace

EXPORT void offload_rt_tree_attention(const TreeAttention* attention, int n_threads) {
  attend(*attention, n_threads);
}
