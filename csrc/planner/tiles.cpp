// Work lists of a kernel: for every tile of rows, the runs of column tiles that it has to visit.
//
// Row tiles lie on a grid; column tiles start anywhere. A connected stretch of touched columns is tiled from
// its own start, rounded down to col_align, and a stretch that one band covers in every row of the tile becomes
// one run without a mask.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>

#include "planner.h"

namespace magi {
namespace {

constexpr int64_t kTileInf = int64_t{1} << 30;

// The columns that a band touches in a tile of rows, and those it covers in all of them.
struct Touched {
  int64_t lo, hi, full_lo, full_hi;
  size_t band;
};

TileBand narrow(const Band& b) {
  auto cap = [](int64_t x) { return static_cast<int32_t>(std::min(std::max(x, -kTileInf), kTileInf)); };
  return {cap(b.q0), cap(b.q1), cap(b.k0), cap(b.k1), cap(b.dlo), cap(b.dhi), cap(b.step), 0};
}

class Builder {
 public:
  Builder(const Bands& bands, int64_t tile_cols, int64_t col_align)
      : bands_(bands), width_(tile_cols), align_(col_align) {}

  void add_item(int64_t row0, int64_t n_rows, const std::vector<Touched>& touched) {
    item_ = {int32_t(row0), int32_t(n_rows), int32_t(plan.runs.size()), 0, 0, 0, -1, 0};
    last_bands_.clear();
    tile(touched);
    item_.run_end = int32_t(plan.runs.size());
    plan.items.push_back(item_);
  }

  TilePlan plan;

 private:
  // `touched` is sorted by lo. The width is a multiple of the alignment, so only a stretch's start is rounded.
  void tile(const std::vector<Touched>& touched) {
    int64_t done = -kInf;
    for (size_t j = 0; j < touched.size();) {
      int64_t col = std::max(touched[j].lo & -align_, done), hi = touched[j].hi;
      size_t z = j + 1;
      auto extend = [&](int64_t limit) {  // an interval that starts at or before `limit` belongs to the stretch
        while (z < touched.size() && touched[z].lo <= limit) hi = std::max(hi, touched[z++].hi);
      };
      for (size_t seen = 0; seen != z;) seen = z, extend(hi);
      while (col < hi) {
        extend(col + width_ - 1);
        int64_t n_full = 0;
        for (size_t y = j; y < z; ++y)
          if (touched[y].full_lo <= col) n_full = std::max(n_full, (touched[y].full_hi - col) / width_);
        if (n_full > 0) {
          emit(col, n_full, 0, 0);
          col += n_full * width_;
          continue;
        }
        here_.clear();
        for (size_t y = j; y < z; ++y)
          if (touched[y].lo < col + width_ && touched[y].hi > col) here_.push_back(touched[y].band);
        if (!here_.empty()) emit_partial(col);
        col += width_;
      }
      done = col;
      j = z;
    }
  }

  void emit_partial(int64_t col) {
    if (here_ != last_bands_) {
      band_begin_ = int32_t(plan.bands.size());
      for (size_t i : here_) plan.bands.push_back(narrow(bands_[i]));
      last_bands_ = here_;
    }
    emit(col, 1, band_begin_, int32_t(here_.size()));
  }

  void emit(int64_t col, int64_t n, int32_t band_begin, int32_t n_band) {
    item_.n_tiles += int32_t(n);
    if (int32_t(plan.runs.size()) > item_.run_begin) {
      TileRun& r = plan.runs.back();
      if (r.band_begin == band_begin && r.n_band == n_band && r.col_start + r.n_tiles * width_ == col) {
        r.n_tiles += int32_t(n);
        return;
      }
    }
    plan.runs.push_back({int32_t(col), int32_t(n), band_begin, n_band});
  }

