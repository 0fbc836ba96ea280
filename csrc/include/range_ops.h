// What range_gather and range_scatter_add share on every device.
#pragma once
#include <vector>

#include "checks.h"

namespace magi {

inline void check_ranges(const Tensor& ranges) {
  STD_TORCH_CHECK(ranges.dim() == 2 && ranges.size(1) == 2 && ranges.scalar_type() == ScalarType::Long,
                  "ranges must be int64 [n, 2], got shape ", shape_text(ranges));
}

// The shape of x with another number of rows.
inline std::vector<int64_t> with_rows(const Tensor& x, int64_t rows) {
  std::vector<int64_t> shape{rows};
  for (int64_t i = 1; i < x.dim(); ++i) shape.push_back(x.size(i));
  return shape;
}

inline int64_t row_elements(const Tensor& x) {
  int64_t n = 1;
  for (int64_t i = 1; i < x.dim(); ++i) n *= x.size(i);
  return n;
}

}  // namespace magi
