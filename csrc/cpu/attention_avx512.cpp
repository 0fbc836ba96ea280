// The attention tiles for AVX-512.
#if defined(__x86_64__)
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")
#endif

#define MAGI_ISA avx512
#define MAGI_VECTOR_BYTES 64
#include "attention_tiles.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace magi::cpu {

const Kernels& avx512_kernels() {
  static const Kernels kernels{"avx512", avx512::scratch_bytes, avx512::forward, avx512::grad_q, avx512::grad_kv};
  return kernels;
}

}  // namespace magi::cpu
#endif  // x86-64
