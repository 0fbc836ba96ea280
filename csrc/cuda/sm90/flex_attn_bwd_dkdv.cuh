// dK and dV for sm_90a over a tile plan whose rows are keys. A block owns 128 keys of a KV head: K and V stay in
// shared memory, dK and dV in registers, and tiles of 64 query rows pass by, of one query head after the other. So
// nothing is added up in memory: same inputs, same bits. Where that leaves multiprocessors idle, a tile's query rows
// are shared out to several items, and a second kernel adds the parts up in order.
//
//   warp 0, one thread   loader: K and V of an item, Q and dO of its tiles, lse and delta of their rows
//   warp 1, one thread   walker (plan_walk.cuh)
//   warps 4 and up       two consumer warpgroups, 64 keys each
//
// Everything is transposed, keys x query rows, so that what two products give is an operand of the next two:
//   S = K Q^T,  P = exp2(S - lse),  dV += P dO;   dP = V dO^T,  dS = P (dP - delta),  dK += dS Q.
//
// Both gradients fit the registers up to a head dim of 128. Beyond it a launch computes one of them.
#pragma once
#include "../common/row_mask.cuh"
#include "../common/softcap.cuh"
#include "../ptx/hopper.cuh"
#include "flex_attn_bwd_dkdv.h"
#include "plan_walk.cuh"

