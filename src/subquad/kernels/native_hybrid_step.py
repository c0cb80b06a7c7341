"""One token of causal hybrid attention by the native kernels: the whole state in, the whole state out, in one call."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from . import native_library as library
from .native import Form
from .native_library import DTYPES, FUNCTIONS, Hybrid, Problem, Step
from .native_memory import new_states, states_exceed_caches
from .native_operators import HEADER, MAPS, TENSOR, check_status

__all__ = ["Memory", "call_step"]


class Memory(NamedTuple):
    """What a state holds: the far sums, window and sinks, masks, and counts (csrc/problem.h, SqStep)."""

    weighted: Tensor  # (B, H, M, E)
    normaliser: Tensor  # (B, H, M)
    log_max: Tensor  # (B, H, M)
    window_k: Tensor  # (B, H, w, D)
    window_v: Tensor  # (B, H, w, E)
    sink_k: Tensor  # (B, H, N, D)
    sink_v: Tensor  # (B, H, N, E)
    window_mask: Tensor  # (B, w)
    sink_mask: Tensor  # (B, N)
    length: Tensor  # (B,)
    start: Tensor
    seen: Tensor  # far keys


def _at(name: str) -> int:
    """The offset of a field of the far problem inside a Step."""
    return int(Step.hy.offset + Hybrid.far.offset + getattr(Problem, name).offset)


_FAR = {name: _at(name) for name in ("q", "k", "v", "out", "map_q")}
_NEAR = {name: Step.hy.offset + getattr(Hybrid, name).offset for name in ("near_q", "near_k", "sink_k", "sink_v")}
_TOKEN = {name: getattr(Step, name).offset for name in ("token_k", "token_v")}


# length .. token_mask, length_out .. sink_v_out: the pointers behind the tensors.
_TAIL = struct.Struct("6P9P")


def _fill(step: Step, at: int, x: Tensor) -> None:
    TENSOR.pack_into(step, at, x.data_ptr(), *x.stride(), DTYPES[x.dtype], 0)


def call_step(
    form: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far_q: Tensor,
    far_k: Tensor,
    key_mask: Tensor | None,
    memory: Memory,
    gain: Tensor | None,
    scale: float,
    maps: bytes,
) -> tuple[Tensor, Memory]:
    """out (B, Hq, 1, E) in float32 and the memory after the token; nothing that was given is changed.

    q, far_q (B, Hq, 1, .), k, v (B, H, 1, .): the token; far_k (B, H, 1, .): the one that leaves the window, as the far
    map takes it; key_mask (B, 1); gain (Hq,). The memory is contiguous, its floats are float32.
    """
    batch, heads, width = k.shape[0], k.shape[1], v.shape[3]
    features, window, sinks = memory.normaliser.shape[2], memory.window_mask.shape[1], memory.sink_mask.shape[1]
    step = Step()
    key_mask = None if key_mask is None else key_mask.contiguous()
    weight, signs, norms = form.arrays[0], form.arrays[5], form.arrays[6]
    HEADER.pack_into(
        step,
        _at("batch"),
        *(batch, q.shape[1], heads, 1, 1, far_q.shape[3], width, features),
        *(features // 2 if form.antithetic else features, 0, 1),
        *(FUNCTIONS[form.function], 0 if weight.numel() else 1 if norms.numel() else 2, form.antithetic, 1),
        *(signs.shape[-2] if norms.numel() and not weight.numel() else 0, 1, torch.get_num_threads(), 0),
        *(form.epsilon, 0.0, 0, 0),
    )
    memoryview(step).cast("B")[_FAR["map_q"] : _FAR["map_q"] + MAPS[1]] = maps
    out = torch.empty((batch, q.shape[1], 1, width), dtype=torch.float32)
    for at, tensor in (
        (_FAR["q"], far_q),
        (_FAR["k"], far_k),
        (_FAR["v"], memory.window_v if window else v),
        (_FAR["out"], out),
        (_NEAR["near_q"], q),
        (_NEAR["near_k"], memory.window_k),
        (_NEAR["sink_k"], memory.sink_k),
        (_NEAR["sink_v"], memory.sink_v),
        (_TOKEN["token_k"], k),
        (_TOKEN["token_v"], v),
    ):
        _fill(step, at, tensor)
    hybrid, far = step.hy, step.hy.far
    hybrid.near_dim, hybrid.sinks, hybrid.window, hybrid.past, hybrid.scale = q.shape[3], sinks, window, window, scale
    if gain is not None:
        hybrid.gain = gain.data_ptr()
    floats = new_states(*(x.shape for x in memory[:7]))
    far.past_caches = states_exceed_caches()
    flags = [torch.empty_like(x) for x in memory[7:9]]
    counts = torch.empty((3, batch), dtype=torch.int64).unbind(0)
    after = Memory(*floats, *flags, *counts)
    far.s_in, far.z_in, far.c_in = (x.data_ptr() for x in memory[:3])
    far.s_out, far.z_out, far.c_out = (x.data_ptr() for x in floats[:3])
    window_mask, sink_mask, *numbers = (x.data_ptr() for x in memory[7:])
    window_mask_out, sink_mask_out, *numbers_out = (x.data_ptr() for x in after[7:])
    _TAIL.pack_into(
        step,
        Step.length.offset,
        *(*numbers, sink_mask, window_mask),
        0 if key_mask is None else key_mask.data_ptr(),
        *(*numbers_out, sink_mask_out, window_mask_out, *(x.data_ptr() for x in floats[3:])),
    )
    check_status(library.load().subquad_hybrid_decode(ctypes.byref(step)))
    return out, after
