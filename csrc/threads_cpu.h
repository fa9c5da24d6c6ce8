// Threads of the CPU library.
//
// Waking a thread of OpenMP's runtime takes as long as a small product, and a runtime whose threads spin for milliseconds slows
// the threads that read weights. These threads spin for kWaiting, within which the next product of a layer begins, and sleep
// afterwards. A token of a model with 23 layers in bfloat16 takes 103 ms instead of 114 (two cores, AVX2).
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

constexpr std::chrono::microseconds kWaiting{200};

// Wait until a word differs from a value.
inline void wait_while(const std::atomic<uint32_t>& word, uint32_t value) {
  const auto stop = std::chrono::steady_clock::now() + kWaiting;
  do {
    for (int i = 0; i < 32; ++i) {
      if (word.load(std::memory_order_acquire) != value) return;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < stop);
  while (word.load(std::memory_order_acquire) == value) word.wait(value, std::memory_order_acquire);
}

// The calling thread and its helpers, which exist until the calling thread ends.
class Team {
 public:
  ~Team() { dismiss(); }

  // Call body(first, last) for pieces of `size` tasks each until n tasks are done, by n_threads threads.
  template <typename Body>
  void run(int n_threads, int64_t n, int64_t size, const Body& body) {
    if (n_threads <= 1 || n <= size) {
      if (n > 0) body(int64_t{0}, n);
      return;
    }
    if (static_cast<int>(helpers_.size()) != n_threads - 1) hire(n_threads - 1);
    body_ = &body;
    call_ = [](const void* body, int64_t first, int64_t last) { (*static_cast<const Body*>(body))(first, last); };
    n_ = n, size_ = size;
    next_.store(0, std::memory_order_relaxed);
    job_.fetch_add(1);  // odd: open
    job_.notify_all();
    work();
    job_.fetch_add(1);
    // Only for helpers that work: one without a processor would take longer than all tasks.
    for (uint32_t busy; (busy = n_busy_.load()) != 0;) wait_while(n_busy_, busy);
  }

 private:
  void work() {
    for (int64_t first; (first = next_.fetch_add(size_, std::memory_order_relaxed)) < n_;)
      call_(body_, first, first + size_ < n_ ? first + size_ : n_);
  }

  void help(uint32_t job) {
    while (true) {
      wait_while(job_, job);
      job = job_.load(std::memory_order_acquire);
      if (is_over_) return;
      if (job % 2 == 0) continue;
      n_busy_.fetch_add(1);
      if (job_.load() == job) work();
      if (n_busy_.fetch_sub(1) == 1) n_busy_.notify_one();
    }
  }

  void hire(int n_helpers) {
    dismiss();
    is_over_ = false;
    for (int i = 0; i < n_helpers; ++i) helpers_.emplace_back(&Team::help, this, job_.load());
  }

  void dismiss() {
    is_over_ = true;
    job_.fetch_add(2);
    job_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
    helpers_.clear();
  }

  std::vector<std::thread> helpers_;
  std::atomic<uint32_t> job_{0}, n_busy_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<bool> is_over_{false};
  const void* body_ = nullptr;
  void (*call_)(const void*, int64_t, int64_t) = nullptr;
  int64_t n_ = 0, size_ = 0;
};

// Memory of a thread, kept for its next call.
struct Memory {
  char* bytes = nullptr;
  int64_t size = 0;

  ~Memory() { free(bytes); }
  char* reserve(int64_t nbytes) {
    if (size < nbytes) {
      free(bytes);
      size = (nbytes + 63) / 64 * 64;
      bytes = static_cast<char*>(aligned_alloc(64, size));
    }
    return bytes;
  }
};
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

inline Team& team() {
  static thread_local Team team;
  return team;
}