namespace magi::cuda::sm90 {

constexpr int BK = kBackwardKeys, BQ = kBackwardQueries;

// kKeyStages: of K and V; kStages, kDoutStages: of Q with lse and delta, and of dO.
template <int kHeadDim, int kHeadDimV, bool kDk, bool kDv, int kKeyStages, int kStages, int kDoutStages>
struct DkDvShape {
  static constexpr int DQK = kHeadDim, DV = kHeadDimV, NK = kKeyStages, NQ = kStages, NO = kDoutStages;
  static constexpr bool DK_ = kDk, DV_ = kDv;
  static constexpr int kVBytes = kDk ? BK * DV * 2 : 0;  // V is only needed for dS
  // Registers of a thread. With 24 the producers spill, which they can afford better than the consumers.
  static constexpr bool kCrowded = kDk && kDv && kHeadDim > 64;
  static constexpr int kProducerRegisters = kCrowded ? 24 : 40, kConsumerRegisters = kCrowded ? 240 : 232;
};

template <class Shape>
struct DkDvShared {
  static constexpr int DQK = Shape::DQK, DV = Shape::DV, NK = Shape::NK, NQ = Shape::NQ, NO = Shape::NO;
  alignas(1024) uint8_t k[NK][BK * DQK * 2];
  alignas(1024) uint8_t v[NK][Shape::kVBytes ? Shape::kVBytes : 1024];
  alignas(1024) uint8_t q[NQ][BQ * DQK * 2];
  alignas(1024) uint8_t dout[NO][BQ * DV * 2];
  alignas(128) float lse_log2[NQ][BQ];
  alignas(128) float delta[NQ][BQ];
  alignas(8) uint64_t k_full[NK], k_empty[NK], q_full[NQ], q_empty[NQ], dout_full[NO], dout_empty[NO];
  PlanRings plan;
};

// --- loader -------------------------------------------------------------------------------------------------

template <class Shape>
MAGI_DEVICE void load_dkdv_tiles(const DkDvParams& p, DkDvShared<Shape>& s) {
  constexpr int DQK = Shape::DQK, DV = Shape::DV, NK = Shape::NK, NQ = Shape::NQ, NO = Shape::NO;
  uint32_t tile = 0;  // runs on over all items, as the phases of the barriers do
  for (uint32_t it = 0;; ++it) {
    const int k_stage = it % NK, slot = it % kItemSlots;
    const uint32_t k_full = shared_address(&s.k_full[k_stage]);
    barrier_wait(shared_address(&s.plan.item_full[slot]), (it / kItemSlots) & 1);
    const int n = s.plan.item[slot].n_tiles, key = s.plan.item[slot].row0, kv_head = s.plan.group[slot];
    barrier_wait(shared_address(&s.k_empty[k_stage]), ((it / NK) & 1) ^ 1);
    // The consumers are done with item it - NK, and with its slot.
    if (it >= NK) barrier_arrive(shared_address(&s.plan.item_empty[(it - NK) % kItemSlots]));
    if (n <= 0) {
      barrier_arrive(k_full);
      if (n < 0) return;
      continue;
    }
    barrier_expect(k_full, BK * DQK * 2 + Shape::kVBytes);
#pragma unroll
    for (int d = 0; d < DQK / 64; ++d)
      tma_load(shared_address(s.k[k_stage]) + d * BK * 128, &p.k, k_full, d * 64, kv_head, key, kEvictFirst);
    if constexpr (Shape::DK_) {
#pragma unroll
      for (int d = 0; d < DV / 64; ++d)
        tma_load(shared_address(s.v[k_stage]) + d * BK * 128, &p.v, k_full, d * 64, kv_head, key, kEvictFirst);
    }
    for (int t = 0; t < n; ++t, ++tile) {
      const int at = tile % kTileSlots, q_stage = tile % NQ, dout_stage = tile % NO;
      barrier_wait(shared_address(&s.plan.tile_full[at]), (tile / kTileSlots) & 1);
      const int token = s.plan.tile[at].col_start, head = kv_head * p.walk.repeats + s.plan.tile[at].repeat;
      const uint32_t q_full = shared_address(&s.q_full[q_stage]), dout_full = shared_address(&s.dout_full[dout_stage]);
      barrier_wait(shared_address(&s.q_empty[q_stage]), (tile / NQ & 1) ^ 1);
      // All warps are done with tile - NQ, and with its descriptor.
      if (tile >= NQ) barrier_arrive(shared_address(&s.plan.tile_empty[(tile - NQ) % kTileSlots]));
      barrier_expect(q_full, BQ * DQK * 2 + 2 * BQ * 4);
#pragma unroll
      for (int d = 0; d < DQK / 64; ++d)
        tma_load(shared_address(s.q[q_stage]) + d * BQ * 128, &p.q, q_full, d * 64, head, token, kEvictLast);
      const int64_t row = head * p.padded_rows + token;
      bulk_load(shared_address(s.lse_log2[q_stage]), p.lse_log2 + row, BQ * 4, q_full);
      bulk_load(shared_address(s.delta[q_stage]), p.delta + row, BQ * 4, q_full);
      barrier_wait(shared_address(&s.dout_empty[dout_stage]), (tile / NO & 1) ^ 1);
      barrier_expect(dout_full, BQ * DV * 2);
#pragma unroll
      for (int d = 0; d < DV / 64; ++d)
        tma_load(shared_address(s.dout[dout_stage]) + d * BQ * 128, &p.dout, dout_full, d * 64, head, token,
                 kEvictLast);
    }
  }
}

// --- consumers ----------------------------------------------------------------------------------------------

template <class Shape, bool kBFloat16, bool kSoftcap>
struct DkDvConsumer {
  static constexpr int DQK = Shape::DQK, DV = Shape::DV, NK = Shape::NK, NQ = Shape::NQ, NO = Shape::NO;
  static constexpr bool kDk = Shape::DK_, kDv = Shape::DV_, kBoth = kDk && kDv;
  static constexpr int kOrderBarrier = 1, kStoreBarrier = 3;  // one for each warpgroup
  using S = DkDvShared<Shape>;
  using Scores = Wgmma<BQ, kBFloat16, 0>;
  using Masks = RowMask<BQ>[2];
  // From this warpgroup's rows of K to those of V, in any stage.
  static_assert(!kDk || NK == 1 || DQK == DV);
  static constexpr uint32_t kToV = offsetof(S, v) - offsetof(S, k);

