#include "fibers.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_on_cpu {
namespace {

constexpr size_t kStackBytes = 96 << 10;
constexpr size_t kGuardBytes = 4096;
constexpr unsigned char kPoison = 0xff;  // NaN in every float type

struct Copy {
  void* to;
  const void* from;
  bool is_there;
};

enum class State { ready, at_block, at_grid, at_warp, done };

struct Fiber {
  Here here;
  State state = State::ready;
  int index = 0, block = 0;  // among all that run
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

struct Warp {
  void* lanes[32];
  Work work = nullptr;
  int n_arrived = 0;
};

struct Block {
  std::vector<unsigned char> shared;
  int n_waiting = 0;
};

struct Machine {
  std::vector<std::unique_ptr<unsigned char[]>> stacks;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  std::map<std::pair<int, const void*>, size_t> limits;
  const std::function<void()>* kernel = nullptr;
  Fiber* current = nullptr;
  int n_at_grid = 0;
  std::string failure;
  std::mt19937 order{1};
#if defined(__x86_64__)
  void* scheduler = nullptr;
#else
  ucontext_t scheduler;
#endif
};

Machine machine;

#if defined(__x86_64__)
// Saves what a call must keep, and goes on with another stack.
extern "C" void cuda_on_cpu_switch(void** save, void* load);
asm(R"(
.text
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");

void to_scheduler() { cuda_on_cpu_switch(&machine.current->stack_pointer, machine.scheduler); }
void to_fiber(Fiber& fiber) {
  machine.current = &fiber;
  cuda_on_cpu_switch(&machine.scheduler, fiber.stack_pointer);
}
#else
void to_scheduler() { swapcontext(&machine.current->context, &machine.scheduler); }
void to_fiber(Fiber& fiber) {
  machine.current = &fiber;
  swapcontext(&machine.scheduler, &fiber.context);
}
#endif

void fiber_main() {
  (*machine.kernel)();
  machine.current->state = State::done;
  to_scheduler();
}

void prepare(Fiber& fiber, unsigned char* stack) {
#if defined(__x86_64__)
  // Six registers and the return address; the stack is as a call would leave it.
  auto* top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + kStackBytes) & ~uintptr_t{15});
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&fiber_main);
  top -= 6;
  std::memset(top, 0, 6 * sizeof(void*));
  fiber.stack_pointer = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack = {stack, 0, kStackBytes};
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
#endif
}

void fail(const std::string& why) {
  if (machine.failure.empty()) machine.failure = why;
}

// Fails and never goes on with this thread.
void stop(const std::string& why) {
  fail(why);
  to_scheduler();
}

// Runs the lanes of a warp until none can go on; whether any could.
bool run_warp(int warp) {
  bool has_run = false;
  for (bool again = true; again && machine.failure.empty();) {
    again = false;
    for (int lane = 0; lane < 32 && machine.failure.empty(); ++lane) {
      Fiber& fiber = machine.fibers[warp * 32 + lane];
      if (fiber.state != State::ready) continue;
      to_fiber(fiber);
      again = has_run = true;
    }
  }
  return has_run;
}

// Runs blocks at the same time.
void run_blocks(const std::vector<Dim3>& places, int n_threads, size_t nbytes_shared) {
  const int n_fibers = n_threads * static_cast<int>(places.size());
  machine.fibers.assign(n_fibers, Fiber());
  machine.warps.assign(n_fibers / 32, Warp());
  machine.n_at_grid = 0;
  machine.blocks.resize(places.size());
  for (Block& block : machine.blocks) {
    block.shared.assign(nbytes_shared + kGuardBytes, kPoison);
    block.n_waiting = 0;
  }
  while (machine.stacks.size() < machine.fibers.size()) machine.stacks.emplace_back(new unsigned char[kStackBytes]);
  for (int i = 0; i < n_fibers; ++i) {
    Fiber& fiber = machine.fibers[i];
    fiber.index = i, fiber.block = i / n_threads;
    fiber.here = {Dim3(i % n_threads), places[fiber.block]};
    prepare(fiber, machine.stacks[i].get());
  }
  std::vector<int> blocks(places.size()), warps(n_threads / 32);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::iota(warps.begin(), warps.end(), 0);
  std::shuffle(warps.begin(), warps.end(), machine.order);
  for (bool has_run = true; has_run && machine.failure.empty();) {
    has_run = false;
    // Whichever block goes first is far ahead of the others: as far as it gets without them.
    std::shuffle(blocks.begin(), blocks.end(), machine.order);
    for (int block : blocks)
      for (bool again = true; again && machine.failure.empty(); has_run |= again) {
        again = false;
        for (int warp : warps) again |= run_warp(block * n_threads / 32 + warp);
      }
  }
  for (const Fiber& fiber : machine.fibers)
    if (fiber.state != State::done) fail("thread " + std::to_string(fiber.index) + " waits for ever");
  for (const Block& block : machine.blocks)
    for (size_t i = nbytes_shared; i < block.shared.size(); ++i)
      if (block.shared[i] != kPoison) fail("a write past the end of shared memory");
}

