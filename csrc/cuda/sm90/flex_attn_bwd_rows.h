// What the backward kernels need of every query row, and the sink's gradient, which needs nothing else.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace magi::cuda::sm90 {

struct PrepareParams {
  const void* dout;  // [rows, num_heads, head_dim_v], the last dimension dense; bfloat16 or float16
  int64_t dout_row_stride, dout_head_stride;  // in elements
  const void* out;                            // [rows, num_heads, head_dim_v], dense; dout's dtype or float32
  bool bfloat16, out_float32;
  const float* lse;   // [rows, num_heads], natural logarithm
  const float* dlse;  // null, or [rows, num_heads]
  int64_t rows;
  int64_t padded_rows;    // of the results; at least `rows`
  int32_t num_heads;      // a multiple of heads_in_tile
  int32_t heads_in_tile;  // 1, 2, 4 or 8
  int32_t head_dim_v;     // a multiple of 8, up to 256
  // Results [num_heads / heads_in_tile, padded_rows, heads_in_tile]. lse_log2: lse in powers of two. delta:
  // sum(dout * out) - dlse. A row that sees nothing and a row past the end have +inf and 0.
  float* lse_log2;
  float* delta;
  const float* sink;  // null, or [num_sink, num_heads], per row [rows, num_sink, num_heads]
  bool sink_per_row;
  int32_t num_sink;
  float* dsink;         // the gradient, in the shape of `sink`
  float* sink_partial;  // scratch [prepare_rows_blocks(...), num_sink, num_heads]; null where sink_per_row
};

// Pairs (row, head) that a block takes: of heads_in_tile heads.
constexpr int kPreparePairs = 128;

// The number of stretches of rows that blocks take.
inline int64_t prepare_rows_blocks(int64_t padded_rows, int32_t heads_in_tile) {
  const int64_t rows = kPreparePairs / heads_in_tile;
  return (padded_rows + rows - 1) / rows;
}

// Same inputs, same bits: sums have a fixed order.
cudaError_t prepare_rows(const PrepareParams& p, cudaStream_t stream);

}  // namespace magi::cuda::sm90
