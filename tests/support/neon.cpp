// Calls functions of a library for another process, whose memory it reads page by page at the same addresses.
// stdin: calls, and requested pages. stdout: the address of a page to read, or 0; then written pages, 0, and the result.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <map>

constexpr uint64_t kPage = 4096;
struct Call {
  char function[64];
  uint64_t arguments[11];
};
std::map<uint64_t, bool> is_written;  // of each page
std::atomic_flag busy;

void receive(void* to, uint64_t nbytes) {
  for (char* at = static_cast<char*>(to); nbytes > 0;) {
    const ssize_t n = read(0, at, nbytes);
    if (n <= 0) _exit(0);
    at += n, nbytes -= n;
  }
}
void send(const void* from, uint64_t nbytes) {
  for (const char* at = static_cast<const char*>(from); nbytes > 0;) {
    const ssize_t n = write(1, at, nbytes);
    if (n <= 0) _exit(0);
    at += n, nbytes -= n;
  }
}

// The first fault of a page reads it, the second makes it writable.
void fetch(int, siginfo_t* info, void*) {
  const uint64_t page = reinterpret_cast<uint64_t>(info->si_addr) & -kPage;
  while (busy.test_and_set()) {
  }
  void* target = reinterpret_cast<void*>(page);
  if (const auto [entry, is_new] = is_written.try_emplace(page, false); is_new) {
    send(&page, sizeof(page));
    void* copy = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    receive(copy, kPage);
    mprotect(copy, kPage, PROT_READ);
    mremap(copy, kPage, kPage, MREMAP_MAYMOVE | MREMAP_FIXED, target);
  } else {
    mprotect(target, kPage, PROT_READ | PROT_WRITE);
    entry->second = true;
  }
  busy.clear();
}

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  struct sigaction action = {};
  action.sa_sigaction = fetch;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
  for (;;) {
    Call call;
    receive(&call, sizeof(call));
    const auto* a = call.arguments;
    using Function = uint64_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
    const uint64_t end = 0,
      result = reinterpret_cast<Function>(dlsym(library, call.function))(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
    send(&end, sizeof(end));
    for (const auto& [page, written] : is_written) {
      if (written) send(&page, sizeof(page)), send(reinterpret_cast<void*>(page), kPage);
      munmap(reinterpret_cast<void*>(page), kPage);
    }
    is_written.clear();
    send(&end, sizeof(end));
    send(&result, sizeof(result));
  }
}
