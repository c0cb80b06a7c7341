"""The native kernels as torch operators: one attention, its gradient, and the shapes of both for tracers.

    subquad::attention            (q, k, v, ...)             -> out, S, z, c, checkpoints
    subquad::attention_backward   (gradients, saved tensors) -> dq, dk, dv, dS_in, dz_in

Registered with fake and autograd implementations, so `torch.compile(fullgraph=True)` keeps them as one node each. Empty
tensors stand for "not there" (no mask, no state, no projection): a traced graph then has one signature.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from . import native_library as library
from .native_library import DTYPES, FUNCTIONS, SEGMENT, Map, Problem
from .native_memory import new_states

__all__ = [
    "HEADER",
    "MAPS",
    "TENSOR",
    "Attention",
    "attention",
    "attention_backward",
    "call_backward",
    "call_forward",
    "check_status",
    "make_problem",
    "pack_maps",
    "write",
]

Attention = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _address(x: Tensor) -> int | None:
    return x.data_ptr() if x.numel() else None


def _rows(q: Tensor, weight: Tensor, norms: Tensor, function: str) -> int:
    if function == "taylor":
        return int(1 + q.shape[-1] * (q.shape[-1] + 3) // 2)
    return int(weight.shape[-2] if weight.numel() else norms.shape[-1] if norms.numel() else q.shape[-1])


# Filling ctypes fields one by one costs more than a decode step; these write whole runs of them.
HEADER = struct.Struct("11q8i2f2i")
TENSOR = struct.Struct("P4q2i")
_PLACES = {name: getattr(Problem, name).offset for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
MAPS = (Problem.map_q.offset, ctypes.sizeof(Map) * 2)


def pack_maps(arrays: list[Tensor], square: float) -> bytes:
    """The two maps as the library sees them; valid as long as `arrays` live.

    An eighth array is the queries' own tilt (h, D) or empty, and says that their scale matters (hybrid attention).
    """
    weight, query_offset, key_offset, bias, tilt, signs, norms, *own = arrays
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in arrays)
    maps = (Map * 2)()
    nothing = query_offset.new_empty(0)
    for side, offset, leaning in zip(maps, (query_offset, key_offset), (*(own or [nothing]), tilt), strict=True):
        named = {"weight": weight, "offset": offset, "bias": bias, "signs": signs, "norms": norms, "tilt": leaning}
        for name, array in named.items():
            if array.numel():
                setattr(side, name, array.data_ptr())
                setattr(side, f"{name}_head", array.stride(0) if array.shape[0] > 1 else 0)
    maps[0].square, maps[1].square = square if own else 0.0, square
    return bytes(maps)


def write(problem: Problem, name: str, x: Tensor) -> None:
    """`x` (B, H, L, width) as the library sees it; the caller keeps `x` alive."""
    TENSOR.pack_into(problem, _PLACES[name], x.data_ptr(), *x.stride(), DTYPES[x.dtype], 0)


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    causal: bool,
    normalise: bool,
    maps: bytes | None = None,
) -> Problem:
    """One call for the library, without its results and states; the caller keeps every tensor alive."""
    weight, norms, signs = arrays[0], arrays[6], arrays[5]
    problem = Problem()
    batch, heads_q, length_q, dim = q.shape
    _, heads, length, width = v.shape
    rows = _rows(q, weight, norms, function)
    projection = 0 if weight.numel() else 1 if norms.numel() else 2
    HEADER.pack_into(
        problem,
        0,
        *(batch, heads_q, heads, length_q, length, dim, width, rows * (2 if antithetic else 1), rows, 0, length),
        *(FUNCTIONS[function], projection, antithetic, causal, signs.shape[-2] if projection == 1 else 0, normalise),
        *(torch.get_num_threads(), 0, epsilon, 0.0, 0, 0),
    )
    write(problem, "q", q)
    write(problem, "k", k)
    write(problem, "v", v)
    offset, size = MAPS
    memoryview(problem).cast("B")[offset : offset + size] = pack_maps(arrays, square) if maps is None else maps
    if key_mask.numel():
        problem.key_mask = key_mask.data_ptr()
        problem.mask_batch, problem.mask_token = key_mask.stride()
    return problem


def check_status(status: int) -> None:
    """Raise what a call of the library reports."""
    if status:
        raise MemoryError("the native kernels could not allocate their working memory")


def _outputs(q: Tensor, k: Tensor, v: Tensor, features: int, causal: bool, keep: bool, step: bool = False) -> Attention:
    batch, heads, width = q.shape[0], k.shape[1], v.shape[3]
    # The backward takes sum(dout * out) of every row, so a rounded output would be an error of every gradient.
    out = torch.empty((*q.shape[:3], width), dtype=torch.float32 if keep else v.dtype, device=v.device)
    shapes = [(batch, heads, features, width), (batch, heads, features), (batch, heads, features)]
    if step:  # one by one: the results of an operator must not share memory
        sums, totals, maxima = (new_states(shape)[0] for shape in shapes)
    else:
        sums, totals, maxima = (torch.empty(shape, dtype=torch.float32, device=v.device) for shape in shapes)
    segments = (k.shape[2] + SEGMENT - 1) // SEGMENT if causal and keep else 0
    kept = totals.new_empty((batch, heads, segments, features * (width + 2)))
    return out, sums, totals, maxima, kept


def call_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    state: list[Tensor],
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    causal: bool,
    normalise: bool,
    keep: bool,
    maps: bytes | None = None,
) -> Attention:
    """The forward itself, without torch's dispatcher around it; `attention` says what everything is.

    maps: `pack_maps(arrays, square)`, where the caller keeps it.
    """
    problem = make_problem(q, k, v, key_mask, arrays, square, function, antithetic, epsilon, causal, normalise, maps)
    single = causal and q.shape[2] == 1 and k.shape[2] == 1 and not keep
    results = _outputs(q, k, v, problem.features, causal, keep, single)
    out, sums, totals, maxima, kept = results
    write(problem, "out", out)
    state = [x.contiguous() for x in state]  # a tracer may have changed the strides
    if state:
        problem.s_in, problem.z_in, problem.c_in = (x.data_ptr() for x in state)
    problem.s_out, problem.z_out, problem.c_out = sums.data_ptr(), totals.data_ptr(), maxima.data_ptr()
    problem.checkpoints = _address(kept)
    if keep:
        problem.differentiable = 1
    kernels = library.load()
    check_status((kernels.subquad_decode if single else kernels.subquad_forward)(ctypes.byref(problem)))
    return results


@torch.library.custom_op("subquad::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    state: list[Tensor],
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    causal: bool,
    normalise: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Kernelised attention on the CPU.

    q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E): float32, bfloat16 or float16, any strides
    key_mask: (B, S) bool, or empty
    state:    [S (B, H, M, E), z (B, H, M), c (B, H, M)] contiguous float32, or []
    arrays:   weight (h, R, D), query_offset, key_offset, bias (h, R), tilt (h, D), signs (h, n, k, D'), norms (h, R);
              contiguous float32 with h = 1 or H; empty where not used
    keep:     store states along the sequence for the backward

    Returns out (B, Hq, L, E) in v's dtype (float32 with `keep`), the state after the keys, and the stored states.
    """
    return call_forward(
        q, k, v, key_mask, state, arrays, square, function, antithetic, epsilon, causal, normalise, keep
    )


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    state: list[Tensor],
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    causal: bool,
    normalise: bool,
    keep: bool,
) -> Attention:
    features = _rows(q, arrays[0], arrays[6], function) * (2 if antithetic else 1)
    return _outputs(q, k, v, features, causal, keep)


