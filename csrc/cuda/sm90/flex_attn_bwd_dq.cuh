// Attention backward for sm_90a, dQ alone, over the tile plan of the forward. One block per SM:
//
//   warp 0, one thread   loader: TMA loads of Q, dO, K and V tiles
//   warp 1, one thread   walker: reads the plan some tiles ahead
//   warps 4 to 11        two consumer warpgroups, 64 rows of the query tile each, which never wait for each other
//
// A consumer starts S = Q K^T and dP = dO V^T of a tile together with dQ += dS K of the tile before, and computes
// dS = P (dP - delta) while the tensor cores go on. So K stays for two tiles: with two stages of it this took 32
// cycles a key at head_dim 128 on an H200, with three 25 (the products alone 24).
#pragma once
#include "../common/row_mask.cuh"
#include "../common/softcap.cuh"
#include "../ptx/hopper.cuh"
#include "flex_attn_bwd_dq.h"
#include "plan_walk.cuh"

namespace magi::cuda::sm90::dq {

// What an instance is made for: head dims, keys in a tile, stages of Q and dO, of K, of V.
template <int kHeadDim, int kHeadDimV, int kTileCols, int kStagesOfQ, int kStagesOfK, int kStagesOfV>
struct Shape {
  static constexpr int DQK = kHeadDim, DV = kHeadDimV, BN = kTileCols;
  static constexpr int NQ = kStagesOfQ, NK = kStagesOfK, NV = kStagesOfV;
  // Where dQ is staged for its store. The other of the two is free for the next item before the last dQ product.
  static constexpr bool kStageInDout = DV >= DQK;
  static_assert(NK >= 2 && NK < kTileSlots && NQ < kItemSlots, "the walker must get ahead");
};

constexpr int kRows = kDqRows, kWarpgroups = 2, kThreads = 128 * (kWarpgroups + 1);
// Registers of a thread: the pool is what the launch gave to all.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Together, so that an address in dO is one in Q plus a constant.
template <class Shape>
struct QueryTile {
  alignas(1024) uint8_t q[kRows * Shape::DQK * 2];
  alignas(1024) uint8_t dout[kRows * Shape::DV * 2];
};

template <class Shape>
struct Shared {
  static constexpr int DQK = Shape::DQK, DV = Shape::DV, BN = Shape::BN, NQ = Shape::NQ, NK = Shape::NK, NV = Shape::NV;
  QueryTile<Shape> queries[NQ];
  alignas(1024) uint8_t k[NK][BN * DQK * 2];
  alignas(1024) uint8_t v[NV][BN * DV * 2];
  alignas(8) uint64_t q_full[NQ], q_empty[NQ], dout_full[NQ], dout_empty[NQ];
  alignas(8) uint64_t k_full[NK], k_empty[NK], v_full[NV], v_empty[NV];
  PlanRings plan;
};

// The parity of the phase in which a ring of n stages is used for the i-th time.
MAGI_DEVICE uint32_t phase_of(uint32_t i, int n) { return (i / n) & 1; }

// --- loader ---------------------------------------------------------------------------------------------------

// Issues all loads, in the order K0 V0 Q dO K1 V1 ...: the first keys of an item need not wait for its stage of Q.
template <class Shape>
MAGI_DEVICE void load_tiles(const DqParams& p, Shared<Shape>& s) {
  constexpr int DQK = Shape::DQK, DV = Shape::DV, BN = Shape::BN, NQ = Shape::NQ, NK = Shape::NK, NV = Shape::NV;
  uint32_t tile = 0;  // runs on over all items, as the phases of the barriers do
  for (uint32_t it = 0;; ++it) {
    const int q_stage = it % NQ, slot = it % kItemSlots;
    const uint32_t q_full = shared_address(&s.q_full[q_stage]), dout_full = shared_address(&s.dout_full[q_stage]);
    barrier_wait(shared_address(&s.plan.item_full[slot]), phase_of(it, kItemSlots));
    const int n = s.plan.item[slot].n_tiles, token = s.plan.item[slot].row0, group = s.plan.group[slot];
    const int head = group << p.heads_shift;
    auto wait_for_q = [&] { barrier_wait(shared_address(&s.q_empty[q_stage]), phase_of(it, NQ) ^ 1); };
    auto wait_for_dout = [&] { barrier_wait(shared_address(&s.dout_empty[q_stage]), phase_of(it, NQ) ^ 1); };
    auto load_q = [&] {
      wait_for_q();
      barrier_expect(q_full, kRows * DQK * 2);
#pragma unroll
      for (int d = 0; d < DQK / 64; ++d)
        tma_load(shared_address(s.queries[q_stage].q) + d * kRows * 128, &p.q, q_full, d * 64, head, token,
                 kEvictFirst);
    };
    auto load_dout = [&] {
      wait_for_dout();
      barrier_expect(dout_full, kRows * DV * 2);
#pragma unroll
      for (int d = 0; d < DV / 64; ++d)
        tma_load(shared_address(s.queries[q_stage].dout) + d * kRows * 128, &p.dout, dout_full, d * 64, head, token,
                 kEvictFirst);
    };
    // Where both are free, the consumers are done with item it - NQ, and with its slot.
    auto release_slot = [&] {
      if (it >= NQ) barrier_arrive(shared_address(&s.plan.item_empty[(it - NQ) % kItemSlots]));
    };
    if (n <= 0) {
      wait_for_q();
      wait_for_dout();
      release_slot();
      barrier_arrive(dout_full);
      barrier_arrive(q_full);
      if (n < 0) return;
      continue;
    }
    const int kv_head = group / p.groups_per_kv;
    for (int t = 0; t < n; ++t, ++tile) {
      const int k_stage = tile % NK, v_stage = tile % NV;
      const uint32_t k_full = shared_address(&s.k_full[k_stage]), v_full = shared_address(&s.v_full[v_stage]);
      barrier_wait(shared_address(&s.plan.tile_full[tile % kTileSlots]), phase_of(tile, kTileSlots));
      const int key = s.plan.tile[tile % kTileSlots].col_start;
      barrier_wait(shared_address(&s.k_empty[k_stage]), phase_of(tile, NK) ^ 1);
      // The dQ product of tile - NK is done: before they issued it, all warps had read the descriptor.
      if (tile >= NK) barrier_arrive(shared_address(&s.plan.tile_empty[(tile - NK) % kTileSlots]));
      barrier_expect(k_full, BN * DQK * 2);
#pragma unroll
      for (int d = 0; d < DQK / 64; ++d)
        tma_load(shared_address(s.k[k_stage]) + d * BN * 128, &p.k, k_full, d * 64, kv_head, key, kEvictLast);
      barrier_wait(shared_address(&s.v_empty[v_stage]), phase_of(tile, NV) ^ 1);
      barrier_expect(v_full, BN * DV * 2);
#pragma unroll
      for (int d = 0; d < DV / 64; ++d)
        tma_load(shared_address(s.v[v_stage]) + d * BN * 128, &p.v, v_full, d * 64, kv_head, key, kEvictLast);
      if (t > 0) continue;
      if constexpr (Shape::kStageInDout) {
        load_q();
        load_dout();
      } else {
        load_dout();
        load_q();
      }
      release_slot();
    }
  }
}

// --- consumers ------------------------------------------------------------------------------------------------

// An item as the consumers see it.
struct Work {
  uint32_t number;  // of this block's items
  int n_tiles, first_token;
  uint32_t q;  // this warpgroup's rows of Q in shared memory
  // Read again at the end, to save registers.
  int n_tokens, group, row;
};

template <class Shape, bool kBFloat16, bool kSoftcap>
struct Consumer {
  static constexpr int DQK = Shape::DQK, DV = Shape::DV, BN = Shape::BN, NQ = Shape::NQ, NK = Shape::NK, NV = Shape::NV;
  using S = Shared<Shape>;
  using Scores = Wgmma<BN, kBFloat16, 0>;
  using Output = Wgmma<DQK, kBFloat16, 1>;
  using Masks = RowMask<BN>[2];
  static constexpr uint32_t kToDout = offsetof(QueryTile<Shape>, dout);  // from a row of Q to that of dO
  static constexpr uint32_t kToStaged = Shape::kStageInDout ? kToDout : 0;

