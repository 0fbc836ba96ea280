// Head dim 192 with values of 128, as in multi-head latent attention.
#include "flex_attn_fwd.cuh"

namespace magi::cuda::sm90 {

const ForwardInstance kForward192 = instance_of<Shape<192, 128, 96, 2, 2>, false>();
const ForwardInstance kForward192Softcap = instance_of<Shape<192, 128, 96, 2, 2>, true>();

}  // namespace magi::cuda::sm90
