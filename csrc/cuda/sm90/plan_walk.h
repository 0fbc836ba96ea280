// What a kernel for sm_90a needs to walk a tile plan, as its host code sees it.
#pragma once
#include <cstdint>

#include "tile_plan.h"

namespace magi::cuda::sm90 {

// The list of items is gone through once for each group of heads.
struct Walk {
  const TileItem* items;
  const TileRun* runs;
  const TileBand* bands;
  int32_t n_items;        // in the list
  int32_t n_groups;       // of heads
  int32_t repeats;        // how often an item goes through its tiles, for different heads
  bool groups_innermost;  // the longest items of all groups first, rather than group after group
  int32_t* next_work;     // 0 at launch
};

}  // namespace magi::cuda::sm90
