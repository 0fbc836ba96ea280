// Head dim 256: one stage of Q, as two leave room for tiles of 48 keys only.
#include "flex_attn_fwd.cuh"

namespace magi::cuda::sm90 {

const ForwardInstance kForward256 = instance_of<Shape<256, 256, 80, 1, 2>, false>();
const ForwardInstance kForward256Softcap = instance_of<Shape<256, 256, 80, 1, 2>, true>();

}  // namespace magi::cuda::sm90
