// Head dim 192 with values of 128, as in multi-head latent attention.
#include "flex_attn_fwd.cuh"

namespace magi::cuda::sm90 {

const ForwardInstance kForward192{192, 128, 96, launch<192, 128, 96, 2>};

}  // namespace magi::cuda::sm90
