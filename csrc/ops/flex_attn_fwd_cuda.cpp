// flex_attn_fwd_sm90: checks, tensor maps, and the choice of an instance of the kernel for sm_90a.
#include <cuda.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "../cuda/sm90/flex_attn_fwd.h"
#include "checks.h"

// Weak: a torch without CUDA has no such symbol, and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace magi::cuda {
namespace {

using MaybeTensor = std::optional<Tensor>;
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

constexpr int64_t kElement = 2;  // bytes of a bfloat16 or float16

void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, " failed: ", cudaGetErrorString(error));
}

// The driver's function, looked up so that nothing links to the driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result),
               "looking up cuTensorMapEncodeTiled");
    STD_TORCH_CHECK(entry != nullptr, "the driver has no cuTensorMapEncodeTiled; it must be one for CUDA 12 or newer");
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return found;
}

// The tensor itself where TMA can read it: dense last dimension, other strides positive multiples of 16 bytes.
Tensor readable_by_tma(const Tensor& x) {
  bool good = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && (x.size(2) <= 1 || x.stride(2) == 1);
  for (int64_t i = 0; i < 2; ++i) good &= x.size(i) <= 1 || (x.stride(i) > 0 && x.stride(i) * kElement % 16 == 0);
  return good ? x : torch::stable::contiguous(x);
}

// A map of [tokens, heads, dim] in boxes of 64 dims x `heads` heads x `tokens` tokens. What a box reaches past
// the tensor is read as 0 and not written.
CUtensorMap tensor_map(const Tensor& x, int64_t heads, int64_t tokens) {
  auto stride = [&](int64_t i, int64_t dense) { return cuuint64_t((x.size(i) <= 1 ? dense : x.stride(i)) * kElement); };
  const cuuint64_t sizes[3] = {cuuint64_t(x.size(2)), cuuint64_t(x.size(1)), cuuint64_t(x.size(0))};
  const cuuint64_t strides[2] = {stride(1, x.size(2)), stride(0, x.size(1) * x.size(2))};
  const cuuint32_t box[3] = {64, cuuint32_t(heads), cuuint32_t(tokens)};
  const cuuint32_t ones[3] = {1, 1, 1};
  const auto type =
      x.scalar_type() == ScalarType::BFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map;
  const CUresult result =
      encode_tiled()(&map, type, 3, x.data_ptr(), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", int(result), " for shape ",
                  shape_text(x));
  return map;
}

const sm90::ForwardInstance& choose_instance(int64_t d, int64_t dv, int64_t tile_cols, bool softcap) {
  using namespace sm90;
  for (const ForwardInstance* i : {&kForward64, &kForward64Softcap, &kForward128, &kForward128Wide, &kForward128Softcap,
                                   &kForward192, &kForward192Softcap, &kForward256, &kForward256Softcap})
    if (d <= i->head_dim && dv <= i->head_dim_v && tile_cols == i->tile_cols && softcap == i->softcap) return *i;
  STD_TORCH_CHECK(false, "flex_attn has no kernel for sm_90a with head_dim ", d, ", head_dim_v ", dv, ", tiles of ",
                  tile_cols, " keys and ", softcap ? "a" : "no", " softcap");
}

void check_plan(const Tensor& x, const char* name, int64_t width) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int && x.dim() == 2 && x.size(1) == width && x.is_contiguous(), name,
                  " must be a contiguous int32 tensor [n, ", width, "], got shape ", shape_text(x));
}

// softcap * tanh(scale / softcap * x), in powers of two.
Softcap softcap_of(double scale, double softcap) {
  constexpr double kLog2e = 1.4426950408889634, kSmall = 1. / 3;
  // tanh(x) / x in powers of x^2, minimax for |x| <= kSmall: within 3e-8.
  constexpr double kPoly[4] = {0.9999999764259748, -0.3333265013890008, 0.1330226640181583, -0.049400007628006726};
  if (softcap <= 0) return {};
  const double inner = scale / softcap;
  Softcap c{float(inner), float(softcap * kLog2e), float(kSmall * kSmall / (inner * inner)), {}};
  double power = scale * kLog2e;
  for (int i = 0; i < 4; ++i, power *= inner * inner) c.poly[i] = float(kPoly[i] * power);
  return c;
}

