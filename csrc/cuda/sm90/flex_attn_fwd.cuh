// Attention forward for sm_90a over a tile plan. One block per SM:
//
//   warp 0, one thread   loader: TMA loads of Q, K and V tiles
//   warp 1, one thread   walker: reads the plan some tiles ahead, so that nobody waits for its chain of loads
//   warps 4 and up       two or three consumer warpgroups, 64 rows of the query tile each, which never wait for
//                        each other
//
// A consumer starts S = Q K^T of a tile together with O += P V of the tile before, and does the softmax of S
// while the tensor cores finish the latter. What was measured on an H200 and lost: an order barrier between the
// warpgroups (+0.5 of 18.3 cycles per key), waiting for P V after the exponentials (+0.6), a softmax reference
// that follows every new maximum (+1.1).
#pragma once
#include "../common/row_mask.cuh"
#include "../common/row_terms.cuh"
#include "../common/softcap.cuh"
#include "../ptx/hopper.cuh"
#include "flex_attn_fwd.h"
#include "plan_walk.cuh"

namespace magi::cuda::sm90 {

// How far, in powers of two, a score may grow past the softmax reference of its row before the sums are scaled
// anew: P is 16-bit and the sums are float32, so 2^8 costs no accuracy. After FlashAttention-4.
constexpr float kSlack = 8.f;

// What an instance is made for: head dims, keys in a tile, stages of Q, consumer warpgroups.
template <int kHeadDim, int kHeadDimV, int kTileCols, int kStagesOfQ, int kWarpgroups>
struct Shape {
  static constexpr int DQK = kHeadDim, DV = kHeadDimV, BN = kTileCols, NQ = kStagesOfQ, W = kWarpgroups;
  static constexpr int kRows = 64 * W, kThreads = 128 * (W + 1);
  // Registers of a thread: the pool is what the launch gave to all. With fewer the walker spills.
  static constexpr int kProducerRegisters = W == 2 ? 40 : 32, kConsumerRegisters = W == 2 ? 232 : 160;
};

template <class Shape>
struct Shared {
  static constexpr int DQK = Shape::DQK, DV = Shape::DV, BN = Shape::BN, NQ = Shape::NQ;
  alignas(1024) uint8_t q[NQ][Shape::kRows * DQK * 2];
  alignas(1024) uint8_t k[2][BN * DQK * 2];
  alignas(1024) uint8_t v[2][BN * DV * 2];
  alignas(8) uint64_t q_full[NQ], q_empty[NQ], k_full[2], k_empty[2], v_full[2], v_empty[2];
  PlanRings plan;
};

// --- loader ---------------------------------------------------------------------------------------------------

// Issues all loads, in the order K0 Q K1 V0 K2 V1 ...
template <class Shape>
MAGI_DEVICE void load_tiles(const ForwardParams& p, Shared<Shape>& s) {
  constexpr int DQK = Shape::DQK, DV = Shape::DV, BN = Shape::BN, NQ = Shape::NQ;
  uint32_t tile = 0;  // runs on over all items, as the phases of the barriers do
  auto load_v = [&](uint32_t t, int kv_head, int key) {
    const int stage = t & 1;
    barrier_wait(shared_address(&s.v_empty[stage]), ((t >> 1) & 1) ^ 1);
    barrier_expect(shared_address(&s.v_full[stage]), BN * DV * 2);
#pragma unroll
    for (int d = 0; d < DV / 64; ++d)
      tma_load(shared_address(s.v[stage]) + d * BN * 128, &p.v, shared_address(&s.v_full[stage]), d * 64, kv_head, key,
               kEvictLast);
  };
  for (uint32_t it = 0;; ++it) {
    const int q_stage = it % NQ, slot = it % kItemSlots;
    barrier_wait(shared_address(&s.plan.item_full[slot]), (it / kItemSlots) & 1);
    const int n = s.plan.item[slot].n_tiles, token = s.plan.item[slot].row0, group = s.plan.group[slot];
    barrier_wait(shared_address(&s.q_empty[q_stage]), ((it / NQ) & 1) ^ 1);
    // The consumers are done with item it - NQ, and with its slot.
    if (it >= NQ) barrier_arrive(shared_address(&s.plan.item_empty[(it - NQ) % kItemSlots]));
    if (n <= 0) {
      barrier_arrive(shared_address(&s.q_full[q_stage]));
      if (n < 0) return;
      continue;
    }
    const int kv_head = group / p.groups_per_kv;
    int previous = 0;
    for (int t = 0; t < n; ++t, ++tile) {
      const int stage = tile & 1;
      barrier_wait(shared_address(&s.plan.tile_full[tile % kTileSlots]), (tile / kTileSlots) & 1);
      const int key = s.plan.tile[tile % kTileSlots].col_start;
      barrier_wait(shared_address(&s.k_empty[stage]), ((tile >> 1) & 1) ^ 1);
      // Q K^T of tile - 2 is done, so all warps had issued it, and had read the descriptor of tile - 3 before.
      if (tile >= 3) barrier_arrive(shared_address(&s.plan.tile_empty[(tile - 3) % kTileSlots]));
      barrier_expect(shared_address(&s.k_full[stage]), BN * DQK * 2);
#pragma unroll
      for (int d = 0; d < DQK / 64; ++d)
        tma_load(shared_address(s.k[stage]) + d * BN * 128, &p.k, shared_address(&s.k_full[stage]), d * 64, kv_head,
                 key, kEvictLast);
      if (t == 0) {
        barrier_expect(shared_address(&s.q_full[q_stage]), Shape::kRows * DQK * 2);
#pragma unroll
        for (int d = 0; d < DQK / 64; ++d)
          tma_load(shared_address(s.q[q_stage]) + d * Shape::kRows * 128, &p.q, shared_address(&s.q_full[q_stage]),
                   d * 64, group << p.heads_shift, token, kEvictFirst);
      } else {
        load_v(tile - 1, kv_head, previous);
      }
      previous = key;
    }
    load_v(tile - 1, kv_head, previous);
  }
}

// --- consumers ----------------------------------------------------------------------------------------------

// The online softmax of a thread's two rows, in units of the products times scale_log2. Sums and maxima are of
// this thread's columns only, until the item ends.
struct RowState {
  float largest[2];            // product of q and k
  float reference[2], sum[2];  // sum of exp2(score - reference); reference -inf: nothing seen yet

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = reference[r] = -kInfinity, sum[r] = 0.f;
  }
};

