"""Hybrid attention in the native kernels, as torch operators: exact near field, kernelised far field, one loop.

    subquad::hybrid            (q, k, v, sinks, ...)         -> out, S, z, c, stats, checkpoints
    subquad::hybrid_backward   (gradients, saved tensors)    -> dq, dk, dv, dsinks, dfar, dS_in, dz_in, dgain

k and v hold `past` tokens before the first query's own; query i stands at token past + i. Empty tensors stand for "not
there", as in native_operators.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from . import native_library as library
from .native_library import DTYPES, SEGMENT, Hybrid
from .native_operators import TENSOR, check_status, make_problem

__all__ = ["NOWHERE", "Results", "call_hybrid", "call_hybrid_backward", "hybrid", "hybrid_backward"]

# The place of a sink that is not there; its negative is that of one which left the window long ago.
NOWHERE = 1 << 40

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _write(problem: Hybrid, name: str, x: Tensor) -> None:
    TENSOR.pack_into(problem, getattr(Hybrid, name).offset, x.data_ptr(), *x.stride(), DTYPES[x.dtype], 0)


def _write_far(problem: Hybrid, name: str, x: Tensor) -> None:
    at = Hybrid.far.offset + getattr(library.Problem, name).offset
    TENSOR.pack_into(problem, at, x.data_ptr(), *x.stride(), DTYPES[x.dtype], 0)


def _make(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    scale: float,
    window: int,
    past: int,
    causal: bool,
    tail: bool,
    *,
    maps: bytes | None = None,
) -> Hybrid:
    """The call for the library; the caller keeps every tensor alive, and has made states and masks contiguous."""
    near_mask, far_mask, places = masks
    far_q, far_k = far or (q, k)
    problem = make_problem(far_q, far_k, v, far_mask, arrays, square, function, antithetic, epsilon, True, True, maps)
    problem.length_k = q.shape[2] + tail
    problem.key_shift = past - window - 1
    problem.keys_stored = k.shape[2]
    call = Hybrid()
    call.far = problem
    _write(call, "near_q", q)
    _write(call, "near_k", k)
    if sinks:
        _write(call, "sink_k", sinks[0])
        _write(call, "sink_v", sinks[1])
        call.sinks, call.sink_place = sinks[0].shape[2], places.data_ptr()
    if near_mask.numel():
        call.near_mask = near_mask.data_ptr()
        call.near_batch, call.near_token = near_mask.stride()
    if gain.numel():
        call.gain = gain.data_ptr()
    if state:
        call.far.s_in, call.far.z_in, call.far.c_in = (x.data_ptr() for x in state)
    call.near_dim, call.window, call.past = q.shape[3], window, past
    call.both_sides, call.scale = not causal, scale
    return call


def _outputs(q: Tensor, k: Tensor, v: Tensor, features: int, causal: bool, tail: bool, keep: bool) -> Results:
    batch, heads, width = q.shape[0], k.shape[1], v.shape[3]
    # Unrounded for the backward, which takes sum(dout * out) of every row.
    out = torch.empty((*q.shape[:3], width), dtype=torch.float32 if keep else v.dtype, device=v.device)
    stats = torch.empty((*q.shape[:3], 2), dtype=torch.float32, device=v.device)
    sums, totals, maxima = (stats.new_empty(0) for _ in range(3))  # an operator's results must not be one tensor
    if tail:
        sums = stats.new_empty((batch, heads, features, width))
        totals = stats.new_empty((batch, heads, features))
        maxima = torch.empty_like(totals)
    segments = (q.shape[2] + tail + SEGMENT - 1) // SEGMENT if keep else 0
    # One run of checkpoints per walk: along the sequence and, without a causal mask, from its end.
    shape = (batch, heads, segments * (1 if causal else 2), features * (width + 2))
    kept = stats.new_empty(shape if keep else 0)
    return out, sums, totals, maxima, stats, kept


def _features(q: Tensor, far: list[Tensor], arrays: list[Tensor], antithetic: bool) -> int:
    weight, norms = arrays[0], arrays[6]
    rows = (
        weight.shape[-2] if weight.numel() else norms.shape[-1] if norms.numel() else (far[0] if far else q).shape[-1]
    )
    return int(rows) * (2 if antithetic else 1)


def call_hybrid(*arguments: Any, keep: bool, maps: bytes | None = None) -> Results:
    """The forward itself, without torch's dispatcher around it; the arguments are those of `hybrid` up to `tail`.

    maps: `pack_maps(arrays, square)`, where the caller keeps it.
    """
    q, k, v, sinks, far, state, masks, gain, *options = arguments
    causal, tail = options[-2:]
    state, masks = ([x.contiguous() for x in some] for some in (state, masks))
    gain = gain.contiguous()
    call = _make(q, k, v, sinks, far, state, masks, gain, *options, maps=maps)
    results = _outputs(q, k, v, call.far.features, causal, tail, keep)
    out, sums, totals, maxima, stats, kept = results
    _write_far(call, "out", out)
    call.stats = stats.data_ptr()
    if tail:
        call.far.s_out, call.far.z_out, call.far.c_out = sums.data_ptr(), totals.data_ptr(), maxima.data_ptr()
    if keep:
        call.far.checkpoints = kept.data_ptr()
    check_status(library.load().subquad_hybrid_forward(ctypes.byref(call)))
    return results


@torch.library.custom_op("subquad::hybrid", mutates_args=())
def hybrid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    scale: float,
    window: int,
    past: int,
    causal: bool,
    tail: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hybrid attention on the CPU.

    q (B, Hq, L, D), k (B, H, past + L, D), v (B, H, past + L, E): float32, bfloat16 or float16, any strides; L > 0
    sinks:  [k (B, H, N, D), v (B, H, N, E)] or []
    far:    [q, k] as the far map takes them, or [] where these are q and k themselves
    state:  [S (B, H, M, E), z (B, H, M), c (B, H, M)] of the far keys before k, float32, or []
    masks:  real keys (B, past + L) bool or empty, far keys (the real ones without the sinks) likewise, and the token
            at which each sink stands (B, N) int64: NOWHERE if it is not there, -NOWHERE if it stands before k
    gain:   (Hq,) float32, added to the logarithm of the far weights, or empty
    arrays, square, function, antithetic, epsilon: the far map, see `native_operators.attention`; and as an eighth
            array the queries' own tilt (h, D) or empty
    window: tokens on each side with exact weights; causal: only earlier ones
    tail:   also return the far state of everything that has left the window when the last query is done
    keep:   store states along the sequence for the backward

    Returns out (B, Hq, L, E) in v's dtype (float32 with `keep`), the far state, and what the backward needs.
    """
    return call_hybrid(
        *(q, k, v, sinks, far, state, masks, gain, arrays, square, function, antithetic, epsilon),
        *(scale, window, past, causal, tail),
        keep=keep,
    )