void check(const Launch& launch) {
  const auto limit = machine.limits.find({launch.card, launch.kernel});
  const size_t most_shared = limit == machine.limits.end() ? 48 << 10 : limit->second;
  if (launch.nbytes_shared > most_shared) fail("more shared memory than a block of this kernel may have");
  if (launch.n_threads > 1024 || launch.grid.y > 65535 || launch.grid.z > 65535) fail("a grid or block is too large");
  if (launch.is_cooperative && launch.grid.x > kProcessors) fail("more blocks than run at the same time");
}

}  // namespace

void run(const Launch& launch, const std::function<void()>& body) {
  machine.failure.clear();
  machine.kernel = &body;
  check(launch);
  std::vector<Dim3> together;
  for (unsigned z = 0; z < launch.grid.z; ++z)
    for (unsigned y = 0; y < launch.grid.y; ++y)
      for (unsigned x = 0; x < launch.grid.x && machine.failure.empty(); ++x) {
        together.emplace_back(x, y, z);
        if (launch.is_cooperative && together.size() < launch.grid.x) continue;
        run_blocks(together, launch.n_threads, launch.nbytes_shared);
        together.clear();
      }
  if (!machine.failure.empty()) throw std::runtime_error(machine.failure);
}

bool limit_shared_memory(int card, const void* kernel, int nbytes) {
  return machine.limits.emplace(std::pair(card, kernel), nbytes).second;
}

const Here& here() { return machine.current->here; }
unsigned char* shared_memory() { return machine.blocks[machine.current->block].shared.data(); }

void sync_block() {
  const int n = static_cast<int>(machine.fibers.size() / machine.blocks.size()), block = machine.current->block;
  machine.current->state = State::at_block;
  if (++machine.blocks[block].n_waiting == n) {
    machine.blocks[block].n_waiting = 0;
    for (int i = block * n; i < (block + 1) * n; ++i) machine.fibers[i].state = State::ready;
  }
  to_scheduler();
}

void sync_grid() {
  machine.current->state = State::at_grid;
  if (++machine.n_at_grid == static_cast<int>(machine.fibers.size())) {
    machine.n_at_grid = 0;
    for (Fiber& fiber : machine.fibers) fiber.state = State::ready;
  }
  to_scheduler();
}

void meet(Work work, void* own) {
  Fiber& fiber = *machine.current;
  const int first = fiber.index / 32 * 32;
  Warp& warp = machine.warps[fiber.index / 32];
  if (warp.n_arrived > 0 && warp.work != work) stop("lanes of a warp are in different operations");
  warp.work = work;
  warp.lanes[fiber.index - first] = own;
  if (++warp.n_arrived < 32) {
    fiber.state = State::at_warp;
    to_scheduler();
    return;
  }
  warp.n_arrived = 0;
  work(warp.lanes);
  for (int lane = 0; lane < 32; ++lane) machine.fibers[first + lane].state = State::ready;
}

void copy_later(void* to, const void* from, bool is_there) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) stop("a copy is not aligned");
  std::memset(to, kPoison, 16);
  machine.current->open.push_back({to, from, is_there});
}

void close_group() {
  machine.current->groups.push_back(std::move(machine.current->open));
  machine.current->open.clear();
}

void wait_for_groups(int n_left) {
  auto& groups = machine.current->groups;
  for (; static_cast<int>(groups.size()) > n_left; groups.pop_front())
    for (const Copy& copy : groups.front())
      if (copy.is_there)
        std::memcpy(copy.to, copy.from, 16);
      else
        std::memset(copy.to, 0, 16);
}

}  // namespace cuda_on_cpu