@torch.library.custom_op("subquad::attention_backward", mutates_args=())
def attention_backward(
    grads: list[Tensor],
    saved: list[Tensor],
    state: list[Tensor],
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    causal: bool,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attention`: grads = [dout, dS, dz], saved = [q, k, v, key_mask, out, S, z, c, checkpoints]."""
    return call_backward(grads, saved, state, arrays, square, function, antithetic, epsilon, causal, normalise)


def call_backward(
    grads: list[Tensor], saved: list[Tensor], state: list[Tensor], arrays: list[Tensor], *options: Any
) -> Attention:
    """The backward itself, without torch's dispatcher around it; `attention_backward` says what everything is."""
    q, k, v, key_mask, out, sums, totals, maxima, kept = saved
    dout, dsums, dtotals = grads
    problem = make_problem(q, k, v, key_mask, arrays, *options)
    results = _gradients(saved, state)
    dq, dk, dv, ds_in, dz_in = results
    state, (sums, totals, maxima, kept, dsums, dtotals) = (
        [x.contiguous() for x in some] for some in (state, (sums, totals, maxima, kept, dsums, dtotals))
    )
    for name, tensor in (("out", out), ("dout", dout), ("dq", dq), ("dk", dk), ("dv", dv)):
        write(problem, name, tensor)
    problem.s_out, problem.z_out, problem.c_out = sums.data_ptr(), totals.data_ptr(), maxima.data_ptr()
    problem.ds_out, problem.dz_out = dsums.data_ptr(), dtotals.data_ptr()
    problem.checkpoints = _address(kept)
    if state:
        problem.s_in, problem.z_in, problem.c_in = (x.data_ptr() for x in state)
        problem.ds_in, problem.dz_in = ds_in.data_ptr(), dz_in.data_ptr()
    check_status(library.load().subquad_backward(ctypes.byref(problem)))
    return results


def _gradients(saved: list[Tensor], state: list[Tensor]) -> Attention:
    q, k, v = saved[:3]
    given = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    past = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in state[:2]] or [
        q.new_empty(0),
        q.new_empty(0),
    ]
    return given[0], given[1], given[2], past[0], past[1]


@attention_backward.register_fake
def _(grads: list[Tensor], saved: list[Tensor], state: list[Tensor], *options: Any) -> Attention:
    return _gradients(saved, state)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Attention) -> None:
    q, k, v, key_mask, state, arrays, *options, _ = inputs
    out, sums, totals, maxima, kept = output
    ctx.save_for_backward(q, k, v, key_mask, out, sums, totals, maxima, kept, *state, *arrays)
    ctx.options, ctx.past = options, len(state)


def _backward(ctx: Any, dout: Tensor, dsums: Tensor, dtotals: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    state, arrays = saved[9 : 9 + ctx.past], saved[9 + ctx.past :]
    out, sums, totals = saved[4:7]
    grads = [
        torch.zeros_like(like) if grad is None else grad.contiguous()
        for grad, like in zip((dout, dsums, dtotals), (out, sums, totals), strict=True)
    ]
    dq, dk, dv, ds, dz = attention_backward(grads, saved[:9], state, arrays, *ctx.options)
    past = [ds, dz, None] if ctx.past else []
    return dq, dk, dv, None, past, [None] * len(arrays), *[None] * (len(ctx.options) + 1)


attention.register_autograd(_backward, setup_context=_save)
