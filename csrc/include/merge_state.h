// What merge_state asks of its inputs on every device.
#pragma once
#include "checks.h"

namespace magi {

inline void check_merge_state(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  STD_TORCH_CHECK(out_a.dim() == 3, "out_a must be [rows, heads, head_dim], got ", shape_text(out_a));
  const int64_t rows = out_a.size(0), heads = out_a.size(1);
  check_shape(out_b, "out_b", {rows, heads, out_a.size(2)});
  check_shape(lse_a, "lse_a", {rows, heads});
  check_shape(lse_b, "lse_b", {rows, heads});
  const ScalarType type = out_a.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double,
                  "merge_state needs float32 or float64 partial results, got ", torch::headeronly::toString(type),
                  "; ask the attention for out_float32=True");
  STD_TORCH_CHECK(out_b.scalar_type() == type && lse_a.scalar_type() == type && lse_b.scalar_type() == type,
                  "out_a, lse_a, out_b and lse_b must have one dtype");
}

}  // namespace magi