  const DqParams& p;
  S& s;
  const int warp, warpgroup;  // warp: of the warpgroup
  const int row;              // the first of this thread's rows in the tile; the second is row + 8
  const int lane_column;
  const bool leader;
  uint32_t tile = 0;     // counts the tiles of all items
  bool storing = false;  // a TMA store may still be reading what the item before has staged
  float lse_log2[2], delta[2];
  float dq[DQK / 2];
  uint32_t ds[BN / 4];  // dS as an A operand: an accumulator becomes one without any shuffle

  __device__ __forceinline__ Consumer(const DqParams& p, S& s)
      : p(p),
        s(s),
        warp(uniform(threadIdx.x / 32) & 3),
        warpgroup(uniform(threadIdx.x / 128) - 1),
        row(warpgroup * 64 + first_row(warp, threadIdx.x % 32)),
        lane_column(first_column(threadIdx.x)),
        leader(threadIdx.x % 128 == 0) {}

  // Of row r of this thread's two: which of the item's tokens, and which head.
  __device__ __forceinline__ int token_of(const Work& w, int r) const { return (w.row + 8 * r) >> p.heads_shift; }
  __device__ __forceinline__ int head_of(const Work& w, int r) const {
    return (w.group << p.heads_shift) + ((w.row + 8 * r) & ((1 << p.heads_shift) - 1));
  }

