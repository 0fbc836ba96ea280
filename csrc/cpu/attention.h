// What the CPU attention consists of: the operators (attention.cpp) call, for each tile of rows and head, one
// of three functions, compiled once per instruction set (attention_tiles.h).
#pragma once
#include <cstdint>

#include "tile_plan.h"

namespace magi::cpu {

// Rows of a tensor [rows, heads, dim] with a dense last dimension.
struct Rows {
  const void* data;
  int64_t row, head;  // strides in elements
};

struct Tiles {
  const TileItem* items;
  const TileRun* runs;
  const TileBand* bands;
  int64_t n_items;
  int32_t tile_cols;
};

// Pointers without a stride are dense: out, dq [Sq, Hq, ...], dk, dv [Sk, Hkv, ...], lse, delta [Sq, Hq].
// `acc` values are double for double inputs and float otherwise.
struct Params {
  Rows q, k, v, dout;
  int64_t sq, sk, hq, hkv, d, dv;
  double scale, softcap;
  const double* sink;      // logsumexp over the sink tokens, [1 or Sq, Hq]; null without a sink
  int64_t sink_row;        // row stride of `sink`: 0 where all rows share it
  bool wide;               // results in the accumulation type instead of the input type
  void* out;               // input type, or acc
  void* lse;               // acc; written forward, read backward
  float* max_logits;       // [n_items, Hq] partial results; null if not wanted
  const void* delta;       // acc; rowsum(dout * out) - dlse
  void *dq, *dk, *dv_out;  // input type, or acc
};

enum class Input { kDouble, kFloat, kBFloat16, kHalf };

constexpr int kTile = 64;  // rows and columns of the largest tile

struct Kernels {
  const char* name;
  // Bytes of scratch that one call needs; 64-byte aligned.
  int64_t (*scratch_bytes)(Input, const Params&);
  void (*forward)(Input, const Params&, const Tiles&, int64_t item, int64_t head, void* scratch);
  void (*grad_q)(Input, const Params&, const Tiles&, int64_t item, int64_t head, void* scratch);
  void (*grad_kv)(Input, const Params&, const Tiles&, int64_t item, int64_t kv_head, void* scratch);
};

const Kernels& generic_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

}  // namespace magi::cpu
