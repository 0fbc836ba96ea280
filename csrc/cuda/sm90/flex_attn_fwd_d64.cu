// Head dim 64.
#include "flex_attn_fwd.cuh"

namespace magi::cuda::sm90 {

const ForwardInstance kForward64{64, 64, 128, launch<64, 64, 128, 2>};

}  // namespace magi::cuda::sm90
