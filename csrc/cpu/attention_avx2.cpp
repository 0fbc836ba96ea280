// The attention tiles for AVX2 and FMA.
#if defined(__x86_64__)
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define MAGI_ISA avx2
#define MAGI_VECTOR_BYTES 32
#include "attention_tiles.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace magi::cpu {

const Kernels& avx2_kernels() {
  static const Kernels kernels{"avx2", avx2::scratch_bytes, avx2::forward, avx2::grad_q, avx2::grad_kv};
  return kernels;
}

}  // namespace magi::cpu
#endif  // x86-64
