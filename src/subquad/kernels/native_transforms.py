"""The native operators with gradients outside of a compiled graph, through an autograd.Function, and under functorch.

Operators registered with torch are for tracers and transforms: the first call of one makes torch import its compiler
(two seconds, some 800 modules), which a step of eager training does not need.

A mapped axis becomes part of the batch axis: every (batch, head) is computed on its own anyway. The map's arrays are
the same for all of them; mapping over those (ensembles of projections) has to go through the chunked backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .checkpointing import tracing
from .native_operators import Attention, attention, attention_backward, call_backward, call_forward
from .operator import differentiable_once

__all__ = ["functional_attention", "narrow", "refuse_mapped", "widen_all"]


def widen(x: Tensor, dim: int | None, size: int) -> Tensor:
    """(B, ...) with a mapped axis at `dim`, or none -> (size * B, ...); empty placeholders stay as they are."""
    if dim is None:
        if x.numel() == 0 and x.dim() == 1:
            return x
        x = x.unsqueeze(0).expand(size, *x.shape)
    else:
        x = x.movedim(dim, 0)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if x.dim() > 1 else x


def narrow(results: Sequence[Tensor], size: int) -> tuple[Any, Any]:
    """The results of a widened call with their mapped axis in front, and where that axis is."""
    dims = tuple(None if x.dim() == 1 else 0 for x in results)
    split = tuple(x if x.dim() == 1 else x.unflatten(0, (size, x.shape[0] // size)) for x in results)
    return split, dims


def widen_all(tensors: list[Tensor], dims: Any, size: int) -> list[Tensor]:
    """Every tensor with its mapped axis folded into the batch; `dims` None: none is mapped."""
    dims = [None] * len(tensors) if dims is None else dims
    return [widen(x, dim, size) for x, dim in zip(tensors, dims, strict=True)]


def refuse_mapped(dims: Any) -> None:
    """What the heads of one call share cannot be mapped over."""
    found = dims if isinstance(dims, (list, tuple)) else [dims]
    if any(dim is not None for dim in found):
        raise NotImplementedError("vmap over projections is not possible with backend='native'; use backend='chunked'")


@attention.register_vmap
def _(
    info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, state: Any, arrays: Any, *rest: Any
) -> Any:
    refuse_mapped(in_dims[5])
    size = info.batch_size
    tensors = widen_all([q, k, v, mask], in_dims[:4], size)
    return narrow(attention(*tensors, widen_all(state, in_dims[4], size), arrays, *rest), size)


@attention_backward.register_vmap
def _(info: Any, in_dims: Any, grads: Any, saved: Any, state: Any, arrays: Any, *rest: Any) -> Any:
    refuse_mapped(in_dims[3])
    size = info.batch_size
    wide = [widen_all(x, dims, size) for x, dims in zip((grads, saved, state), in_dims[:3], strict=True)]
    wide[0] = [x.contiguous() for x in wide[0]]
    return narrow(attention_backward(*wide, arrays, *rest), size)


class _Functional(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        past: int,
        options: tuple[Any, ...],
        maps: bytes | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        *rest: Tensor,
    ) -> Attention:
        arguments = (q, k, v, mask, list(rest[:past]), list(rest[past:]), *options)
        run: Any = attention if tracing(q) else partial(call_forward, maps=maps)
        result: Attention = run(*arguments, keep=True)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Attention) -> None:
        past, options, _, q, k, v, mask, *rest = inputs
        ctx.past, ctx.options = past, options
        ctx.save_for_backward(q, k, v, mask, *output, *rest)
        ctx.mark_non_differentiable(*output[3:])

    @staticmethod
    @differentiable_once("backend='native'")
    def backward(ctx: Any, dout: Tensor, dsums: Tensor, dtotals: Tensor, *_: Any) -> Any:
        saved = list(ctx.saved_tensors)
        state, arrays = saved[9 : 9 + ctx.past], saved[9 + ctx.past :]
        grads = [x.contiguous() for x in (dout, dsums, dtotals)]
        run = attention_backward if tracing(dout) else call_backward
        dq, dk, dv, ds, dz = run(grads, saved[:9], state, arrays, *ctx.options)
        return None, None, None, dq, dk, dv, None, *([ds, dz, None] if ctx.past else []), *[None] * len(arrays)


def functional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    state: list[Tensor],
    arrays: list[Tensor],
    *options: Any,
    maps: bytes | None = None,
) -> Attention:
    """`attention` with gradients, eagerly or inside torch.func transforms; maps: see `call_forward`."""
    run: Any = _Functional.apply
    result: Attention = run(len(state), options, maps, q, k, v, mask, *state, *arrays)
    return result
