"""Hybrid attention of the native kernels under autograd, `torch.func.grad` and `vmap`.

A mapped axis becomes part of the batch axis, as in native_transforms.py; projections and gains are shared by a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checkpointing import tracing
from .native_hybrid import Results, call_hybrid, call_hybrid_backward, hybrid, hybrid_backward
from .native_transforms import narrow, refuse_mapped, widen_all
from .operator import differentiable_once

__all__ = ["functional_hybrid"]

# Inputs that are lists, in order: sinks, far, state, masks; gain and arrays follow.
Lists = list[list[Tensor]]


def _split(tensors: list[Tensor], sizes: tuple[int, ...]) -> Lists:
    parts, start = [], 0
    for size in sizes:
        parts.append(tensors[start : start + size])
        start += size
    return parts


def _differentiate(saved: list[Tensor], sizes: tuple[int, ...], options: Any, grads: Any) -> tuple[Any, ...]:
    """(dq, dk, dv, dsinks, dfar, dstate, dgain) for the gradients of out, S and z."""
    core, rest = saved[:9], saved[9:]
    sinks, far, state, masks, (gain,), arrays = _split(rest, sizes)
    given = [
        torch.zeros_like(like) if grad is None else grad.contiguous()
        for grad, like in zip(grads, core[3:6], strict=True)
    ]
    run: Any = hybrid_backward if tracing(given[0]) else call_hybrid_backward
    found = run(given, core, sinks, far, state, masks, gain, arrays, *options)
    dq, dk, dv, dsink_k, dsink_v, dfar_q, dfar_k, ds, dz, dgain = found
    return (
        *(dq, dk, dv),
        [dsink_k, dsink_v] if sinks else [],
        [dfar_q, dfar_k] if far else [],
        [ds, dz, None] if state else [],
        dgain.sum(0) if gain.numel() else None,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, sinks, far, state, masks, gain, arrays, *options, _ = inputs
    lists = [sinks, far, state, masks, [gain], arrays]
    ctx.save_for_backward(q, k, v, *output, *(x for part in lists for x in part))
    ctx.options, ctx.sizes = options, tuple(len(part) for part in lists)


def _backward(ctx: Any, dout: Tensor, dsums: Tensor, dtotals: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    *given, dgain = _differentiate(saved, ctx.sizes, ctx.options, (dout, dsums, dtotals))
    masks, arrays = ctx.sizes[3], ctx.sizes[5]
    return (*given, [None] * masks, dgain, [None] * arrays, *[None] * (len(ctx.options) + 1))


hybrid.register_autograd(_backward, setup_context=_save)


@hybrid.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    size = info.batch_size
    refuse_mapped(in_dims[7])
    refuse_mapped(in_dims[8])
    q, k, v = widen_all(list(args[:3]), in_dims[:3], size)
    lists = [widen_all(x, dims, size) for x, dims in zip(args[3:7], in_dims[3:7], strict=True)]
    return narrow(hybrid(q, k, v, *lists, *args[7:]), size)


@hybrid_backward.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    size = info.batch_size
    refuse_mapped(in_dims[6])
    refuse_mapped(in_dims[7])
    lists = [widen_all(x, dims, size) for x, dims in zip(args[:6], in_dims[:6], strict=True)]
    results, dims = narrow(hybrid_backward(*lists, *args[6:]), size)
    return list(results), list(dims)


class _Functional(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        sizes: tuple[int, ...], options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *rest: Tensor
    ) -> Results:
        sinks, far, state, masks, (gain,), arrays = _split(list(rest), sizes)
        run: Any = hybrid if tracing(q) else call_hybrid
        result: Results = run(q, k, v, sinks, far, state, masks, gain, arrays, *options, keep=True)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        sizes, options, q, k, v, *rest = inputs
        ctx.sizes, ctx.options = sizes, options
        ctx.save_for_backward(q, k, v, *output, *rest)
        ctx.mark_non_differentiable(*output[3:])

    @staticmethod
    @differentiable_once("backend='native'")
    def backward(ctx: Any, dout: Tensor, dsums: Tensor, dtotals: Tensor, *_: Any) -> Any:
        saved = list(ctx.saved_tensors)
        dq, dk, dv, dsinks, dfar, dstate, dgain = _differentiate(saved, ctx.sizes, ctx.options, (dout, dsums, dtotals))
        masks, arrays = ctx.sizes[3], ctx.sizes[5]
        return None, None, dq, dk, dv, *dsinks, *dfar, *dstate, *[None] * masks, dgain, *[None] * arrays


def functional_hybrid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    *options: Any,
) -> Results:
    """`hybrid` with gradients, eagerly or inside torch.func transforms."""
    lists = [sinks, far, state, masks, [gain], arrays]
    run: Any = _Functional.apply
    sizes = tuple(len(part) for part in lists)
    result: Results = run(sizes, options, q, k, v, *(x for part in lists for x in part))
    return result
