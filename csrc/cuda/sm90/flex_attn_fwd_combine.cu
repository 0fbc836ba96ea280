// Joins the parts of rows whose keys several items of the forward shared: a warp per row and head.

#include "../common/row_terms.cuh"
#include "flex_attn_fwd.h"

namespace magi::cuda::sm90 {
namespace {

constexpr int kWarps = 8;

__global__ void __launch_bounds__(32 * kWarps, 4) combine(const CombineParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;  // of [n_splits, tile_tokens, num_heads_q]
  const int64_t part_rows = int64_t(p.tile_tokens) * p.num_heads_q;
  const int64_t split = unit / part_rows;
  if (split >= p.n_splits) return;
  const TileSplit s = p.splits[split];
  const int in_part = int(unit - split * part_rows), token = in_part / p.num_heads_q, head = in_part % p.num_heads_q;
  if (token >= s.n_rows) return;

  const int64_t first = s.first_slot * part_rows + in_part, row = int64_t(s.row0 + token) * p.num_heads_q + head;
  float most = -kInfinity, sum = 0.f;
  for (int i = 0; i < s.n_slots; ++i) most = fmaxf(most, p.partial_lse[first + i * part_rows]);
  auto weight = [&](int i) { return exp2_approx((p.partial_lse[first + i * part_rows] - most) * kLog2e); };
  if (most != -kInfinity)
    for (int i = 0; i < s.n_slots; ++i) sum += weight(i);
  const RowResult result = close_row(most * kLog2e, sum, p.terms, s.row0 + token, head, row);
  if (lane == 0) p.lse[row] = result.lse;

  for (int d = 4 * lane; d < p.head_dim_v; d += 128) {
    float x[4] = {};
    for (int i = 0; i < s.n_slots && most != -kInfinity; ++i) {
      const float4 part = *reinterpret_cast<const float4*>(p.partial_out + (first + i * part_rows) * p.head_dim_v + d);
      const float w = weight(i);
      x[0] += w * part.x, x[1] += w * part.y, x[2] += w * part.z, x[3] += w * part.w;
    }
    const int64_t at = row * p.head_dim_v + d;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] *= result.own;
      if (result.before != 0.f) x[i] = add_before(x[i], result.before, p.terms.out_before[at + i]);
    }
    if (p.out_float32)
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(x[0], x[1], x[2], x[3]);
    else if (p.bfloat16)
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) =
          make_uint2(pack<true>(x[0], x[1]), pack<true>(x[2], x[3]));
    else
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) =
          make_uint2(pack<false>(x[0], x[1]), pack<false>(x[2], x[3]));
  }
}

}  // namespace

cudaError_t combine_splits(const CombineParams& p, cudaStream_t stream) {
  const int64_t units = int64_t(p.n_splits) * p.tile_tokens * p.num_heads_q;
  combine<<<unsigned((units + kWarps - 1) / kWarps), 32 * kWarps, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace magi::cuda::sm90
