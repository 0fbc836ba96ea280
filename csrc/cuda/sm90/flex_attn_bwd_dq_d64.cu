// Head dim 64. With a softcap tiles of 128 keys spill.
#include "flex_attn_bwd_dq.cuh"

namespace magi::cuda::sm90 {

const DqInstance kDq64 = dq::instance_of<dq::Shape<64, 64, 128, 2, 3, 2>, false>();
const DqInstance kDq64Softcap = dq::instance_of<dq::Shape<64, 64, 96, 2, 3, 2>, true>();

}  // namespace magi::cuda::sm90
