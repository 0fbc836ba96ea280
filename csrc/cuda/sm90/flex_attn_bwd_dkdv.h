// The dK and dV kernel for sm_90a as its host code sees it: arguments, and a launch per instance.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "../common/softcap.h"
#include "plan_walk.h"

namespace magi::cuda::sm90 {

// A tile of rows has 128 keys; a tile of columns has 64 query rows of one head.
constexpr int kBackwardKeys = 128, kBackwardQueries = 64;

struct DkDvParams {
  CUtensorMap q, dout;            // [tokens, heads, dim] in boxes of 64 dims x 1 head x 64 tokens
  CUtensorMap k, v;               // in boxes of 64 dims x 1 head x 128 tokens
  CUtensorMap dk, dv;             // in boxes of 64 dims x 1 head x 64 tokens; unused where results are float32
  Walk walk;                      // rows are keys; a group is a KV head, and a repeat one of its query heads
  const float *lse_log2, *delta;  // [query heads, padded_rows]
  int64_t padded_rows;            // a multiple of 4
  int32_t num_heads_kv;
  int32_t head_dim, head_dim_v;
  float scale;       // product of q and k -> logit
  float scale_log2;  // product -> score, a logit in powers of two
  Softcap softcap;
  float *dk_float32, *dv_float32;  // null, or dense results
  // Of the items with a slot, which hold a part of their keys' query rows: [slots, 128, num_heads_kv, dim].
  float *dk_parts, *dv_parts;
};

// Adds the parts of such keys up.
struct JoinKeysParams {
  const TileSplit* splits;
  int32_t n_splits, num_heads_kv, dim;
  const float* parts;
  void* out;  // [keys, num_heads_kv, dim], dense
  bool out_float32, bfloat16;
};
cudaError_t join_keys(const JoinKeysParams&, cudaStream_t);

// Made for head dims (tensors may have fewer), one or both of the results, and with a softcap or without.
struct DkDvInstance {
  int head_dim, head_dim_v;
  bool dk, dv, softcap;
  cudaError_t (*launch)(const DkDvParams&, bool bfloat16, int blocks, cudaStream_t);
};

extern const DkDvInstance kDkDv64, kDkDv64Softcap, kDkDv128, kDk128Softcap, kDv128Softcap, kDk192, kDv192,
    kDk192Softcap, kDv192Softcap, kDk256, kDv256, kDk256Softcap, kDv256Softcap;

}  // namespace magi::cuda::sm90
