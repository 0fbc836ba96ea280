// The backward kernel for dQ for sm_90a as its host code sees it: arguments, and a launch per instance.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../common/softcap.h"
#include "plan_walk.h"

namespace magi::cuda::sm90 {

// Rows of a query tile: tokens x heads_in_tile query heads that share a KV head.
constexpr int kDqRows = 128;

struct DqParams {
  CUtensorMap q, dout, k, v;  // [tokens, heads, dim] in boxes of 64 dims x heads x tokens
  CUtensorMap dq_tile;        // of a warpgroup: 64 rows; not used where dq is float32
  Walk walk;                  // the plan of the forward; a group has heads_in_tile query heads
  int32_t heads_shift;        // log2 of heads_in_tile
  int32_t groups_per_kv;      // such groups per KV head
  int32_t num_heads_q;
  int32_t head_dim;
  float scale;       // product -> logit
  float scale_log2;  // product -> logit in powers of two; not used with a softcap
  Softcap softcap;
  const float *lse_log2, *delta;  // [num_heads_q, padded_rows] of prepare_rows
  int64_t padded_rows;
  void* dq;  // [tokens, num_heads_q, head_dim], dense; in the input's dtype or float32
  bool dq_float32;
  const float* before;  // null, or what dq adds to, in the shape of dq; may be dq
};

// An instance is chosen by the head dims it was built for (tensors may have fewer), the width of a key tile, and
// whether it has a softcap.
struct DqInstance {
  int head_dim, head_dim_v, tile_cols;
  bool softcap;
  cudaError_t (*launch)(const DqParams&, bool bfloat16, int blocks, cudaStream_t);
};

extern const DqInstance kDq64, kDq64Softcap, kDq128, kDq128Narrow, kDq128Softcap, kDq192, kDq192Softcap, kDq256,
    kDq256Softcap;

}  // namespace magi::cuda::sm90
