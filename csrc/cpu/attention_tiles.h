// The CPU attention of one tile of rows and one head. Included once per instruction set, with MAGI_ISA (a
// namespace) and MAGI_VECTOR_BYTES defined and the compiler's target set.
//
// Everything is computed in small dense matrices in scratch memory, in float (double for double inputs), with
// rows padded to kPad columns. Hidden pairs are never multiplied: probabilities and score gradients are
// selected to zero, and rows and columns that nothing in the tile sees are loaded as zeros, so that whatever
// bits they hold cannot spread.

namespace magi::cpu::MAGI_ISA {
namespace {

constexpr int64_t kPad = 32;

inline int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

template <typename Acc>
struct Vector {
  typedef Acc type __attribute__((vector_size(MAGI_VECTOR_BYTES)));
  typedef Acc loose __attribute__((vector_size(MAGI_VECTOR_BYTES), aligned(alignof(Acc)), may_alias));
  static constexpr int width = MAGI_VECTOR_BYTES / sizeof(Acc);
};

// C[M, N] = (add ? C : 0) + A[M, K] B[K, N]; M a multiple of kRows, N of kPad. Row-major.
constexpr int kRows = MAGI_VECTOR_BYTES == 64 ? 8 : 4;
constexpr int64_t kSum = 16;

template <typename Acc>
void multiply(int64_t m_size, int64_t n_size, int64_t k_size, const Acc* __restrict__ a, int64_t lda,
              const Acc* __restrict__ b, int64_t ldb, Acc* __restrict__ c, int64_t ldc, bool add) {
  using V = typename Vector<Acc>::type;
  using Loose = typename Vector<Acc>::loose;
  constexpr int w = Vector<Acc>::width;
  for (int64_t n = 0; n < n_size; n += 2 * w) {
    for (int64_t m = 0; m < m_size; m += kRows) {
      // Blocks of the sum are added up on their own, which keeps rounding errors from growing with its length.
      for (int64_t k0 = 0; k0 < k_size; k0 += kSum) {
        V sum[kRows][2] = {};
        for (int64_t k = k0; k < std::min(k0 + kSum, k_size); ++k) {
          const V b0 = *reinterpret_cast<const Loose*>(b + k * ldb + n);
          const V b1 = *reinterpret_cast<const Loose*>(b + k * ldb + n + w);
          for (int i = 0; i < kRows; ++i) {
            const Acc x = a[(m + i) * lda + k];
            sum[i][0] += x * b0;
            sum[i][1] += x * b1;
          }
        }
        for (int i = 0; i < kRows; ++i)
          for (int j = 0; j < 2; ++j) {
            Loose& to = *reinterpret_cast<Loose*>(c + (m + i) * ldc + n + j * w);
            to = add || k0 > 0 ? to + sum[i][j] : sum[i][j];
          }
      }
    }
  }
}

inline void exponential(double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = std::exp(x[i]);
}

// exp of floats: 2^n by the exponent bits, times a polynomial on [-ln2/2, ln2/2] (Cephes' expf).
inline void exponential(float* x, int64_t n) {
  using V = Vector<float>::type;
  using Loose = Vector<float>::loose;
  typedef int32_t I __attribute__((vector_size(MAGI_VECTOR_BYTES)));
  const V one = V{} + 1.0f;
  for (int64_t i = 0; i < n; i += Vector<float>::width) {
    const V raw = *reinterpret_cast<const Loose*>(x + i);
    V t = raw > 88.0f ? V{} + 88.0f : raw;
    t = t < -87.0f ? V{} - 87.0f : t;
    const V shifted = t * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the sum rounds to an integer
    const V whole = shifted - 12582912.0f;
    const V r = t - whole * 0.693359375f + whole * 2.12194440e-4f;
    V p = V{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + one;
    const I bits = (reinterpret_cast<I>(shifted) - 0x4B400000 + 127) << 23;
    const V y = p * reinterpret_cast<V>(bits);
    *reinterpret_cast<Loose*>(x + i) = raw < -87.0f ? V{} : y;
  }
}

template <typename Acc>
Acc largest(const Acc* x, int64_t n) {
  using V = typename Vector<Acc>::type;
  using Loose = typename Vector<Acc>::loose;
  V most = *reinterpret_cast<const Loose*>(x);
  for (int64_t i = Vector<Acc>::width; i < n; i += Vector<Acc>::width) {
    const V y = *reinterpret_cast<const Loose*>(x + i);
    most = y > most ? y : most;
  }
  Acc out = most[0];
  for (int i = 1; i < Vector<Acc>::width; ++i) out = most[i] > out ? most[i] : out;
  return out;
}

template <typename Acc>
Acc total(const Acc* x, int64_t n) {
  using V = typename Vector<Acc>::type;
  using Loose = typename Vector<Acc>::loose;
  V sum{};
  for (int64_t i = 0; i < n; i += Vector<Acc>::width) sum += V(*reinterpret_cast<const Loose*>(x + i));
  Acc out = 0;
  for (int i = 0; i < Vector<Acc>::width; ++i) out += sum[i];
  return out;
}

// One tile's visible pairs: bit c of row[r].
struct Visible {
  uint64_t row[kTile];
  uint64_t any;  // columns that some row sees
  bool all;      // every pair of valid rows and columns

  void set(const TileItem& item, const Tiles& tiles, const TileRun& run, int32_t col, int64_t n_cols) {
    const int32_t width = int32_t(std::min<int64_t>(tiles.tile_cols, n_cols - col));
    const uint64_t valid = width == 64 ? ~uint64_t{0} : (uint64_t{1} << width) - 1;
    all = run.n_band == 0;
    any = valid;
    if (all) return;
    any = 0;
    for (int32_t r = 0; r < item.n_rows; ++r) {
      uint64_t bits = 0;
      for (int32_t b = run.band_begin; b < run.band_begin + run.n_band; ++b) {
        int32_t lo, hi;
        tiles.bands[b].columns(item.row0 + r, lo, hi);
        lo = std::max(lo - col, 0);
        hi = std::min(hi - col, width);
        if (lo < hi) bits |= (hi == 64 ? ~uint64_t{0} : (uint64_t{1} << hi) - 1) & ~((uint64_t{1} << lo) - 1);
      }
      row[r] = bits;
      any |= bits;
    }
  }
};

template <typename Acc>
struct Matrix {
  Acc* data;
  int64_t ld;
  Acc* row(int64_t r) const { return data + r * ld; }
};

// Hands out matrices from the scratch memory.
template <typename Acc>
struct Scratch {
  char* next;
  Matrix<Acc> matrix(int64_t rows, int64_t cols) {
    Matrix<Acc> m{reinterpret_cast<Acc*>(next), padded(cols)};
    next += rows * m.ld * int64_t(sizeof(Acc));
    return m;
  }
};

template <typename T, typename Acc>
const T* row_of(const Rows& x, int64_t row, int64_t head) {
  return static_cast<const T*>(x.data) + row * x.row + head * x.head;
}

// Loads `n` rows of `dim` elements; rows without their bit in `seen` become zero, and so does
// the padding up to kTile rows.
template <typename T, typename Acc>
void load(const Rows& x, int64_t row0, int64_t n, int64_t head, int64_t dim, uint64_t seen, const Matrix<Acc>& out) {
  for (int64_t r = 0; r < kTile; ++r) {
    Acc* to = out.row(r);
    int64_t d = 0;
    if (r < n && (seen >> r & 1)) {
      const T* from = row_of<T, Acc>(x, row0 + r, head);
      for (; d < dim; ++d) to[d] = Acc(from[d]);
    }
    for (; d < out.ld; ++d) to[d] = 0;
  }
}

template <typename Acc>
void transpose(const Matrix<Acc>& in, int64_t cols, const Matrix<Acc>& out) {
  for (int64_t r0 = 0; r0 < kTile; r0 += 8)
    for (int64_t c = 0; c < cols; ++c)
      for (int64_t r = r0; r < r0 + 8; ++r) out.row(c)[r] = in.row(r)[c];
}

constexpr uint64_t kAllRows = ~uint64_t{0};

inline uint64_t rows_seeing(const Visible& seen, int32_t n_rows) {
  if (seen.all) return kAllRows;
  uint64_t rows = 0;
  for (int32_t r = 0; r < n_rows; ++r) rows |= uint64_t(seen.row[r] != 0) << r;
  return rows;
}

inline int64_t row_blocks(int32_t n_rows) { return (n_rows + kRows - 1) / kRows * kRows; }

// Calls tile(run, column) for every column tile of an item, in order.
template <typename F>
void for_each_tile(const Tiles& tiles, const TileItem& item, F&& tile) {
  for (int32_t j = item.run_begin; j < item.run_end; ++j) {
    const TileRun& run = tiles.runs[j];
    for (int32_t t = 0; t < run.n_tiles; ++t) tile(run, run.col_start + t * tiles.tile_cols);
  }
}

template <typename T, typename Acc>
void store(void* out, bool wide, int64_t offset, const Acc* from, int64_t n, Acc factor) {
  if (wide) {
    Acc* to = static_cast<Acc*>(out) + offset;
    for (int64_t i = 0; i < n; ++i) to[i] = from[i] * factor;
  } else {
    T* to = static_cast<T*>(out) + offset;
    for (int64_t i = 0; i < n; ++i) to[i] = T(from[i] * factor);
  }
}

template <typename T, typename Acc>
void forward_tile(const Params& p, const Tiles& tiles, int64_t index, int64_t head, void* memory) {
  const TileItem& item = tiles.items[index];
  const Acc minus_inf = -std::numeric_limits<Acc>::infinity();
  const int64_t kv_head = head / (p.hq / p.hkv), m_size = row_blocks(item.n_rows);
  Scratch<Acc> scratch{static_cast<char*>(memory)};
  Matrix<Acc> q = scratch.matrix(kTile, p.d), k = scratch.matrix(kTile, p.d);
  Matrix<Acc> k_t = scratch.matrix(padded(p.d), kTile), v = scratch.matrix(kTile, p.dv);
  Matrix<Acc> s = scratch.matrix(kTile, kTile), o = scratch.matrix(kTile, p.dv);
  Acc most[kTile], sum[kTile], raw_most = minus_inf;
  for (int64_t r = 0; r < kTile; ++r) most[r] = minus_inf, sum[r] = 0;
  std::fill(o.data, o.data + kTile * o.ld, Acc(0));
  load<T, Acc>(p.q, item.row0, item.n_rows, head, p.d, kAllRows, q);

  for_each_tile(tiles, item, [&](const TileRun& run, int32_t col) {
    Visible seen;
    seen.set(item, tiles, run, col, p.sk);
    const int64_t width = std::min<int64_t>(tiles.tile_cols, p.sk - col);
    load<T, Acc>(p.k, col, width, kv_head, p.d, seen.any, k);
    load<T, Acc>(p.v, col, width, kv_head, p.dv, seen.any, v);
    transpose(k, p.d, k_t);
    multiply<Acc>(m_size, kTile, p.d, q.data, q.ld, k_t.data, k_t.ld, s.data, s.ld, false);
    for (int32_t r = 0; r < item.n_rows; ++r) {
      Acc* row = s.row(r);
      for (int64_t c = 0; c < kTile; ++c) row[c] *= Acc(p.scale);
      if (seen.all) {
        for (int64_t c = width; c < kTile; ++c) row[c] = minus_inf;
      } else if (seen.row[r] == 0) {
        std::fill(row, row + kTile, Acc(0));
        continue;
      } else {
        for (int64_t c = 0; c < kTile; ++c) row[c] = (seen.row[r] >> c & 1) ? row[c] : minus_inf;
      }
      if (p.max_logits) raw_most = std::max(raw_most, largest(row, kTile));
      if (p.softcap > 0)
        for (int64_t c = 0; c < kTile; ++c)
          if (row[c] != minus_inf) row[c] = Acc(p.softcap) * std::tanh(row[c] / Acc(p.softcap));
      const Acc before = most[r], now = std::max(before, largest(row, kTile));
      const Acc reference = now == minus_inf ? Acc(0) : now;
      for (int64_t c = 0; c < kTile; ++c) row[c] -= reference;
      exponential(row, kTile);
      if (now != before) {
        const Acc shrink = std::exp(before - reference);
        sum[r] *= shrink;
        Acc* out = o.row(r);
        for (int64_t c = 0; c < o.ld; ++c) out[c] *= shrink;
        most[r] = now;
      }
      sum[r] += total(row, kTile);
    }
    for (int64_t r = item.n_rows; r < m_size; ++r) std::fill(s.row(r), s.row(r) + kTile, Acc(0));
    multiply<Acc>(m_size, padded(p.dv), kTile, s.data, s.ld, v.data, v.ld, o.data, o.ld, true);
  });

  for (int32_t r = 0; r < item.n_rows; ++r) {
    const int64_t row = item.row0 + r;
    Acc reference = most[r], weight = 1, denominator = sum[r];
    if (p.sink) {
      const Acc sink = Acc(p.sink[row * p.sink_row + head]);
      if (sink != minus_inf) {
        reference = std::max(most[r], sink);
        weight = std::exp(most[r] - reference);
        denominator = sum[r] * weight + std::exp(sink - reference);
      }
    }
    const bool empty = most[r] == minus_inf;
    const Acc lse = reference == minus_inf ? minus_inf : reference + std::log(denominator);
    if (empty) std::fill(o.row(r), o.row(r) + o.ld, Acc(0));
    static_cast<Acc*>(p.lse)[row * p.hq + head] = lse;
    store<T, Acc>(p.out, p.wide, (row * p.hq + head) * p.dv, o.row(r), p.dv, empty ? Acc(1) : weight / denominator);
  }
  if (p.max_logits) p.max_logits[index * p.hq + head] = float(raw_most);
}

// From products `s` of queries and keys and `dp` to probabilities and score gradients, in place; both zero
// where hidden. lse and delta are per row, or per column where `by_column`.
template <typename Acc>
void score_gradients(const Params& p, const Visible& seen, int32_t n_rows, int64_t width, bool by_column,
                     const Acc* lse, const Acc* delta, const Matrix<Acc>& s, const Matrix<Acc>& dp) {
  for (int32_t r = 0; r < n_rows; ++r) {
    Acc *x = s.row(r), *g = dp.row(r);
    Acc slope[kTile];
    for (int64_t c = 0; c < kTile; ++c) x[c] *= Acc(p.scale);
    if (p.softcap > 0) {
      for (int64_t c = 0; c < kTile; ++c) {
        const Acc t = std::tanh(x[c] / Acc(p.softcap));
        x[c] = Acc(p.softcap) * t;
        slope[c] = 1 - t * t;
      }
    }
    for (int64_t c = 0; c < kTile; ++c) x[c] -= lse[by_column ? c : r];
    exponential(x, kTile);
    for (int64_t c = 0; c < kTile; ++c) g[c] = x[c] * (g[c] - delta[by_column ? c : r]);
    if (p.softcap > 0)
      for (int64_t c = 0; c < kTile; ++c) g[c] *= slope[c];
    if (seen.all) {
      for (int64_t c = width; c < kTile; ++c) x[c] = g[c] = 0;
    } else {
      for (int64_t c = 0; c < kTile; ++c) {
        const bool visible = seen.row[r] >> c & 1;
        x[c] = visible ? x[c] : Acc(0);
        g[c] = visible ? g[c] : Acc(0);
      }
    }
  }
  for (int64_t r = n_rows; r < row_blocks(n_rows); ++r) {
    std::fill(s.row(r), s.row(r) + kTile, Acc(0));
    std::fill(dp.row(r), dp.row(r) + kTile, Acc(0));
  }
}

template <typename T, typename Acc>
void grad_q_tile(const Params& p, const Tiles& tiles, int64_t index, int64_t head, void* memory) {
  const TileItem& item = tiles.items[index];
  const int64_t kv_head = head / (p.hq / p.hkv), m_size = row_blocks(item.n_rows);
  Scratch<Acc> scratch{static_cast<char*>(memory)};
  Matrix<Acc> q = scratch.matrix(kTile, p.d), dout = scratch.matrix(kTile, p.dv), dq = scratch.matrix(kTile, p.d);
  Matrix<Acc> k = scratch.matrix(kTile, p.d), k_t = scratch.matrix(padded(p.d), kTile);
  Matrix<Acc> v = scratch.matrix(kTile, p.dv), v_t = scratch.matrix(padded(p.dv), kTile);
  Matrix<Acc> s = scratch.matrix(kTile, kTile), dp = scratch.matrix(kTile, kTile);
  std::fill(dq.data, dq.data + kTile * dq.ld, Acc(0));
  load<T, Acc>(p.q, item.row0, item.n_rows, head, p.d, kAllRows, q);
  load<T, Acc>(p.dout, item.row0, item.n_rows, head, p.dv, kAllRows, dout);
  Acc lse[kTile], delta[kTile];
  for (int32_t r = 0; r < item.n_rows; ++r) {
    lse[r] = static_cast<const Acc*>(p.lse)[(item.row0 + r) * p.hq + head];
    delta[r] = static_cast<const Acc*>(p.delta)[(item.row0 + r) * p.hq + head];
  }
  for_each_tile(tiles, item, [&](const TileRun& run, int32_t col) {
    Visible seen;
    seen.set(item, tiles, run, col, p.sk);
    const int64_t width = std::min<int64_t>(tiles.tile_cols, p.sk - col);
    load<T, Acc>(p.k, col, width, kv_head, p.d, seen.any, k);
    load<T, Acc>(p.v, col, width, kv_head, p.dv, seen.any, v);
    transpose(k, p.d, k_t);
    transpose(v, p.dv, v_t);
    multiply<Acc>(m_size, kTile, p.d, q.data, q.ld, k_t.data, k_t.ld, s.data, s.ld, false);
    multiply<Acc>(m_size, kTile, p.dv, dout.data, dout.ld, v_t.data, v_t.ld, dp.data, dp.ld, false);
    score_gradients<Acc>(p, seen, item.n_rows, width, false, lse, delta, s, dp);
    multiply<Acc>(m_size, padded(p.d), kTile, dp.data, dp.ld, k.data, k.ld, dq.data, dq.ld, true);
  });
  for (int32_t r = 0; r < item.n_rows; ++r)
    store<T, Acc>(p.dq, p.wide, ((item.row0 + r) * p.hq + head) * p.d, dq.row(r), p.d, Acc(p.scale));
}

template <typename T, typename Acc>
void grad_kv_tile(const Params& p, const Tiles& tiles, int64_t index, int64_t kv_head, void* memory) {
  const TileItem& item = tiles.items[index];
  const int64_t group = p.hq / p.hkv, m_size = row_blocks(item.n_rows);
  Scratch<Acc> scratch{static_cast<char*>(memory)};
  Matrix<Acc> k = scratch.matrix(kTile, p.d), v = scratch.matrix(kTile, p.dv);
  Matrix<Acc> dk = scratch.matrix(kTile, p.d), dv = scratch.matrix(kTile, p.dv);
  Matrix<Acc> q = scratch.matrix(kTile, p.d), q_t = scratch.matrix(padded(p.d), kTile);
  Matrix<Acc> dout = scratch.matrix(kTile, p.dv), dout_t = scratch.matrix(padded(p.dv), kTile);
  Matrix<Acc> s = scratch.matrix(kTile, kTile), dp = scratch.matrix(kTile, kTile);
  std::fill(dk.data, dk.data + kTile * dk.ld, Acc(0));
  std::fill(dv.data, dv.data + kTile * dv.ld, Acc(0));
  load<T, Acc>(p.k, item.row0, item.n_rows, kv_head, p.d, kAllRows, k);
  load<T, Acc>(p.v, item.row0, item.n_rows, kv_head, p.dv, kAllRows, v);
  for_each_tile(tiles, item, [&](const TileRun& run, int32_t col) {
    Visible seen;
    seen.set(item, tiles, run, col, p.sq);
    const int64_t width = std::min<int64_t>(tiles.tile_cols, p.sq - col);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      load<T, Acc>(p.q, col, width, head, p.d, seen.any, q);
      load<T, Acc>(p.dout, col, width, head, p.dv, seen.any, dout);
      transpose(q, p.d, q_t);
      transpose(dout, p.dv, dout_t);
      Acc lse[kTile] = {}, delta[kTile] = {};
      for (int64_t c = 0; c < width; ++c) {
        lse[c] = static_cast<const Acc*>(p.lse)[(col + c) * p.hq + head];
        delta[c] = static_cast<const Acc*>(p.delta)[(col + c) * p.hq + head];
      }
      multiply<Acc>(m_size, kTile, p.d, k.data, k.ld, q_t.data, q_t.ld, s.data, s.ld, false);
      multiply<Acc>(m_size, kTile, p.dv, v.data, v.ld, dout_t.data, dout_t.ld, dp.data, dp.ld, false);
      score_gradients<Acc>(p, seen, item.n_rows, width, true, lse, delta, s, dp);
      multiply<Acc>(m_size, padded(p.dv), kTile, s.data, s.ld, dout.data, dout.ld, dv.data, dv.ld, true);
      multiply<Acc>(m_size, padded(p.d), kTile, dp.data, dp.ld, q.data, q.ld, dk.data, dk.ld, true);
    }
  });
  for (int32_t r = 0; r < item.n_rows; ++r) {
    const int64_t row = (item.row0 + r) * p.hkv + kv_head;
    store<T, Acc>(p.dk, p.wide, row * p.d, dk.row(r), p.d, Acc(p.scale));
    store<T, Acc>(p.dv_out, p.wide, row * p.dv, dv.row(r), p.dv, Acc(1));
  }
}

int64_t scratch_bytes(Input input, const Params& p) {
  const int64_t d = padded(p.d), dv = padded(p.dv), size = input == Input::kDouble ? 8 : 4;
  return size * kTile * (5 * (d + dv) + 3 * kTile);
}

#define MAGI_BY_INPUT(function)                                                                      \
  void function(Input input, const Params& p, const Tiles& t, int64_t item, int64_t head, void* s) { \
    switch (input) {                                                                                 \
      case Input::kDouble:                                                                           \
        return function##_tile<double, double>(p, t, item, head, s);                                 \
      case Input::kFloat:                                                                            \
        return function##_tile<float, float>(p, t, item, head, s);                                   \
      case Input::kBFloat16:                                                                         \
        return function##_tile<torch::headeronly::BFloat16, float>(p, t, item, head, s);             \
      case Input::kHalf:                                                                             \
        return function##_tile<torch::headeronly::Half, float>(p, t, item, head, s);                 \
    }                                                                                                \
  }
MAGI_BY_INPUT(forward)
MAGI_BY_INPUT(grad_q)
MAGI_BY_INPUT(grad_kv)
#undef MAGI_BY_INPUT

}  // namespace
}  // namespace magi::cpu::MAGI_ISA
