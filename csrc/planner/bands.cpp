// Sets of (q, k) pairs as bands.
//
//   bands --pieces--> linear pieces --sweep--> row segments --Runs--> maximal runs --Chains--> canonical bands
//
// The sweep cuts the rows wherever two interval ends meet, so that within a segment their order is constant
// and a set operation is one pass over the sorted ends. Runs and Chains then depend on the set alone: they
// extend runs and bands row by row from the top as far as the rows allow.
#include <algorithm>

#include "planner.h"

namespace magi {
namespace {

struct Interval {
  int64_t lo, slo, hi, shi;
};

// Rows [a, b) that see the same sorted, disjoint, not touching intervals, up to their slopes.
struct Segment {
  int64_t a = 0, b = 0;
  std::vector<Interval> iv;
};

void append_pieces(const Band& band, std::vector<Piece>& out) {
  auto rectangle = [&](int64_t a, int64_t b) {
    const int64_t lo = band.lo(a), hi = band.hi(a);
    if (a < b && lo < hi) out.push_back({a, b, lo, 0, hi, 0});
  };
  if (band.step > 1) {
    for (int64_t a = band.q0; a < band.q1; a += band.step) rectangle(a, std::min(a + band.step, band.q1));
    return;
  }
  auto inside = [&](int64_t q) { return std::min(std::max(q, band.q0), band.q1); };
  const int64_t lo_moves = inside(band.k0 - band.dlo);  // from here on the lower end moves
  const int64_t hi_rests = inside(band.k1 - band.dhi);  // from here on the upper end rests
  int64_t cuts[4] = {band.q0, std::min(lo_moves, hi_rests), std::max(lo_moves, hi_rests), band.q1};
  for (int c = 0; c < 3; ++c) {
    int64_t a = cuts[c], b = cuts[c + 1];
    if (a >= b) continue;
    const int64_t slo = a >= lo_moves, shi = a < hi_rests;
    const int64_t width = band.hi(a) - band.lo(a);
    if (shi > slo) a = std::max(a, a + 1 - width);
    if (shi < slo) b = std::min(b, a + width);
    if (shi == slo && width <= 0) continue;
    if (a < b) out.push_back({a, b, band.lo(a), slo, band.hi(a), shi});
  }
}

// Joins bands greedily out of maximal runs. A band's lower end rests and then moves by one key a row; its
// upper end moves and then rests.
class Chains {
 public:
  void add(const Segment& s) {
    if (!open_.empty() && open_.front().b != s.a) flush();
    size_t i = 0;  // most intervals go on as they were
    while (i < s.iv.size() && i < open_.size() && open_[i].lo >= s.iv[i].lo - 1 && extend(open_[i], s.iv[i], s.b)) ++i;
    rest_.assign(open_.begin() + i, open_.end());
    open_.resize(i);
    size_t j = 0;
    for (; i < s.iv.size(); ++i) {
      const Interval& iv = s.iv[i];
      while (j < rest_.size() && rest_[j].lo < iv.lo - 1) close(rest_[j++]);
      if (j < rest_.size() && extend(rest_[j], iv, s.b)) {
        open_.push_back(rest_[j++]);
      } else {
        const int64_t n = s.b - s.a - 1;
        open_.push_back({s.a, s.b, iv.lo, iv.hi, iv.lo + iv.slo * n, iv.hi + iv.shi * n, n > 0 && iv.slo == 1,
                         n > 0 && iv.shi == 1, n > 0 && iv.shi == 0});
      }
    }
    while (j < rest_.size()) close(rest_[j++]);
  }

  Bands finish() {
    flush();
    std::sort(out_.begin(), out_.end(),
              [](const Band& x, const Band& y) { return std::make_pair(x.q0, x.k0) < std::make_pair(y.q0, y.k0); });
    return std::move(out_);
  }

 private:
  struct Open {
    int64_t a, b, lo_first, hi_first, lo, hi;  // lo, hi: of the last row
    bool lo_moves, hi_moved, hi_rests;
  };

  static bool extend(Open& o, const Interval& iv, int64_t b) {
    const int64_t n = b - o.b - 1;  // steps inside the new run
    const int64_t dlo = iv.lo - o.lo, dhi = iv.hi - o.hi;
    const bool lo_fits = (dlo == 1 || (dlo == 0 && !o.lo_moves)) && (n == 0 || iv.slo >= dlo);
    const bool hi_fits = (dhi == 0 || (dhi == 1 && !o.hi_rests)) && (n == 0 || iv.shi <= dhi);
    if (!lo_fits || !hi_fits) return false;
    o.lo_moves = o.lo_moves || dlo == 1 || (n > 0 && iv.slo == 1);
    o.hi_moved = o.hi_moved || dhi == 1;
    o.hi_rests = o.hi_rests || dhi == 0 || (n > 0 && iv.shi == 0);
    o.b = b;
    o.lo = iv.lo + iv.slo * n;
    o.hi = iv.hi + iv.shi * n;
    return true;
  }

