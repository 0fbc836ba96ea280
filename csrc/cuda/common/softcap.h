// A softcap of logits, as host and kernels see it.
#pragma once

namespace magi::cuda {

// score(x) = factor * tanh(inner * x), in powers of two.
struct Softcap {
  float exponent;         // of tanh(inner * x) = 1 - 2 / (1 + 2^(exponent * x))
  float factor, inverse;  // inverse: 1 / factor
  float small_square;     // up to this x^2 score(x) is x * (poly[0] + poly[1] x^2 ...)
  float poly[4];
};

}  // namespace magi::cuda
