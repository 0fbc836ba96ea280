// range_gather and range_scatter_add on CUDA: ranges of rows out of a tensor, and their sum back into one, at copy
// bandwidth. Ranges are not checked against the tensors here: that would need the host to wait for the device.
//
// gather: a thread copies units of up to 16 bytes and finds the range of each unit's row by bisection.
//
// scatter_add: a block owns a tile of output rows. It collects the ranges that reach into the tile, in order, in shared
// memory; then each thread sums a few units of one row over them. No atomics: the order of the sums is that of the
// ranges, whatever runs when. Where a tile has more ranges than shared memory holds, they come in batches, once for
// every pass over the tile, while the sums stay in registers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "../common/pack.cuh"
#include "../common/stream.h"
#include "range_ops.h"

namespace magi::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Copies `n_out` rows of `units` units. ends[i] is the number of output rows up to the end of range i.
template <typename Unit>
__global__ void gather_rows(const Unit* __restrict__ x, Unit* __restrict__ out, const int64_t* __restrict__ ranges,
                            const int64_t* __restrict__ ends, int64_t n_ranges, int64_t n_out, int64_t units) {
  const int64_t total = n_out * units;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / units;
    int64_t lo = 0, hi = n_ranges - 1;  // the first range with ends > row
    while (lo < hi) {
      const int64_t mid = (lo + hi) / 2;
      if (ends[mid] > row)
        hi = mid;
      else
        lo = mid + 1;
    }
    const int64_t source = ranges[2 * lo + 1] - (ends[lo] - row);
    out[i] = x[source * units + (i - row * units)];
  }
}

__device__ double widened(double x) { return x; }
__device__ float widened(float x) { return x; }
__device__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float widened(__half x) { return __half2float(x); }

__device__ void narrow(double x, double& to) { to = x; }
__device__ void narrow(float x, float& to) { to = x; }
__device__ void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }
__device__ void narrow(float x, __half& to) { to = __float2half_rn(x); }

// The part of a range that lies in a tile of rows.
struct alignas(16) Part {
  int64_t source;      // the row of y that is added to the tile's row 0, were that in the range
  int32_t begin, end;  // rows of the tile
};

constexpr int kAhead = 4;  // ranges that a thread loads at once
constexpr int kCapacity = 2 * kAhead * kThreads;
constexpr int kUnits = 4;  // units of a row that a thread sums

struct Parts {
  Part part[kCapacity];
  int hits[kAhead * kWarps];
};

// Lists the parts of ranges `next` and on that lie in rows [row0, row0 + rows), in order, as many as there is room
// for; moves `next` behind the last range it looked at. All threads of the block call it.
__device__ int collect(Parts& parts, const int64_t* __restrict__ ranges, const int64_t* __restrict__ ends,
                       int64_t n_ranges, int64_t row0, int64_t rows, int64_t& next) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  int count = 0;
  __syncthreads();  // nobody reads the earlier list any more
  while (next < n_ranges && count <= kCapacity - kAhead * kThreads) {
    Part part[kAhead];
    unsigned hit[kAhead];
    bool any = false;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t i = next + k * kThreads + threadIdx.x;
      int64_t begin = 0, end = 0, until = 0;
      if (i < n_ranges) begin = ranges[2 * i], end = ranges[2 * i + 1], until = ends[i];
      const int64_t first = max(begin - row0, int64_t{0}), last = min(end - row0, rows);
      part[k] = {until - end + row0, int32_t(first), int32_t(last)};
      hit[k] = __ballot_sync(0xffffffff, first < last);
      any |= hit[k] != 0;
      if (lane == 0) parts.hits[k * kWarps + warp] = __popc(hit[k]);
    }
    next += kAhead * kThreads;
    if (!__syncthreads_or(any)) continue;
    int before = count;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      int at = before + __popc(hit[k] & ((1u << lane) - 1));
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const int hits = parts.hits[k * kWarps + w];
        at += w < warp ? hits : 0;
        before += hits;
      }
      if (hit[k] >> lane & 1) parts.part[at] = part[k];
    }
    count = before;
    __syncthreads();  // the list can be read, the hits written again
  }
  return count;
}

