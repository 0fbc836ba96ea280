// Before the backward: lse in powers of two, delta = sum(dout * out) - dlse, and the sink's gradient.
//
// A block takes 128 pairs (row, head): some rows of heads_in_tile heads. In a first pass 8, 16 or 32 lanes share a
// pair, each with 8 elements of it; then a thread has a pair. The sink's gradient -exp(sink - lse) * delta, summed
// over rows, is added up per block and then over blocks.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "flex_attn_bwd_rows.h"

namespace magi::cuda::sm90 {
namespace {

constexpr int kThreads = 256, kPairs = kPreparePairs, kMaxHeads = 8;
constexpr int kBatch = 4;  // pairs whose elements are loaded together
constexpr int kSumColumns = 8, kSumRows = 64;
constexpr float kLog2e = 1.4426950408889634f, kInfinity = std::numeric_limits<float>::infinity();

struct Shifts {
  int heads, lanes;  // log2 of heads_in_tile and of the lanes that share a pair
};

__device__ float wide(float x) { return x; }
__device__ float wide(__half x) { return __half2float(x); }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
struct Eight {
  alignas(16) T x[8];
};

template <bool kAligned, typename T>
__device__ void load(const T* from, Eight<T>& to) {
  if constexpr (kAligned) {
    auto* words = reinterpret_cast<uint4*>(to.x);
#pragma unroll
    for (int i = 0; i < int(sizeof(to) / 16); ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to.x[i] = from[i];
  }
}

// What out is exactly 0 for does not depend on dout, which may hold anything there.
template <typename T, typename Out>
__device__ float dot(const Eight<T>& dout, const Eight<Out>& out) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float o = wide(out.x[i]);
    sum = fmaf(o, o == 0 ? 0.f : wide(dout.x[i]), sum);
  }
  return sum;
}

template <typename T, typename Out, bool kAligned>
__global__ void __launch_bounds__(kThreads) prepare(const PrepareParams p, const Shifts shifts) {
  __shared__ float sums[kPairs];
  __shared__ float warp_sums[kPairs / 32][kMaxHeads];
  const int thread = int(threadIdx.x), heads = 1 << shifts.heads;
  const int groups = p.num_heads >> shifts.heads;  // the fastest index of blocks: neighbours read adjacent memory
  const int group = int(blockIdx.x % unsigned(groups)), first_head = group << shifts.heads;
  const int64_t block = blockIdx.x / unsigned(groups), first_row = block * (kPairs >> shifts.heads);

  // A thread's own pair.
  const int64_t row = first_row + (thread >> shifts.heads);
  const int head = first_head + (thread & (heads - 1));
  const bool owner = thread < kPairs, inside = owner && row < p.rows;
  const int64_t at = row * p.num_heads + head;
  const float lse = inside ? p.lse[at] : -kInfinity;
  const bool sees = lse != -kInfinity;
  const float dlse = sees && p.dlse != nullptr ? p.dlse[at] : 0.f;

  const int lane = thread & ((1 << shifts.lanes) - 1), element = lane * 8;
  const int step = kThreads >> shifts.lanes;  // at most kPairs / kBatch
  for (int first = thread >> shifts.lanes; first < kPairs; first += kBatch * step) {
    Eight<T> g[kBatch];
    Eight<Out> o[kBatch];
    bool filled[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = first + i * step;
      const int64_t r = first_row + (pair >> shifts.heads), h = first_head + (pair & (heads - 1));
      filled[i] = r < p.rows && element < p.head_dim_v;
      if (!filled[i]) continue;
      load<kAligned>(static_cast<const T*>(p.dout) + r * p.dout_row_stride + h * p.dout_head_stride + element, g[i]);
      load<kAligned>(static_cast<const Out*>(p.out) + (r * p.num_heads + h) * p.head_dim_v + element, o[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float sum = filled[i] ? dot(g[i], o[i]) : 0.f;
      for (int x = 1 << shifts.lanes >> 1; x > 0; x >>= 1) sum += __shfl_xor_sync(~0u, sum, x);
      if (lane == 0) sums[first + i * step] = sum;
    }
  }
  __syncthreads();

  const float delta = sees ? sums[thread] - dlse : 0.f;
  if (owner && row < p.padded_rows) {
    const int64_t to = ((group * p.padded_rows + row) << shifts.heads) + (thread & (heads - 1));
    p.lse_log2[to] = sees ? lse * kLog2e : kInfinity;
    p.delta[to] = delta;
  }
  if (p.sink == nullptr) return;
  for (int t = 0; t < p.num_sink; ++t) {
    const int64_t from = ((p.sink_per_row ? row * p.num_sink : 0) + t) * p.num_heads + head;
    const float weight = sees ? expf(p.sink[from] - lse) : 0.f;
    float grad = weight == 0 ? 0.f : -weight * delta;
    if (p.sink_per_row) {
      if (inside) p.dsink[from] = grad;
      continue;
    }
    for (int x = 16; x >= heads; x >>= 1) grad += __shfl_xor_sync(~0u, grad, x);
    if (owner && thread % 32 < heads) warp_sums[thread / 32][thread % 32] = grad;
    __syncthreads();
    if (thread < heads) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kPairs / 32; ++w) sum += warp_sums[w][thread];
      p.sink_partial[(block * p.num_sink + t) * p.num_heads + head] = sum;
    }
    __syncthreads();
  }
}

// out[c] = the sum of x[r, c] over r.
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_rows(const float* x, float* out, int64_t rows, int64_t columns) {
  __shared__ double sums[kSumRows][kSumColumns];
  const int c = int(threadIdx.x) % kSumColumns, r = int(threadIdx.x) / kSumColumns;
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + c;
  double sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t i = r; i < rows; i += kSumRows) sum += double(x[i * columns + column]);
  }
  sums[r][c] = sum;
  for (int half = kSumRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (r < half) sums[r][c] += sums[r + half][c];
  }
  if (r == 0 && column < columns) out[column] = float(sums[0][c]);
}