// An item as the consumers see it.
struct Work {
  uint32_t number;  // of this block's items
  int n_tiles, first_token;
  uint32_t q;  // this warpgroup's rows of Q in shared memory
  // Only known at the end, to save registers.
  int n_tokens, group, slot, row;
};

template <class Shape, bool kBFloat16, bool kSoftcap>
struct Consumer {
  static constexpr int DQK = Shape::DQK, DV = Shape::DV, BN = Shape::BN, NQ = Shape::NQ, kTileRows = Shape::kRows;
  using S = Shared<Shape>;
  using QK = Wgmma<BN, kBFloat16, 0>;
  using PV = Wgmma<DV, kBFloat16, 1>;
  using Masks = RowMask<BN>[2];

  const ForwardParams& p;
  S& s;
  const int warp, warpgroup;  // warp: of the warpgroup
  const int row;              // the first of this thread's rows in the tile; the second is row + 8
  const int lane_column;
  const bool leader;
  uint32_t tile = 0;     // counts the tiles of all items
  bool storing = false;  // a TMA store may still be reading the stage of Q of the item before
  float o[DV / 2];
  uint32_t weights[BN / 4];  // P as an A operand: an accumulator becomes one without any shuffle
  RowState rows;
  bool small;  // no product of the tile leaves the softcap's polynomial

  __device__ __forceinline__ Consumer(const ForwardParams& p, S& s)
      : p(p),
        s(s),
        warp(uniform(threadIdx.x / 32) & 3),
        warpgroup(uniform(threadIdx.x / 128) - 1),
        row(warpgroup * 64 + first_row(threadIdx.x / 32 & 3, threadIdx.x % 32)),  // not of `warp`, which would stay
        lane_column(first_column(threadIdx.x)),
        leader(threadIdx.x % 128 == 0) {}