// out[r] = sum of the rows of y whose range covers r. A row is `units` units; thread c of the `columns` threads of a
// row sums its units c, c + columns, ...
template <typename T, typename Acc, int kWidth>
__global__ void __launch_bounds__(kThreads, 3)
    add_rows(const Pack<T, kWidth>* __restrict__ y, Pack<T, kWidth>* __restrict__ out,
             const int64_t* __restrict__ ranges, const int64_t* __restrict__ ends, int64_t n_ranges, int64_t n_rows,
             int64_t units, int64_t columns, int64_t tile_rows) {
  __shared__ Parts parts;
  for (int64_t row0 = blockIdx.x * tile_rows; row0 < n_rows; row0 += gridDim.x * tile_rows) {
    const int64_t rows = min(tile_rows, n_rows - row0), items = rows * columns;
    bool whole = false;  // the list holds all parts of the tile
    int count = 0;
    for (int64_t item0 = int64_t{blockIdx.y} * kThreads; item0 < items; item0 += int64_t{gridDim.y} * kThreads) {
      // Past the last item, `row` is past the last row of the tile, and no part covers it.
      const int64_t item = item0 + threadIdx.x;
      const int row = int(item / columns);
      const int64_t column = item - row * columns, unit = row * units + column;  // in the tile
      const int mine = int(min((units - column + columns - 1) / columns, int64_t{kUnits}));
      Acc sum[kUnits][kWidth] = {};
      for (int64_t next = 0;;) {
        if (!whole) {
          const bool from_start = next == 0;
          count = collect(parts, ranges, ends, n_ranges, row0, rows, next);
          whole = from_start && next >= n_ranges;
        }
        for (int i = 0; i < count; ++i) {
          const Part part = parts.part[i];
          if (row < part.begin || row >= part.end) continue;
          const Pack<T, kWidth>* from = y + part.source * units + unit;
          Pack<T, kWidth> x[kUnits] = {};
#pragma unroll
          for (int k = 0; k < kUnits; ++k)
            if (k < mine) x[k] = from[k * columns];
#pragma unroll
          for (int k = 0; k < kUnits; ++k)
#pragma unroll
            for (int j = 0; j < kWidth; ++j) sum[k][j] += widened(x[k].v[j]);
        }
        if (whole || next >= n_ranges) break;
      }
      if (row >= rows) continue;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (k >= mine) continue;
        Pack<T, kWidth> x;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) narrow(sum[k][j], x.v[j]);
        out[row0 * units + unit + k * columns] = x;
      }
    }
  }
}

// The number of output rows up to the end of each range.
Tensor range_ends(const Tensor& ranges) {
  using torch::stable::detail::from;
  const std::optional<Tensor> none;
  std::array<StableIValue, 5> diff{from(ranges), from(int64_t{1}), from(int64_t{1}), from(none), from(none)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::diff", "", diff.data(), TORCH_ABI_VERSION));
  std::array<StableIValue, 3> sum{diff[0], from(int64_t{0}), from(std::optional<ScalarType>{})};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::cumsum", "", sum.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(sum[0]);
}

const int64_t* longs(const Tensor& x) { return static_cast<const int64_t*>(x.data_ptr()); }

template <typename Unit>
void launch_gather(const Tensor& x, Tensor& out, const Tensor& ranges, int64_t row_bytes, cudaStream_t stream) {
  const Tensor ends = range_ends(ranges);
  const int64_t units = row_bytes / int64_t(sizeof(Unit)), total = out.size(0) * units;
  const int64_t blocks = std::min<int64_t>((total + kThreads - 1) / kThreads, 132 * 32);
  gather_rows<Unit><<<unsigned(blocks), kThreads, 0, stream>>>(static_cast<const Unit*>(x.data_ptr()),
                                                               static_cast<Unit*>(out.data_ptr()), longs(ranges),
                                                               longs(ends), ranges.size(0), out.size(0), units);
  check_cuda(cudaGetLastError(), "launching range_gather");
}

Tensor range_gather(const Tensor& x_in, const Tensor& ranges_in, int64_t n_out) {
  check_ranges(ranges_in);
  STD_TORCH_CHECK(x_in.dim() >= 1, "x must have at least one dimension");
  const int32_t device = x_in.get_device_index();
  check_device(ranges_in, "ranges", device);
  torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor x = torch::stable::contiguous(x_in), ranges = torch::stable::contiguous(ranges_in);
  const int64_t row_bytes = row_elements(x) * int64_t(x.element_size());
  Tensor out = torch::stable::new_empty(x, with_rows(x, n_out));
  if (n_out == 0 || row_bytes == 0) return out;
  const cudaStream_t stream = current_stream(device);
  const uintptr_t aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) | uintptr_t(row_bytes);
  if (aligned % 16 == 0)
    launch_gather<uint4>(x, out, ranges, row_bytes, stream);
  else if (aligned % 4 == 0)
    launch_gather<uint32_t>(x, out, ranges, row_bytes, stream);
  else if (aligned % 2 == 0)
    launch_gather<uint16_t>(x, out, ranges, row_bytes, stream);
  else
    launch_gather<uint8_t>(x, out, ranges, row_bytes, stream);
  return out;
}