  const DkDvParams& p;
  S& s;
  const int warp, warpgroup;  // warp: of the warpgroup
  const int row;              // the first of this thread's keys in the tile; the second is row + 8
  const int lane_column;
  const bool leader;
  uint32_t tile = 0;     // counts the tiles of all items
  bool storing = false;  // TMA stores may still be reading the stage of K of the item before
  float dk[kDk ? DQK / 2 : 1], dv[kDv ? DV / 2 : 1];

  __device__ __forceinline__ DkDvConsumer(const DkDvParams& p, S& s)
      : p(p),
        s(s),
        warp(uniform(threadIdx.x / 32) & 3),
        warpgroup(uniform(threadIdx.x / 128) - 1),
        row(warpgroup * 64 + first_row(warp, threadIdx.x % 32)),
        lane_column(first_column(threadIdx.x)),
        leader(threadIdx.x % 128 == 0) {}

  // A tile in work.
  struct Step {
    float scores[BQ / 2];                                              // S, then P
    float dp[kDk ? BQ / 2 : 1];                                        // dP, then dS
    uint32_t p_packed[kDv ? BQ / 4 : 1], ds_packed[kDk ? BQ / 4 : 1];  // as A operands
    Masks masks;
    int n_band;
  };

  // keys x rows: S or dP of this warpgroup's 64 keys, over kDim.
  template <int kDim>
  __device__ __forceinline__ void start_scores(float (&x)[BQ / 2], uint32_t keys, uint32_t rows) {
    constexpr uint64_t layout = matrix_layout(16);
    pin(x);
    wgmma_fence();
    const uint64_t a = matrix(keys, layout), b = matrix(rows, layout);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      Scores::ss(x, a + k_contiguous_step(i, BK), b + k_contiguous_step(i, BQ), i != 0);
    wgmma_commit();
  }
  // keys x kDim: what the tile adds to dV or dK.
  template <int kDim>
  __device__ __forceinline__ void start_gradient(float (&x)[kDim / 2], uint32_t (&weights)[BQ / 4], uint32_t rows) {
    constexpr uint64_t layout = matrix_layout(BQ * 128);
    pin(weights);
    pin(x);
    wgmma_fence();
    const uint64_t b = matrix(rows, layout);
#pragma unroll
    for (int i = 0; i < BQ / 16; ++i) Wgmma<kDim, kBFloat16, 1>::rs(x, weights + 4 * i, b + n_contiguous_step(i), 1);
    wgmma_commit();
  }

  // Q and dO of a tile. Computed anew for each product, as are K and V: the descriptors of a whole loop are more than
  // uniform registers.
  __device__ __forceinline__ uint32_t q_rows(uint32_t number) const {
    return shared_address(s.q[0]) + uniform(uint32_t(opaque(number)) % NQ) * (BQ * DQK * 2);
  }
  __device__ __forceinline__ uint32_t dout_rows(uint32_t number) const {
    return shared_address(s.dout[0]) + uniform(uint32_t(opaque(number)) % NO) * (BQ * DV * 2);
  }

  __device__ __forceinline__ void start_s(Step& t, uint32_t k) {
    barrier_wait(shared_address(&s.q_full[tile % NQ]), tile / NQ & 1);
    start_scores<DQK>(t.scores, uniform(opaque(k)), q_rows(tile));
  }
  __device__ __forceinline__ void start_dp(Step& t, uint32_t k) {
    barrier_wait(shared_address(&s.dout_full[tile % NO]), tile / NO & 1);
    if constexpr (kDk) start_scores<DV>(t.dp, uniform(opaque(k)) + kToV, dout_rows(tile));
  }
  __device__ __forceinline__ void read_masks(Step& t, int first_key) {
    const TileDescriptor& d = s.plan.tile[tile % kTileSlots];
    t.n_band = d.n_band;
    t.masks[0] = t.masks[1] = {};
    if (t.n_band) {
      const int col_start = d.col_start, begin = d.band_begin;
      TileBand band = d.first;
      for (int i = 0;;) {
        t.masks[0].add(band, first_key + row, col_start, lane_column);
        t.masks[1].add(band, first_key + row + 8, col_start, lane_column);
        if (++i >= t.n_band) break;
        band = p.walk.bands[begin + i];
      }
    }
  }

