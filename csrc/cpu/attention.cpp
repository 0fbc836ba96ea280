// flex_attn_fwd_tiles and flex_attn_bwd_tiles on the CPU: checks, then one task per tile of rows and head.
#include "attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>

#include "checks.h"

namespace magi::cpu {
namespace {

using MaybeTensor = std::optional<Tensor>;

const Kernels& kernels() {
#if defined(__x86_64__)
  static const Kernels& chosen =
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
          ? avx512_kernels()
      : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2_kernels()
                                                                        : generic_kernels();
  return chosen;
#else
  return generic_kernels();
#endif
}

Input input_of(const Tensor& q) {
  switch (q.scalar_type()) {
    case ScalarType::Double:
      return Input::kDouble;
    case ScalarType::Float:
      return Input::kFloat;
    case ScalarType::BFloat16:
      return Input::kBFloat16;
    case ScalarType::Half:
      return Input::kHalf;
    default:
      STD_TORCH_CHECK(false, "flex_attn has CPU kernels for float64, float32, bfloat16 and float16, got ",
                      torch::headeronly::toString(q.scalar_type()));
  }
}

ScalarType wide_type(Input input) { return input == Input::kDouble ? ScalarType::Double : ScalarType::Float; }

Rows rows_of(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1)}; }

Tiles tiles_of(const Tensor& items, const Tensor& runs, const Tensor& bands, int64_t tile_rows, int64_t tile_cols) {
  STD_TORCH_CHECK(tile_rows >= 1 && tile_rows <= kTile && tile_cols >= 1 && tile_cols <= kTile, "CPU tiles have 1 to ",
                  kTile, " rows and columns, got ", tile_rows, " x ", tile_cols);
  auto check = [](const Tensor& x, const char* name, int64_t width) {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int && x.dim() == 2 && x.size(1) == width && x.is_contiguous(), name,
                    " must be a contiguous int32 tensor [n, ", width, "], got shape ", shape_text(x));
  };
  check(items, "items", 8);
  check(runs, "runs", 4);
  check(bands, "bands", 8);
  return {static_cast<const TileItem*>(items.data_ptr()), static_cast<const TileRun*>(runs.data_ptr()),
          static_cast<const TileBand*>(bands.data_ptr()), items.size(0), int32_t(tile_cols)};
}

// Checks the shapes and fills in what forward and backward share. q, k and v have dense rows.
Params params_of(const Tensor& q, const Tensor& k, const Tensor& v, double scale, double softcap, bool wide) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, "q, k and v must be [rows, heads, head_dim], got ",
                  shape_text(q), ", ", shape_text(k), ", ", shape_text(v));
  Params p{};
  p.sq = q.size(0), p.hq = q.size(1), p.d = q.size(2);
  p.sk = k.size(0), p.hkv = k.size(1), p.dv = v.size(2);
  check_shape(k, "k", {p.sk, p.hkv, p.d});
  check_shape(v, "v", {p.sk, p.hkv, p.dv});
  STD_TORCH_CHECK(p.hkv > 0 && p.hq % p.hkv == 0, "the heads of q must be a multiple of those of k, got ", p.hq,
                  " and ", p.hkv);
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                  "q, k and v must have one dtype");
  p.q = rows_of(q), p.k = rows_of(k), p.v = rows_of(v);
  p.scale = scale, p.softcap = softcap, p.wide = wide;
  return p;
}

// The sink logits of each (row and) head summed up: logsumexp over the sink tokens.
std::vector<double> sink_logits(const MaybeTensor& sink, Params& p) {
  std::vector<double> out;
  if (!sink.has_value()) return out;
  const Tensor s = torch::stable::contiguous(*sink);
  STD_TORCH_CHECK(s.scalar_type() == ScalarType::Float, "sink must be float32");
  const bool per_row = s.dim() == 3;
  const int64_t tokens = s.size(per_row ? 1 : 0), rows = per_row ? p.sq : 1;
  if (per_row)
    check_shape(s, "sink", {p.sq, tokens, p.hq});
  else
    check_shape(s, "sink", {tokens, p.hq});
  const float* from = static_cast<const float*>(s.data_ptr());
  out.resize(size_t(rows * p.hq));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < p.hq; ++h) {
      const float* x = from + r * tokens * p.hq + h;
      double most = -std::numeric_limits<double>::infinity(), sum = 0;
      for (int64_t t = 0; t < tokens; ++t) most = std::max(most, double(x[t * p.hq]));
      for (int64_t t = 0; t < tokens; ++t) sum += std::exp(double(x[t * p.hq]) - most);
      out[size_t(r * p.hq + h)] = std::isfinite(most) ? most + std::log(sum) : most;
    }
  p.sink = out.data();
  p.sink_row = per_row ? p.hq : 0;
  return out;
}

