// Where things lie in shared memory and in accumulators: arithmetic alone, which a host compiler takes too.
#pragma once
#include <cstdint>

#include "tile_plan.h"

namespace magi::cuda {

// The place of a byte of a panel after the 128-byte swizzle.
MAGI_HOST_DEVICE constexpr uint32_t swizzled(uint32_t byte) { return byte ^ ((byte >> 3) & 0x70); }

// --- descriptors of wgmma operands --------------------------------------------------------------------------

// Matrices in shared memory: panels of rows of 128 bytes, swizzled, aligned to 1024 bytes.
//   K contiguous:  panels along K; 8 rows are 1024 bytes apart; the first argument is ignored.
//   N contiguous:  panels along N, `panel_bytes` apart; 8 steps of K are 1024 bytes apart.
MAGI_HOST_DEVICE constexpr uint64_t matrix_layout(uint32_t panel_bytes) {
  return (uint64_t(panel_bytes >> 4) << 16) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 62);
}
MAGI_HOST_DEVICE constexpr uint64_t matrix(uint32_t address, uint64_t layout) {
  return layout | ((address & 0x3FFFF) >> 4);
}
// What to add to a descriptor for the 16 steps of K from 16 * i.
//   K contiguous:  `rows` is that of a panel.
MAGI_HOST_DEVICE constexpr int k_contiguous_step(int i, int rows) { return (i / 4) * (rows * 128 >> 4) + (i % 4) * 2; }
MAGI_HOST_DEVICE constexpr int n_contiguous_step(int i) { return i * (2048 >> 4); }

// --- accumulators of m64nNk16 -------------------------------------------------------------------------------

// A thread has two rows, 8 apart, and N / 4 elements of each. Element i of row r is the accumulator's number
// accumulator_index(i, r) and lies in column 8 * (i / 2) + first_column(lane) + i % 2.
MAGI_HOST_DEVICE constexpr int first_row(int warp, int lane) { return warp * 16 + lane / 4; }
MAGI_HOST_DEVICE constexpr int first_column(int lane) { return 2 * (lane & 3); }
MAGI_HOST_DEVICE constexpr int accumulator_index(int i, int r) { return (i / 2) * 4 + (i & 1) + 2 * r; }

}  // namespace magi::cuda