  void close(const Open& o) {
    out_.push_back(
        {o.a, o.b, o.lo_first, o.hi, o.lo_moves ? o.lo - (o.b - 1) : -kInf, o.hi_moved ? o.hi_first - o.a : kInf, 1});
  }

  void flush() {
    for (const Open& o : open_) close(o);
    open_.clear();
  }

  std::vector<Open> open_, rest_;
  Bands out_;
};

// Cuts a sequence of segments into runs: from the top, as many rows as move alike.
class Runs {
 public:
  explicit Runs(Chains& out) : out_(out) {}

  void add(Segment s) {
    if (s.iv.empty()) return;
    if (run_.iv.size() != s.iv.size() || run_.b != s.a || !absorb_first_row(s)) {
      flush();
      run_ = std::move(s);
      return;
    }
    ++run_.b;
    if (s.b == run_.b) return;
    bool alike = true;
    for (size_t i = 0; i < s.iv.size(); ++i)
      alike = alike && s.iv[i].slo == run_.iv[i].slo && s.iv[i].shi == run_.iv[i].shi;
    if (alike) {
      run_.b = s.b;
      return;
    }
    flush();
    for (Interval& iv : s.iv) iv.lo += iv.slo, iv.hi += iv.shi;
    ++s.a;
    run_ = std::move(s);
  }

  void flush() {
    if (!run_.iv.empty()) out_.add(run_);
    run_.iv.clear();
  }

 private:
  bool absorb_first_row(const Segment& s) {
    const int64_t n = run_.b - run_.a - 1;  // steps in the run so far
    for (size_t i = 0; i < s.iv.size(); ++i) {
      const Interval& r = run_.iv[i];
      const int64_t dlo = s.iv[i].lo - (r.lo + (n ? r.slo * n : 0));
      const int64_t dhi = s.iv[i].hi - (r.hi + (n ? r.shi * n : 0));
      if (dlo < 0 || dlo > 1 || dhi < 0 || dhi > 1) return false;
      if (n > 0 && (dlo != r.slo || dhi != r.shi)) return false;
    }
    if (n == 0)
      for (size_t i = 0; i < s.iv.size(); ++i) {
        run_.iv[i].slo = s.iv[i].lo - run_.iv[i].lo;
        run_.iv[i].shi = s.iv[i].hi - run_.iv[i].hi;
      }
    return true;
  }

  Chains& out_;
  Segment run_;
};

// Joins rectangles of equal height that climb regularly into staircases of at least three steps.
Bands join_stairs(const Bands& bands) {
  struct Stair {
    Band band;  // of the steps so far
    int64_t end, lo, hi;
    bool lo_moves, hi_rests, done;
    std::vector<size_t> steps;
  };
  constexpr size_t kMinSteps = 3;
  std::vector<Stair> open;
  std::vector<uint8_t> joined(bands.size(), 0);
  Bands out;
  auto close = [&](const Stair& s) {
    if (s.steps.size() < kMinSteps) return;
    for (size_t i : s.steps) joined[i] = 1;
    out.push_back(s.band);
  };
  auto extend = [](Stair& s, const Band& r, size_t index) {
    const int64_t step = s.band.step, height = r.q1 - r.q0;
    const int64_t dlo = r.k0 - s.lo, dhi = r.k1 - s.hi;
    if (s.done || height > step || dlo < 0 || dlo > step || dhi < 0 || dhi > step) return false;
    if (s.lo_moves && dlo != step) return false;
    if (s.hi_rests && dhi != 0) return false;
    if (dlo == 0 && dhi == 0) return false;
    if (dlo > 0) s.lo_moves = true, s.band.dlo = r.k0 - r.q0;
    if (dhi > 0 && s.steps.size() == 1) s.band.dhi = s.hi - s.band.q0;
    if (dhi < step) s.hi_rests = true;
    s.lo = r.k0, s.hi = r.k1, s.end = r.q1;
    s.band.q1 = r.q1, s.band.k1 = r.k1;
    s.done = height < step;
    s.steps.push_back(index);
    return true;
  };
  for (size_t i = 0; i < bands.size(); ++i) {
    const Band& r = bands[i];
    size_t kept = 0;
    for (size_t j = 0; j < open.size(); ++j) {
      if (open[j].end < r.q0)
        close(open[j]);
      else {
        if (kept != j) open[kept] = std::move(open[j]);
        ++kept;
      }
    }
    open.resize(kept);
    if (r.dlo != -kInf || r.dhi != kInf) continue;
    bool taken = false;
    for (Stair& s : open)
      if (s.end == r.q0 && (taken = extend(s, r, i))) break;
    if (taken) continue;
    Stair s{r, r.q1, r.k0, r.k1, false, false, false, {i}};
    s.band.step = r.q1 - r.q0;
    if (s.band.step > 1) open.push_back(std::move(s));
  }
  for (const Stair& s : open) close(s);
  if (out.empty()) return bands;
  for (size_t i = 0; i < bands.size(); ++i)
    if (!joined[i]) out.push_back(bands[i]);
  std::sort(out.begin(), out.end(),
            [](const Band& x, const Band& y) { return std::make_pair(x.q0, x.k0) < std::make_pair(y.q0, y.k0); });
  return out;
}

// One end of an active interval in the current row.
struct End {
  int64_t at, slope, until;  // it lives in the rows before `until`
  int change_a, change_b;    // +1 where an interval of that operand starts, -1 behind its last key

