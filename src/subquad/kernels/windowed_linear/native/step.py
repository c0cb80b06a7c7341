"""One token by the native kernels: the whole state in, the whole state out, with as little Python as there can be.

At batch 1 the library needs some 20 microseconds for such a step, less than torch's dispatcher for a few operators.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from ....state import State, Tokens
from ...native import library
from ...native.library import CallStruct, check_status
from ...native.pool import new_states, states_exceed_caches
from ..map_arrays import NOTHING
from .maps import NativeMap
from .operator import Batched, Inputs, Options, make_call, past_sums, sums_after, write

__all__ = ["linear_step", "window_step"]

_ALL_REAL = Batched()
_STATES = struct.Struct("6P")  # s_in .. c_out
_TAIL = struct.Struct("7P")  # count .. sink_v_out


def linear_step(
    found: NativeMap, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: State, normalise: bool
) -> tuple[Tensor, State]:
    """out (B, Hq, 1, E) and the state after the token; q, k as the map takes them. Nothing that was given is changed.

    The parts of the new state lie in one block of memory, which lives as long as any of them.
    """
    assert state.far is not None
    masks = _ALL_REAL if key_mask is None else Batched(far_mask=key_mask)
    options = Options(*found.options, scale=1.0, window=-1, past=0, causal=True, normalise=normalise, tail=True)
    call = make_call(Inputs(q, k, v), masks, found.map.arrays, options, found.packed)
    width = v.shape[3]
    shape = (call.batch, call.heads_kv, call.features)
    out = torch.empty((*q.shape[:3], width), dtype=v.dtype)
    past, after = past_sums(state.far), new_states((*shape, width), shape, shape)
    call.non_temporal = states_exceed_caches()
    write(call, "out", out)
    _STATES.pack_into(call, CallStruct.s_in.offset, *(x.data_ptr() for x in (*past, *after)))
    check_status(library.load().subquad_step(ctypes.byref(call)))
    count = state.count + (1 if key_mask is None else key_mask.sum(-1))
    return out, State(count, sums_after(state.far, *after), None, None, state.origin, None, state.scale)


def window_step(
    found: NativeMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far: tuple[Tensor, Tensor],
    key_mask: Tensor | None,
    state: State,
    gain: Tensor,
    scale: float,
) -> tuple[Tensor, State]:
    """out (B, Hq, 1, E) in float32 and the state after the token; nothing that was given is changed.

    far: q (B, Hq, 1, .) and the key that leaves the window (B, H, 1, .) as the far map takes them; key_mask (B, 1).
    """
    assert state.window is not None and state.sinks is not None
    tokens = [x if x.is_contiguous() else x.contiguous() for x in (*state.window, *state.sinks)]
    window_k, window_v, sink_k, sink_v = tokens
    window = window_k.shape[2]
    key_mask = None if key_mask is None else key_mask.contiguous()
    past = [] if state.far is None else past_sums(state.far)
    options = Options(*found.options, scale=scale, window=window, past=window, causal=True, normalise=True, tail=False)
    keys, values = (window_k, window_v) if window else (k, v)
    arrays = [*found.map.arrays, found.map.tilt]
    weighted, normaliser, log_max = past or [NOTHING] * 3
    inputs = Inputs(q, keys, values, NOTHING, NOTHING, *far, weighted, normaliser, gain)
    call = make_call(inputs, Batched(log_max), arrays, options, found.packed_rows)
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=torch.float32)
    write(call, "out", out)
    write(call, "token_k", k)
    write(call, "token_v", v)
    call.sinks = sink_k.shape[2]
    if call.sinks:
        write(call, "sink_k", sink_k)
        write(call, "sink_v", sink_v)
    floats = new_states(*(x.shape for x in (*past, *tokens)))
    call.non_temporal = states_exceed_caches()
    count = torch.empty_like(state.count)
    if past:
        call.s_out, call.z_out, call.c_out = (x.data_ptr() for x in floats[:3])
    window_k, window_v, sink_k, sink_v = floats[-4:]
    _TAIL.pack_into(
        call,
        CallStruct.count.offset,
        state.count.data_ptr(),
        0 if key_mask is None else key_mask.data_ptr(),
        *(x.data_ptr() for x in (count, window_k, window_v, sink_k, sink_v)),
    )
    check_status(library.load().subquad_step(ctypes.byref(call)))
    sums = None if state.far is None else sums_after(state.far, *floats[:3])
    return out, State(
        *(count, sums, Tokens(window_k, window_v), Tokens(sink_k, sink_v)),
        *(state.origin, state.feature_map, state.scale),
    )
