// Elements that are loaded and stored together.
#pragma once

namespace magi::cuda {

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T v[kWidth];
};

}  // namespace magi::cuda
