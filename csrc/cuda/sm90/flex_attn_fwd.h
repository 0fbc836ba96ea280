// The forward kernel for sm_90a as its host code sees it: arguments, tile shapes, and a launch per instance.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../common/row_terms.h"
#include "../common/softcap.h"
#include "plan_walk.h"
#include "tile_plan.h"

namespace magi::cuda::sm90 {

// A query tile has 128 or 192 rows: tokens x heads_in_tile query heads that share a KV head.

struct ForwardParams {
  CUtensorMap q, k, v;    // [tokens, heads, dim] in boxes of 64 dims x heads x tokens
  CUtensorMap out_tile;   // of a warpgroup: 64 rows
  Walk walk;              // rows are tokens; a group has heads_in_tile query heads
  int32_t heads_shift;    // log2 of heads_in_tile
  int32_t groups_per_kv;  // such groups per KV head
  int32_t num_heads_q;
  int32_t head_dim_v;
  float scale;       // product -> logit
  float scale_log2;  // product, with softcap its tanh, -> score, a logit in powers of two
  Softcap softcap;
  void* out;  // [tokens, num_heads_q, head_dim_v], dense; in the input's dtype or float32
  bool out_float32;
  float* lse;  // [tokens, num_heads_q]
  RowTerms terms;
  // Of the items with a slot, which hold a part of their rows' keys: [slots, tokens of a tile, num_heads_q, ...].
  float *partial_out, *partial_lse;
  float* max_logits;  // null, or [num_heads_q], -inf at launch
};

// Joins the parts of such rows.
struct CombineParams {
  const TileSplit* splits;
  int32_t n_splits;
  int32_t tile_tokens, num_heads_q, head_dim_v;
  const float *partial_out, *partial_lse;
  void* out;
  bool out_float32, bfloat16;
  float* lse;
  RowTerms terms;
};
cudaError_t combine_splits(const CombineParams&, cudaStream_t);

// An instance is chosen by the head dims it was built for (tensors may have fewer), the width of a key tile, and
// whether it has a softcap.
struct ForwardInstance {
  int head_dim, head_dim_v, rows, tile_cols;
  bool softcap;
  cudaError_t (*launch)(const ForwardParams&, bool bfloat16, int blocks, cudaStream_t);
};

extern const ForwardInstance kForward64, kForward64Softcap, kForward128, kForward128Wide, kForward128Softcap,
    kForward192, kForward192Softcap, kForward256, kForward256Softcap;

}  // namespace magi::cuda::sm90
