// flex_attn_bwd_sm90: checks, tensor maps, and the launches of a backward pass: what is needed of every row, dK and
// dV (one launch, or one for each), dQ.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "../cuda/sm90/flex_attn_bwd_dkdv.h"
#include "../cuda/sm90/flex_attn_bwd_dq.h"
#include "../cuda/sm90/flex_attn_bwd_rows.h"
#include "sm90_host.h"

namespace magi::cuda {
namespace {

constexpr int64_t kRowAlignment = 4;  // lse and delta of a tile are copied in units of 16 bytes

std::vector<const sm90::DkDvInstance*> choose_dkdv(const Shapes& n, bool softcap) {
  using namespace sm90;
  std::vector<const DkDvInstance*> chosen;
  bool dk = false, dv = false;
  for (const DkDvInstance* i : {&kDkDv64, &kDkDv64Softcap, &kDkDv128, &kDk128Softcap, &kDv128Softcap, &kDk192, &kDv192,
                                &kDk192Softcap, &kDv192Softcap, &kDk256, &kDv256, &kDk256Softcap, &kDv256Softcap})
    if (n.d <= i->head_dim && n.dv <= i->head_dim_v && softcap == i->softcap && !(dk && i->dk) && !(dv && i->dv))
      chosen.push_back(i), dk |= i->dk, dv |= i->dv;
  STD_TORCH_CHECK(dk && dv, "flex_attn has no backward kernel for sm_90a with head_dim ", n.d, " and head_dim_v ",
                  n.dv);
  return chosen;
}

const sm90::DqInstance& choose_dq(const Shapes& n, int64_t tile_cols, bool softcap) {
  using namespace sm90;
  for (const DqInstance* i : {&kDq64, &kDq64Softcap, &kDq128, &kDq128Narrow, &kDq128Softcap, &kDq192, &kDq192Softcap,
                              &kDq256, &kDq256Softcap})
    if (n.d <= i->head_dim && n.dv <= i->head_dim_v && tile_cols == i->tile_cols && softcap == i->softcap) return *i;
  STD_TORCH_CHECK(false, "flex_attn has no dQ kernel for sm_90a with head_dim ", n.d, ", head_dim_v ", n.dv,
                  " and tiles of ", tile_cols, " keys");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& dout_in, const MaybeTensor& dlse_in, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
    const Tensor& out_in, const Tensor& lse_in, const MaybeTensor& dq_before_in, const Tensor& q_items,
    const Tensor& q_runs, const Tensor& q_bands, const Tensor& k_items, const Tensor& k_runs, const Tensor& k_bands,
    const Tensor& k_splits, const MaybeTensor& sink_in, int64_t tile_rows, int64_t tile_cols, int64_t num_slots,
    double scale, double softcap, bool grad_float32, int64_t sm_margin) {
  const Shapes n = check_inputs(q_in, k_in, v_in);
  const ScalarType dtype = q_in.scalar_type();
  const bool bfloat16 = dtype == ScalarType::BFloat16;
  check_shape(dout_in, "dout", {n.sq, n.hq, n.dv});
  check_shape(out_in, "out", {n.sq, n.hq, n.dv});
  STD_TORCH_CHECK(dout_in.scalar_type() == dtype, "dout must have the dtype of q");
  STD_TORCH_CHECK(out_in.scalar_type() == dtype || out_in.scalar_type() == ScalarType::Float,
                  "out must have the dtype of q, or float32");
  STD_TORCH_CHECK(scale > 0, "scale must be positive here, got ", scale, "; give other ones to q");
  check_plan(k_splits, "k_splits", 4);
  const auto& dq_instance = choose_dq(n, tile_cols, softcap > 0);
  const auto dkdv_instances = choose_dkdv(n, softcap > 0);
  const int32_t heads_shift = heads_shift_of(n, sm90::kDqRows, tile_rows);
  const int64_t heads_in_tile = int64_t{1} << heads_shift;
  const int32_t device = q_in.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  const Launch on = launch_on(device, sm_margin);

  using torch::stable::new_empty;
  const ScalarType grad = grad_float32 ? ScalarType::Float : dtype;
  Tensor dq = new_empty(q_in, {n.sq, n.hq, n.d}, grad);
  Tensor dk = new_empty(q_in, {n.sk, n.hkv, n.d}, grad), dv = new_empty(q_in, {n.sk, n.hkv, n.dv}, grad);
  const Tensor lse = row_term(lse_in, "lse", {n.sq, n.hq}), out = torch::stable::contiguous(out_in);
  MaybeTensor dlse, dq_before, sink, sink_partial;  // dense, and alive until the launches
  if (dlse_in.has_value()) dlse = row_term(*dlse_in, "dlse", {n.sq, n.hq});
  if (dq_before_in.has_value()) dq_before = row_term(*dq_before_in, "dq_before", {n.sq, n.hq, n.d});
  const Tensor q = readable_by_tma(q_in), k = readable_by_tma(k_in), v = readable_by_tma(v_in);
  const Tensor dout = readable_by_tma(dout_in);

  // Past the last row there must be a whole tile of rows that see nothing.
  const int64_t padded_rows = (n.sq + kRowAlignment - 1) / kRowAlignment * kRowAlignment + sm90::kBackwardQueries;
  Tensor rows = new_empty(q_in, {2, n.hq, padded_rows}, ScalarType::Float);
  float* lse_log2 = static_cast<float*>(rows.data_ptr());
  float* delta = lse_log2 + n.hq * padded_rows;
  sm90::PrepareParams r{};
  r.dout = dout.data_ptr();
  r.dout_row_stride = dout.stride(0), r.dout_head_stride = dout.stride(1);
  r.out = out.data_ptr();
  r.bfloat16 = bfloat16, r.out_float32 = out.scalar_type() == ScalarType::Float;
  r.lse = floats(lse), r.dlse = dlse.has_value() ? floats(*dlse) : nullptr;
  r.rows = n.sq, r.padded_rows = padded_rows;
  r.num_heads = int32_t(n.hq), r.heads_in_tile = 1, r.head_dim_v = int32_t(n.dv);
  r.lse_log2 = lse_log2, r.delta = delta;
  Tensor dsink;
  if (sink_in.has_value()) {
    r.sink_per_row = sink_in->dim() == 3;
    r.num_sink = int32_t(sink_in->size(r.sink_per_row ? 1 : 0));
    sink = row_term(
        *sink_in, "sink",
        r.sink_per_row ? std::vector<int64_t>{n.sq, r.num_sink, n.hq} : std::vector<int64_t>{r.num_sink, n.hq});
    dsink = torch::stable::empty_like(*sink);
    r.sink = floats(*sink), r.dsink = static_cast<float*>(dsink.data_ptr());
    sink_partial = new_empty(q_in, {r.sink_per_row ? 0 : sm90::prepare_rows_blocks(padded_rows, 1), r.num_sink, n.hq},
                             ScalarType::Float);
    r.sink_partial = r.sink_per_row ? nullptr : static_cast<float*>(sink_partial->data_ptr());
  } else {
    dsink = new_empty(q_in, {0}, ScalarType::Float);
  }
  check_cuda(prepare_rows(r, on.stream), "launching the preparation of rows");

  constexpr int64_t kCounters = 3;
  Tensor counters = new_empty(q_in, {kCounters}, ScalarType::Int);
  auto* counter = static_cast<int32_t*>(counters.data_ptr());
  check_cuda(cudaMemsetAsync(counter, 0, kCounters * sizeof(int32_t), on.stream), "clearing the work counters");
  auto blocks = [&](const sm90::Walk& w) { return int(std::min(on.blocks, int64_t(w.n_items) * w.n_groups)); };
  // Maps of nothing do not exist; without queries or keys nothing is loaded.
  auto map = [&](const Tensor& x, int64_t heads, int64_t tokens) {
    return x.size(0) ? tensor_map(x, heads, tokens) : CUtensorMap{};
  };

  if (n.sk > 0) {
    sm90::DkDvParams p{};
    p.q = map(q, 1, sm90::kBackwardQueries), p.dout = map(dout, 1, sm90::kBackwardQueries);
    p.k = map(k, 1, sm90::kBackwardKeys), p.v = map(v, 1, sm90::kBackwardKeys);
    if (!grad_float32) p.dk = map(dk, 1, 64), p.dv = map(dv, 1, 64);
    p.lse_log2 = lse_log2, p.delta = delta, p.padded_rows = padded_rows;
    p.num_heads_kv = int32_t(n.hkv), p.head_dim = int32_t(n.d), p.head_dim_v = int32_t(n.dv);
    p.scale = float(scale), p.scale_log2 = float(scale * 1.4426950408889634);
    p.softcap = softcap_of(scale, softcap);
    if (grad_float32)
      p.dk_float32 = static_cast<float*>(dk.data_ptr()), p.dv_float32 = static_cast<float*>(dv.data_ptr());
    Tensor dk_parts = new_empty(q_in, {num_slots, sm90::kBackwardKeys, n.hkv, n.d}, ScalarType::Float);
    Tensor dv_parts = new_empty(q_in, {num_slots, sm90::kBackwardKeys, n.hkv, n.dv}, ScalarType::Float);
    p.dk_parts = static_cast<float*>(dk_parts.data_ptr()), p.dv_parts = static_cast<float*>(dv_parts.data_ptr());
    for (const sm90::DkDvInstance* instance : dkdv_instances) {
      p.walk = walk_of(k_items, k_runs, k_bands, n.hkv, counter++);
      p.walk.repeats = int32_t(n.hq / n.hkv);
      p.walk.groups_innermost = true;
      check_cuda(instance->launch(p, bfloat16, blocks(p.walk), on.stream), "launching flex_attn_bwd_dkdv");
    }
    if (k_splits.size(0) > 0) {
      sm90::JoinKeysParams j{static_cast<const TileSplit*>(k_splits.data_ptr()),
                             int32_t(k_splits.size(0)),
                             int32_t(n.hkv),
                             int32_t(n.d),
                             p.dk_parts,
                             dk.data_ptr(),
                             grad_float32,
                             bfloat16};
      check_cuda(join_keys(j, on.stream), "launching the sum of parts of dK");
      j.dim = int32_t(n.dv), j.parts = p.dv_parts, j.out = dv.data_ptr();
      check_cuda(join_keys(j, on.stream), "launching the sum of parts of dV");
    }
  }
  if (n.sq > 0) {
    sm90::DqParams p{};
    p.q = map(q, heads_in_tile, tile_rows), p.dout = map(dout, heads_in_tile, tile_rows);
    p.k = map(k, 1, tile_cols), p.v = map(v, 1, tile_cols);
    if (!grad_float32) p.dq_tile = map(dq, heads_in_tile, 64 / heads_in_tile);
    p.walk = walk_of(q_items, q_runs, q_bands, n.hq / heads_in_tile, counter);
    p.heads_shift = heads_shift, p.groups_per_kv = int32_t(n.hq / n.hkv / heads_in_tile);
    p.num_heads_q = int32_t(n.hq), p.head_dim = int32_t(n.d);
    p.scale = float(scale), p.scale_log2 = float(scale * 1.4426950408889634);
    p.softcap = softcap_of(scale, softcap);
    p.lse_log2 = lse_log2, p.delta = delta, p.padded_rows = padded_rows;
    p.dq = dq.data_ptr(), p.dq_float32 = grad_float32;
    p.before = dq_before.has_value() ? floats(*dq_before) : nullptr;
    check_cuda(dq_instance.launch(p, bfloat16, blocks(p.walk), on.stream), "launching flex_attn_bwd_dq");
  }
  return {dq, dk, dv, dsink};
}

}  // namespace
}  // namespace magi::cuda

STABLE_TORCH_LIBRARY_IMPL(torch_magi, CUDA, m) { m.impl("flex_attn_bwd_sm90", TORCH_BOX(&magi::cuda::backward)); }
