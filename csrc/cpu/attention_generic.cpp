// The attention tiles for the instruction set every machine has.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"

#define MAGI_ISA generic
#define MAGI_VECTOR_BYTES 16
#include "attention_tiles.h"

namespace magi::cpu {

const Kernels& generic_kernels() {
  static const Kernels kernels{"generic", generic::scratch_bytes, generic::forward, generic::grad_q, generic::grad_kv};
  return kernels;
}

}  // namespace magi::cpu
