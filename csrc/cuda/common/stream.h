// The current stream and CUDA's errors, for host code.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "checks.h"

// Weak: a torch without CUDA has no such symbol, and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace magi::cuda {

inline void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, " failed: ", cudaGetErrorString(error));
}

inline cudaStream_t current_stream(int32_t device) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// A kernel would read host memory, or another device's, where the dispatcher looked at one tensor alone.
inline void check_device(const Tensor& x, const char* name, int32_t device) {
  STD_TORCH_CHECK(x.get_device_index() == device, name, " must be on cuda:", device, " as the first argument is");
}

}  // namespace magi::cuda
