// The linear forward with products of bfloat16 pairs, compiled once per way to form them (see CMakeLists.txt).
#define SQ_PAIRS 1
#include "../linear_forward.h"

namespace SQ_NS {

extern const SqPairKernels pair_kernels;
const SqPairKernels pair_kernels = {linear_forward, check_pairs};

}  // namespace SQ_NS
