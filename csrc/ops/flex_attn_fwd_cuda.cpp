// flex_attn_fwd_sm90: checks, tensor maps, and the choice of an instance of the forward kernel.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <tuple>

#include "../cuda/sm90/flex_attn_fwd.h"
#include "sm90_host.h"

namespace magi::cuda {
namespace {

const sm90::ForwardInstance& choose_instance(int64_t d, int64_t dv, int64_t tile_cols, bool softcap) {
  using namespace sm90;
  for (const ForwardInstance* i : {&kForward64, &kForward64Softcap, &kForward128, &kForward128Wide, &kForward128Softcap,
                                   &kForward192, &kForward192Softcap, &kForward256, &kForward256Softcap})
    if (d <= i->head_dim && dv <= i->head_dim_v && tile_cols == i->tile_cols && softcap == i->softcap) return *i;
  STD_TORCH_CHECK(false, "flex_attn has no kernel for sm_90a with head_dim ", d, ", head_dim_v ", dv, ", tiles of ",
                  tile_cols, " keys and ", softcap ? "a" : "no", " softcap");
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                           const Tensor& items, const Tensor& runs, const Tensor& bands,
                                           const Tensor& splits, const MaybeTensor& sink_in,
                                           const MaybeTensor& out_before_in, const MaybeTensor& lse_before_in,
                                           int64_t tile_rows, int64_t tile_cols, int64_t num_slots, double scale,
                                           double softcap, bool out_float32, bool return_max_logits,
                                           int64_t sm_margin) {
  const Shapes n = check_inputs(q_in, k_in, v_in);
  const auto [sq, sk, hq, hkv, d, dv] = n;
  const ScalarType dtype = q_in.scalar_type();
  STD_TORCH_CHECK(scale > 0, "scale must be positive here, got ", scale, "; give other ones to q");
  check_plan(splits, "splits", 4);
  const auto& instance = choose_instance(d, dv, tile_cols, softcap > 0);
  const int32_t heads_shift = heads_shift_of(n, instance.rows, tile_rows);
  const int64_t heads_in_tile = int64_t{1} << heads_shift;
  const int32_t device = q_in.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  const Launch on = launch_on(device, sm_margin);

  Tensor out = torch::stable::new_empty(q_in, {sq, hq, dv}, out_float32 ? ScalarType::Float : dtype);
  Tensor lse = torch::stable::new_empty(q_in, {sq, hq}, ScalarType::Float);
  Tensor max_logits = torch::stable::new_empty(q_in, {return_max_logits ? hq : 0}, ScalarType::Float);
  if (return_max_logits) torch::stable::fill_(max_logits, -std::numeric_limits<double>::infinity());
  if (sq == 0) return {out, lse, max_logits};

  const Tensor q = readable_by_tma(q_in), k = readable_by_tma(k_in), v = readable_by_tma(v_in);
  Tensor next_work = torch::stable::new_empty(q_in, {1}, ScalarType::Int);
  check_cuda(cudaMemsetAsync(next_work.data_ptr(), 0, sizeof(int32_t), on.stream), "clearing the work counter");

  sm90::ForwardParams p{};
  p.q = tensor_map(q, heads_in_tile, tile_rows);
  // Without keys no tile is loaded, and a result of float32 is not stored by TMA; maps of nothing do not exist.
  p.k = sk ? tensor_map(k, 1, tile_cols) : p.q;
  p.v = sk ? tensor_map(v, 1, tile_cols) : p.q;
  p.out_tile = out_float32 ? p.q : tensor_map(out, heads_in_tile, 64 / heads_in_tile);
  p.walk = walk_of(items, runs, bands, hq / heads_in_tile, static_cast<int32_t*>(next_work.data_ptr()));
  p.heads_shift = heads_shift;
  p.groups_per_kv = int32_t(hq / hkv / heads_in_tile);
  p.num_heads_q = int32_t(hq);
  p.head_dim_v = int32_t(dv);
  p.scale = float(scale);
  p.scale_log2 = float(scale * 1.4426950408889634);
  p.softcap = softcap_of(scale, softcap);
  p.out = out.data_ptr();
  p.out_float32 = out_float32;
  p.lse = static_cast<float*>(lse.data_ptr());
  p.max_logits = return_max_logits ? static_cast<float*>(max_logits.data_ptr()) : nullptr;
  MaybeTensor sink, out_before, lse_before;  // dense, and alive until the launch
  if (sink_in.has_value()) {
    const bool per_row = sink_in->dim() == 2;
    sink = row_term(*sink_in, "sink", per_row ? std::vector<int64_t>{sq, hq} : std::vector<int64_t>{hq});
    p.terms.sink = floats(*sink);
    p.terms.sink_row_stride = per_row ? hq : 0;
  }
  STD_TORCH_CHECK(out_before_in.has_value() == lse_before_in.has_value(), "out_before and lse_before go together");
  if (out_before_in.has_value()) {
    out_before = row_term(*out_before_in, "out_before", {sq, hq, dv});
    lse_before = row_term(*lse_before_in, "lse_before", {sq, hq});
    p.terms.out_before = floats(*out_before);
    p.terms.lse_before = floats(*lse_before);
  }
  MaybeTensor partial_out, partial_lse;
  if (num_slots > 0) {
    partial_out = torch::stable::new_empty(q_in, {num_slots, tile_rows, hq, dv}, ScalarType::Float);
    partial_lse = torch::stable::new_empty(q_in, {num_slots, tile_rows, hq}, ScalarType::Float);
    p.partial_out = static_cast<float*>(partial_out->data_ptr());
    p.partial_lse = static_cast<float*>(partial_lse->data_ptr());
  }
  const int blocks = int(std::min(on.blocks, int64_t(p.walk.n_items) * p.walk.n_groups));
  check_cuda(instance.launch(p, dtype == ScalarType::BFloat16, blocks, on.stream), "launching flex_attn_fwd");
  if (splits.size(0) == 0) return {out, lse, max_logits};
  sm90::CombineParams c{};
  c.splits = static_cast<const TileSplit*>(splits.data_ptr());
  c.n_splits = int32_t(splits.size(0));
  c.tile_tokens = int32_t(tile_rows), c.num_heads_q = int32_t(hq), c.head_dim_v = int32_t(dv);
  c.partial_out = p.partial_out, c.partial_lse = p.partial_lse;
  c.out = p.out, c.out_float32 = out_float32, c.bfloat16 = dtype == ScalarType::BFloat16, c.lse = p.lse;
  c.terms = p.terms;
  check_cuda(sm90::combine_splits(c, on.stream), "launching the combination of split rows");
  return {out, lse, max_logits};
}

}  // namespace
}  // namespace magi::cuda

STABLE_TORCH_LIBRARY_IMPL(torch_magi, CUDA, m) { m.impl("flex_attn_fwd_sm90", TORCH_BOX(&magi::cuda::forward)); }
