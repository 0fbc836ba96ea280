// The tile plan as kernels read it: for each tile of rows, the runs of column tiles to visit.
//
// Forward and dQ: rows are queries, columns keys. dK and dV: rows are keys, columns queries.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define MAGI_HOST_DEVICE __host__ __device__
#else
#define MAGI_HOST_DEVICE
#endif

namespace magi {

// A tile of rows. Every row is in exactly one item, also a row without a visible column (n_tiles == 0); or, where
// `split_items` has shared its columns out, in several, with a slot each. slot is -1 in the others.
struct TileItem {
  int32_t row0, n_rows, run_begin, run_end, n_tiles, flags, slot, reserved;
};

// Rows whose columns several items share out: their slots number the places where these leave their parts.
struct TileSplit {
  int32_t row0, n_rows, first_slot, n_slots;
};

// n_tiles adjacent column tiles. n_band == 0: every pair is visible, and no column is past the last one.
struct TileRun {
  int32_t col_start, n_tiles, band_begin, n_band;
};

// The pair (r, c) is visible iff r0 <= r < r1, c0 <= c < c1 and dlo <= c - r' < dhi, where
// r' = r0 + step * ((r - r0) / step). A pair is visible if any band of its tile shows it.
struct TileBand {
  int32_t r0, r1, c0, c1, dlo, dhi, step, reserved;

  // The visible columns [lo, hi) of a row; lo >= hi if there are none.
  MAGI_HOST_DEVICE void columns(int32_t row, int32_t& lo, int32_t& hi) const {
    if (row < r0 || row >= r1) {
      lo = hi = 0;
      return;
    }
    const int32_t anchor = step == 1 ? row : r0 + step * ((row - r0) / step);
    lo = anchor + dlo > c0 ? anchor + dlo : c0;
    hi = anchor + dhi < c1 ? anchor + dhi : c1;
  }
};

}  // namespace magi
