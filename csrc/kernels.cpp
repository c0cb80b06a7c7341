// Compiled once per instruction set (see CMakeLists.txt): SQ_NS names the namespace, SQ_VL the lanes.
#include "hybrid_backward.h"
#include "hybrid_decode.h"

namespace SQ_NS {

extern const SqKernels kernels;
const SqKernels kernels = {forward,        backward,        decode,        project_only,
                           hybrid_forward, hybrid_backward, hybrid_decode};

}  // namespace SQ_NS
