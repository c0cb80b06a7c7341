// Compiled once per instruction set, like ../kernels.cpp.
#include "backward.h"

namespace SQ_NS {

extern const SqLshKernels lsh_kernels;
const SqLshKernels lsh_kernels = {lsh::forward, lsh::backward};

}  // namespace SQ_NS
