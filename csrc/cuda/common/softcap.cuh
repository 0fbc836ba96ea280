// The softcap to float32 accuracy, where tanh.approx has 11 bits: logits of 50 * tanh(x) would be off by 0.01. Small
// products, all that most models ever see, take no special function.
#pragma once
#include "../ptx/hopper.cuh"
#include "row_terms.cuh"
#include "softcap.h"

namespace magi::cuda {

// score(x) / x, where the polynomial holds.
MAGI_DEVICE float softcap_slope(const Softcap& c, float square) {
  return fmaf(square, fmaf(square, fmaf(square, c.poly[3], c.poly[2]), c.poly[1]), c.poly[0]);
}
MAGI_DEVICE float softcap_of(const Softcap& c, float x) {
  const float square = x * x, near = x * softcap_slope(c, square);
  const float far = fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(c.exponent * x)), 1.f) * c.factor;
  return select(square <= c.small_square, near, far);
}
// What a softcap leaves of a gradient: 1 - tanh^2 where the score is factor * tanh.
MAGI_DEVICE float softcap_derivative(const Softcap& c, float score) {
  const float tanh = score * c.inverse;
  return fmaf(-tanh, tanh, 1.f);
}

}  // namespace magi::cuda