  // S -> P; with a softcap the packed P, and P times the softcap's derivative in its place.
  __device__ __forceinline__ void exponentiate(Step& t) {
    const float* lse = s.lse_log2[tile % NQ] + lane_column;
#pragma unroll
    for (int j = 0; j < BQ / 8; ++j) {
      const float2 l = *reinterpret_cast<const float2*>(lse + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = t.scores[4 * j + i];
        const float of_row = i % 2 ? l.y : l.x;
        if constexpr (!kSoftcap) x = exp2_approx(fmaf(x, p.scale_log2, -of_row));
      }
      if constexpr (kSoftcap) {
        float slope[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = t.scores[4 * j + i];
          const float score = softcap_of(p.softcap, x);
          slope[i] = softcap_derivative(p.softcap, score);
          x = exp2_approx(score - (i % 2 ? l.y : l.x));
        }
        if (t.n_band) hide(t, j);
        if constexpr (kDv) pack_weights(t, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) t.scores[4 * j + i] *= slope[i];
      } else if (t.n_band) {
        hide(t, j);
      }
    }
  }
  __device__ __forceinline__ void hide(Step& t, int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!t.masks[i / 2].shows(2 * j + i % 2)) t.scores[4 * j + i] = 0.f;
  }
  __device__ __forceinline__ void pack_weights(Step& t, int j) {
    t.p_packed[2 * j] = pack<kBFloat16>(t.scores[4 * j], t.scores[4 * j + 1]);
    t.p_packed[2 * j + 1] = pack<kBFloat16>(t.scores[4 * j + 2], t.scores[4 * j + 3]);
  }
  // dP -> dS
  __device__ __forceinline__ void differentiate(Step& t) {
    const float* delta = s.delta[tile % NQ] + lane_column;
#pragma unroll
    for (int j = 0; j < BQ / 8; ++j) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = t.dp[4 * j + i];
        x = t.scores[4 * j + i] * (x - (i % 2 ? d.y : d.x));
      }
    }
  }
  __device__ __forceinline__ void pack_operands(Step& t) {
#pragma unroll
    for (int j = 0; j < BQ / 8; ++j) {
      if constexpr (kDv && !kSoftcap) pack_weights(t, j);
      if constexpr (kDk) {
        t.ds_packed[2 * j] = pack<kBFloat16>(t.dp[4 * j], t.dp[4 * j + 1]);
        t.ds_packed[2 * j + 1] = pack<kBFloat16>(t.dp[4 * j + 2], t.dp[4 * j + 3]);
      }
    }
  }
  // Never taken: no P is a NaN of all ones. It ends a basic block, so that ptxas cannot hoist the wait for dP that
  // follows above the exponentials.
  __device__ __forceinline__ void end_block(const Step& t) {
    uint32_t ones = ~0u;
#pragma unroll
    for (int i = 0; i < BQ / 2; ++i) ones &= __float_as_uint(t.scores[i]);
    if (ones == ~0u) __nanosleep(1);
  }
  __device__ __forceinline__ void release(uint32_t number, bool dout_too) {
    // lse, delta and the descriptor were read by plain loads: every warp tells that it is done with them. A product
    // is done for the whole warpgroup at once.
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&s.q_empty[number % NQ]));
    if (leader && dout_too) barrier_arrive(shared_address(&s.dout_empty[number % NO]));
  }

  // S is done; dP may not be.
  __device__ __forceinline__ void finish_scores(Step& t) {
    exponentiate(t);
    if constexpr (kDk) end_block(t);
  }

  // The products of a tile with the scores of the next beside them. A warpgroup starts its products while the other
  // one does its arithmetic.
  template <bool kMore>
  __device__ __forceinline__ void both_step(Step& t, uint32_t k, int first_key) {
    const uint32_t number = uniform(tile);  // ptxas loses that it is
    tile = number + 1;
    named_barrier_sync<256>(kOrderBarrier + warpgroup);
    start_gradient<DV>(dv, t.p_packed, dout_rows(number));
    start_gradient<DQK>(dk, t.ds_packed, q_rows(number));
    // P, dS, S and dP are never all alive: with the gradients there are not enough registers.
    wgmma_wait<1>();
    pin(t.p_packed);
    pin(dv);
    if constexpr (kMore) {
      start_s(t, k);
      start_dp(t, k);
      read_masks(t, first_key);
    }
    named_barrier_arrive<256>(kOrderBarrier + (warpgroup ^ 1));
    if constexpr (kMore) {
      wgmma_wait<1>();
      pin(t.scores);
    } else {
      wgmma_wait<0>();
    }
    pin(dk);
    pin(t.ds_packed);
    release(number, true);
    if constexpr (kMore) {
      finish_scores(t);
      wgmma_wait<0>();
      pin(t.dp);
      differentiate(t);
      pack_operands(t);
    }
  }

  // The same for one of the gradients. Up to a head dim of 192 there are registers enough to start the next scores
  // before it.
  template <bool kMore>
  __device__ __forceinline__ void one_step(Step& t, uint32_t k, int first_key) {
    constexpr bool kLast = DQK <= 192;      // the gradient is the last of the products
    const uint32_t number = uniform(tile);  // ptxas loses that it is
    tile = number + 1;
    auto start = [&] {
      if constexpr (kDk)
        start_gradient<DQK>(dk, t.ds_packed, q_rows(number));
      else
        start_gradient<DV>(dv, t.p_packed, dout_rows(number));
    };
    auto finish = [&] {
      wgmma_wait<0>();
      if constexpr (kDk) {
        pin(dk);
        pin(t.ds_packed);
      } else {
        pin(dv);
        pin(t.p_packed);
      }
    };
    if constexpr (!kLast) {
      start();
      finish();
      release(number, !kDk);
    }
    if constexpr (kMore) {
      start_s(t, k);
      start_dp(t, k);
    }
    if constexpr (kLast) start();
    if constexpr (kMore) {
      read_masks(t, first_key);
      wgmma_wait<int(kDk) + int(kLast)>();
      pin(t.scores);
      if constexpr (kLast && kSoftcap && kDv) finish();  // the softcap packs P at once
      finish_scores(t);
      if constexpr (kDk) {
        wgmma_wait<int(kLast)>();
        pin(t.dp);
        if (leader) barrier_arrive(shared_address(&s.dout_empty[tile % NO]));
        differentiate(t);
      }
    }
    if constexpr (kLast) {
      finish();
      release(number, !kDk);
    }
    if constexpr (kMore) pack_operands(t);
  }

  template <bool kMore>
  __device__ __forceinline__ void step(Step& t, uint32_t k, int first_key) {
    if constexpr (kBoth)
      both_step<kMore>(t, k, first_key);
    else
      one_step<kMore>(t, k, first_key);
  }

  __device__ __forceinline__ void run_tiles(int n, uint32_t it, int first_key) {
    const int k_stage = it % NK;
    const uint32_t k = uniform(shared_address(s.k[k_stage]) + warpgroup * 64 * 128);
    Step t;
    start_s(t, k);
    start_dp(t, k);
    read_masks(t, first_key);
    release_stored(it - 1);
    wgmma_wait<kDk ? 1 : 0>();
    pin(t.scores);
    finish_scores(t);
    if constexpr (kDk) {
      wgmma_wait<0>();
      pin(t.dp);
      if constexpr (!kBoth)
        if (leader) barrier_arrive(shared_address(&s.dout_empty[tile % NO]));
      differentiate(t);
    }
    pack_operands(t);
#pragma unroll 1
    for (; n > 1; --n) step<true>(t, k, first_key);
    step<false>(t, k, first_key);
  }

  // Gives the stage of K and V of item `number` back once its stores have read it.
  __device__ __forceinline__ void release_stored(uint32_t number) {
    if (storing && warp == 0 && elect_one()) {
      tma_store_wait_read();
      barrier_arrive(shared_address(&s.k_empty[number % NK]));
    }
    storing = false;
  }

  // Writes float32 rows [..., num_heads_kv, dim] from registers, the item's first key to row `first`.
  template <int kDim>
  __device__ __forceinline__ void store_rows(float* to, const float (&x)[kDim / 2], float factor, int64_t first,
                                             int n_rows, int kv_head, int dim) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = row + 8 * r;
      if (key >= n_rows) continue;
      float* at = to + ((first + key) * p.num_heads_kv + kv_head) * dim + lane_column;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j)
        if (8 * j + lane_column < dim)
          *reinterpret_cast<float2*>(at + 8 * j) =
              make_float2(x[4 * j + 2 * r] * factor, x[4 * j + 2 * r + 1] * factor);
    }
  }
  // Puts this warp's 16 rows where its keys were.
  template <int kDim>
  __device__ __forceinline__ void stage_rows(uint32_t to, const float (&x)[kDim / 2], float factor) {
    const int r = warp * 16 + (threadIdx.x & 15), half = threadIdx.x >> 4 & 1;
    auto packed = [&](int i) { return pack<kBFloat16>(x[i] * factor, x[i + 1] * factor); };
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j)
      store_matrices(to + (j / 4) * BK * 128 + swizzled(r * 128 + ((j % 4) * 2 + half) * 16), packed(8 * j),
                     packed(8 * j + 2), packed(8 * j + 4), packed(8 * j + 6));
  }

  __device__ __forceinline__ void store(uint32_t it) {
    const int k_stage = it % NK, slot = it % kItemSlots, kv_head = s.plan.group[slot];
    const TileItem& item = s.plan.item[slot];
    const bool empty = item.n_tiles == 0;
    if (item.slot >= 0 || p.dk_float32) {
      const bool part = item.slot >= 0;
      const int64_t first = part ? int64_t(item.slot) * BK : item.row0;
      if constexpr (kDk)
        store_rows<DQK>(part ? p.dk_parts : p.dk_float32, dk, p.scale, first, item.n_rows, kv_head, p.head_dim);
      if constexpr (kDv)
        store_rows<DV>(part ? p.dv_parts : p.dv_float32, dv, 1.f, first, item.n_rows, kv_head, p.head_dim_v);
      named_barrier_sync<128>(kStoreBarrier + warpgroup);
      if (leader) barrier_arrive(shared_address(&s.k_empty[k_stage]));
      return;
    }
    // A warpgroup reads its own keys alone, and has finished all its products.
    const uint32_t k = uniform(shared_address(s.k[k_stage]) + warpgroup * 64 * 128);
    const uint32_t v = kDk ? uniform(shared_address(s.v[k_stage]) + warpgroup * 64 * 128) : k;
    const int key = item.row0 + warpgroup * 64;
    if constexpr (kDk) stage_rows<DQK>(k, dk, p.scale);
    if constexpr (kDv) stage_rows<DV>(v, dv, 1.f);
    fence_shared_for_async();
    named_barrier_sync<128>(kStoreBarrier + warpgroup);
    if (warp == 0 && elect_one()) {
      if constexpr (kDk) {
#pragma unroll
        for (int d = 0; d < DQK / 64; ++d) tma_store(&p.dk, k + d * BK * 128, d * 64, kv_head, key);
      }
      if constexpr (kDv) {
#pragma unroll
        for (int d = 0; d < DV / 64; ++d) tma_store(&p.dv, v + d * BK * 128, d * 64, kv_head, key);
      }
      tma_store_commit();
    }
    storing = true;
    if (NK == 1 || empty) release_stored(it);
  }

  __device__ __forceinline__ void run() {
    if (kBoth && warpgroup == 0) named_barrier_arrive<256>(kOrderBarrier);  // this one goes first
    for (uint32_t it = 0;; ++it) {
      const int slot = it % kItemSlots;
      barrier_wait(shared_address(&s.k_full[it % NK]), (it / NK) & 1);
      const int n = s.plan.item[slot].n_tiles, first_key = s.plan.item[slot].row0;
      if (n < 0) break;
#pragma unroll
      for (float& x : dk) x = 0.f;
#pragma unroll
      for (float& x : dv) x = 0.f;
      if (n > 0)
        run_tiles(n, it, first_key);
      else
        release_stored(it - 1);
      store(it);
    }
    if (warp == 0 && elect_one()) tma_store_wait();
  }
};

