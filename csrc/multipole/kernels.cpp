// Compiled once per instruction set, like ../kernels.cpp.
#include "backward.h"
#include "constant.h"

namespace SQ_NS {

extern const SqMultipoleKernels multipole_kernels;
const SqMultipoleKernels multipole_kernels = {
    multipole::forward, multipole::backward, multipole::statistics_floats, multipole::step,      multipole::cluster,
    multipole::page,    multipole::grow,     multipole::absorb,            multipole::summarise, VL};

}  // namespace SQ_NS
