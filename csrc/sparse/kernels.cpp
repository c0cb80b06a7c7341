// Compiled once per instruction set, like ../kernels.cpp.
#include "backward.h"

namespace SQ_NS {

extern const SqSparseKernels sparse_kernels;
const SqSparseKernels sparse_kernels = {sparse::forward, sparse::backward};

}  // namespace SQ_NS
