// Memory of a pass's threads. It is taken before the parallel region, which no exception may leave.
#pragma once
#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <new>

struct NoMemory {
  int64_t bytes;
};

// `numbers` for each of `threads`, each part on a cache line's boundary.
template <typename number>
class Scratch {
  int64_t bytes;
  char* all;

 public:
  Scratch(int threads, int64_t numbers)
      : bytes((numbers * sizeof(number) + 63) / 64 * 64),
        all(static_cast<char*>(std::aligned_alloc(64, threads * bytes))) {
    if (!all && bytes) throw NoMemory{threads * bytes};
  }
  ~Scratch() { std::free(all); }
  Scratch(const Scratch&) = delete;

  // The calling thread's part.
  number* own() const {
    number* data = reinterpret_cast<number*>(all + omp_get_thread_num() * bytes);
    __asm__ volatile("" ::"r"(data) : "memory");  // GCC's tile instructions do not say that they read memory
    return data;
  }
};

// What a pass returns to its caller, who speaks C: 0, or how many bytes it could not have; -1 where that is unknown.
template <typename Pass>
int64_t memory_missed(Pass pass) {
  try {
    pass();
    return 0;
  } catch (const NoMemory& missed) {
    return missed.bytes;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
