// Head dim 256: one stage of Q, as two leave room for tiles of 48 keys only.
#include "flex_attn_fwd.cuh"

namespace magi::cuda::sm90 {

const ForwardInstance kForward256{256, 256, 80, launch<256, 256, 80, 1>};

}  // namespace magi::cuda::sm90
