// Head dim 128. With a softcap there are no registers for both gradients: each has a launch of its own.
#include "flex_attn_bwd_dkdv.cuh"

namespace magi::cuda::sm90 {

const DkDvInstance kDkDv128 = dkdv_instance<DkDvShape<128, 128, true, true, 2, 3, 3>, false>();
const DkDvInstance kDk128Softcap = dkdv_instance<DkDvShape<128, 128, true, false, 2, 3, 3>, true>();
const DkDvInstance kDv128Softcap = dkdv_instance<DkDvShape<128, 128, false, true, 2, 3, 3>, true>();

}  // namespace magi::cuda::sm90