  // S = Q K^T, respectively dP = dO V^T.
  template <int kDim>
  __device__ __forceinline__ void start_scores(float (&x)[BN / 2], uint32_t rows, uint32_t keys) {
    constexpr uint64_t layout = matrix_layout(16);
    pin(x);
    wgmma_fence();
    const uint64_t a = matrix(rows, layout), b = matrix(keys, layout);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      Scores::ss(x, a + k_contiguous_step(i, kRows), b + k_contiguous_step(i, BN), i != 0);
    wgmma_commit();
  }
  // dq and ds must not be touched until it has been waited for.
  __device__ __forceinline__ void start_output(uint32_t keys) {
    constexpr uint64_t layout = matrix_layout(BN * 128);
    pin(ds);
    pin(dq);
    wgmma_fence();
    const uint64_t b = matrix(keys, layout);
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) Output::rs(dq, ds + 4 * i, b + n_contiguous_step(i), 1);
    wgmma_commit();
  }
  __device__ __forceinline__ void finish_output(int k_stage) {
    wgmma_wait<0>();
    pin(dq);
    pin(ds);
    // A wgmma is done for the whole warpgroup at once, so one thread may release its operands.
    if (leader) barrier_arrive(shared_address(&s.k_empty[k_stage]));
  }

  // Returns the number of bands: 0 for a tile without hidden pairs, whose masks are not to be used.
  __device__ __forceinline__ int read_masks(Masks& masks, const Work& w) {
    const TileDescriptor& d = s.plan.tile[tile % kTileSlots];
    const int n = d.n_band;
    if (n) {
      const int col_start = d.col_start, begin = d.band_begin;
      TileBand band = d.first;
      for (int i = 0;;) {
        masks[0].add(band, w.first_token + ((row + 8 * 0) >> p.heads_shift), col_start, lane_column);
        masks[1].add(band, w.first_token + ((row + 8 * 1) >> p.heads_shift), col_start, lane_column);
        if (++i >= n) break;
        band = p.walk.bands[begin + i];
      }
    }
    return n;
  }

