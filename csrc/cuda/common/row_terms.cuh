// How the softmax of a row ends: with the sum over its keys, a sink, and an earlier result over other keys.
#pragma once
#include <cmath>
#include <cstdint>

#include "../ptx/hopper.cuh"
#include "row_terms.h"

namespace magi::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kInfinity = INFINITY;

// The output is own * (weights times values) + before * (earlier output).
struct RowResult {
  float lse, own, before;
};

// sum: of exp2(score - reference) over the keys, a score being a logit in powers of two. reference: -inf for a row
// without keys, whose sum is 0. row: in [rows, num_heads_q].
MAGI_DEVICE RowResult close_row(float reference, float sum, const RowTerms& terms, int64_t token, int head,
                                int64_t row) {
  float most = reference, own = 1.f, earlier = 0.f, total = sum;
  if (terms.sink || terms.lse_before) {
    const float sink = terms.sink ? terms.sink[token * terms.sink_row_stride + head] * kLog2e : -kInfinity;
    const float lse_before = terms.lse_before ? terms.lse_before[row] : -kInfinity;
    const float before = lse_before == kInfinity ? -kInfinity : lse_before * kLog2e;  // +inf: empty, see merge_state
    most = fmaxf(reference, fmaxf(sink, before));
    if (most == -kInfinity) return {-kInfinity, 0.f, 0.f};
    if (before == most && reference == -kInfinity && sink == -kInfinity) return {lse_before, 0.f, 1.f};  // bit for bit
    own = exp2_approx(reference - most), earlier = exp2_approx(before - most);
    total = sum * own + exp2_approx(sink - most) + earlier;
  } else if (reference == -kInfinity) {
    return {-kInfinity, 0.f, 0.f};
  }
  // An exact division takes a slow path where it divides 0.
  const float inverse = reciprocal_approx(total);
  return {(most + __log2f(total)) * kLn2, own * inverse, earlier * inverse};
}

// Adds an earlier output that has a weight; the sign of a zero stays.
MAGI_DEVICE float add_before(float own, float weight, float before) {
  return own == 0.f ? weight * before : fmaf(weight, before, own);
}

}  // namespace magi::cuda
