// The walker: one thread of each block reads the plan some items and tiles ahead and leaves them in rings in shared
// memory, so that nobody waits for the chain of loads counter -> item -> run -> band.
//
// Who takes from a ring must give back: `item_empty` once all are done with an item, `tile_empty` once all warps
// have read a descriptor (a later product of all of them tells).
#pragma once
#include "../ptx/hopper.cuh"
#include "plan_walk.h"

namespace magi::cuda::sm90 {

constexpr int kItemSlots = 4, kTileSlots = 8;

// A tile of columns.
struct alignas(16) TileDescriptor {
  int32_t col_start, n_band, band_begin, repeat;
  TileBand first;  // the only band of most partial tiles
};

struct PlanRings {
  alignas(8) uint64_t item_full[kItemSlots], item_empty[kItemSlots], tile_full[kTileSlots], tile_empty[kTileSlots];
  alignas(16) TileItem item[kItemSlots];  // n_tiles, of all repeats, is -1 at the end
  int32_t group[kItemSlots];
  TileDescriptor tile[kTileSlots];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kItemSlots; ++i)
      barrier_init(shared_address(item_full + i), 1), barrier_init(shared_address(item_empty + i), 1);
    for (int i = 0; i < kTileSlots; ++i)
      barrier_init(shared_address(tile_full + i), 1), barrier_init(shared_address(tile_empty + i), 1);
  }
};

// tile_cols: of the plan.
MAGI_DEVICE void walk_plan(const Walk& p, PlanRings& s, int tile_cols) {
  uint32_t tile = 0;
  for (uint32_t it = 0;; ++it) {
    const int work = it == 0 ? int(blockIdx.x) : atomicAdd(p.next_work, 1) + int(gridDim.x);
    const int slot = it % kItemSlots;
    barrier_wait(shared_address(&s.item_empty[slot]), ((it / kItemSlots) & 1) ^ 1);
    if (work >= p.n_items * p.n_groups) {
      s.item[slot].n_tiles = -1;
      barrier_arrive(shared_address(&s.item_full[slot]));
      return;
    }
    const int inner = p.groups_innermost ? p.n_groups : p.n_items, outer = work / inner, rest = work - outer * inner;
    TileItem item = p.items[p.groups_innermost ? outer : rest];
    item.n_tiles *= p.repeats;
    s.item[slot] = item;
    s.group[slot] = p.groups_innermost ? rest : outer;
    barrier_arrive(shared_address(&s.item_full[slot]));
    for (int repeat = 0; repeat < p.repeats; ++repeat) {
      for (int r = item.run_begin; r < item.run_end; ++r) {
        const TileRun run = p.runs[r];
        for (int t = 0; t < run.n_tiles; ++t, ++tile) {
          const int at = tile % kTileSlots;
          barrier_wait(shared_address(&s.tile_empty[at]), ((tile / kTileSlots) & 1) ^ 1);
          TileDescriptor& d = s.tile[at];
          d.col_start = run.col_start + t * tile_cols;
          d.n_band = run.n_band;
          d.band_begin = run.band_begin;
          d.repeat = repeat;
          if (run.n_band) d.first = p.bands[run.band_begin];
          barrier_arrive(shared_address(&s.tile_full[at]));
        }
      }
    }
  }
}

}  // namespace magi::cuda::sm90