  // Products become P; with a softcap P times its derivative. Of hidden pairs this may be infinite.
  __device__ __forceinline__ void exponentiate(float (&x)[BN / 2]) {
    if constexpr (kSoftcap) {
      const Softcap& c = p.softcap;
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) most = fmaxf(most, fabsf(x[i]));
      if (!__any_sync(~0u, most * most > c.small_square))
        weigh(x, [&](float y) { return y * softcap_slope(c, y * y); });
      else
        weigh(x, [&](float y) { return softcap_of(c, y); });
    } else {
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) x[i] = exp2_approx(fmaf(x[i], p.scale_log2, -lse_log2[(i >> 1) & 1]));
    }
  }
  template <class Score>
  __device__ __forceinline__ void weigh(float (&x)[BN / 2], Score score_of) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      const float score = score_of(x[i]);
      x[i] = exp2_approx(score - lse_log2[(i >> 1) & 1]) * softcap_derivative(p.softcap, score);
    }
  }

  __device__ __forceinline__ void hide(float (&weights)[BN / 2], const Masks& masks) {
#pragma unroll
    for (int i = 0; i < BN / 4; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = accumulator_index(i, r);
        weights[at] = masks[r].shows(i) ? weights[at] : 0.f;
      }
  }

  __device__ __forceinline__ Work next_work(uint32_t it) {
    Work w;
    w.number = it;
    barrier_wait(shared_address(&s.q_full[it % NQ]), phase_of(it, NQ));
    w.first_token = s.plan.item[it % kItemSlots].row0;
    w.q = uniform(shared_address(s.queries[it % NQ].q) + warpgroup * 64 * 128);
    read_rest(w);
    return w;
  }
  // Also before what was staged is given back: the item's slot goes with it.
  __device__ __forceinline__ void read_rest(Work& w) {
    const int slot = w.number % kItemSlots;
    w.n_tiles = s.plan.item[slot].n_tiles;
    w.n_tokens = s.plan.item[slot].n_rows;
    w.group = s.plan.group[slot];
    w.row = opaque(row);
  }

  // P = 0 and dS = 0 in rows past the item's last.
  __device__ __forceinline__ void load_rows(const Work& w) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool inside = token_of(w, r) < w.n_tokens;
      const int64_t at = head_of(w, r) * p.padded_rows + w.first_token + token_of(w, r);
      lse_log2[r] = inside ? p.lse_log2[at] : kInfinity;
      delta[r] = inside ? p.delta[at] : 0.f;
    }
  }

  // The barriers of what an item's dQ is staged in, and of the other one of Q and dO.
  __device__ __forceinline__ uint32_t staged_empty(uint32_t it) const {
    return shared_address(&(Shape::kStageInDout ? s.dout_empty : s.q_empty)[it % NQ]);
  }
  __device__ __forceinline__ uint32_t other_empty(uint32_t it) const {
    return shared_address(&(Shape::kStageInDout ? s.q_empty : s.dout_empty)[it % NQ]);
  }

  // Gives back what item `number` has staged once its store has read it. Put off until other work is under way: the
  // wait stalls a whole warp.
  __device__ __forceinline__ void release_stored(uint32_t number) {
    if (storing && warp == 0 && elect_one()) {
      tma_store_wait_read();
      barrier_arrive(staged_empty(number));
    }
    storing = false;
  }

  // dS of a tile; beside that the dQ product of the tile before, if there is one.
  template <bool kFirst>
  __device__ __forceinline__ void do_tile(const Work& w) {
    constexpr int kBefore = kFirst ? 0 : 1;  // products that may go on when this tile's are waited for
    float weights[BN / 2], grads[BN / 2];
    Masks masks;
    const int k_stage = uniform(tile % NK), v_stage = uniform(tile % NV);
    const int k_before = k_stage ? k_stage - 1 : NK - 1;
    const uint32_t q = uniform(opaque(w.q));  // anew: the descriptors of a whole loop are more than uniform registers
    barrier_wait(shared_address(&s.k_full[k_stage]), phase_of(tile, NK));
    start_scores<DQK>(weights, q, shared_address(s.k[k_stage]));
    if constexpr (kFirst) barrier_wait(shared_address(&s.dout_full[w.number % NQ]), phase_of(w.number, NQ));
    barrier_wait(shared_address(&s.v_full[v_stage]), phase_of(tile, NV));
    start_scores<DV>(grads, q + kToDout, shared_address(s.v[v_stage]));
    if constexpr (!kFirst) start_output(shared_address(s.k[k_before]));
    const int n_band = read_masks(masks, w);
    ++tile;
    if constexpr (kFirst) release_stored(w.number - 1);
    wgmma_wait<1 + kBefore>();
    pin(weights);
    exponentiate(weights);
    // After the exponentials: as a block of its own this also keeps ptxas from moving the next wait before them.
    if (n_band) hide(weights, masks);
    wgmma_wait<kBefore>();
    pin(grads);
    if (leader) barrier_arrive(shared_address(&s.v_empty[v_stage]));
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) grads[i] = weights[i] * (grads[i] - delta[(i >> 1) & 1]);
    if constexpr (!kFirst) finish_output(k_before);
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) ds[i] = pack<kBFloat16>(grads[2 * i], grads[2 * i + 1]);
  }

  __device__ __forceinline__ void last_output() {
    const int k_stage = uniform((tile - 1) % NK);
    start_output(shared_address(s.k[k_stage]));
    finish_output(k_stage);
  }

  // The place of row r of this thread in [rows, num_heads_q, head_dim], from its first column.
  __device__ __forceinline__ int64_t place_of(const Work& w, int r) const {
    const int64_t row = int64_t(w.first_token + token_of(w, r)) * p.num_heads_q + head_of(w, r);
    return row * p.head_dim + lane_column;
  }

  // dq becomes the result.
  __device__ __forceinline__ void scale_rows(const Work& w) {
#pragma unroll
    for (int i = 0; i < DQK / 2; ++i) dq[i] *= p.scale;
    if (!p.before) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (token_of(w, r) >= w.n_tokens) continue;
      const float* before = p.before + place_of(w, r);
#pragma unroll
      for (int j = 0; j < DQK / 8; ++j) {
        if (8 * j + lane_column >= p.head_dim) continue;
        const float2 x = *reinterpret_cast<const float2*>(before + 8 * j);
        dq[4 * j + 2 * r] += x.x;
        dq[4 * j + 2 * r + 1] += x.y;
      }
    }
  }

  // Writes the rows from registers: for float32 results, and tiles of which only some tokens exist.
  __device__ __forceinline__ void store_rows(const Work& w) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (token_of(w, r) >= w.n_tokens) continue;
      const int64_t at = place_of(w, r);
