"""One call of the native library: the tensors of `operators.attention` written into its struct, and what comes back.

`call_forward` and `call_backward` are the plain calls. `operators.py` gives them to tracers and to autograd, and says
what the arguments are.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...state import Sums
from . import library
from .library import DTYPES, FUNCTIONS, SEGMENT, CallStruct, Map, check_status

__all__ = [
    "NOWHERE",
    "NO_MASK",
    "NO_PLACES",
    "PACKED_SIZE",
    "Options",
    "Results",
    "call_backward",
    "call_forward",
    "empty_gradients",
    "empty_results",
    "make_call",
    "pack_maps",
    "past_sums",
    "projection_rows",
    "sums_after",
    "write",
]

NO_MASK = torch.empty(0, dtype=torch.bool)
NO_PLACES = torch.empty(0, dtype=torch.int64)
# The place of a sink that is not there.
NOWHERE = 1 << 40

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# Filling ctypes fields one by one costs more than a decode step; these write whole runs of them.
_HEADER = struct.Struct("11q8if3i")
_TENSOR = struct.Struct("P4q2i")
_TENSORS = "q k v out dout dq dk dv near_q near_k sink_k sink_v near_dq near_dk sink_dk sink_dv token_k token_v".split()
_PLACES = {name: getattr(CallStruct, name).offset for name in _TENSORS}
_MAPS = CallStruct.map_q.offset
PACKED_SIZE = ctypes.sizeof(Map) * 2


class Options(NamedTuple):
    """What a call has besides tensors, in the order in which the operators take it."""

    square: float
    function: str
    antithetic: bool
    epsilon: float
    scale: float
    window: int
    past: int
    causal: bool
    normalise: bool
    tail: bool

    @property
    def near(self) -> bool:
        """Whether there is a window."""
        return self.window >= 0


def past_sums(sums: Sums) -> list[Tensor]:
    """S, z, c of a state as the library takes them: contiguous float32, c of the shape of z."""
    weighted, normaliser, log_max = sums
    if log_max.shape[-1] != normaliser.shape[-1]:
        log_max = log_max.expand_as(normaliser)
    given = (weighted, normaliser, log_max)
    # `to` and `contiguous` of what is right already would cost a good part of a decode step.
    return [x if x.dtype == torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous() for x in given]


def sums_after(before: Sums, weighted: Tensor, normaliser: Tensor, log_max: Tensor) -> Sums:
    """What comes back, as a state holds it: maps without a log scale keep their c = 0 of shape (B, H, 1)."""
    shared = before.log_max.shape[-1] == 1 and log_max.shape[-1] != 1
    return Sums(weighted, normaliser, before.log_max if shared else log_max.detach())


def pack_maps(arrays: Sequence[Tensor], square: float) -> bytes:
    """The two maps as the library sees them; valid as long as `arrays` live.

    arrays: those of `Arrays`; a sixth is the queries' own tilt (h, D) or empty, and says that their scale matters
    (beside near keys).
    """
    weight, bias, tilt, signs, norms, *own = arrays
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in arrays)
    maps = (Map * 2)()
    for side, leaning in zip(maps, (*(own or [weight.new_empty(0)]), tilt), strict=True):
        named = {"weight": weight, "bias": bias, "signs": signs, "norms": norms, "tilt": leaning}
        for name, array in named.items():
            if array.numel():
                setattr(side, name, array.data_ptr())
                setattr(side, f"{name}_head", array.stride(0) if array.shape[0] > 1 else 0)
    maps[0].square, maps[1].square = square if own else 0.0, square
    return bytes(maps)


def write(call: CallStruct, name: str, x: Tensor) -> None:
    """`x` (B, H, L, width) as the library sees it; the caller keeps `x` alive."""
    _TENSOR.pack_into(call, _PLACES[name], x.data_ptr(), *x.stride(), DTYPES[x.dtype], 0)


def projection_rows(q: Tensor, weight: Tensor, norms: Tensor, function: str) -> int:
    """Rows of the projection; q as the far map takes it."""
    if function == "none":
        return 0
    if function == "taylor":
        return int(1 + q.shape[-1] * (q.shape[-1] + 3) // 2)
    return int(weight.shape[-2] if weight.numel() else norms.shape[-1] if norms.numel() else q.shape[-1])


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: Sequence[Tensor],
    options: Options,
    *,
    maps: bytes | None = None,
) -> CallStruct:
    """The call for the library; the caller keeps every tensor alive, and has made states, masks and gain contiguous.

    maps: `pack_maps(arrays, square)`, where the caller keeps it.
    """
    square, function, antithetic, epsilon, scale, window, past, causal, normalise, tail = options
    near = options.near
    far_q, far_k = far or (q, k)
    weight, _, _, signs, norms, *_ = arrays
    rows = projection_rows(far_q, weight, norms, function)
    projection = 0 if weight.numel() else 1 if norms.numel() else 2
    batch, heads_q, length, dim = far_q.shape
    heads, stored = k.shape[1], k.shape[2]
    call = CallStruct()
    _HEADER.pack_into(
        call,
        0,
        *(batch, heads_q, heads, length, length + tail if near else stored, dim, v.shape[3]),
        *(rows * 2 if antithetic else rows, rows, past - window - 1 if near else 0, stored),
        *(FUNCTIONS[function], projection, antithetic, near or causal, signs.shape[-2] if projection == 1 else 0),
        *(normalise, torch.get_num_threads(), 0, epsilon, 0, 0, near),
    )
    write(call, "q", far_q)
    write(call, "k", far_k)
    write(call, "v", v)
    memoryview(call).cast("B")[_MAPS : _MAPS + PACKED_SIZE] = pack_maps(arrays, square) if maps is None else maps
    far_mask, near_mask, places = masks
    if far_mask.numel():
        call.key_mask = far_mask.data_ptr()
        call.mask_batch, call.mask_token = far_mask.stride()
    if state:
        call.s_in, call.z_in, call.c_in = (x.data_ptr() for x in state)
    if not near:
        return call
    write(call, "near_q", q)
    write(call, "near_k", k)
    if near_mask.numel():
        call.near_mask = near_mask.data_ptr()
        call.near_batch, call.near_token = near_mask.stride()
    if sinks:
        write(call, "sink_k", sinks[0])
        write(call, "sink_v", sinks[1])
        call.sinks, call.sink_place = sinks[0].shape[2], places.data_ptr()
    if gain.numel():
        call.gain = gain.data_ptr()
    call.near_dim, call.window, call.past = q.shape[3], window, past
    call.both_sides, call.scale = not causal, scale
    return call


def empty_results(q: Tensor, k: Tensor, v: Tensor, features: int, options: Options, keep: bool) -> Results:
    near, causal, tail = options.near, options.causal, options.tail
    batch, heads, width = q.shape[0], k.shape[1], v.shape[3]
    # The backward takes sum(dout * out) of every row, so a rounded output would be an error of every gradient.
    out = torch.empty((*q.shape[:3], width), dtype=torch.float32 if keep else v.dtype, device=v.device)
    stats, sums, totals, maxima, kept = (  # the results of an operator must not be one tensor
        torch.empty(0, dtype=torch.float32, device=v.device) for _ in range(5)
    )
    if near:
        stats = stats.new_empty((*q.shape[:3], 2))
    # The backward of full attention reads the state that every query has read.
    if tail or (keep and not near):
        sums = stats.new_empty((batch, heads, features, width))
        totals = stats.new_empty((batch, heads, features))
        maxima = torch.empty_like(totals)
    tokens = q.shape[2] + tail if near else k.shape[2]
    if keep and (near or causal):
        # One run of checkpoints per walk: along the sequence and, near without a causal mask, from its end.
        segments = (tokens + SEGMENT - 1) // SEGMENT * (2 if near and not causal else 1)
        kept = stats.new_empty((batch, heads, segments, features * (width + 2)))
    return out, sums, totals, maxima, stats, kept


def call_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: Sequence[Tensor],
    options: Options,
    *,
    keep: bool,
    maps: bytes | None = None,
) -> Results:
    """The forward itself, without torch's dispatcher around it; `operators.attention` says what the arguments are."""
    state, masks = ([x.contiguous() for x in some] for some in (state, masks))  # a tracer may have changed the strides
    call = make_call(q, k, v, sinks, far, state, masks, gain.contiguous(), arrays, options, maps=maps)
    results = empty_results(q, k, v, call.features, options, keep)
    out, sums, totals, maxima, stats, kept = results
    write(call, "out", out)
    if sums.numel() or totals.numel():
        call.s_out, call.z_out, call.c_out = sums.data_ptr(), totals.data_ptr(), maxima.data_ptr()
    call.stats = stats.data_ptr() or None
    call.checkpoints = kept.data_ptr() or None
    call.differentiable = keep
    kernels = library.load()
    single = not options.near and options.causal and options.tail and not keep and q.shape[2] == k.shape[2] == 1
    check_status((kernels.subquad_step if single else kernels.subquad_forward)(ctypes.byref(call)))
    return results


