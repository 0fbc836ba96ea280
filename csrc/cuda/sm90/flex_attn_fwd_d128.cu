// Head dim 128. 160 keys in a tile suit long rows of keys, 128 short ones; 176 fit only with one stage of Q and
// lose more between items than they gain (2.4 instead of 1.1 tile times). With a softcap there is so much to
// compute between the products that three warpgroups on smaller tiles are faster.
#include "flex_attn_fwd.cuh"

namespace magi::cuda::sm90 {

const ForwardInstance kForward128 = instance_of<Shape<128, 128, 128, 2, 2>, false>();
const ForwardInstance kForward128Wide = instance_of<Shape<128, 128, 160, 2, 2>, false>();
const ForwardInstance kForward128Softcap = instance_of<Shape<128, 128, 80, 2, 3>, true>();

}  // namespace magi::cuda::sm90
