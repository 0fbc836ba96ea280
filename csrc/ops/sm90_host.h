// What the host code of the kernels for sm_90a shares: checks, tensor maps for TMA, the device and its stream.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <optional>
#include <vector>

#include "../cuda/common/softcap.h"
#include "../cuda/common/stream.h"
#include "../cuda/sm90/plan_walk.h"
#include "checks.h"

namespace magi::cuda {

using MaybeTensor = std::optional<Tensor>;
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

constexpr int64_t kElement = 2;  // bytes of a bfloat16 or float16

// The driver's function, looked up so that nothing links to the driver.
inline EncodeTiled encode_tiled() {
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
inline Tensor readable_by_tma(const Tensor& x) {
  bool good = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && (x.size(2) <= 1 || x.stride(2) == 1);
  for (int64_t i = 0; i < 2; ++i) good &= x.size(i) <= 1 || (x.stride(i) > 0 && x.stride(i) * kElement % 16 == 0);
  return good ? x : torch::stable::contiguous(x);
}

// A map of [tokens, heads, dim] in boxes of 64 dims x `heads` heads x `tokens` tokens. What a box reaches past
// the tensor is read as 0 and not written.
inline CUtensorMap tensor_map(const Tensor& x, int64_t heads, int64_t tokens) {
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

inline void check_plan(const Tensor& x, const char* name, int64_t width) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int && x.dim() == 2 && x.size(1) == width && x.is_contiguous(), name,
                  " must be a contiguous int32 tensor [n, ", width, "], got shape ", shape_text(x));
}

// The walk through a tile plan (items, runs, bands), once for each group of heads.
inline sm90::Walk walk_of(const Tensor& items, const Tensor& runs, const Tensor& bands, int64_t n_groups,
                          int32_t* next_work) {
  check_plan(items, "items", 8);
  check_plan(runs, "runs", 4);
  check_plan(bands, "bands", 8);
  return {static_cast<const TileItem*>(items.data_ptr()),
          static_cast<const TileRun*>(runs.data_ptr()),
          static_cast<const TileBand*>(bands.data_ptr()),
          int32_t(items.size(0)),
          int32_t(n_groups),
          1,
          false,
          next_work};
}

// softcap * tanh(scale / softcap * x), in powers of two.
inline Softcap softcap_of(double scale, double softcap) {
  constexpr double kLog2e = 1.4426950408889634, kSmall = 1. / 3;
  // tanh(x) / x in powers of x^2, minimax for |x| <= kSmall: within 3e-8.
  constexpr double kPoly[4] = {0.9999999764259748, -0.3333265013890008, 0.1330226640181583, -0.049400007628006726};
  if (softcap <= 0) return {};
  const double inner = scale / softcap;
  Softcap c{float(2 * kLog2e * inner),
            float(softcap * kLog2e),
            float(1 / (softcap * kLog2e)),
            float(kSmall * kSmall / (inner * inner)),
            {}};
  double power = scale * kLog2e;
  for (int i = 0; i < 4; ++i, power *= inner * inner) c.poly[i] = float(kPoly[i] * power);
  return c;
}

// A dense float32 tensor of rows.
inline Tensor row_term(const Tensor& x, const char* name, const std::vector<int64_t>& shape) {
  check_shape(x, name, shape);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, name, " must be float32, got ",
                  torch::headeronly::toString(x.scalar_type()));
  return torch::stable::contiguous(x);
}
inline const float* floats(const Tensor& x) { return static_cast<const float*>(x.data_ptr()); }

struct Shapes {
  int64_t sq, sk, hq, hkv, d, dv;
};

// The shapes of q, k and v.
inline Shapes check_inputs(const Tensor& q, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, "q, k and v must be [rows, heads, head_dim], got ",
                  shape_text(q), ", ", shape_text(k), ", ", shape_text(v));
  const Shapes n{q.size(0), k.size(0), q.size(1), k.size(1), q.size(2), v.size(2)};
  check_shape(k, "k", {n.sk, n.hkv, n.d});
  check_shape(v, "v", {n.sk, n.hkv, n.dv});
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "flex_attn has CUDA kernels for bfloat16 and float16, got ", torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(k.scalar_type() == dtype && v.scalar_type() == dtype, "q, k and v must have one dtype");
  STD_TORCH_CHECK(n.hkv > 0 && n.hq % n.hkv == 0, "the heads of q must be a multiple of those of k, got ", n.hq,
                  " and ", n.hkv);
  STD_TORCH_CHECK(n.d % 8 == 0 && n.dv % 8 == 0 && n.d > 0 && n.dv > 0, "head dims must be multiples of 8, got ", n.d,
                  " and ", n.dv);
  return n;
}

// log2 of the query heads in a tile of `rows` rows.
inline int32_t heads_shift_of(const Shapes& n, int64_t rows, int64_t tokens) {
  const int64_t heads = tokens > 0 ? rows / tokens : 0;
  STD_TORCH_CHECK(
      heads > 0 && heads <= 8 && (heads & (heads - 1)) == 0 && heads * tokens == rows && (n.hq / n.hkv) % heads == 0,
      "a tile must have ", rows, " tokens divided by 1, 2, 4 or 8 heads that share a KV head, got ", tokens, " for ",
      n.hq / n.hkv, " query heads per KV head");
  int32_t shift = 0;
  while ((1 << shift) < heads) ++shift;
  return shift;
}

struct Launch {
  cudaStream_t stream;
  int64_t blocks;  // at most
};

// Call it under a guard of the device.
inline Launch launch_on(int32_t device, int64_t sm_margin) {
  int major = 0, minor = 0, sms = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the capability");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for the capability");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "asking for the number of SMs");
  STD_TORCH_CHECK(major == 9 && minor == 0, "this kernel is for compute capability 9.0, got ", major, ".", minor);
  STD_TORCH_CHECK(sm_margin >= 0 && sm_margin < sms, "sm_margin must leave at least one of the ", sms, " SMs, got ",
                  sm_margin);
  return {current_stream(device), sms - sm_margin};
}

}  // namespace magi::cuda
