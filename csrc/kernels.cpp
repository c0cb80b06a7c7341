// Compiled once per instruction set (see CMakeLists.txt): SQ_NS names the namespace, SQ_VL the lanes.
#include "backward.h"
#include "forward.h"
#include "step.h"

namespace SQ_NS {

extern const SqKernels kernels;
const SqKernels kernels = {forward, backward, step, project_only};

}  // namespace SQ_NS
