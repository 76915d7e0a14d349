// Memory of one thread for the time of a pass, on a cache line's boundary.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>

template <typename number>
struct Scratch {
  number* data;
  explicit Scratch(int64_t numbers)
      : data(static_cast<number*>(std::aligned_alloc(64, (numbers * sizeof(number) + 63) / 64 * 64))) {
    if (!data && numbers) {
      std::fputs("megamoe: no memory is left for a pass on the CPU\n", stderr);
      std::abort();
    }
    __asm__ volatile("" ::"r"(data) : "memory");  // GCC's tile instructions do not say that they read memory
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
};
