// A CUDA thread block on a CPU: each of its threads is a fiber, and fibers change only where threads wait for each other.
//
// Warps run one after the other, each as far as it gets, in an order that changes from launch to launch: a barrier that is
// missing then shows as a read of what nobody has written yet. Shared memory holds NaN at first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace cuda_on_cpu {

struct Dim3 {
  unsigned x, y, z;
  Dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct Here {
  Dim3 thread, block;
};

constexpr int kProcessors = 16;

struct Launch {
  int card;
  const void* kernel;
  Dim3 grid;
  int n_threads;
  size_t nbytes_shared;
  bool is_cooperative;  // all blocks run at the same time
};

// Runs `body` once for every thread of every block of the grid.
// Throws std::runtime_error where threads wait for each other for ever, or write past the end of shared memory, and where
// a card would refuse the launch.
void run(const Launch& launch, const std::function<void()>& body);

// What a block of a kernel may have on a card beyond 48 KB. False if that has been said before.
bool limit_shared_memory(int card, const void* kernel, int nbytes);

const Here& here();
unsigned char* shared_memory();
void sync_block();
void sync_grid();

// Called by all lanes of a warp with a pointer to what each brings; the last to come does `work` for all of them.
// `work` names the operation: lanes that meet in different ones are reported.
using Work = void (*)(void* const (&lanes)[32]);
void meet(Work work, void* own);

// cp.async: nothing arrives before it is waited for, and what was there before is gone at once.
void copy_later(void* to, const void* from, bool is_there);
void close_group();
void wait_for_groups(int n_left);

}  // namespace cuda_on_cpu