def call_backward(
    grads: list[Tensor],
    saved: list[Tensor],
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    options: Options,
) -> list[Tensor]:
    """The backward itself, without torch's dispatcher around it; the arguments are those of `attention_backward`."""
    near = options.near
    q, k, v, out, sums, totals, maxima, stats, kept = saved
    state, masks, grads = ([x.contiguous() for x in some] for some in (state, masks, grads))
    gain, stats, kept, sums, totals, maxima = (x.contiguous() for x in (gain, stats, kept, sums, totals, maxima))
    call = make_call(q, k, v, sinks, far, state, masks, gain, arrays, options)
    results = empty_gradients(saved, sinks, far, state, gain, summed=near)
    dq, dk, dv, dsink_k, dsink_v, dfar_q, dfar_k, ds_in, dz_in, dgain = results
    for name, tensor in (("out", out), ("dout", grads[0]), ("dv", dv)):
        write(call, name, tensor)
    write(call, "dq", dfar_q if far else dq)
    write(call, "dk", dfar_k if far else dk)
    if near:
        write(call, "near_dq", dq)
        write(call, "near_dk", dk)
        if sinks:
            write(call, "sink_dk", dsink_k)
            write(call, "sink_dv", dsink_v)
        call.accumulate = 1
        if gain.numel():
            call.gain_grad = dgain.data_ptr()
    call.stats, call.checkpoints = stats.data_ptr() or None, kept.data_ptr() or None
    if totals.numel():
        call.s_out, call.z_out, call.c_out = sums.data_ptr(), totals.data_ptr(), maxima.data_ptr()
        call.ds_out, call.dz_out = grads[1].data_ptr(), grads[2].data_ptr()
    if state:
        call.ds_in, call.dz_in = ds_in.data_ptr(), dz_in.data_ptr()
    check_status(library.load().subquad_backward(ctypes.byref(call)))
    if not near:
        return results
    like = empty_gradients(saved, sinks, far, state, gain, summed=False, device=torch.device("meta"))
    return [x.to(y.dtype) for x, y in zip(results, like, strict=True)]


def empty_gradients(
    saved: list[Tensor],
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    gain: Tensor,
    summed: bool,
    device: torch.device | None = None,
) -> list[Tensor]:
    """Zeros for what is `summed` in float32, or tensors of the shapes and dtypes that are handed back."""
    q = saved[0]
    none = q.new_empty(0)
    inputs = [*saved[:3], *(sinks or [none, none]), *(far or [none, none]), *(state[:2] or [none, none])]
    make = torch.zeros if summed else torch.empty
    device = q.device if device is None else device
    made = [make(x.shape, dtype=torch.float32 if summed else x.dtype, device=device) for x in inputs]
    per_batch = (q.shape[0], gain.shape[0]) if gain.numel() else (0,)
    return [*made, make(per_batch, dtype=torch.float32, device=device)]
