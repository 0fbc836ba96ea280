// Head dim 256. Q and dO leave room for three stages of K and one of V: V is free again long before the next is needed.
#include "flex_attn_bwd_dq.cuh"

namespace magi::cuda::sm90 {

const DqInstance kDq256 = dq::instance_of<dq::Shape<256, 256, 48, 1, 3, 1>, false>();
const DqInstance kDq256Softcap = dq::instance_of<dq::Shape<256, 256, 48, 1, 3, 1>, true>();

}  // namespace magi::cuda::sm90
