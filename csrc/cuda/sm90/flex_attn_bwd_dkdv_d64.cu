// Head dim 64.
#include "flex_attn_bwd_dkdv.cuh"

namespace magi::cuda::sm90 {

using Shape64 = DkDvShape<64, 64, true, true, 2, 4, 4>;
const DkDvInstance kDkDv64 = dkdv_instance<Shape64, false>();
const DkDvInstance kDkDv64Softcap = dkdv_instance<Shape64, true>();

}  // namespace magi::cuda::sm90
