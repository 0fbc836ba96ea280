// Thin wrappers of the PTX instructions that kernels for sm_90a use. Nothing here decides anything.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "layout.cuh"
#include "wgmma.cuh"

namespace magi::cuda {

#define MAGI_DEVICE static __device__ __forceinline__

MAGI_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Tells the compiler that x is the same in the whole warp. A descriptor or stage that it does not know to be
// uniform costs two to four moves between register files before every wgmma, without any message.
MAGI_DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// x, of which the compiler then knows nothing: what derives from it is computed where it is used, not ahead of a
// loop that needs the registers.
MAGI_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// True for one thread of the warp.
MAGI_DEVICE bool elect_one() {
  uint32_t chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen;
}

// --- mbarriers ----------------------------------------------------------------------------------------------

MAGI_DEVICE void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
// Makes initialised barriers visible to TMA.
MAGI_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MAGI_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the phase complete only after so many bytes have been copied.
MAGI_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns once the phase of that parity has completed. A fresh barrier passes for parity 1.
MAGI_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra passed_%=;\n"
      "bra again_%=;\n"
      "passed_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- TMA ----------------------------------------------------------------------------------------------------

constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;  // L2 policies, as CUTLASS encodes them
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

MAGI_DEVICE void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
MAGI_DEVICE void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}
// Copies 16-byte units from a 16-byte aligned place.
MAGI_DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
MAGI_DEVICE void tma_store(const CUtensorMap* map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
MAGI_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// The shared memory of this thread's stores has been read; respectively, the stores are done.
MAGI_DEVICE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
MAGI_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders this thread's plain accesses to shared memory before later ones of TMA and wgmma.
MAGI_DEVICE void fence_shared_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- named barriers and the register pool -------------------------------------------------------------------

template <int kThreads>
MAGI_DEVICE void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
MAGI_DEVICE void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kRegisters>
MAGI_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
MAGI_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- wgmma --------------------------------------------------------------------------------------------------

MAGI_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MAGI_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last kPending groups are done.
template <int kPending>
MAGI_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps plain register code on its side of the start of a wgmma, or of the wait for it.
template <int N>
MAGI_DEVICE void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N>
MAGI_DEVICE void pin(uint32_t (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// --- conversions --------------------------------------------------------------------------------------------

MAGI_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MAGI_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Never a branch, which the compiler makes of `?:` where one side is expensive.
MAGI_DEVICE float select(bool condition, float yes, float no) {
  float y;
  asm("{.reg .pred p; setp.ne.b32 p, %1, 0; selp.f32 %0, %2, %3, p;}"
      : "=f"(y)
      : "r"(int(condition)), "f"(yes), "f"(no));
  return y;
}
template <bool kBFloat16>
MAGI_DEVICE uint32_t pack(float low, float high) {
  uint32_t r;
  if constexpr (kBFloat16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Four 8 x 8 matrices of 16-bit numbers from the accumulator layout to shared memory.
MAGI_DEVICE void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

}  // namespace magi::cuda
