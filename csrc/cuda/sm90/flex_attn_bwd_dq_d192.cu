// Head dim 192 with values of 128, as in multi-head latent attention.
#include "flex_attn_bwd_dq.cuh"

namespace magi::cuda::sm90 {

const DqInstance kDq192 = dq::instance_of<dq::Shape<192, 128, 80, 1, 3, 2>, false>();
const DqInstance kDq192Softcap = dq::instance_of<dq::Shape<192, 128, 64, 1, 3, 2>, true>();

}  // namespace magi::cuda::sm90