  // Of row r of this thread's two: which of the item's tokens, and which head.
  __device__ __forceinline__ int token_of(const Work& w, int r) const { return (w.row + 8 * r) >> p.heads_shift; }
  __device__ __forceinline__ int head_of(const Work& w, int r) const {
    return (w.group << p.heads_shift) + ((w.row + 8 * r) & ((1 << p.heads_shift) - 1));
  }

  __device__ __forceinline__ void start_scores(float (&scores)[BN / 2], uint32_t q, uint32_t k) {
    constexpr uint64_t layout = matrix_layout(16);
    pin(scores);
    wgmma_fence();
    const uint64_t a = matrix(q, layout), b = matrix(k, layout);
#pragma unroll
    for (int i = 0; i < DQK / 16; ++i)
      QK::ss(scores, a + k_contiguous_step(i, kTileRows), b + k_contiguous_step(i, BN), i != 0);
    wgmma_commit();
  }
  // o and weights must not be touched until it has been waited for.
  __device__ __forceinline__ void start_output(uint32_t v) {
    constexpr uint64_t layout = matrix_layout(BN * 128);
    pin(weights);
    pin(o);
    wgmma_fence();
    const uint64_t b = matrix(v, layout);
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) PV::rs(o, weights + 4 * i, b + n_contiguous_step(i), 1);
    wgmma_commit();
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

  __device__ __forceinline__ void hide(float (&x)[BN / 2], const Masks& masks) {
#pragma unroll
    for (int i = 0; i < BN / 4; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = accumulator_index(i, r);
        x[at] = masks[r].shows(i) ? x[at] : -kInfinity;
      }
  }

  // The score of a product, in powers of two. Rising, so the largest product has the largest score.
  __device__ __forceinline__ float score_of(float product) const {
    if constexpr (kSoftcap)
      return product == -kInfinity ? product : softcap_of(p.softcap, product);
    else
      return product * p.scale_log2;
  }

