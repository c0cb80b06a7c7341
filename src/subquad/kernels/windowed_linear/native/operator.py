"""Windowed linear attention in the library: its tensors written into the struct of a call, and what comes back.

`attention` is the torch operator (see `TorchOperator` for its forms); a decode step uses `make_call` alone.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....state import Sums
from ...native import library
from ...native.library import DTYPES, FUNCTIONS, SEGMENT, CallStruct, Map, check_status
from ...native.torch_operator import NO_MASK, TorchOperator
from ..map_arrays import NOTHING

__all__ = [
    "NOWHERE",
    "NO_PLACES",
    "PACKED_SIZE",
    "Batched",
    "Inputs",
    "Options",
    "attention",
    "make_call",
    "pack_maps",
    "past_sums",
    "sums_after",
    "write",
]

NO_PLACES = torch.empty(0, dtype=torch.int64)
# The place of a sink that is not there.
NOWHERE = 1 << 40

# Filling ctypes fields one by one costs more than a decode step; these write whole runs of them.
_HEADER = struct.Struct("11q8if3i")
_TENSOR = struct.Struct("P4q2i")
_TENSORS = "q k v out dout dq dk dv near_q near_k sink_k sink_v near_dq near_dk sink_dk sink_dv token_k token_v".split()
_PLACES = {name: getattr(CallStruct, name).offset for name in _TENSORS}
_MAPS = CallStruct.map_q.offset
PACKED_SIZE = ctypes.sizeof(Map) * 2


class Inputs(NamedTuple):
    """What may want a gradient. Tokens are float32, bfloat16 or float16 with any strides.

    q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E); with a window S = past + L: k and v hold `past` tokens before the
    first query's own
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink_k: Tensor = NOTHING  # (B, H, N, D)
    sink_v: Tensor = NOTHING  # (B, H, N, E)
    far_q: Tensor = NOTHING  # queries and keys as the far map takes them, where these are not q and k themselves
    far_k: Tensor = NOTHING
    weighted: Tensor = NOTHING  # S (B, H, M, E) of the far keys before k
    normaliser: Tensor = NOTHING  # z (B, H, M)
    gain: Tensor = NOTHING  # (B, Hq) float32, added to the logarithm of the far weights


class Batched(NamedTuple):
    """What wants no gradient.

    places: the token at which each sink stands, NOWHERE if it is not there, negative if it stands before k
    """

    log_max: Tensor = NOTHING  # c (B, H, M) of the far keys before k
    far_mask: Tensor = NO_MASK  # (B, S), which keys are far from later queries
    near_mask: Tensor = NO_MASK  # (B, S), which keys have a place in the window
    places: Tensor = NO_PLACES  # (B, N) int64


class Options(NamedTuple):
    """What a call has besides tensors.

    function: of the far map; "none": nothing is far
    scale:    of the exact scores
    window:   -1: nothing is near
    tail:     also return the far state: of all keys; with a window, of those that have left it after the last query
    """

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

    def encoded(self) -> tuple[list[int], list[float]]:
        """As a torch operator takes them: ints and floats."""
        flags = [int(x) for x in (self.antithetic, self.causal, self.normalise, self.tail)]
        return [_NAMES.index(self.function), self.window, self.past, *flags], [self.square, self.epsilon, self.scale]

    @staticmethod
    def decoded(ints: Sequence[int], floats: Sequence[float] = (0.0, 0.0, 0.0)) -> Options:
        """What `encoded` made of them."""
        function, window, past, antithetic, causal, normalise, tail = ints
        square, epsilon, scale = floats
        flags = bool(causal), bool(normalise), bool(tail)
        return Options(square, _NAMES[function], bool(antithetic), epsilon, scale, window, past, *flags)


_NAMES = list(FUNCTIONS)


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


