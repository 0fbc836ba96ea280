// Head dim 128. 96 keys in a tile take 25 cycles each on an H200, 64 keys 27; but with these a second stage of Q and dO
// fits, and short rows of keys are up to 18 % faster. Tiles of 112 spill.
#include "flex_attn_bwd_dq.cuh"

namespace magi::cuda::sm90 {

const DqInstance kDq128 = dq::instance_of<dq::Shape<128, 128, 96, 1, 3, 2>, false>();
const DqInstance kDq128Narrow = dq::instance_of<dq::Shape<128, 128, 64, 2, 3, 2>, false>();
const DqInstance kDq128Softcap = dq::instance_of<dq::Shape<128, 128, 80, 1, 3, 2>, true>();

}  // namespace magi::cuda::sm90