using TileFunction = void (*)(Input, const Params&, const Tiles&, int64_t, int64_t, void*);

// Runs `function` for every item and head. Threads take tasks one by one, the longest items first.
void for_all_tiles(TileFunction function, Input input, const Params& p, const Tiles& tiles, int64_t heads) {
  const int64_t tasks = tiles.n_items * heads;
  if (tasks == 0) return;
  const int64_t bytes = (kernels().scratch_bytes(input, p) + 63) / 64 * 64;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min<int64_t>(torch::stable::get_num_threads(), tasks), 1, [&](int64_t, int64_t) {
    std::unique_ptr<void, decltype(&std::free)> scratch(std::aligned_alloc(64, size_t(bytes)), &std::free);
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) function(input, p, tiles, i / heads, i % heads, scratch.get());
  });
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                           const Tensor& items, const Tensor& runs, const Tensor& bands,
                                           const MaybeTensor& sink, int64_t tile_rows, int64_t tile_cols, double scale,
                                           double softcap, bool out_float32, bool return_max_logits) {
  const Tensor q = dense_rows(q_in), k = dense_rows(k_in), v = dense_rows(v_in);
  const Input input = input_of(q);
  Params p = params_of(q, k, v, scale, softcap, out_float32);
  const Tiles tiles = tiles_of(items, runs, bands, tile_rows, tile_cols);
  const std::vector<double> sinks = sink_logits(sink, p);
  const ScalarType wide = wide_type(input);
  Tensor out = torch::stable::new_empty(q, {p.sq, p.hq, p.dv}, out_float32 ? wide : q.scalar_type());
  Tensor lse = torch::stable::new_empty(q, {p.sq, p.hq}, wide);
  Tensor max_logits = torch::stable::new_empty(q, {return_max_logits ? p.hq : 0}, ScalarType::Float);
  p.out = out.data_ptr(), p.lse = lse.data_ptr();
  std::vector<float> per_item;
  if (return_max_logits) {
    per_item.resize(size_t(tiles.n_items * p.hq));
    p.max_logits = per_item.data();
  }
  for_all_tiles(kernels().forward, input, p, tiles, p.hq);
  if (return_max_logits) {
    float* most = static_cast<float*>(max_logits.data_ptr());
    for (int64_t h = 0; h < p.hq; ++h) {
      most[h] = -std::numeric_limits<float>::infinity();
      for (int64_t i = 0; i < tiles.n_items; ++i) most[h] = std::max(most[h], per_item[size_t(i * p.hq + h)]);
    }
  }
  return {out, lse, max_logits};
}