def _projection_rows(q: Tensor, weight: Tensor, norms: Tensor, function: str) -> int:
    """Rows of the projection; q as the far map takes it."""
    if function == "none":
        return 0
    if function == "taylor":
        return int(1 + q.shape[-1] * (q.shape[-1] + 3) // 2)
    return int(weight.shape[-2] if weight.numel() else norms.shape[-1] if norms.numel() else q.shape[-1])


def make_call(
    inputs: Inputs, batched: Batched, arrays: Sequence[Tensor], options: Options, maps: bytes | None = None
) -> CallStruct:
    """The call for the library; the caller keeps every tensor alive, and has made states, masks and gain contiguous.

    maps: `pack_maps(arrays, square)`, where the caller keeps it.
    """
    q, k, v, sink_k, sink_v, far_q, far_k, *sums, gain = inputs
    log_max, far_mask, near_mask, places = batched
    square, function, antithetic, epsilon, scale, window, past, causal, normalise, tail = options
    near = options.near
    if not far_q.numel():
        far_q, far_k = q, k
    weight, _, _, signs, norms, *_ = arrays
    rows = _projection_rows(far_q, weight, norms, function)
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
    if far_mask.numel():
        call.key_mask = far_mask.data_ptr()
        call.mask_batch, call.mask_token = far_mask.stride()
    if log_max.numel():
        call.s_in, call.z_in, call.c_in = (x.data_ptr() for x in (*sums, log_max))
    if not near:
        return call
    write(call, "near_q", q)
    write(call, "near_k", k)
    if near_mask.numel():
        call.near_mask = near_mask.data_ptr()
        call.near_batch, call.near_token = near_mask.stride()
    if sink_k.numel():
        write(call, "sink_k", sink_k)
        write(call, "sink_v", sink_v)
        call.sinks, call.sink_place = sink_k.shape[2], places.data_ptr()
    if gain.numel():
        call.gain = gain.data_ptr()
    call.near_dim, call.window, call.past = q.shape[3], window, past
    call.both_sides, call.scale = not causal, scale
    return call


class _Attention(TorchOperator):
    """Windowed linear attention on the CPU: `Inputs`, `Batched`, arrays of the map, `Options.encoded`.

    arrays: weight (h, R, D), bias (h, R), tilt (h, D), signs (h, n, k, D'), norms (h, R); contiguous float32 with h = 1
            or H; empty where not used. With a window a sixth: the queries' own tilt

    Results: out (B, Hq, L, E) in v's dtype (float32 with `keep`); S, z, c of the far state, or empty; row statistics
    (B, Hq, L, 2) with a window; and with `keep` states along the sequence.
    """

    def __init__(self) -> None:
        super().__init__("attention", differentiable=3)

    def results(self, inputs: Any, shared: Any, ints: Any, keep: bool) -> list[Tensor]:
        q, k, v, _, _, far_q, *_ = inputs
        options = Options.decoded(ints)
        near, causal, tail = options.near, options.causal, options.tail
        rows = _projection_rows(far_q if far_q.numel() else q, shared[0], shared[4], options.function)
        features = rows * (2 if options.antithetic else 1)
        batch, heads, width = q.shape[0], k.shape[1], v.shape[3]
        # The backward takes sum(dout * out) of every row, so a rounded output would be an error of every gradient.
        out = torch.empty((*q.shape[:3], width), dtype=torch.float32 if keep else v.dtype, device=v.device)
        sums, totals, maxima, stats, kept = (torch.empty(0, dtype=torch.float32, device=v.device) for _ in range(5))
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
        return [out, sums, totals, maxima, stats, kept]

    def forward(
        self, inputs: Any, batched: Any, shared: Any, ints: Any, floats: Any, keep: bool, packed: Any = None
    ) -> list[Tensor]:
        given, beside = _contiguous(inputs, batched)
        options = Options.decoded(ints, floats)
        call = make_call(given, beside, shared, options, packed)
        results = self.results(inputs, shared, ints, keep)
        out, sums, totals, maxima, stats, kept = results
        write(call, "out", out)
        if totals.numel():
            call.s_out, call.z_out, call.c_out = (x.data_ptr() for x in (sums, totals, maxima))
        call.stats, call.checkpoints = stats.data_ptr() or None, kept.data_ptr() or None
        call.differentiable = keep
        kernels = library.load()
        single = not options.near and options.causal and options.tail and not keep and inputs[1].shape[2] == 1
        check_status((kernels.subquad_step if single else kernels.subquad_forward)(ctypes.byref(call)))
        return results

    def backward(
        self, grads: Any, inputs: Any, results: Any, batched: Any, shared: Any, ints: Any, floats: Any
    ) -> list[Tensor]:
        given, beside = _contiguous(inputs, batched)
        out, sums, totals, maxima, stats, kept = (x.contiguous() for x in results)
        dout, dsums, dtotals = (x.contiguous() for x in grads)
        options = Options.decoded(ints, floats)
        call = make_call(given, beside, shared, options)
        # With a window gradients are summed in float32; else each is written once.
        make, dtype = (torch.zeros, torch.float32) if options.near else (torch.empty, None)
        found = [make(x.shape, dtype=dtype or x.dtype) for x in inputs]
        dq, dk, dv, dsink_k, dsink_v, dfar_q, dfar_k, dweighted, dnormaliser, dgain = found
        far = given.far_q.numel() > 0
        for name, tensor in (("out", out), ("dout", dout), ("dv", dv)):
            write(call, name, tensor)
        write(call, "dq", dfar_q if far else dq)
        write(call, "dk", dfar_k if far else dk)
        if options.near:
            write(call, "near_dq", dq)
            write(call, "near_dk", dk)
            if given.sink_k.numel():
                write(call, "sink_dk", dsink_k)
                write(call, "sink_dv", dsink_v)
            call.accumulate = 1
            call.gain_grad = dgain.data_ptr() or None
        call.stats, call.checkpoints = stats.data_ptr() or None, kept.data_ptr() or None
        if totals.numel():
            call.s_out, call.z_out, call.c_out = (x.data_ptr() for x in (sums, totals, maxima))
            call.ds_out, call.dz_out = dsums.data_ptr(), dtotals.data_ptr()
        if given.weighted.numel():
            call.ds_in, call.dz_in = dweighted.data_ptr(), dnormaliser.data_ptr()
        check_status(library.load().subquad_backward(ctypes.byref(call)))
        return [x.to(like.dtype) for x, like in zip(found, inputs, strict=True)]


def _contiguous(inputs: Sequence[Tensor], batched: Sequence[Tensor]) -> tuple[Inputs, Batched]:
    """The state, masks and gain are walked over; a tracer may have changed their strides."""
    *tokens, weighted, normaliser, gain = inputs
    state = (x.contiguous() for x in (weighted, normaliser, gain))
    return Inputs(*tokens, *state), Batched(*(x.contiguous() for x in batched))


attention = _Attention()