  // Masks a tile and brings the references up to date. True, for the whole warp, if they have changed: then o
  // must be scaled by `factor`.
  __device__ __forceinline__ bool update_reference(float (&x)[BN / 2], int n_band, const Masks& masks,
                                                   float (&factor)[2]) {
    if constexpr (kSoftcap) {
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) most = fmaxf(most, fabsf(x[i]));
      small = !__any_sync(~0u, most * most > p.softcap.small_square);
    }
    if (n_band) hide(x, masks);
    bool grew = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = rows.largest[r];
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) most = fmaxf(most, fmaxf(x[4 * j + 2 * r], x[4 * j + 2 * r + 1]));
      rows.largest[r] = most;
      grew |= score_of(most) > rows.reference[r] + kSlack;
    }
    if (!__any_sync(~0u, grew)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = rows.largest[r];
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float reference = score_of(most);
      factor[r] = exp2_approx(rows.reference[r] - (reference == -kInfinity ? 0.f : reference));
      rows.reference[r] = reference;
      rows.sum[r] *= factor[r];
    }
    return true;
  }

  __device__ __forceinline__ void exponentiate(const float (&x)[BN / 2]) {
    if constexpr (kSoftcap) {
      const Softcap& c = p.softcap;
      if (small)  // the slope is positive: a hidden -inf stays what it is
        sum_weights(x, [&](float y, float reference) {
          return exp2_approx(fmaf(y, softcap_slope(c, fminf(y * y, c.small_square)), -reference));
        });
      else
        sum_weights(x, [&](float y, float reference) {
          return select(y == -kInfinity, 0.f, exp2_approx(softcap_of(c, y) - reference));
        });
    } else {
      sum_weights(x, [&](float y, float reference) { return exp2_approx(fmaf(y, p.scale_log2, -reference)); });
    }
  }
  template <class Weight>
  __device__ __forceinline__ void sum_weights(const float (&x)[BN / 2], Weight weight) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float reference = rows.reference[r] == -kInfinity ? 0.f : rows.reference[r];
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) {
        const float a = weight(x[4 * j + 2 * r], reference), b = weight(x[4 * j + 2 * r + 1], reference);
        weights[2 * j + r] = pack<kBFloat16>(a, b);
        sum += a + b;
      }
      rows.sum[r] += sum;
    }
  }

  __device__ __forceinline__ Work next_work(uint32_t it) {
    Work w;
    w.number = it;
    barrier_wait(shared_address(&s.q_full[it % NQ]), (it / NQ) & 1);
    const int slot = it % kItemSlots;
    w.first_token = s.plan.item[slot].row0;
    w.n_tiles = s.plan.item[slot].n_tiles;
    w.q = uniform(shared_address(s.q[it % NQ]) + warpgroup * 64 * 128);
    return w;
  }

  // Before the stage of Q is given back: the item's slot goes with it.
  __device__ __forceinline__ void read_rest(Work& w) {
    const int slot = w.number % kItemSlots;
    w.first_token = s.plan.item[slot].row0;  // these two anew, to save registers before
    w.n_tiles = s.plan.item[slot].n_tiles;
    w.n_tokens = s.plan.item[slot].n_rows;
    w.group = s.plan.group[slot];
    w.slot = s.plan.item[slot].slot;
    w.row = opaque(row);
  }

  // Gives the stage of Q of item `number` back once its store has read it. Put off until other work is under way:
  // the wait stalls a whole warp.
  __device__ __forceinline__ void release_stored(uint32_t number) {
    if (storing && warp == 0 && elect_one()) {
      tma_store_wait_read();
      barrier_arrive(shared_address(&s.q_empty[number % NQ]));
    }
    storing = false;
  }

  __device__ __forceinline__ void first_tile(const Work& w) {
    float scores[BN / 2], factor[2];
    Masks masks;
    const int stage = uniform(tile & 1);
    barrier_wait(shared_address(&s.k_full[stage]), (tile >> 1) & 1);
    start_scores(scores, w.q, shared_address(s.k[stage]));
    const int n_band = read_masks(masks, w);
    release_stored(w.number - 1);
    wgmma_wait<0>();
    pin(scores);
    if (leader) barrier_arrive(shared_address(&s.k_empty[stage]));
    update_reference(scores, n_band, masks, factor);
    exponentiate(scores);
  }

  // Scores of the next tile beside the output of this one.
  __device__ __forceinline__ void next_tile(const Work& w) {
    float scores[BN / 2], factor[2];
    Masks masks;
    const int v_stage = uniform(tile & 1), k_stage = v_stage ^ 1;
    const uint32_t v_phase = (tile >> 1) & 1;
    // Anew where the descriptors of a whole loop are more than uniform registers.
    const uint32_t q = DQK > 192 ? uniform(opaque(w.q)) : w.q;
    ++tile;
    barrier_wait(shared_address(&s.k_full[k_stage]), (tile >> 1) & 1);
    start_scores(scores, q, shared_address(s.k[k_stage]));
    barrier_wait(shared_address(&s.v_full[v_stage]), v_phase);
    start_output(shared_address(s.v[v_stage]));
    const int n_band = read_masks(masks, w);
    wgmma_wait<1>();
    pin(scores);
    // A wgmma is done for the whole warpgroup at once, so one thread may release its operands.
    if (leader) barrier_arrive(shared_address(&s.k_empty[k_stage]));
    // After the maximum the output product is as good as done. From there on its registers are free, so that
    // conversions and scaling fill the gaps between the exponentials. The softcap needs them even earlier.
    auto finish_output = [&] {
      wgmma_wait<0>();
      pin(o);
      pin(weights);
      if (leader) barrier_arrive(shared_address(&s.v_empty[v_stage]));
    };
    if constexpr (kSoftcap) finish_output();
    const bool grew = update_reference(scores, n_band, masks, factor);
    if constexpr (!kSoftcap) finish_output();
    if (grew) {
#pragma unroll
      for (int i = 0; i < DV / 2; ++i) o[i] *= factor[(i >> 1) & 1];
    }
    exponentiate(scores);
  }

  // Beside the last product, the rows' sums: they need no output, and may load.
  __device__ __forceinline__ void last_output(Work& w, RowResult (&results)[2]) {
    const int stage = uniform(tile & 1);
    barrier_wait(shared_address(&s.v_full[stage]), (tile >> 1) & 1);
    ++tile;
    start_output(shared_address(s.v[stage]));
    read_rest(w);
    close_rows(w, results);
    wgmma_wait<0>();
    pin(o);
    if (leader) barrier_arrive(shared_address(&s.v_empty[stage]));
  }

  // The place of row r of this thread in [rows, num_heads_q] of the results, or of the parts of a split item.
  __device__ __forceinline__ int64_t row_index(const Work& w, int r) const {
    const int64_t first = w.slot < 0 ? int64_t(w.first_token) : int64_t(w.slot) * (kTileRows >> p.heads_shift);
    return (first + token_of(w, r)) * p.num_heads_q + head_of(w, r);
  }

  // Sums over the four threads of a row; writes lse and the largest logits.
  __device__ __forceinline__ void close_rows(const Work& w, RowResult (&results)[2]) {
    const RowTerms terms = w.slot < 0 ? p.terms : RowTerms{};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int x = 1; x < 4; x *= 2) {
        rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], x);
        rows.largest[r] = fmaxf(rows.largest[r], __shfl_xor_sync(~0u, rows.largest[r], x));
      }
      results[r] = {-kInfinity, 0.f, 0.f};
      if (token_of(w, r) >= w.n_tokens) continue;
      const int head = head_of(w, r);
      const int64_t row = row_index(w, r);
      results[r] = close_row(rows.reference[r], rows.sum[r], terms, w.first_token + token_of(w, r), head, row);
      if (lane_column != 0) continue;
      (w.slot < 0 ? p.lse : p.partial_lse)[row] = results[r].lse;
      if (p.max_logits &&
          rows.reference[r] != -kInfinity) {  // floats order like their bits, the negative ones backwards
        const float most = rows.largest[r] * p.scale;
        if (most >= 0)
          atomicMax(reinterpret_cast<int*>(p.max_logits + head), __float_as_int(most));
        else
          atomicMin(reinterpret_cast<unsigned*>(p.max_logits + head), __float_as_uint(most));
      }
    }
  }

  // o becomes the output.
  __device__ __forceinline__ void finish_output(const Work& w, const RowResult (&results)[2]) {
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) o[i] *= results[(i >> 1) & 1].own;
    if (!p.terms.out_before || w.slot >= 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (results[r].before == 0.f) continue;
      const float* before = p.terms.out_before + row_index(w, r) * p.head_dim_v + lane_column;
#pragma unroll
      for (int j = 0; j < DV / 8; ++j) {
        if (8 * j + lane_column >= p.head_dim_v) continue;
        const float2 x = *reinterpret_cast<const float2*>(before + 8 * j);
        o[4 * j + 2 * r] = add_before(o[4 * j + 2 * r], results[r].before, x.x);
        o[4 * j + 2 * r + 1] = add_before(o[4 * j + 2 * r + 1], results[r].before, x.y);
      }
    }
  }

  // Writes the rows from registers: for float32 results, and tiles of which only some tokens exist.
  __device__ __forceinline__ void store_rows(const Work& w) {
    void* out = w.slot < 0 ? p.out : p.partial_out;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (token_of(w, r) >= w.n_tokens) continue;
      const int64_t at = row_index(w, r) * p.head_dim_v + lane_column;
#pragma unroll
      for (int j = 0; j < DV / 8; ++j) {
        if (8 * j + lane_column >= p.head_dim_v) continue;
        const float a = o[4 * j + 2 * r], b = o[4 * j + 2 * r + 1];
        if (p.out_float32 || w.slot >= 0)
          *reinterpret_cast<float2*>(static_cast<float*>(out) + at + 8 * j) = make_float2(a, b);
        else
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + at + 8 * j) = pack<kBFloat16>(a, b);
      }
    }
  }

  // Puts the rows into this warpgroup's half of Q, which nobody reads any more: each warp its 16 rows.
  __device__ __forceinline__ void stage_rows(uint32_t to) {
    const int r = warp * 16 + (threadIdx.x & 15), half = threadIdx.x >> 4 & 1;
#pragma unroll
    for (int j = 0; j < DV / 16; ++j)
      store_matrices(to + (j / 4) * kTileRows * 128 + swizzled(r * 128 + ((j % 4) * 2 + half) * 16),
                     pack<kBFloat16>(o[8 * j], o[8 * j + 1]), pack<kBFloat16>(o[8 * j + 2], o[8 * j + 3]),
                     pack<kBFloat16>(o[8 * j + 4], o[8 * j + 5]), pack<kBFloat16>(o[8 * j + 6], o[8 * j + 7]));
  }

  __device__ __forceinline__ void store(const Work& w) {
    const int barrier = 1 + warpgroup;
    if (p.out_float32 || w.slot >= 0 || (w.n_tokens << p.heads_shift) < kTileRows) {
      store_rows(w);
      named_barrier_sync<128>(barrier);
      if (leader) barrier_arrive(shared_address(&s.q_empty[w.number % NQ]));
      return;
    }
    stage_rows(w.q);
    fence_shared_for_async();
    named_barrier_sync<128>(barrier);
    if (warp == 0 && elect_one()) {
#pragma unroll
      for (int d = 0; d < DV / 64; ++d)
        tma_store(&p.out_tile, w.q + d * kTileRows * 128, d * 64, w.group << p.heads_shift,
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
      RowResult results[2];
      rows.clear();
#pragma unroll
      for (int i = 0; i < DV / 2; ++i) o[i] = 0.f;
      if (w.n_tiles > 0) {
        first_tile(w);
#pragma unroll 1
        for (int left = w.n_tiles; left > 1; --left) next_tile(w);
        last_output(w, results);
      } else {
        release_stored(w.number - 1);
        read_rest(w);
        close_rows(w, results);
      }
      finish_output(w, results);
      store(w);
    }
    if (warp == 0 && elect_one()) tma_store_wait();
  }
};