#pragma unroll
      for (int j = 0; j < DQK / 8; ++j) {
        if (8 * j + lane_column >= p.head_dim) continue;
        const float a = dq[4 * j + 2 * r], b = dq[4 * j + 2 * r + 1];
        if (p.dq_float32)
          *reinterpret_cast<float2*>(static_cast<float*>(p.dq) + at + 8 * j) = make_float2(a, b);
        else
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.dq) + at + 8 * j) = pack<kBFloat16>(a, b);
      }
    }
  }

  // Puts the rows where this warpgroup's half of dO or Q was, which nobody reads any more: each warp its 16 rows.
  __device__ __forceinline__ void stage_rows(uint32_t to) {
    const int r = warp * 16 + (threadIdx.x & 15), half = threadIdx.x >> 4 & 1;
#pragma unroll
    for (int j = 0; j < DQK / 16; ++j)
      store_matrices(to + (j / 4) * kRows * 128 + swizzled(r * 128 + ((j % 4) * 2 + half) * 16),
                     pack<kBFloat16>(dq[8 * j], dq[8 * j + 1]), pack<kBFloat16>(dq[8 * j + 2], dq[8 * j + 3]),
                     pack<kBFloat16>(dq[8 * j + 4], dq[8 * j + 5]), pack<kBFloat16>(dq[8 * j + 6], dq[8 * j + 7]));
  }

  __device__ __forceinline__ void store(const Work& w) {
    const int barrier = 1 + warpgroup;
    if (p.dq_float32 || (w.n_tokens << p.heads_shift) < kRows) {
      store_rows(w);
      named_barrier_sync<128>(barrier);
      if (leader) barrier_arrive(staged_empty(w.number));
      return;
    }
    stage_rows(w.q + kToStaged);
    fence_shared_for_async();
    named_barrier_sync<128>(barrier);
    if (warp == 0 && elect_one()) {
#pragma unroll
      for (int d = 0; d < DQK / 64; ++d)
        tma_store(&p.dq_tile, w.q + kToStaged + d * kRows * 128, d * 64, w.group << p.heads_shift,
                  w.first_token + ((warpgroup * 64) >> p.heads_shift));
      tma_store_commit();
    }
    storing = true;
    if (NQ == 1 || w.n_tiles == 0) release_stored(w.number);
  }

  __device__ __forceinline__ void run() {
    for (uint32_t it = 0;; ++it) {
      Work w = next_work(it);
      if (w.n_tiles < 0) break;
      load_rows(w);
#pragma unroll
      for (int i = 0; i < DQK / 2; ++i) dq[i] = 0.f;
      if (w.n_tiles > 0) {
        do_tile<true>(w);
#pragma unroll 1
        for (int left = w.n_tiles; left > 1; --left) do_tile<false>(w);
        if (leader) barrier_arrive(other_empty(it));  // its S and dP are done
        last_output();
      } else {
        release_stored(w.number - 1);
        if (leader) barrier_arrive(other_empty(it));
      }
      read_rest(w);
      scale_rows(w);
      store(w);
    }
    if (warp == 0 && elect_one()) tma_store_wait();
  }
};

