// Chunks to ranks. Every function returns the rank of each chunk, and gives each rank as many chunks, give or
// take one, unless `uneven` asks otherwise.
#include <numeric>

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
// lower rank, and among equal chunks the earlier one comes first. Unless `uneven`, whole chunks are shared out
// evenly, and a last chunk that is `short` goes to a rank without one whole chunk more than the others, so that
// the ranks' rows differ by one chunk at most.
std::vector<int32_t> dispatch_min_heap(const std::vector<int64_t>& areas, int64_t n_ranks, bool uneven,
                                       bool last_is_short) {
  const int64_t n = int64_t(areas.size());
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return areas[a] > areas[b]; });

  const int64_t whole = n - last_is_short, share = whole / n_ranks;
  int64_t larger = whole % n_ranks;  // how many ranks may still take one whole chunk more than `share`
  std::vector<int64_t> load(n_ranks, 0), count(n_ranks, 0);  // area, whole chunks
  int64_t short_rank = -1;
  std::vector<int32_t> rank(n);
  for (int64_t c : order) {
    const bool is_short = last_is_short && c == n - 1;
    auto takes = [&](int64_t r) {
      if (uneven || count[r] < share) return true;
      return count[r] == share && (is_short || (larger > 0 && r != short_rank));
    };
    int64_t least = -1;
    for (int64_t r = 0; r < n_ranks; ++r)
      if (takes(r) && (least < 0 || load[r] < load[least])) least = r;
    rank[c] = int32_t(least);
    load[least] += areas[c];
    if (is_short) {
      short_rank = least;
    } else {
      larger -= count[least]++ == share;
    }
  }
  return rank;
}

}  // namespace magi
