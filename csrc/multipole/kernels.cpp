// Compiled once per instruction set, like ../kernels.cpp.
#include "backward.h"

namespace SQ_NS {

extern const SqMultipoleKernels multipole_kernels;
const SqMultipoleKernels multipole_kernels = {multipole::forward, multipole::backward};

}  // namespace SQ_NS
