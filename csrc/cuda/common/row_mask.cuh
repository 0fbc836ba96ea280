// Which elements of a row of a tile are visible, as bits in registers.
//
// A wgmma accumulator gives a thread BN / 4 elements of each of its two rows: element e is column
// 8 * (e / 2) + 2 * (lane % 4) + e % 2. Bit e stands for element e, so masking is one bit test an element
// however many bands a tile has.
#pragma once
#include <algorithm>
#include <cstdint>

#include "tile_plan.h"

namespace magi::cuda {

#define MAGI_INLINE MAGI_HOST_DEVICE inline __attribute__((always_inline))
#ifndef __CUDACC__
using std::max, std::min;
#endif

// Shift left where amounts of 32 and more give 0, unlike in C++.
MAGI_INLINE uint32_t shift_left(uint32_t x, uint32_t by) {
#ifdef __CUDA_ARCH__
  uint32_t r;
  asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(by));
  return r;
#else
  return by < 32 ? x << by : 0;
#endif
}

template <int BN>
struct RowMask {
  static constexpr int kWords = (BN / 4 + 31) / 32;
  uint32_t bits[kWords] = {};

  // Adds what a band shows of `row`. col_start: the tile's first column; lane_column: 2 * (lane % 4).
  MAGI_INLINE void add(const TileBand& band, int row, int col_start, int lane_column) {
    const int anchor = band.step == 1 ? row : band.r0 + band.step * ((row - band.r0) / band.step);
    const bool inside = row >= band.r0 && row < band.r1;
    const int first = max(band.c0, anchor + band.dlo) - col_start - lane_column;
    const int last = min(band.c1, anchor + band.dhi) - col_start - lane_column;
    const int lo = min(max(first, 0), BN), hi = inside ? max(min(last, BN), 0) : 0;
    // The number of this thread's elements before a column.
    const int e_lo = (lo >> 3) * 2 + min(lo & 7, 2), e_hi = (hi >> 3) * 2 + min(hi & 7, 2);
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      bits[w] |= shift_left(~0u, max(e_lo - 32 * w, 0)) & ~shift_left(~0u, max(e_hi - 32 * w, 0));
  }
  MAGI_INLINE bool shows(int element) const { return bits[element / 32] & (1u << (element % 32)); }
};

}  // namespace magi::cuda
