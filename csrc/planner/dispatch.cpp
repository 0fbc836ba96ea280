// Chunks to ranks. Every function returns the rank of each chunk, and gives each rank n_chunks / n_ranks
// chunks, rounded down or up, unless `uneven` asks otherwise.
#include <numeric>
#include <queue>

#include "planner.h"

namespace magi {

//   2 ranks, 8 chunks:  0 0 0 0 1 1 1 1
std::vector<int32_t> dispatch_sequential(int64_t n_chunks, int64_t n_ranks) {
  std::vector<int32_t> rank(n_chunks);
  for (int64_t r = 0; r < n_ranks; ++r)
    for (int64_t c = n_chunks * r / n_ranks; c < n_chunks * (r + 1) / n_ranks; ++c) rank[c] = int32_t(r);
  return rank;
}

//   2 ranks, 8 chunks:  0 0 1 1 1 1 0 0
std::vector<int32_t> dispatch_head_tail(int64_t n_chunks, int64_t n_ranks) {
  std::vector<int32_t> rank(n_chunks);
  const int64_t pieces = 2 * n_ranks;
  // The head pieces are rounded down and the tail pieces up, or the other way round, so that every rank's
  // sum is n_chunks / n_ranks rounded down or up.
  std::vector<int64_t> size(pieces);
  for (int64_t r = 0; r < n_ranks; ++r) {
    const int64_t both = n_chunks / n_ranks + (r < n_chunks % n_ranks);
    size[r] = both / 2;
    size[pieces - 1 - r] = both - both / 2;
  }
  int64_t c = 0;
  for (int64_t p = 0; p < pieces; ++p)
    for (int64_t i = 0; i < size[p]; ++i) rank[c++] = int32_t(p < n_ranks ? p : pieces - 1 - p);
  return rank;
}

// The largest chunk first, each to the rank with the least area that still takes a chunk; ties go to the
// lower rank, and among equal chunks the earlier one comes first.
std::vector<int32_t> dispatch_min_heap(const std::vector<int64_t>& areas, int64_t n_ranks, bool uneven) {
  const int64_t n = int64_t(areas.size());
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return areas[a] > areas[b]; });
  using Load = std::pair<int64_t, int64_t>;  // area, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
  for (int64_t r = 0; r < n_ranks; ++r) loads.push({0, r});
  int64_t larger = n % n_ranks;  // how many ranks may still take one chunk more than the others
  std::vector<int64_t> count(n_ranks, 0);
  std::vector<int32_t> rank(n);
  for (int64_t c : order) {
    Load least = loads.top();
    while (!uneven && count[least.second] == n / n_ranks && larger == 0) {
      loads.pop();
      least = loads.top();
    }
    loads.pop();
    if (!uneven && count[least.second] == n / n_ranks) --larger;
    rank[c] = int32_t(least.second);
    if (++count[least.second] <= n / n_ranks || uneven) loads.push({least.first + areas[c], least.second});
  }
  return rank;
}

}  // namespace magi
