// merge_state on the CPU: the partial results of two sets of keys become that of their union.
#include "merge_state.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>
#include <tuple>

namespace magi::cpu {
namespace {

template <typename Acc>
void merge_rows(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b, Tensor& out,
                Tensor& lse) {
  const Acc inf = std::numeric_limits<Acc>::infinity();
  const int64_t n = lse_a.size(0) * lse_a.size(1), dim = out_a.size(2);
  const Acc *oa = static_cast<const Acc*>(out_a.data_ptr()), *ob = static_cast<const Acc*>(out_b.data_ptr());
  const Acc *la = static_cast<const Acc*>(lse_a.data_ptr()), *lb = static_cast<const Acc*>(lse_b.data_ptr());
  Acc *o = static_cast<Acc*>(out.data_ptr()), *l = static_cast<Acc*>(lse.data_ptr());
  torch::stable::parallel_for(0, n, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // An empty row has lse -inf, or +inf where FlashAttention-2 wrote it.
      const bool empty_a = std::isinf(la[i]), empty_b = std::isinf(lb[i]);
      Acc* to = o + i * dim;
      const Acc *a = oa + i * dim, *b = ob + i * dim;
      if (empty_a || empty_b) {
        for (int64_t d = 0; d < dim; ++d) to[d] = empty_a ? (empty_b ? Acc(0) : b[d]) : a[d];
        l[i] = empty_a ? (empty_b ? -inf : lb[i]) : la[i];
        continue;
      }
      const Acc most = std::max(la[i], lb[i]);
      const Acc wa = std::exp(la[i] - most), wb = std::exp(lb[i] - most), sum = wa + wb;
      for (int64_t d = 0; d < dim; ++d) to[d] = (wa / sum) * a[d] + (wb / sum) * b[d];
      l[i] = most + std::log(sum);
    }
  });
}

std::tuple<Tensor, Tensor> merge_state(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                       const Tensor& lse_b) {
  check_merge_state(out_a, lse_a, out_b, lse_b);
  const int64_t rows = out_a.size(0), heads = out_a.size(1);
  const Tensor oa = torch::stable::contiguous(out_a), ob = torch::stable::contiguous(out_b);
  const Tensor la = torch::stable::contiguous(lse_a), lb = torch::stable::contiguous(lse_b);
  Tensor out = torch::stable::new_empty(oa, {rows, heads, oa.size(2)}),
         lse = torch::stable::new_empty(la, {rows, heads});
  if (oa.scalar_type() == ScalarType::Float)
    merge_rows<float>(oa, la, ob, lb, out, lse);
  else
    merge_rows<double>(oa, la, ob, lb, out, lse);
  return {out, lse};
}

}  // namespace
}  // namespace magi::cpu

STABLE_TORCH_LIBRARY_IMPL(torch_magi, CPU, m) { m.impl("merge_state", TORCH_BOX(&magi::cpu::merge_state)); }