// --- kernel -------------------------------------------------------------------------------------------------

template <class Shape, bool kBFloat16, bool kSoftcap>
__global__ void __launch_bounds__(Shape::kThreads, 1) flex_attn_fwd(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  constexpr int NQ = Shape::NQ, W = Shape::W;
  using S = Shared<Shape>;
  S& s = *reinterpret_cast<S*>(raw);
  const int warp = uniform(threadIdx.x / 32);
  if (warp == 0 && elect_one()) {
    if (shared_address(raw) & 1023) __trap();  // the swizzle needs it
    auto init = [](uint64_t* barriers, int n, int arrivals) {
      for (int i = 0; i < n; ++i) barrier_init(shared_address(barriers + i), arrivals);
    };
    init(s.q_full, NQ, 1), init(s.q_empty, NQ, W);
    init(s.k_full, 2, 1), init(s.k_empty, 2, W);
    init(s.v_full, 2, 1), init(s.v_empty, 2, W);
    s.plan.init();
    fence_barrier_init();
    tma_prefetch(&p.q), tma_prefetch(&p.k), tma_prefetch(&p.v), tma_prefetch(&p.out_tile);
  }
  __syncthreads();
  if (warp < 4) {
    give_registers<Shape::kProducerRegisters>();
    if (warp == 0 && elect_one()) load_tiles<Shape>(p, s);
    if (warp == 1 && elect_one()) walk_plan(p.walk, s.plan, Shape::BN);
  } else {
    take_registers<Shape::kConsumerRegisters>();
    Consumer<Shape, kBFloat16, kSoftcap>(p, s).run();
  }
}

template <class Shape, bool kBFloat16, bool kSoftcap>
cudaError_t launch_instance(const ForwardParams& p, int blocks, cudaStream_t stream) {
  auto* kernel = flex_attn_fwd<Shape, kBFloat16, kSoftcap>;
  constexpr int bytes = sizeof(Shared<Shape>);
  static_assert(bytes <= 227 * 1024, "more shared memory than a block may have");
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Shape::kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class Shape, bool kSoftcap>
cudaError_t launch(const ForwardParams& p, bool bfloat16, int blocks, cudaStream_t stream) {
  if (bfloat16) return launch_instance<Shape, true, kSoftcap>(p, blocks, stream);
  return launch_instance<Shape, false, kSoftcap>(p, blocks, stream);
}

template <class Shape, bool kSoftcap>
constexpr ForwardInstance instance_of() {
  return {Shape::DQK, Shape::DV, Shape::kRows, Shape::BN, kSoftcap, launch<Shape, kSoftcap>};
}

}  // namespace magi::cuda::sm90
