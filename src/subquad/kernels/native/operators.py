"""The native kernels as torch operators: one attention, its gradient, and the shapes of both for tracers.

    subquad::attention            (q, k, v, ...)             -> out, S, z, c, stats, checkpoints
    subquad::attention_backward   (gradients, saved tensors) -> dq, dk, dv, dsinks, dfar, dS_in, dz_in, dgain

Registered with fake and autograd implementations, so `torch.compile(fullgraph=True)` keeps them as one node each. Empty
tensors stand for "not there" (no mask, no state, no projection): a traced graph then has one signature.

`attention` says what the arguments are. The same tensors go through every entrance: the plain call (`call_forward`),
the operator (for tracers; it takes the `Options` one by one), and the autograd function (`functional_attention`). Eager
training takes that one, because the first call of an operator makes torch import its compiler (two seconds, some 800
modules).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpointing import tracing
from ..operator import differentiable_once, refuse_forward_mode
from .calls import Options, Results, call_backward, call_forward, empty_gradients, empty_results, projection_rows

__all__ = ["attention", "attention_backward", "functional_attention", "narrow", "widen_all"]


@torch.library.custom_op("subquad::attention", mutates_args=())
def attention(
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
    normalise: bool,
    tail: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Windowed linear attention on the CPU.

    q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E): float32, bfloat16 or float16, any strides
            with a window S = past + L: k and v hold `past` tokens before the first query's own
    sinks:  [k (B, H, N, D), v (B, H, N, E)] or []
    far:    [q, k] as the far map takes them, or [] where these are q and k themselves
    state:  [S (B, H, M, E), z (B, H, M), c (B, H, M)] of the far keys before k, contiguous float32, or []
    masks:  far keys (B, S) bool, near keys (B, S) bool, each empty for all, and the token at which each sink stands
            (B, N) int64: NOWHERE if it is not there, negative if it stands before k
    gain:   (Hq,) float32, added to the logarithm of the far weights, or empty
    arrays: weight (h, R, D), bias (h, R), tilt (h, D), signs (h, n, k, D'), norms (h, R);
            contiguous float32 with h = 1 or H; empty where not used. With a window a sixth: the queries' own tilt
    function: of the far map; "none": nothing is far
    scale:  of the exact scores;  window: -1: nothing is near
    tail:   also return the far state: of all keys; with a window, of those that have left it after the last query
    keep:   store what the backward needs

    Returns out (B, Hq, L, E) in v's dtype (float32 with `keep`), the far state or empty tensors, row statistics, and
    states along the sequence.
    """
    options = Options(square, function, antithetic, epsilon, scale, window, past, causal, normalise, tail)
    return call_forward(q, k, v, sinks, far, state, masks, gain, arrays, options, keep=keep)


@attention.register_fake
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
    *given: Any,
) -> Results:
    *listed, keep = given
    options = Options(*listed)
    rows = projection_rows(far[0] if far else q, arrays[0], arrays[4], options.function)
    return empty_results(q, k, v, rows * (2 if options.antithetic else 1), options, keep)


@torch.library.custom_op("subquad::attention_backward", mutates_args=())
def attention_backward(
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
    normalise: bool,
    tail: bool,
) -> list[Tensor]:
    """Gradients of `attention`: grads = [dout, dS, dz], saved = [q, k, v, *results of `attention`].

    Returns [dq, dk, dv, dsink_k, dsink_v, dfar_q, dfar_k, dS_in, dz_in, dgain (B, Hq)], empty where there is no input.
    """
    options = Options(square, function, antithetic, epsilon, scale, window, past, causal, normalise, tail)
    return call_backward(grads, saved, sinks, far, state, masks, gain, arrays, options)


@attention_backward.register_fake
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
    return empty_gradients(saved, sinks, far, state, gain, summed=False)


# -- gradients ------------------------------------------------------------------------------------------------------


