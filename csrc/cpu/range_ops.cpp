// range_gather and range_scatter_add on the CPU: ranges of rows out of a tensor, and their sum back into one.
#include "range_ops.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>
#include <vector>

namespace magi::cpu {
namespace {

struct Ranges {
  std::vector<int64_t> begin, end, at;  // `at`: where the range begins in the concatenation
  int64_t total = 0;
};

Ranges ranges_of(const Tensor& ranges, int64_t n_rows) {
  check_ranges(ranges);
  const Tensor dense = torch::stable::contiguous(ranges);
  const int64_t* r = static_cast<const int64_t*>(dense.data_ptr());
  Ranges out;
  for (int64_t i = 0; i < dense.size(0); ++i) {
    const int64_t a = r[2 * i], b = r[2 * i + 1];
    STD_TORCH_CHECK(0 <= a && a <= b && b <= n_rows, "ranges must lie in [0, ", n_rows, "], got [", a, ", ", b, ")");
    out.begin.push_back(a), out.end.push_back(b), out.at.push_back(out.total);
    out.total += b - a;
  }
  return out;
}

Tensor range_gather(const Tensor& x_in, const Tensor& ranges, int64_t n_out) {
  STD_TORCH_CHECK(x_in.dim() >= 1, "x must have at least one dimension");
  const Tensor x = torch::stable::contiguous(x_in);
  const Ranges r = ranges_of(ranges, x.size(0));
  STD_TORCH_CHECK(r.total == n_out, "n_out must be the number of rows in the ranges, ", r.total, ", got ", n_out);
  Tensor out = torch::stable::new_empty(x, with_rows(x, n_out));
  const int64_t row = row_elements(x) * int64_t(x.element_size());
  const char* from = static_cast<const char*>(x.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  torch::stable::parallel_for(0, int64_t(r.begin.size()), 1, [&](int64_t i0, int64_t i1) {
    for (int64_t i = i0; i < i1; ++i)
      if (r.end[i] > r.begin[i])
        std::memcpy(to + r.at[i] * row, from + r.begin[i] * row, size_t((r.end[i] - r.begin[i]) * row));
  });
  return out;
}

// Adds in the order of the ranges, so that the result does not depend on the number of threads.
template <typename T, typename Acc>
void add_rows(const T* from, T* to, const Ranges& r, int64_t n_rows, int64_t row) {
  torch::stable::parallel_for(0, row, 64, [&](int64_t c0, int64_t c1) {
    std::vector<Acc> sum(size_t(n_rows * (c1 - c0)), Acc(0));
    for (size_t i = 0; i < r.begin.size(); ++i)
      for (int64_t j = 0; j < r.end[i] - r.begin[i]; ++j) {
        const T* x = from + (r.at[i] + j) * row;
        Acc* s = sum.data() + (r.begin[i] + j) * (c1 - c0);
        for (int64_t c = c0; c < c1; ++c) s[c - c0] += Acc(x[c]);
      }
    for (int64_t i = 0; i < n_rows; ++i)
      for (int64_t c = c0; c < c1; ++c) to[i * row + c] = T(sum[size_t(i * (c1 - c0) + c - c0)]);
  });
}

Tensor range_scatter_add(const Tensor& y_in, const Tensor& ranges, int64_t n_rows) {
  STD_TORCH_CHECK(y_in.dim() >= 1, "y must have at least one dimension");
  STD_TORCH_CHECK(n_rows >= 0, "n_rows must be 0 or more, got ", n_rows);
  const Tensor y = torch::stable::contiguous(y_in);
  const Ranges r = ranges_of(ranges, n_rows);
  STD_TORCH_CHECK(r.total == y.size(0), "y must have as many rows as the ranges, ", r.total, ", got ", y.size(0));
  Tensor out = torch::stable::new_empty(y, with_rows(y, n_rows));
  const int64_t row = row_elements(y);
  auto add = [&](auto element, auto acc) {
    using T = decltype(element);
    add_rows<T, decltype(acc)>(static_cast<const T*>(y.data_ptr()), static_cast<T*>(out.data_ptr()), r, n_rows, row);
  };
  switch (y.scalar_type()) {
    case ScalarType::Double:
      add(double{}, double{});
      break;
    case ScalarType::Float:
      add(float{}, float{});
      break;
    case ScalarType::BFloat16:
      add(torch::headeronly::BFloat16{}, float{});
      break;
    case ScalarType::Half:
      add(torch::headeronly::Half{}, float{});
      break;
    default:
      STD_TORCH_CHECK(false, "range_scatter_add takes float64, float32, bfloat16 and float16, got ",
                      torch::headeronly::toString(y.scalar_type()));
  }
  return out;
}

}  // namespace
}  // namespace magi::cpu

STABLE_TORCH_LIBRARY_IMPL(torch_magi, CPU, m) {
  m.impl("range_gather", TORCH_BOX(&magi::cpu::range_gather));
  m.impl("range_scatter_add", TORCH_BOX(&magi::cpu::range_scatter_add));
}