// --- kernel ---------------------------------------------------------------------------------------------------

template <class Shape, bool kBFloat16, bool kSoftcap>
__global__ void __launch_bounds__(kThreads, 1) flex_attn_bwd_dq(const __grid_constant__ DqParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  constexpr int NQ = Shape::NQ, NK = Shape::NK, NV = Shape::NV;
  using S = Shared<Shape>;
  S& s = *reinterpret_cast<S*>(raw);
  const int warp = uniform(threadIdx.x / 32);
  if (warp == 0 && elect_one()) {
    if (shared_address(raw) & 1023) __trap();  // the swizzle needs it
    auto init = [](uint64_t* barriers, int n, int arrivals) {
      for (int i = 0; i < n; ++i) barrier_init(shared_address(barriers + i), arrivals);
    };
    init(s.q_full, NQ, 1), init(s.q_empty, NQ, kWarpgroups);
    init(s.dout_full, NQ, 1), init(s.dout_empty, NQ, kWarpgroups);
    init(s.k_full, NK, 1), init(s.k_empty, NK, kWarpgroups);
    init(s.v_full, NV, 1), init(s.v_empty, NV, kWarpgroups);
    s.plan.init();
    fence_barrier_init();
    tma_prefetch(&p.q), tma_prefetch(&p.dout), tma_prefetch(&p.k), tma_prefetch(&p.v);
    if (!p.dq_float32) tma_prefetch(&p.dq_tile);
  }
  __syncthreads();
  if (warp < 4) {
    give_registers<kProducerRegisters>();
    if (warp == 0 && elect_one()) load_tiles<Shape>(p, s);
    if (warp == 1 && elect_one()) walk_plan(p.walk, s.plan, Shape::BN);
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<Shape, kBFloat16, kSoftcap>(p, s).run();
  }
}

template <class Shape, bool kBFloat16, bool kSoftcap>
cudaError_t launch_instance(const DqParams& p, int blocks, cudaStream_t stream) {
  auto* kernel = flex_attn_bwd_dq<Shape, kBFloat16, kSoftcap>;
  constexpr int bytes = sizeof(Shared<Shape>);
  static_assert(bytes <= 227 * 1024, "more shared memory than a block may have");
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class Shape, bool kSoftcap>
cudaError_t launch(const DqParams& p, bool bfloat16, int blocks, cudaStream_t stream) {
  if (bfloat16) return launch_instance<Shape, true, kSoftcap>(p, blocks, stream);
  return launch_instance<Shape, false, kSoftcap>(p, blocks, stream);
}

template <class Shape, bool kSoftcap>
constexpr DqInstance instance_of() {
  return {Shape::DQK, Shape::DV, Shape::BN, kSoftcap, launch<Shape, kSoftcap>};
}

}  // namespace magi::cuda::sm90::dq