def _split(tensors: list[Tensor], sizes: tuple[int, ...]) -> list[list[Tensor]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(tensors[start : start + size])
        start += size
    return parts


def _differentiate(saved: list[Tensor], sizes: tuple[int, ...], options: Options, grads: Any) -> tuple[Any, ...]:
    """(dq, dk, dv, dsinks, dfar, dstate, dgain) for the gradients of out, S and z."""
    core, rest = saved[:9], saved[9:]
    sinks, far, state, masks, (gain,), arrays = _split(rest, sizes)
    given = [
        torch.zeros_like(like) if grad is None else grad.contiguous()
        for grad, like in zip(grads, core[3:6], strict=True)
    ]
    tensors = (given, core, sinks, far, state, masks, gain, arrays)
    found = attention_backward(*tensors, *options) if tracing(given[0]) else call_backward(*tensors, options)
    dq, dk, dv, dsink_k, dsink_v, dfar_q, dfar_k, ds, dz, dgain = found
    return (
        *(dq, dk, dv),
        [dsink_k, dsink_v] if sinks else [],
        [dfar_q, dfar_k] if far else [],
        [ds, dz, None] if state else [],
        dgain.sum(0) if gain.numel() else None,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, sinks, far, state, masks, gain, arrays, *options, _keep = inputs
    lists = [sinks, far, state, masks, [gain], arrays]
    ctx.save_for_backward(q, k, v, *output, *(x for part in lists for x in part))
    ctx.options, ctx.sizes = Options(*options), tuple(len(part) for part in lists)


def _backward(ctx: Any, dout: Tensor, dsums: Tensor, dtotals: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    *given, dgain = _differentiate(saved, ctx.sizes, ctx.options, (dout, dsums, dtotals))
    masks, arrays = ctx.sizes[3], ctx.sizes[5]
    return (*given, [None] * masks, dgain, [None] * arrays, *[None] * (len(ctx.options) + 1))


attention.register_autograd(_backward, setup_context=_save)


class _Functional(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        sizes: tuple[int, ...],
        options: Options,
        maps: bytes | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *rest: Tensor,
    ) -> Results:
        sinks, far, state, masks, (gain,), arrays = _split(list(rest), sizes)
        tensors = (q, k, v, sinks, far, state, masks, gain, arrays)
        if tracing(q):
            result: Results = attention(*tensors, *options, keep=True)
            return result
        return call_forward(*tensors, options, keep=True, maps=maps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        sizes, options, _, q, k, v, *rest = inputs
        ctx.sizes, ctx.options = sizes, options
        ctx.save_for_backward(q, k, v, *output, *rest)
        ctx.mark_non_differentiable(*output[3:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode("backend='native'")

    @staticmethod
    @differentiable_once("backend='native'")
    def backward(ctx: Any, dout: Tensor, dsums: Tensor, dtotals: Tensor, *_: Any) -> Any:
        saved = list(ctx.saved_tensors)
        dq, dk, dv, dsinks, dfar, dstate, dgain = _differentiate(saved, ctx.sizes, ctx.options, (dout, dsums, dtotals))
        masks, arrays = ctx.sizes[3], ctx.sizes[5]
        return None, None, None, dq, dk, dv, *dsinks, *dfar, *dstate, *[None] * masks, dgain, *[None] * arrays


def functional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    options: Options,
    maps: bytes | None = None,
) -> Results:
    """`attention` with gradients, eagerly or inside torch.func transforms."""
    lists = [sinks, far, state, masks, [gain], arrays]
    run: Any = _Functional.apply
    sizes = tuple(len(part) for part in lists)
    result: Results = run(sizes, options, maps, q, k, v, *(x for part in lists for x in part))
    return result


# -- vmap: a mapped axis becomes part of the batch axis, since every (batch, head) is computed on its own -------------


def _widen(x: Tensor, dim: int | None, size: int) -> Tensor:
    """(B, ...) with a mapped axis at `dim`, or none -> (size * B, ...); empty placeholders stay as they are."""
    if dim is None:
        if x.numel() == 0 and x.dim() == 1:
            return x
        x = x.unsqueeze(0).expand(size, *x.shape)
    else:
        x = x.movedim(dim, 0)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if x.dim() > 1 else x


def widen_all(tensors: Sequence[Tensor], dims: Any, size: int) -> list[Tensor]:
    dims = [None] * len(tensors) if dims is None else dims
    return [_widen(x, dim, size) for x, dim in zip(tensors, dims, strict=True)]


def narrow(results: Sequence[Tensor], size: int) -> tuple[Any, Any]:
    """The results of a widened call with their mapped axis in front, and where that axis is."""
    dims = tuple(None if x.dim() == 1 else 0 for x in results)
    split = tuple(x if x.dim() == 1 else x.unflatten(0, (size, x.shape[0] // size)) for x in results)
    return split, dims


def _refuse_mapped(dims: Any) -> None:
    """What the heads of one call share (projections, gains) cannot be mapped over."""
    found = dims if isinstance(dims, (list, tuple)) else [dims]
    if any(dim is not None for dim in found):
        raise NotImplementedError("vmap over projections is not possible with backend='native'; use backend='chunked'")


@attention.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    size = info.batch_size
    _refuse_mapped(in_dims[7])
    _refuse_mapped(in_dims[8])
    q, k, v = widen_all(args[:3], in_dims[:3], size)
    lists = [widen_all(x, dims, size) for x, dims in zip(args[3:7], in_dims[3:7], strict=True)]
    return narrow(attention(q, k, v, *lists, *args[7:]), size)


@attention_backward.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    size = info.batch_size
    _refuse_mapped(in_dims[6])
    _refuse_mapped(in_dims[7])
    lists = [widen_all(x, dims, size) for x, dims in zip(args[:6], in_dims[:6], strict=True)]
    lists[0] = [x.contiguous() for x in lists[0]]
    results, dims = narrow(attention_backward(*lists, *args[6:]), size)
    return list(results), list(dims)