// A dense float32 tensor of rows.
Tensor row_term(const Tensor& x, const char* name, const std::vector<int64_t>& shape) {
  check_shape(x, name, shape);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, name, " must be float32, got ",
                  torch::headeronly::toString(x.scalar_type()));
  return torch::stable::contiguous(x);
}
const float* floats(const Tensor& x) { return static_cast<const float*>(x.data_ptr()); }

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                           const Tensor& items, const Tensor& runs, const Tensor& bands,
                                           const Tensor& splits, const MaybeTensor& sink_in,
                                           const MaybeTensor& out_before_in, const MaybeTensor& lse_before_in,
                                           int64_t tile_rows, int64_t tile_cols, int64_t num_slots, double scale,
                                           double softcap, bool out_float32, bool return_max_logits,
                                           int64_t sm_margin) {
  STD_TORCH_CHECK(q_in.dim() == 3 && k_in.dim() == 3 && v_in.dim() == 3,
                  "q, k and v must be [rows, heads, head_dim], got ", shape_text(q_in), ", ", shape_text(k_in), ", ",
                  shape_text(v_in));
  const int64_t sq = q_in.size(0), hq = q_in.size(1), d = q_in.size(2);
  const int64_t sk = k_in.size(0), hkv = k_in.size(1), dv = v_in.size(2);
  check_shape(k_in, "k", {sk, hkv, d});
  check_shape(v_in, "v", {sk, hkv, dv});
  const ScalarType dtype = q_in.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "flex_attn has CUDA kernels for bfloat16 and float16, got ", torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(k_in.scalar_type() == dtype && v_in.scalar_type() == dtype, "q, k and v must have one dtype");
  STD_TORCH_CHECK(hkv > 0 && hq % hkv == 0, "the heads of q must be a multiple of those of k, got ", hq, " and ", hkv);
  STD_TORCH_CHECK(d % 8 == 0 && dv % 8 == 0 && d > 0 && dv > 0, "head dims must be multiples of 8, got ", d, " and ",
                  dv);
  STD_TORCH_CHECK(scale > 0, "scale must be positive here, got ", scale, "; give other ones to q");
  check_plan(items, "items", 8);
  check_plan(runs, "runs", 4);
  check_plan(bands, "bands", 8);
  check_plan(splits, "splits", 4);
  const auto& instance = choose_instance(d, dv, tile_cols, softcap > 0);
  const int64_t heads_in_tile = tile_rows > 0 ? instance.rows / tile_rows : 0;
  STD_TORCH_CHECK(heads_in_tile > 0 && heads_in_tile <= 8 && (heads_in_tile & (heads_in_tile - 1)) == 0 &&
                      heads_in_tile * tile_rows == instance.rows && (hq / hkv) % heads_in_tile == 0,
                  "tile_rows must be ", instance.rows, " divided by 1, 2, 4 or 8 heads that share a KV head, got ",
                  tile_rows, " for ", hq / hkv, " query heads per KV head");
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  const int32_t device = q_in.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  int major = 0, minor = 0, sms = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the capability");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for the capability");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "asking for the number of SMs");
  STD_TORCH_CHECK(major == 9 && minor == 0, "this kernel is for compute capability 9.0, got ", major, ".", minor);
  STD_TORCH_CHECK(sm_margin >= 0 && sm_margin < sms, "sm_margin must leave at least one of the ", sms, " SMs, got ",
                  sm_margin);

  Tensor out = torch::stable::new_empty(q_in, {sq, hq, dv}, out_float32 ? ScalarType::Float : dtype);
  Tensor lse = torch::stable::new_empty(q_in, {sq, hq}, ScalarType::Float);
  Tensor max_logits = torch::stable::new_empty(q_in, {return_max_logits ? hq : 0}, ScalarType::Float);
  if (return_max_logits) torch::stable::fill_(max_logits, -std::numeric_limits<double>::infinity());
  if (sq == 0) return {out, lse, max_logits};

  const Tensor q = readable_by_tma(q_in), k = readable_by_tma(k_in), v = readable_by_tma(v_in);
  Tensor next_work = torch::stable::new_empty(q_in, {1}, ScalarType::Int);
  void* handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &handle));
  const auto stream = static_cast<cudaStream_t>(handle);
  check_cuda(cudaMemsetAsync(next_work.data_ptr(), 0, sizeof(int32_t), stream), "clearing the work counter");

  sm90::ForwardParams p{};
  p.q = tensor_map(q, heads_in_tile, tile_rows);
  // Without keys no tile is loaded, and a result of float32 is not stored by TMA; maps of nothing do not exist.
  p.k = sk ? tensor_map(k, 1, tile_cols) : p.q;
  p.v = sk ? tensor_map(v, 1, tile_cols) : p.q;
  p.out_tile = out_float32 ? p.q : tensor_map(out, heads_in_tile, 64 / heads_in_tile);
  p.walk = {static_cast<const TileItem*>(items.data_ptr()),
            static_cast<const TileRun*>(runs.data_ptr()),
            static_cast<const TileBand*>(bands.data_ptr()),
            int32_t(items.size(0)),
            int32_t(hq / heads_in_tile),
            1,
            false,
            static_cast<int32_t*>(next_work.data_ptr())};
  while ((1 << p.heads_shift) < heads_in_tile) ++p.heads_shift;
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
  Tensor partial_out = torch::stable::new_empty(q_in, {num_slots, tile_rows, hq, dv}, ScalarType::Float);
  Tensor partial_lse = torch::stable::new_empty(q_in, {num_slots, tile_rows, hq}, ScalarType::Float);
  p.partial_out = static_cast<float*>(partial_out.data_ptr());
  p.partial_lse = static_cast<float*>(partial_lse.data_ptr());
  const int blocks = int(std::min<int64_t>(sms - sm_margin, int64_t(p.walk.n_items) * p.walk.n_groups));
  check_cuda(instance.launch(p, dtype == ScalarType::BFloat16, blocks, stream), "launching flex_attn_fwd");
  if (splits.size(0) == 0) return {out, lse, max_logits};
  sm90::CombineParams c{};
  c.splits = static_cast<const TileSplit*>(splits.data_ptr());
  c.n_splits = int32_t(splits.size(0));
  c.tile_tokens = int32_t(tile_rows), c.num_heads_q = int32_t(hq), c.head_dim_v = int32_t(dv);
  c.partial_out = p.partial_out, c.partial_lse = p.partial_lse;
  c.out = p.out, c.out_float32 = out_float32, c.bfloat16 = dtype == ScalarType::BFloat16, c.lse = p.lse;
  c.terms = p.terms;
  check_cuda(sm90::combine_splits(c, stream), "launching the combination of split rows");
  return {out, lse, max_logits};
}

}  // namespace
}  // namespace magi::cuda

STABLE_TORCH_LIBRARY_IMPL(torch_magi, CUDA, m) { m.impl("flex_attn_fwd_sm90", TORCH_BOX(&magi::cuda::forward)); }
