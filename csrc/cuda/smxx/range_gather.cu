// range_gather on CUDA: ranges of rows out of a tensor, at copy bandwidth.
//
// A thread copies units of up to 16 bytes and finds the range of each unit's row by bisection. Ranges are not
// checked against the tensor here: that would need the host to wait for the device.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "checks.h"

// Weak: a torch without CUDA has no such symbol, and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace magi::cuda {
namespace {

constexpr int kThreads = 256;

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

template <typename Unit>
void launch(const Tensor& x, Tensor& out, const Tensor& ranges, const Tensor& ends, int64_t row_bytes,
            cudaStream_t stream) {
  const int64_t units = row_bytes / int64_t(sizeof(Unit)), total = out.size(0) * units;
  const int64_t blocks = std::min<int64_t>((total + kThreads - 1) / kThreads, 132 * 32);
  gather_rows<Unit><<<unsigned(blocks), kThreads, 0, stream>>>(
      static_cast<const Unit*>(x.data_ptr()), static_cast<Unit*>(out.data_ptr()),
      static_cast<const int64_t*>(ranges.data_ptr()), static_cast<const int64_t*>(ends.data_ptr()), ranges.size(0),
      out.size(0), units);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "range_gather failed to launch: ", cudaGetErrorString(error));
}

Tensor range_gather(const Tensor& x_in, const Tensor& ranges_in, int64_t n_out) {
  STD_TORCH_CHECK(ranges_in.dim() == 2 && ranges_in.size(1) == 2 && ranges_in.scalar_type() == ScalarType::Long,
                  "ranges must be int64 [n, 2], got shape ", shape_text(ranges_in));
  STD_TORCH_CHECK(x_in.dim() >= 1, "x must have at least one dimension");
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  const int32_t device = x_in.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor x = torch::stable::contiguous(x_in), ranges = torch::stable::contiguous(ranges_in);
  std::vector<int64_t> shape{n_out};
  int64_t row_bytes = int64_t(x.element_size());
  for (int64_t i = 1; i < x.dim(); ++i) shape.push_back(x.size(i)), row_bytes *= x.size(i);
  Tensor out = torch::stable::new_empty(x, shape);
  if (n_out == 0 || row_bytes == 0) return out;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const Tensor ends = range_ends(ranges);
  const uintptr_t aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) | uintptr_t(row_bytes);
  auto on = static_cast<cudaStream_t>(stream);
  if (aligned % 16 == 0)
    launch<uint4>(x, out, ranges, ends, row_bytes, on);
  else if (aligned % 4 == 0)
    launch<uint32_t>(x, out, ranges, ends, row_bytes, on);
  else if (aligned % 2 == 0)
    launch<uint16_t>(x, out, ranges, ends, row_bytes, on);
  else
    launch<uint8_t>(x, out, ranges, ends, row_bytes, on);
  return out;
}

}  // namespace
}  // namespace magi::cuda

STABLE_TORCH_LIBRARY_IMPL(torch_magi, CUDA, m) { m.impl("range_gather", TORCH_BOX(&magi::cuda::range_gather)); }