// --- kernel -------------------------------------------------------------------------------------------------

template <class Shape, bool kBFloat16, bool kSoftcap>
__global__ void __launch_bounds__(384, 1) flex_attn_bwd_dkdv(const __grid_constant__ DkDvParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  using S = DkDvShared<Shape>;
  S& s = *reinterpret_cast<S*>(raw);
  const int warp = uniform(threadIdx.x / 32);
  if (warp == 0 && elect_one()) {
    if (shared_address(raw) & 1023) __trap();  // the swizzle needs it
    auto init = [](uint64_t* barriers, int n, int arrivals) {
      for (int i = 0; i < n; ++i) barrier_init(shared_address(barriers + i), arrivals);
    };
    init(s.k_full, Shape::NK, 1), init(s.k_empty, Shape::NK, 2);
    init(s.q_full, Shape::NQ, 1), init(s.q_empty, Shape::NQ, 8);
    init(s.dout_full, Shape::NO, 1), init(s.dout_empty, Shape::NO, 2);
    s.plan.init();
    fence_barrier_init();
    tma_prefetch(&p.q), tma_prefetch(&p.dout), tma_prefetch(&p.k), tma_prefetch(&p.v);
  }
  __syncthreads();
  if (warp < 4) {
    give_registers<Shape::kProducerRegisters>();
    if (warp == 0) {  // else if: nothing is kept for after the loader
      if (elect_one()) load_dkdv_tiles<Shape>(p, s);
    } else if (warp == 1) {
      if (elect_one()) walk_plan(p.walk, s.plan, BQ);
    }
  } else {
    take_registers<Shape::kConsumerRegisters>();
    DkDvConsumer<Shape, kBFloat16, kSoftcap>(p, s).run();
  }
}

template <class Shape, bool kBFloat16, bool kSoftcap>
cudaError_t launch_dkdv_of(const DkDvParams& p, int blocks, cudaStream_t stream) {
  auto* kernel = flex_attn_bwd_dkdv<Shape, kBFloat16, kSoftcap>;
  constexpr int bytes = sizeof(DkDvShared<Shape>);
  static_assert(bytes <= 227 * 1024, "more shared memory than a block may have");
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, 384, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class Shape, bool kSoftcap>
cudaError_t launch_dkdv(const DkDvParams& p, bool bfloat16, int blocks, cudaStream_t stream) {
  if (bfloat16) return launch_dkdv_of<Shape, true, kSoftcap>(p, blocks, stream);
  return launch_dkdv_of<Shape, false, kSoftcap>(p, blocks, stream);
}

template <class Shape, bool kSoftcap>
constexpr DkDvInstance dkdv_instance() {
  return {Shape::DQK, Shape::DV, Shape::DK_, Shape::DV_, kSoftcap, launch_dkdv<Shape, kSoftcap>};
}

}  // namespace magi::cuda::sm90
