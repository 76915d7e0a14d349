// Grouped rows shared out to threads in parts of about equal work, so that neither a few experts nor a hot one among
// many leave a thread without any.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

// Part number `part` of `parts` of the work on an expert, whose rows are first .. first + count - 1.
struct Task {
  int64_t expert, first, count, part, parts;

  // The part of the rows, where rows are cut.
  int64_t first_row() const { return first + begin(count); }
  int64_t rows() const { return end(count) - begin(count); }

  // Where the part begins and ends in a size that is cut along multiples of 16.
  int64_t begin(int64_t size) const { return begin_of(part, size); }
  int64_t end(int64_t size) const { return begin_of(part + 1, size); }

 private:
  int64_t begin_of(int64_t number, int64_t size) const {
    return std::min((size + 15) / 16 * number / parts * 16, size);
  }
};

inline int64_t most_rows(const std::vector<Task>& tasks) {
  int64_t most = 0;
  for (const Task& task : tasks) most = std::max(most, task.rows());
  return most;
}

// ends [experts]: where each one's rows end. An expert without rows has a part too: its gradients are zero.
inline std::vector<Task> tasks_of(const int64_t* ends, int64_t experts, int threads) {
  constexpr int64_t least = 64, parts_a_thread = 4;
  const int64_t share = std::max(least, ends[experts - 1] / (parts_a_thread * threads) + 1);
  std::vector<Task> tasks;
  for (int64_t e = 0; e < experts; e++) {
    const int64_t first = e ? ends[e - 1] : 0, count = ends[e] - first;
    const int64_t parts = std::max<int64_t>(1, (count + share - 1) / share);
    for (int64_t part = 0; part < parts; part++) tasks.push_back({e, first, count, part, parts});
  }
  return tasks;
}
