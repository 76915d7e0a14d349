// Grouped rows in shares of about equal cost for threads to take, cut where it may be inside of an expert. So neither
// few experts nor a hot one among many leave a thread without work, and products stay as large as they can.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

// Rows begin .. end-1 of an expert, whose rows are first .. first + count - 1 of all.
struct Task {
  int64_t expert, first, count, begin, end;

  int64_t first_row() const { return first + begin; }
  int64_t rows() const { return end - begin; }

  // The same part of another size of the expert, along multiples of 16.
  int64_t begin_of(int64_t size) const { return begin ? size * begin / count / 16 * 16 : 0; }
  int64_t end_of(int64_t size) const { return end < count ? size * end / count / 16 * 16 : size; }
};

using Share = std::vector<Task>;

// One for each thread, or of many experts a few. ends [experts]: where each expert's rows end; one without rows has a
// task too, for its gradients.
inline std::vector<Share> shares_of(const int64_t* ends, int64_t experts, int threads) {
  constexpr int64_t weight = 32;  // what reading an expert's weights costs, in rows
  const int64_t whole = ends[experts - 1] + weight * experts;
  const int64_t number = experts < 8 * threads ? threads : 4 * threads;
  std::vector<Share> shares(number);
  int64_t share = 0, before = 0;  // the cost of the experts before
  for (int64_t e = 0; e < experts; e++) {
    const int64_t first = e ? ends[e - 1] : 0, count = ends[e] - first;
    int64_t row = 0;
    do {
      const int64_t left = whole * (share + 1) / number - before;
      const bool fits = share + 1 == number || left >= count + weight;
      const int64_t last = fits ? count : std::clamp(left / 16 * 16, row, count);
      if (last > row || !count) shares[share].push_back({e, first, count, row, last});
      row = last;
      share += !fits;
    } while (row < count);
    before += count + weight;
  }
  return shares;
}

inline int64_t most_rows(const std::vector<Share>& shares) {
  int64_t most = 0;
  for (const Share& share : shares)
    for (const Task& task : share) most = std::max(most, task.rows());
  return most;
}