template <typename T, typename Acc, int kWidth>
void launch_add(const Tensor& y, Tensor& out, const Tensor& ranges, int64_t row, cudaStream_t stream) {
  using Unit = Pack<T, kWidth>;
  const Tensor ends = range_ends(ranges);
  const int64_t n_rows = out.size(0), units = row / kWidth, columns = (units + kUnits - 1) / kUnits;
  // Enough rows that going through all ranges pays, few enough that their list stays short.
  int64_t tile_rows = 16;
  while (tile_rows < 256 && tile_rows * columns < 4 * kThreads) tile_rows *= 2;
  const int64_t tiles = (n_rows + tile_rows - 1) / tile_rows, passes = (tile_rows * columns + kThreads - 1) / kThreads;
  // Few tiles of long rows are shared among blocks.
  const int64_t sharing = std::clamp<int64_t>(132 * 4 / tiles, 1, std::min<int64_t>(passes, 65535));
  const dim3 grid(unsigned(std::min<int64_t>(tiles, 1 << 30)), unsigned(sharing));
  add_rows<T, Acc, kWidth>
      <<<grid, kThreads, 0, stream>>>(static_cast<const Unit*>(y.data_ptr()), static_cast<Unit*>(out.data_ptr()),
                                      longs(ranges), longs(ends), ranges.size(0), n_rows, units, columns, tile_rows);
  check_cuda(cudaGetLastError(), "launching range_scatter_add");
}

template <typename T, typename Acc>
void scatter_add(const Tensor& y, Tensor& out, const Tensor& ranges, cudaStream_t stream) {
  const int64_t row = row_elements(y);
  if (out.size(0) == 0 || row == 0) return;
  const bool whole = (reinterpret_cast<uintptr_t>(y.data_ptr()) | uintptr_t(row) * sizeof(T)) % 16 == 0;
  (whole ? launch_add<T, Acc, int(16 / sizeof(T))> : launch_add<T, Acc, 1>)(y, out, ranges, row, stream);
}

Tensor range_scatter_add(const Tensor& y_in, const Tensor& ranges_in, int64_t n_rows) {
  STD_TORCH_CHECK(y_in.dim() >= 1, "y must have at least one dimension");
  STD_TORCH_CHECK(n_rows >= 0, "n_rows must be 0 or more, got ", n_rows);
  check_ranges(ranges_in);
  const int32_t device = y_in.get_device_index();
  check_device(ranges_in, "ranges", device);
  torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor y = torch::stable::contiguous(y_in), ranges = torch::stable::contiguous(ranges_in);
  Tensor out = torch::stable::new_empty(y, with_rows(y, n_rows));
  const cudaStream_t stream = current_stream(device);
  switch (y.scalar_type()) {
    case ScalarType::Double:
      scatter_add<double, double>(y, out, ranges, stream);
      break;
    case ScalarType::Float:
      scatter_add<float, float>(y, out, ranges, stream);
      break;
    case ScalarType::BFloat16:
      scatter_add<__nv_bfloat16, float>(y, out, ranges, stream);
      break;
    case ScalarType::Half:
      scatter_add<__half, float>(y, out, ranges, stream);
      break;
    default:
      STD_TORCH_CHECK(false, "range_scatter_add takes float64, float32, bfloat16 and float16, got ",
                      torch::headeronly::toString(y.scalar_type()));
  }
  return out;
}

}  // namespace
}  // namespace magi::cuda

STABLE_TORCH_LIBRARY_IMPL(torch_magi, CUDA, m) {
  m.impl("range_gather", TORCH_BOX(&magi::cuda::range_gather));
  m.impl("range_scatter_add", TORCH_BOX(&magi::cuda::range_scatter_add));
}