  const Bands& bands_;
  int64_t width_, align_;
  TileItem item_{};
  std::vector<size_t> here_, last_bands_;
  int32_t band_begin_ = 0;
};

// Longest first in cost buckets of an eighth of an octave; row order is kept inside a bucket.
void sort_longest_first(std::vector<TileItem>& items) {
  int32_t most = 0;
  for (const TileItem& i : items) most = std::max(most, i.n_tiles);
  std::vector<int32_t> bucket(size_t(most) + 1, 0);
  for (int32_t n = 1; n <= most; ++n) bucket[n] = 1 + int32_t(8 * std::log2(double(n)));
  std::vector<size_t> begin(size_t(bucket[most]) + 2, 0);  // of each bucket in the result, the longest first
  auto rank = [&](const TileItem& i) { return size_t(bucket[most] - bucket[i.n_tiles]); };
  for (const TileItem& i : items) ++begin[rank(i) + 1];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<TileItem> sorted(items.size());
  for (const TileItem& i : items) sorted[begin[rank(i)]++] = i;
  items.swap(sorted);
}

}  // namespace

TilePlan tile_plan(const Bands& bands, int64_t n_rows, int64_t tile_rows, int64_t tile_cols, int64_t col_align) {
  if (tile_rows < 1 || tile_cols < 1) throw std::invalid_argument("tile_rows and tile_cols must be positive");
  if (col_align < 1 || (col_align & (col_align - 1)) != 0 || tile_cols % col_align != 0)
    throw std::invalid_argument("col_align must be a power of two that divides tile_cols, got " +
                                std::to_string(col_align) + " for tile_cols " + std::to_string(tile_cols));
  if (n_rows >= kTileInf)
    throw std::invalid_argument("a tile plan holds fewer than 2^30 rows, got " + std::to_string(n_rows));
  Bands sorted = bands;
  std::stable_sort(sorted.begin(), sorted.end(), [](const Band& x, const Band& y) { return x.q0 < y.q0; });
  for (const Band& b : sorted)
    if (b.k1 >= kTileInf)
      throw std::invalid_argument("a tile plan holds fewer than 2^30 columns, got " + std::to_string(b.k1));
  Builder builder(sorted, tile_cols, col_align);
  const size_t n_items = size_t((n_rows + tile_rows - 1) / tile_rows);
  builder.plan.items.reserve(n_items);
  builder.plan.runs.reserve(2 * n_items);
  builder.plan.bands.reserve(n_items);
  std::vector<size_t> active;
  std::vector<Touched> touched;
  size_t next = 0;
  for (int64_t a = 0; a < n_rows; a += tile_rows) {
    const int64_t e = std::min(a + tile_rows, n_rows);
    while (next < sorted.size() && sorted[next].q0 < e) active.push_back(next++);
    active.erase(std::remove_if(active.begin(), active.end(), [&](size_t i) { return sorted[i].q1 <= a; }),
                 active.end());
    touched.clear();
    for (size_t i : active) {
      const Band& b = sorted[i];
      const int64_t first = std::max(a, b.q0), last = std::min(e, b.q1) - 1;
      const int64_t lo = b.lo(first), hi = b.hi(last);
      if (lo >= hi) continue;
      const bool all_rows = b.q0 <= a && b.q1 >= e;
      touched.push_back({lo, hi, all_rows ? b.lo(last) : kInf, all_rows ? b.hi(first) : -kInf, i});
    }
    std::sort(touched.begin(), touched.end(), [](const Touched& x, const Touched& y) { return x.lo < y.lo; });
    builder.add_item(a, e - a, touched);
  }
  sort_longest_first(builder.plan.items);
  return std::move(builder.plan);
}

std::vector<TileSplit> split_items(TilePlan& plan, int32_t tile_cols, int64_t max_tiles) {
  if (max_tiles < 1) throw std::invalid_argument("max_tiles must be positive, got " + std::to_string(max_tiles));
  std::vector<TileSplit> splits;
  std::vector<TileItem> items;
  int32_t slots = 0;
  for (const TileItem& whole : plan.items) {
    const int32_t parts = int32_t((whole.n_tiles + max_tiles - 1) / max_tiles);
    if (parts <= 1) {
      items.push_back(whole);
      continue;
    }
    splits.push_back({whole.row0, whole.n_rows, slots, parts});
    int32_t run = whole.run_begin, used = 0;  // tiles of that run which earlier parts have
    for (int32_t i = 0; i < parts; ++i) {
      TileItem part = whole;
      part.slot = slots++;
      part.n_tiles = whole.n_tiles / parts + (i < whole.n_tiles % parts);
      part.run_begin = int32_t(plan.runs.size());
      for (int32_t left = part.n_tiles; left > 0;) {
        const TileRun from = plan.runs[run];
        const int32_t n = std::min(left, from.n_tiles - used);
        plan.runs.push_back({from.col_start + used * tile_cols, n, from.band_begin, from.n_band});
        left -= n, used += n;
        if (used == from.n_tiles) ++run, used = 0;
      }
      part.run_end = int32_t(plan.runs.size());
      items.push_back(part);
    }
  }
  plan.items.swap(items);
  sort_longest_first(plan.items);
  return splits;
}

void layer_runs(TilePlan& plan) {
  std::vector<TileRun> runs, layered;  // layered: the last run with several bands, as it was replaced
  runs.reserve(plan.runs.size());
  std::vector<TileBand> here;
  std::vector<std::vector<TileBand>> layers;
  for (TileItem& item : plan.items) {
    const auto begin = plan.runs.begin() + item.run_begin, end = plan.runs.begin() + item.run_end;
    item.run_begin = int32_t(runs.size());
    std::copy_if(begin, end, std::back_inserter(runs), [](const TileRun& r) { return r.n_band == 0; });
    item.flags = int32_t(runs.size()) - item.run_begin;
    int32_t last_bands = -1;
    for (auto r = begin; r != end; ++r) {
      if (r->n_band == 0) continue;
      if (r->n_band == 1) {
        runs.push_back(*r);
        continue;
      }
      if (r->band_begin != last_bands) {
        last_bands = r->band_begin;
        const auto first = plan.bands.begin() + r->band_begin;
        here.assign(first, first + r->n_band);
        std::stable_sort(here.begin(), here.end(), [](const TileBand& x, const TileBand& y) { return x.r0 < y.r0; });
        layers.clear();
        for (const TileBand& b : here) {
          auto layer = std::find_if(layers.begin(), layers.end(), [&](const auto& l) { return l.back().r1 <= b.r0; });
          if (layer == layers.end()) layer = layers.emplace(layer);
          layer->push_back(b);
        }
        layered.clear();
        for (const auto& layer : layers) {
          layered.push_back({0, 0, int32_t(plan.bands.size()), int32_t(layer.size())});
          plan.bands.insert(plan.bands.end(), layer.begin(), layer.end());
        }
      }
      for (const TileRun& l : layered) runs.push_back({r->col_start, r->n_tiles, l.band_begin, l.n_band});
      item.n_tiles += (int32_t(layered.size()) - 1) * r->n_tiles;
    }
    item.run_end = int32_t(runs.size());
  }
  plan.runs.swap(runs);
}

}  // namespace magi