template <typename T, typename Out>
void launch(const PrepareParams& p, const Shifts& shifts, int64_t blocks, cudaStream_t stream) {
  const bool aligned = (reinterpret_cast<uintptr_t>(p.dout) | reinterpret_cast<uintptr_t>(p.out)) % 16 == 0 &&
                       (p.dout_row_stride | p.dout_head_stride) % 8 == 0;
  if (aligned)
    prepare<T, Out, true><<<unsigned(blocks), kThreads, 0, stream>>>(p, shifts);
  else
    prepare<T, Out, false><<<unsigned(blocks), kThreads, 0, stream>>>(p, shifts);
}

}  // namespace

cudaError_t prepare_rows(const PrepareParams& p, cudaStream_t stream) {
  Shifts shifts{0, 3};
  while ((1 << shifts.heads) < p.heads_in_tile) ++shifts.heads;
  while ((8 << shifts.lanes) < p.head_dim_v) ++shifts.lanes;
  if (p.heads_in_tile < 1 || p.heads_in_tile > kMaxHeads || (1 << shifts.heads) != p.heads_in_tile || p.num_heads < 1 ||
      p.num_heads % p.heads_in_tile != 0 || p.head_dim_v < 8 || p.head_dim_v > 256 || p.head_dim_v % 8 != 0 ||
      p.rows < 0 || p.padded_rows < p.rows)
    return cudaErrorInvalidValue;
  const int64_t row_blocks = prepare_rows_blocks(p.padded_rows, p.heads_in_tile);
  const int64_t blocks = row_blocks * (p.num_heads / p.heads_in_tile);
  if (blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidValue;
  if (blocks > 0) {
    if (p.bfloat16 && p.out_float32)
      launch<__nv_bfloat16, float>(p, shifts, blocks, stream);
    else if (p.bfloat16)
      launch<__nv_bfloat16, __nv_bfloat16>(p, shifts, blocks, stream);
    else if (p.out_float32)
      launch<__half, float>(p, shifts, blocks, stream);
    else
      launch<__half, __half>(p, shifts, blocks, stream);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  const int64_t columns = int64_t{p.num_sink} * p.num_heads;
  if (p.sink == nullptr || p.sink_per_row || columns == 0) return cudaSuccess;
  sum_rows<<<unsigned((columns + kSumColumns - 1) / kSumColumns), kSumColumns * kSumRows, 0, stream>>>(
      p.sink_partial, p.dsink, row_blocks, columns);
  return cudaGetLastError();
}

}  // namespace magi::cuda::sm90
