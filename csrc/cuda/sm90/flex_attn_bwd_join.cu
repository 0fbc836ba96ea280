// Adds up the parts of dK or dV of keys whose query rows several items shared: a thread per four elements.
#include "../ptx/hopper.cuh"
#include "flex_attn_bwd_dkdv.h"

namespace magi::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) join(const JoinKeysParams p) {
  const int row_units = p.num_heads_kv * p.dim / 4;  // of a key
  const int64_t part_units = int64_t(kBackwardKeys) * row_units;
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x, split = unit / part_units;
  if (split >= p.n_splits) return;
  const TileSplit s = p.splits[split];
  const int64_t in_part = unit - split * part_units;
  if (in_part / row_units >= s.n_rows) return;
  const auto* parts = reinterpret_cast<const float4*>(p.parts) + s.first_slot * part_units + in_part;
  float4 sum = parts[0];
  for (int i = 1; i < s.n_slots; ++i) {
    const float4 x = parts[i * part_units];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const int64_t at = int64_t(s.row0) * row_units + in_part;
  if (p.out_float32)
    static_cast<float4*>(p.out)[at] = sum;
  else if (p.bfloat16)
    static_cast<uint2*>(p.out)[at] = make_uint2(pack<true>(sum.x, sum.y), pack<true>(sum.z, sum.w));
  else
    static_cast<uint2*>(p.out)[at] = make_uint2(pack<false>(sum.x, sum.y), pack<false>(sum.z, sum.w));
}

}  // namespace

cudaError_t join_keys(const JoinKeysParams& p, cudaStream_t stream) {
  const int64_t units = int64_t(p.n_splits) * kBackwardKeys * p.num_heads_kv * (p.dim / 4);
  join<<<unsigned((units + kThreads - 1) / kThreads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace magi::cuda::sm90
