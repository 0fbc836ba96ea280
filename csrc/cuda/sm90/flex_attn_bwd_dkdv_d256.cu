// Head dim 256: one gradient a launch. With dK there is room for one stage of dO.
#include "flex_attn_bwd_dkdv.cuh"

namespace magi::cuda::sm90 {

using ShapeDk256 = DkDvShape<256, 256, true, false, 1, 2, 1>;
using ShapeDv256 = DkDvShape<256, 256, false, true, 1, 2, 2>;
const DkDvInstance kDk256 = dkdv_instance<ShapeDk256, false>();
const DkDvInstance kDv256 = dkdv_instance<ShapeDv256, false>();
const DkDvInstance kDk256Softcap = dkdv_instance<ShapeDk256, true>();
const DkDvInstance kDv256Softcap = dkdv_instance<ShapeDv256, true>();

}  // namespace magi::cuda::sm90