// delta = rowsum(dout * out) - dlse. Where out is exactly 0 it does not depend on dout, which may hold
// anything there. Also adds up the sink's gradient: dsink = -exp(sink - lse) * delta.
template <typename T, typename Acc>
void row_sums(const Params& p, const Rows& out, const Acc* dlse, const MaybeTensor& sink, Acc* delta, Tensor* dsink) {
  const Acc* lse = static_cast<const Acc*>(p.lse);
  torch::stable::parallel_for(0, p.sq, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t h = 0; h < p.hq; ++h) {
        const T* o = static_cast<const T*>(out.data) + r * out.row + h * out.head;
        const T* g = static_cast<const T*>(p.dout.data) + r * p.dout.row + h * p.dout.head;
        double sum = 0;
        for (int64_t d = 0; d < p.dv; ++d) sum += Acc(o[d]) == 0 ? 0 : double(Acc(o[d])) * double(Acc(g[d]));
        delta[r * p.hq + h] = Acc(sum - (dlse ? double(dlse[r * p.hq + h]) : 0));
      }
  });
  if (!sink.has_value()) return;
  const float* s = static_cast<const float*>(sink->data_ptr());
  float* ds = static_cast<float*>(dsink->data_ptr());
  const bool per_row = sink->dim() == 3;
  const int64_t tokens = sink->size(per_row ? 1 : 0);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < p.hq; ++h) {
      double sum = 0;
      for (int64_t r = 0; r < p.sq; ++r) {
        const int64_t at = (per_row ? r * tokens * p.hq : 0) + t * p.hq + h;
        const double probability =
            s[at] == -std::numeric_limits<float>::infinity() ? 0 : std::exp(double(s[at]) - double(lse[r * p.hq + h]));
        const double grad = probability == 0 ? 0 : -probability * double(delta[r * p.hq + h]);
        if (per_row)
          ds[at] = float(grad);
        else
          sum += grad;
      }
      if (!per_row) ds[t * p.hq + h] = float(sum);
    }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dout_in, const MaybeTensor& dlse_in,
                                                    const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                    const Tensor& out_in, const Tensor& lse_in, const Tensor& q_items,
                                                    const Tensor& q_runs, const Tensor& q_bands, const Tensor& k_items,
                                                    const Tensor& k_runs, const Tensor& k_bands,
                                                    const MaybeTensor& sink_in, std::vector<int64_t> tile_shape,
                                                    double scale, double softcap, bool grad_float32) {
  STD_TORCH_CHECK(tile_shape.size() == 4, "tile_shape must hold 4 numbers, got ", tile_shape.size());
  const Tensor q = dense_rows(q_in), k = dense_rows(k_in), v = dense_rows(v_in), dout = dense_rows(dout_in);
  const Tensor out = dense_rows(out_in), lse = torch::stable::contiguous(lse_in);
  const Input input = input_of(q);
  Params p = params_of(q, k, v, scale, softcap, grad_float32);
  check_shape(dout, "dout", {p.sq, p.hq, p.dv});
  check_shape(out, "out", {p.sq, p.hq, p.dv});
  check_shape(lse, "lse", {p.sq, p.hq});
  const ScalarType wide = wide_type(input);
  STD_TORCH_CHECK(dout.scalar_type() == q.scalar_type() && out.scalar_type() == q.scalar_type(),
                  "dout and out must have the dtype of q");
  STD_TORCH_CHECK(lse.scalar_type() == wide, "lse must be float32, or float64 for float64 inputs");
  p.dout = rows_of(dout), p.lse = lse.data_ptr();
  MaybeTensor dlse, sink;
  if (dlse_in.has_value()) {
    dlse = torch::stable::contiguous(*dlse_in);
    check_shape(*dlse, "dlse", {p.sq, p.hq});
    STD_TORCH_CHECK(dlse->scalar_type() == wide, "dlse must have the dtype of lse");
  }
  Tensor dsink = torch::stable::new_empty(q, {0}, ScalarType::Float);
  if (sink_in.has_value()) {
    sink = torch::stable::contiguous(*sink_in);
    sink_logits(sink, p);  // checks its shape
    std::vector<int64_t> shape;
    for (int64_t i = 0; i < sink->dim(); ++i) shape.push_back(sink->size(i));
    dsink = torch::stable::new_empty(q, shape, ScalarType::Float);
  }
  Tensor delta = torch::stable::new_empty(q, {p.sq, p.hq}, wide);
  auto sums = [&](auto element, auto acc) {
    using T = decltype(element);
    using Acc = decltype(acc);
    row_sums<T, Acc>(p, rows_of(out), dlse ? static_cast<const Acc*>(dlse->data_ptr()) : nullptr, sink,
                     static_cast<Acc*>(delta.data_ptr()), &dsink);
  };
  if (input == Input::kDouble) sums(double{}, double{});
  if (input == Input::kFloat) sums(float{}, float{});
  if (input == Input::kBFloat16) sums(torch::headeronly::BFloat16{}, float{});
  if (input == Input::kHalf) sums(torch::headeronly::Half{}, float{});
  p.delta = delta.data_ptr();
  const ScalarType grad_type = grad_float32 ? wide : q.scalar_type();
  Tensor dq = torch::stable::new_empty(q, {p.sq, p.hq, p.d}, grad_type);
  Tensor dk = torch::stable::new_empty(q, {p.sk, p.hkv, p.d}, grad_type);
  Tensor dv = torch::stable::new_empty(q, {p.sk, p.hkv, p.dv}, grad_type);
  p.dq = dq.data_ptr(), p.dk = dk.data_ptr(), p.dv_out = dv.data_ptr();
  for_all_tiles(kernels().grad_q, input, p, tiles_of(q_items, q_runs, q_bands, tile_shape[0], tile_shape[1]), p.hq);
  for_all_tiles(kernels().grad_kv, input, p, tiles_of(k_items, k_runs, k_bands, tile_shape[2], tile_shape[3]), p.hkv);
  return {dq, dk, dv, dsink};
}

}  // namespace
}  // namespace magi::cpu

STABLE_TORCH_LIBRARY_IMPL(torch_magi, CPU, m) {
  m.impl("flex_attn_fwd_tiles", TORCH_BOX(&magi::cpu::forward));
  m.impl("flex_attn_bwd_tiles", TORCH_BOX(&magi::cpu::backward));
}
