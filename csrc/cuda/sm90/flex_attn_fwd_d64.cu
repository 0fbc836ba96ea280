// Head dim 64. The softmax of a tile takes as long as its products: with two warpgroups this ran at 0.7 of the speed
// that the third one gives. 112 keys in a tile lose 5 % against 128, which spill with a softcap.
#include "flex_attn_fwd.cuh"

namespace magi::cuda::sm90 {

const ForwardInstance kForward64 = instance_of<Shape<64, 64, 128, 2, 3>, false>();
const ForwardInstance kForward64Softcap = instance_of<Shape<64, 64, 112, 2, 3>, true>();

}  // namespace magi::cuda::sm90
