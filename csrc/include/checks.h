// Checks that host code makes of tensors, and their messages.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <string>
#include <vector>

namespace magi {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_text(const Tensor& x) {
  std::string out = "[";
  for (int64_t i = 0; i < x.dim(); ++i) out += (i ? ", " : "") + std::to_string(x.size(i));
  return out + "]";
}

inline void check_shape(const Tensor& x, const char* name, const std::vector<int64_t>& shape) {
  bool same = x.dim() == int64_t(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i) same = x.size(int64_t(i)) == shape[i];
  if (same) return;
  std::string expected = "[";
  for (size_t i = 0; i < shape.size(); ++i) expected += (i ? ", " : "") + std::to_string(shape[i]);
  STD_TORCH_CHECK(false, name, " must have shape ", expected, "], got ", shape_text(x));
}

// The tensor itself if its last dimension is dense, otherwise a contiguous copy.
inline Tensor dense_rows(const Tensor& x) {
  if (x.dim() == 0 || x.size(x.dim() - 1) <= 1 || x.stride(x.dim() - 1) == 1) return x;
  return torch::stable::contiguous(x);
}

}  // namespace magi
