// What joins the keys of a row in a forward pass, as host and kernels see it.
#pragma once
#include <cstdint>

namespace magi::cuda {

// A logit that only adds to the sum, and an earlier result over other keys.
struct RowTerms {
  const float* sink;                     // null, or [num_heads_q] for each row
  int64_t sink_row_stride;               // 0: the same for all rows
  const float *out_before, *lse_before;  // null, or [rows, num_heads_q, head_dim_v] and [rows, num_heads_q], dense
};

}  // namespace magi::cuda
