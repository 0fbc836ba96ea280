// A softcap of logits, as host and kernels see it.
#pragma once

namespace magi::cuda {

// score(x) = factor * tanh(inner * x), in powers of two. Where inner * |x| is small, x * (poly[0] + poly[1] x^2 ...).
struct Softcap {
  float inner, factor;
  float small_square;  // the x^2 up to which the polynomial holds
  float poly[4];
};

}  // namespace magi::cuda