  bool operator<(const End& o) const { return at != o.at ? at < o.at : slope < o.slope; }
};

// Orders ends that are sorted but for the slopes of those at the same key.
void settle(std::vector<End>& ends) {
  for (size_t i = 0; i < ends.size();) {
    size_t j = i + 1;
    bool sorted = true;
    for (; j < ends.size() && ends[j].at == ends[i].at; ++j) sorted = sorted && ends[j - 1].slope <= ends[j].slope;
    if (!sorted) std::partition(ends.begin() + i, ends.begin() + j, [](const End& e) { return e.slope == 0; });
    i = j;
  }
}

bool holds(SetOp op, int a, int b) {
  if (op == SetOp::kOr) return a > 0 || b > 0;
  if (op == SetOp::kAnd) return a > 0 && b > 0;
  return a > 0 && b == 0;
}

// Applies `op` to the rows [row, end) in which exactly the intervals of `ends`, which are sorted, live.
void sweep_rows(std::vector<End>& ends, int64_t row, int64_t end, SetOp op, Runs& out) {
  while (row < end) {
    int64_t stop = end;  // the order of the ends is constant in [row, stop)
    for (size_t i = 0; i + 1 < ends.size(); ++i) {
      const int64_t gap = ends[i + 1].at - ends[i].at;
      if (gap == 0 && ends[i].slope != ends[i + 1].slope) stop = row + 1;
      if (gap > 0 && ends[i].slope > ends[i + 1].slope) stop = std::min(stop, row + gap);
    }
    Segment s{row, stop, {}};
    s.iv.reserve(ends.size() / 2);
    int a = 0, b = 0;
    bool inside = false;
    Interval iv{};
    for (size_t i = 0; i < ends.size();) {
      const int64_t at = ends[i].at, slope = ends[i].slope;
      for (; i < ends.size() && ends[i].at == at; ++i) a += ends[i].change_a, b += ends[i].change_b;
      const bool now = holds(op, a, b);
      if (now == inside) continue;
      inside = now;
      if (now) {
        iv.lo = at, iv.slo = slope;
      } else {
        iv.hi = at, iv.shi = slope;
        s.iv.push_back(iv);
      }
    }
    out.add(std::move(s));
    for (End& e : ends) e.at += e.slope * (stop - row);
    settle(ends);
    row = stop;
  }
}

Bands finish(Runs& runs, Chains& chains) {
  runs.flush();
  return join_stairs(chains.finish());
}

}  // namespace

std::vector<Piece> pieces(const Bands& bands) {
  std::vector<Piece> out;
  for (const Band& b : bands) append_pieces(b, out);
  std::sort(out.begin(), out.end(), [](const Piece& x, const Piece& y) { return x.a < y.a; });
  return out;
}

Bands combine(const Bands& a, const Bands& b, SetOp op) {
  struct Tagged {
    Piece piece;
    bool second;
  };
  std::vector<Tagged> all;
  for (const Piece& p : pieces(a)) all.push_back({p, false});
  for (const Piece& p : pieces(b)) all.push_back({p, true});
  std::stable_sort(all.begin(), all.end(), [](const Tagged& x, const Tagged& y) { return x.piece.a < y.piece.a; });
  std::vector<int64_t> events;
  for (const Tagged& t : all) events.push_back(t.piece.a), events.push_back(t.piece.b);
  std::sort(events.begin(), events.end());
  events.erase(std::unique(events.begin(), events.end()), events.end());

  Chains chains;
  Runs runs(chains);
  std::vector<End> ends;
  size_t next = 0;
  for (size_t e = 0; e + 1 < events.size(); ++e) {
    const int64_t row = events[e], end = events[e + 1];
    ends.erase(std::remove_if(ends.begin(), ends.end(), [&](const End& x) { return x.until <= row; }), ends.end());
    const auto before = ends.size();
    for (; next < all.size() && all[next].piece.a == row; ++next) {
      const Piece& p = all[next].piece;
      const int x = !all[next].second, y = all[next].second;
      ends.push_back({p.lo, p.slo, p.b, x, y});
      ends.push_back({p.hi, p.shi, p.b, -x, -y});
    }
    std::sort(ends.begin() + before, ends.end());
    std::inplace_merge(ends.begin(), ends.begin() + before, ends.end());
    sweep_rows(ends, row, end, op, runs);
  }
  return finish(runs, chains);
}

Bands normalize(const Bands& a) { return combine(a, {}, SetOp::kOr); }

namespace {

// One side of a staircase, turned. Key k is below the upper side of the steps from row q0 + step * j on where
// q0 + step * j + dhi > k, which is row k' + step - dhi, with k' the last key <= k that is q0 + dhi modulo step.
// So the keys are the rows of another staircase, but for those before the first such k'. The lower side likewise.
Bands turn_side(const Band& b, bool upper) {
  const int64_t edge = upper ? b.dhi : b.dlo;
  const int64_t offset = (b.q0 + edge - b.k0) % b.step;
  const int64_t start = b.k0 + (offset < 0 ? offset + b.step : offset);
  const int64_t row = std::min(std::max(start - edge, b.q0), b.q1);  // of the keys before `start`
  Bands out;
  out.push_back({b.k0, std::min(start, b.k1), upper ? row : b.q0, upper ? b.q1 : row, -kInf, kInf, 1});
  if (start < b.k1)
    out.push_back({start, b.k1, b.q0, b.q1, upper ? b.step - edge : -kInf, upper ? kInf : b.step - edge, b.step});
  return normalize(out);
}

}  // namespace

Bands transpose(const Bands& a) {
  Bands out;
  for (const Band& b : a) {
    if (b.step == 1) {
      out.push_back({b.k0, b.k1, b.q0, b.q1, b.dhi == kInf ? -kInf : 1 - b.dhi, b.dlo == -kInf ? kInf : 1 - b.dlo, 1});
      continue;
    }
    Bands turned{{b.k0, b.k1, b.q0, b.q1, -kInf, kInf, 1}};
    if (b.dhi != kInf) turned = combine(turned, turn_side(b, true), SetOp::kAnd);
    if (b.dlo != -kInf) turned = combine(turned, turn_side(b, false), SetOp::kAnd);
    out.insert(out.end(), turned.begin(), turned.end());
  }
  return normalize(out);
}

Bands clip(const Bands& a, Range q, Range k) {
  if (q.first >= q.second || k.first >= k.second) return {};
  return combine(a, {{q.first, q.second, k.first, k.second, -kInf, kInf, 1}}, SetOp::kAnd);
}

Bands from_dense(const uint8_t* mask, int64_t sq, int64_t sk) {
  Chains chains;
  Runs runs(chains);
  for (int64_t q = 0; q < sq; ++q) {
    const uint8_t* row = mask + q * sk;
    Segment s{q, q + 1, {}};
    for (int64_t k = 0; k < sk;) {
      if (!row[k]) {
        ++k;
        continue;
      }
      const int64_t lo = k;
      while (k < sk && row[k]) ++k;
      s.iv.push_back({lo, 0, k, 0});
    }
    runs.add(std::move(s));
  }
  return finish(runs, chains);
}

Bands remap(const Bands& a, const Ranges& q, const Ranges& k, const std::vector<int64_t>& k_at) {
  std::vector<int64_t> q_at{0};
  for (const Range& r : q) q_at.push_back(q_at.back() + r.second - r.first);
  auto first_behind = [](const Ranges& ranges, int64_t x) {  // the first range that ends behind x
    return size_t(
        std::upper_bound(ranges.begin(), ranges.end(), x, [](int64_t v, const Range& r) { return v < r.second; }) -
        ranges.begin());
  };
  Bands out;
  auto cut = [&](const Band& b) {
    for (size_t i = first_behind(q, b.q0); i < q.size() && q[i].first < b.q1; ++i) {
      const int64_t qa = std::max(b.q0, q[i].first), qb = std::min(b.q1, q[i].second);
      const int64_t lo = b.lo(qa), hi = b.hi(qb - 1), dq = q_at[i] - q[i].first;
      for (size_t j = first_behind(k, lo); j < k.size() && k[j].first < hi; ++j) {
        const int64_t dk = k_at[j] - k[j].first;
        out.push_back({qa + dq, qb + dq, std::max(b.k0, k[j].first) + dk, std::min(b.k1, k[j].second) + dk,
                       b.dlo == -kInf ? -kInf : b.dlo + dk - dq, b.dhi == kInf ? kInf : b.dhi + dk - dq, 1});
      }
    }
  };
  for (const Band& b : a) {
    if (b.step == 1) {
      cut(b);
      continue;
    }
    for (const Piece& p : pieces({b})) cut({p.a, p.b, p.lo, p.hi, -kInf, kInf, 1});
  }
  return normalize(out);
}

namespace {

// The pairs of a piece in its rows [a, b).
int64_t piece_area(const Piece& p, int64_t a, int64_t b) {
  const int64_t n = b - a, d = p.shi - p.slo;
  const int64_t first = p.hi - p.lo + d * (a - p.a);
  return n * first + d * (n * (n - 1) / 2);
}

}  // namespace

int64_t area(const Bands& a) {
  int64_t sum = 0;
  for (const Piece& p : pieces(a)) sum += piece_area(p, p.a, p.b);
  return sum;
}

std::vector<int64_t> row_areas(const Bands& a, const std::vector<int64_t>& edges) {
  std::vector<int64_t> out(edges.empty() ? 0 : edges.size() - 1, 0);
  for (const Piece& p : pieces(a)) {
    size_t i = std::upper_bound(edges.begin(), edges.end(), p.a) - edges.begin();
    for (i = i ? i - 1 : 0; i < out.size() && edges[i] < p.b; ++i) {
      const int64_t lo = std::max(p.a, edges[i]), hi = std::min(p.b, edges[i + 1]);
      if (lo < hi) out[i] += piece_area(p, lo, hi);
    }
  }
  return out;
}

namespace {

// The sum of min(x + slope * i, cap) over i in [0, n).
int64_t capped_sum(int64_t x, int64_t slope, int64_t n, int64_t cap) {
  if (slope == 0) return n * std::min(x, cap);
  const int64_t below = std::min(std::max<int64_t>(cap - x, 0), n);
  return below * x + below * (below - 1) / 2 + (n - below) * cap;
}

}  // namespace

std::vector<int64_t> block_areas(const Bands& a, const std::vector<int64_t>& q_edges,
                                 const std::vector<int64_t>& k_edges) {
  const size_t n_q = q_edges.size() - 1, n_k = k_edges.size() - 1;
  std::vector<int64_t> out(n_q * n_k, 0);
  auto block_of = [](const std::vector<int64_t>& edges, int64_t x) {
    return size_t(std::upper_bound(edges.begin(), edges.end(), x) - edges.begin() - 1);
  };
  for (const Piece& p : pieces(a))
    for (size_t i = block_of(q_edges, p.a); i < n_q && q_edges[i] < p.b; ++i) {
      const int64_t first = std::max(p.a, q_edges[i]), n = std::min(p.b, q_edges[i + 1]) - first;
      const int64_t lo = p.lo + p.slo * (first - p.a), hi = p.hi + p.shi * (first - p.a);
      // The keys below an edge, of all these rows.
      auto below = [&](int64_t edge) { return capped_sum(hi, p.shi, n, edge) - capped_sum(lo, p.slo, n, edge); };
      int64_t before = 0;
      for (size_t j = block_of(k_edges, lo); j < n_k && k_edges[j] < hi + p.shi * (n - 1); ++j) {
        const int64_t until = below(k_edges[j + 1]);
        out[i * n_k + j] += until - before;
        before = until;
      }
    }
  return out;
}

Ranges key_ranges(const Bands& a, const Ranges& q) {
  Ranges seen;
  for (const Piece& p : pieces(a)) {
    size_t i =
        std::upper_bound(q.begin(), q.end(), p.a, [](int64_t v, const Range& r) { return v < r.second; }) - q.begin();
    for (; i < q.size() && q[i].first < p.b; ++i) {
      const int64_t first = std::max(p.a, q[i].first), last = std::min(p.b, q[i].second) - 1;
      if (first <= last) seen.push_back({p.lo + p.slo * (first - p.a), p.hi + p.shi * (last - p.a)});
    }
  }
  std::sort(seen.begin(), seen.end());
  Ranges out;
  for (const Range& r : seen) {
    if (!out.empty() && r.first <= out.back().second)
      out.back().second = std::max(out.back().second, r.second);
    else
      out.push_back(r);
  }
  return out;
}

}  // namespace magi
