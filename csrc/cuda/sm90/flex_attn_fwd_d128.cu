// Head dim 128. 160 keys in a tile suit long rows of keys, 128 short ones; 176 fit only with one stage of Q and
// lose more between items than they gain (2.4 instead of 1.1 tile times).
#include "flex_attn_fwd.cuh"

namespace magi::cuda::sm90 {

const ForwardInstance kForward128{128, 128, 128, launch<128, 128, 128, 2>};
const ForwardInstance kForward128Wide{128, 128, 160, launch<128, 128, 160, 2>};

}  // namespace magi::cuda::sm90
