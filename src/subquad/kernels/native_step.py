"""One token by the native kernels: state in, state out, with as little Python around the call as there can be.

At batch 1 the library needs some 20 microseconds for such a step, less than torch's dispatcher for a few operators.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from . import native_library as library
from .native_library import Problem
from .native_memory import new_states, states_exceed_caches
from .native_operators import Attention, check_status, make_problem, write

__all__ = ["call_step"]

_STATES = struct.Struct("6P")  # s_in .. c_out
_NO_CHECKPOINTS = torch.empty(0)


def call_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    state: list[Tensor],
    form: tuple[list[Tensor], float, str, bool, float],
    *,
    normalise: bool,
    maps: bytes | None,
) -> Attention:
    """What `call_forward` returns for one token, causally and without a backward; form: its arguments from `arrays` to
    `epsilon`.

    The parts of the new state lie in one block of memory, which lives as long as any of them.
    """
    problem = make_problem(q, k, v, key_mask, *form, True, normalise, maps)
    width = v.shape[3]
    shape = (problem.batch, problem.heads_kv, problem.features)
    out = torch.empty((*q.shape[:3], width), dtype=v.dtype)
    sums, totals, maxima = after = new_states((*shape, width), shape, shape)
    if states_exceed_caches():
        problem.past_caches = 1
    write(problem, "out", out)
    _STATES.pack_into(problem, Problem.s_in.offset, *(x.data_ptr() for x in (*state, *after)))
    check_status(library.load().subquad_decode(ctypes.byref(problem)))
    return out, sums, totals, maxima, _NO_CHECKPOINTS
