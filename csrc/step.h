// Entry point: one token of every sequence, state in, new state out.
#pragma once

#include "linear_step.h"
#include "window_step.h"

namespace SQ_NS {

static int step(const SqCall* call) { return call->near ? window_step(*call) : linear_step(*call); }

}  // namespace SQ_NS
