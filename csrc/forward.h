// Entry point: out = (near + far) / normaliser for whole sequences or for the tokens after a state.
#pragma once

#include "window_bidirectional.h"

namespace SQ_NS {

static int forward(const SqCall* call) { return call->near ? window_forward(*call) : linear_forward(call); }

}  // namespace SQ_NS
