// Compiled once per instruction set, like ../kernels.cpp.
#include "backward.h"

namespace SQ_NS {

extern const SqClusteredKernels clustered_kernels;
const SqClusteredKernels clustered_kernels = {clustered::forward, clustered::backward};

}  // namespace SQ_NS
