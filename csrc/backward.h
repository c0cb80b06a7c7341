// Entry point: gradients of everything that `forward` read.
#pragma once

#include "window_backward.h"

namespace SQ_NS {

static int backward(const SqCall* call) { return call->near ? window_backward(*call) : linear_backward(call); }

}  // namespace SQ_NS
