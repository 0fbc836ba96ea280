// Band algebra, tile plans and dispatch: pure functions on integers. No torch, no Python.
//
// A mask is a list of bands. Everything that combines masks works row segment by row segment: within a
// segment every interval end moves by 0 or 1 keys a row, so a whole segment is a few integers (see bands.cpp).
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tile_plan.h"

namespace magi {

constexpr int64_t kInf = int64_t{1} << 60;  // an inactive diagonal bound is -kInf or kInf

// The pair (q, k) is visible iff q0 <= q < q1, k0 <= k < k1 and dlo <= k - q' < dhi,
// where q' = q0 + step * ((q - q0) / step).
struct Band {
  int64_t q0, q1, k0, k1, dlo, dhi, step;

  int64_t anchor(int64_t q) const { return step == 1 ? q : q0 + step * ((q - q0) / step); }
  int64_t lo(int64_t q) const { return std::max(k0, anchor(q) + dlo); }
  int64_t hi(int64_t q) const { return std::min(k1, anchor(q) + dhi); }
};

using Bands = std::vector<Band>;
using Range = std::pair<int64_t, int64_t>;  // half-open
using Ranges = std::vector<Range>;

// Rows [a, b), none of them empty: row q sees [lo + slo * (q - a), hi + shi * (q - a)), slopes 0 or 1.
struct Piece {
  int64_t a, b, lo, slo, hi, shi;
};

enum class SetOp { kOr, kAnd, kSub };

// --- bands.cpp: sets of pairs -----------------------------------------------------------------------------
// Results are canonical: disjoint bands without empty rows, a function of the set of pairs alone.
Bands combine(const Bands& a, const Bands& b, SetOp op);
Bands normalize(const Bands& a);  // the union of the bands
Bands transpose(const Bands& a);
Bands clip(const Bands& a, Range q, Range k);
Bands from_dense(const uint8_t* mask, int64_t sq, int64_t sk);
// The bands in local coordinates. `q` and `k` are sorted, disjoint ranges; rows are numbered along `q`, and
// the keys of range k[j] begin at k_at[j].
Bands remap(const Bands& a, const Ranges& q, const Ranges& k, const std::vector<int64_t>& k_at);

std::vector<Piece> pieces(const Bands& a);                                          // sorted by first row
int64_t area(const Bands& a);                                                       // of disjoint bands
std::vector<int64_t> row_areas(const Bands& a, const std::vector<int64_t>& edges);  // per [edge, next edge)
// The pairs of each rectangle of a grid, row-major; the edges are sorted and cover the bands.
std::vector<int64_t> block_areas(const Bands& a, const std::vector<int64_t>& q_edges,
                                 const std::vector<int64_t>& k_edges);
Ranges key_ranges(const Bands& a, const Ranges& q);  // keys seen by rows of `q` (sorted, disjoint)

// --- tiles.cpp: work lists of a kernel --------------------------------------------------------------------
struct TilePlan {
  std::vector<TileItem> items;  // longest first
  std::vector<TileRun> runs;
  std::vector<TileBand> bands;
};
// Column tiles start at multiples of col_align, a power of two that divides tile_cols.
TilePlan tile_plan(const Bands& bands, int64_t n_rows, int64_t tile_rows, int64_t tile_cols, int64_t col_align = 1);
// Shares items of more than `max_tiles` column tiles out to several, as even as they go.
std::vector<TileSplit> split_items(TilePlan& plan, int32_t tile_cols, int64_t max_tiles);
// Puts each item's runs without bands first, as many as its flags then say, and gives runs in which a row is in several
// bands once for each of these: a row has at most one band in any run.
void layer_runs(TilePlan& plan);

// --- dispatch.cpp: chunks to ranks ------------------------------------------------------------------------
std::vector<int32_t> dispatch_sequential(int64_t n_chunks, int64_t n_ranks);
std::vector<int32_t> dispatch_head_tail(int64_t n_chunks, int64_t n_ranks);
std::vector<int32_t> dispatch_min_heap(const std::vector<int64_t>& areas, int64_t n_ranks, bool uneven,
                                       bool last_is_short);

}  // namespace magi
