// merge_state on CUDA: the partial results of two sets of keys become that of their union, at copy bandwidth.
//
// A group of 1 to 32 lanes owns a (row, head), so that its weights are computed once per lane and an element costs no
// division. Lanes take units of 16 bytes, or single elements where rows are not whole units.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "../common/pack.cuh"
#include "../common/stream.h"
#include "merge_state.h"

namespace magi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 2;  // loads of one tensor that a thread has under way

// Rounded one by one, as on the CPU: with a fused multiplication a merge would depend on the order of its sides.
__device__ float weighted(float wa, float a, float wb, float b) {
  return __fadd_rn(__fmul_rn(wa, a), __fmul_rn(wb, b));
}
__device__ double weighted(double wa, double a, double wb, double b) {
  return __dadd_rn(__dmul_rn(wa, a), __dmul_rn(wb, b));
}

// Merges `n` rows of `units` units, each with a group of 1 << log_lanes lanes.
template <typename Acc, int kWidth>
__global__ void __launch_bounds__(kThreads)
    merge_rows(const Acc* __restrict__ out_a, const Acc* __restrict__ lse_a, const Acc* __restrict__ out_b,
               const Acc* __restrict__ lse_b, Acc* __restrict__ out, Acc* __restrict__ lse, int64_t n, int64_t units,
               int log_lanes) {
  using Unit = Pack<Acc, kWidth>;
  const int lanes = 1 << log_lanes, lane = int(threadIdx.x) & (lanes - 1);
  const int64_t rows_at_once = (int64_t{gridDim.x} * kThreads) >> log_lanes;
  for (int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) >> log_lanes; row < n; row += rows_at_once) {
    const Acc la = lse_a[row], lb = lse_b[row];
    // An empty row has lse -inf, or +inf where FlashAttention-2 wrote it.
    const bool empty_a = isinf(la), empty_b = isinf(lb);
    // The larger lse has weight exp(0).
    const Acc smaller = exp(-fabs(la - lb)), sum = Acc(1) + smaller;
    const Acc wa = (la < lb ? smaller : Acc(1)) / sum, wb = (la < lb ? Acc(1) : smaller) / sum;
    const Unit *a = reinterpret_cast<const Unit*>(out_a) + row * units,
               *b = reinterpret_cast<const Unit*>(out_b) + row * units;
    Unit* to = reinterpret_cast<Unit*>(out) + row * units;
    for (int64_t first = lane; first < units; first += kUnits * lanes) {
      Unit x[kUnits] = {}, y[kUnits] = {};
#pragma unroll
      for (int k = 0; k < kUnits; ++k)
        if (first + k * lanes < units) x[k] = a[first + k * lanes], y[k] = b[first + k * lanes];
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          // Chosen, not multiplied by 0: the values of an empty side may be NaN.
          const Acc one = empty_a ? (empty_b ? Acc(0) : y[k].v[i]) : x[k].v[i];
          x[k].v[i] = empty_a || empty_b ? one : weighted(wa, x[k].v[i], wb, y[k].v[i]);
        }
        if (first + k * lanes < units) to[first + k * lanes] = x[k];
      }
    }
    if (lane == 0) {
      const Acc one = empty_a ? (empty_b ? -fabs(lb) : lb) : la;
      lse[row] = empty_a || empty_b ? one : (la < lb ? lb : la) + log(sum);
    }
  }
}

template <typename Acc, int kWidth>
void launch(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b, Tensor& out,
            Tensor& lse, cudaStream_t stream) {
  const int64_t n = lse.size(0) * lse.size(1), units = out.size(2) / kWidth;
  int log_lanes = 0;
  while (log_lanes < 5 && (int64_t{kUnits} << log_lanes) < units) ++log_lanes;
  const int64_t rows_per_block = kThreads >> log_lanes;
  const int64_t blocks = std::min<int64_t>((n + rows_per_block - 1) / rows_per_block, 132 * 64);
  auto data = [](const Tensor& x) { return static_cast<Acc*>(x.data_ptr()); };
  merge_rows<Acc, kWidth><<<unsigned(blocks), kThreads, 0, stream>>>(data(out_a), data(lse_a), data(out_b), data(lse_b),
                                                                     data(out), data(lse), n, units, log_lanes);
  check_cuda(cudaGetLastError(), "launching merge_state");
}

std::tuple<Tensor, Tensor> merge_state(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                       const Tensor& lse_b) {
  check_merge_state(out_a, lse_a, out_b, lse_b);
  const int32_t device = out_a.get_device_index();
  check_device(lse_a, "lse_a", device);
  check_device(out_b, "out_b", device);
  check_device(lse_b, "lse_b", device);
  torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor oa = torch::stable::contiguous(out_a), ob = torch::stable::contiguous(out_b);
  const Tensor la = torch::stable::contiguous(lse_a), lb = torch::stable::contiguous(lse_b);
  const int64_t rows = oa.size(0), heads = oa.size(1), dim = oa.size(2);
  Tensor out = torch::stable::new_empty(oa, {rows, heads, dim}), lse = torch::stable::new_empty(la, {rows, heads});
  if (rows == 0 || heads == 0) return {out, lse};
  const cudaStream_t stream = current_stream(device);
  auto address = [](const Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()); };
  const bool whole = (address(oa) | address(ob) | address(out) | uintptr_t(dim) * oa.element_size()) % 16 == 0;
  if (oa.scalar_type() == ScalarType::Float)
    (whole ? launch<float, 4> : launch<float, 1>)(oa, la, ob, lb, out, lse, stream);
  else
    (whole ? launch<double, 2> : launch<double, 1>)(oa, la, ob, lb, out, lse, stream);
  return {out, lse};
}

}  // namespace
}  // namespace magi::cuda

STABLE_TORCH_LIBRARY_IMPL(torch_magi, CUDA, m) { m.impl("merge_state", TORCH_BOX(&magi::cuda::merge_state)); }