@hybrid.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    *options: Any,
) -> Results:
    causal, tail, keep = options[-3:]
    return _outputs(q, k, v, _features(q, far, arrays, antithetic), causal, tail, keep)


@torch.library.custom_op("subquad::hybrid_backward", mutates_args=())
def hybrid_backward(
    grads: list[Tensor],
    saved: list[Tensor],
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    scale: float,
    window: int,
    past: int,
    causal: bool,
    tail: bool,
) -> list[Tensor]:
    """Gradients of `hybrid`: grads = [dout, dS, dz], saved = [q, k, v, *results of `hybrid`].

    Returns [dq, dk, dv, dsink_k, dsink_v, dfar_q, dfar_k, dS_in, dz_in, dgain (B, Hq)], empty where there is no input.
    """
    return call_hybrid_backward(
        *(grads, saved, sinks, far, state, masks, gain, arrays, square, function, antithetic, epsilon),
        *(scale, window, past, causal, tail),
    )


def call_hybrid_backward(grads: list[Tensor], saved: list[Tensor], *arguments: Any) -> list[Tensor]:
    """The backward itself, without torch's dispatcher around it; the arguments are those of `hybrid_backward`."""
    sinks, far, state, masks, gain, *options = arguments
    tail = options[-1]
    q, k, v, out, _, _, _, stats, kept = saved
    state, masks, grads = ([x.contiguous() for x in some] for some in (state, masks, grads))
    gain, stats, kept = gain.contiguous(), stats.contiguous(), kept.contiguous()
    call = _make(q, k, v, sinks, far, state, masks, gain, *options)
    results = _gradients(saved, sinks, far, state, gain, sums=True)
    dq, dk, dv, dsink_k, dsink_v, dfar_q, dfar_k, ds_in, dz_in, dgain = results
    for name, tensor in (("out", out), ("dout", grads[0]), ("dv", dv)):
        _write_far(call, name, tensor)
    _write_far(call, "dq", dfar_q if far else dq)
    _write_far(call, "dk", dfar_k if far else dk)
    _write(call, "near_dq", dq)
    _write(call, "near_dk", dk)
    if sinks:
        _write(call, "sink_dk", dsink_k)
        _write(call, "sink_dv", dsink_v)
    call.far.accumulate = 1
    call.stats, call.far.checkpoints = stats.data_ptr(), kept.data_ptr()
    if tail:
        call.far.ds_out, call.far.dz_out = grads[1].data_ptr(), grads[2].data_ptr()
    if state:
        call.far.ds_in, call.far.dz_in = ds_in.data_ptr(), dz_in.data_ptr()
    if gain.numel():
        call.gain_grad = dgain.data_ptr()
    check_status(library.load().subquad_hybrid_backward(ctypes.byref(call)))
    like = _gradients(saved, sinks, far, state, gain, sums=False)
    return [x.to(y.dtype) for x, y in zip(results, like, strict=True)]


def _gradients(
    saved: list[Tensor], sinks: list[Tensor], far: list[Tensor], state: list[Tensor], gain: Tensor, sums: bool
) -> list[Tensor]:
    """Zeros for what is summed in float32 (`sums`), or the shapes and dtypes that are handed back."""
    q = saved[0]
    none = q.new_empty(0)
    inputs = [*saved[:3], *(sinks or [none, none]), *(far or [none, none]), *(state[:2] or [none, none])]
    make = torch.zeros if sums else torch.empty
    made = [
        make(x.shape, dtype=torch.float32 if sums else x.dtype, device=x.device if sums else torch.device("meta"))
        for x in inputs
    ]
    per_batch = (q.shape[0], gain.shape[0]) if gain.numel() else (0,)
    return [*made, make(per_batch, dtype=torch.float32, device=q.device if sums else torch.device("meta"))]


@hybrid_backward.register_fake
def _(
    grads: list[Tensor],
    saved: list[Tensor],
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    *options: Any,
) -> list[Tensor]:
    like = _gradients(saved, sinks, far, state, gain, sums=False)
    return [torch.empty(x.shape, dtype=x.dtype, device=saved[0].device) for x in like]
