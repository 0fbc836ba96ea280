// Head dim 192 with values of 128: one gradient a launch.
#include "flex_attn_bwd_dkdv.cuh"

namespace magi::cuda::sm90 {

using ShapeDk192 = DkDvShape<192, 128, true, false, 1, 3, 3>;
using ShapeDv192 = DkDvShape<192, 128, false, true, 2, 3, 3>;
const DkDvInstance kDk192 = dkdv_instance<ShapeDk192, false>();
const DkDvInstance kDv192 = dkdv_instance<ShapeDv192, false>();
const DkDvInstance kDk192Softcap = dkdv_instance<ShapeDk192, true>();
const DkDvInstance kDv192Softcap = dkdv_instance<ShapeDv192, true>();

}  // namespace magi::cuda::sm90
