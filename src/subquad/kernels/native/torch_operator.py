"""A function of the native library as a torch operator, for autograd, tracers and transforms.

    subquad::NAME            (inputs, batched, shared, ints, floats, keep)              -> results
    subquad::NAME_backward   (grads, inputs, results, batched, shared, ints, floats)    -> a gradient for each input

Registered with fake, autograd and vmap implementations, so `torch.compile(fullgraph=True)` keeps them as one node each.
Empty tensors stand for "not there" (no mask, no state): a traced graph then has one signature. Eager calls go to the
library directly and eager training through an autograd.Function, since the first call of a torch operator makes torch
import its compiler (two seconds, some 800 modules).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpointing import tracing
from ..operator import differentiable_once, refuse_forward_mode

__all__ = ["NO_MASK", "Tensors", "TorchOperator"]

NO_MASK = torch.empty(0, dtype=torch.bool)

Tensors = Sequence[Tensor]


class TorchOperator:
    """One operator. A subclass implements `results`, `forward` and `backward`.

    inputs:       tensors (B, ...) that may want a gradient
    batched:      tensors (B, ...) that do not, such as masks
    shared:       tensors without a batch axis, such as projections; no gradient either
    ints, floats: options
    keep:         a backward will follow
    packed:       what a subclass knows of `shared` already, which a traced graph cannot hold

    name:           of the torch operator
    differentiable: how many of the results have a gradient, from the first on
    """

    def __init__(self, name: str, differentiable: int = 1) -> None:
        self.name, self.differentiable = name, differentiable
        self._forward, self._backward = _register(self)
        self._function = _make_function(self)

    def results(self, inputs: Tensors, shared: Tensors, ints: Sequence[int], keep: bool) -> list[Tensor]:
        """The tensors that a forward fills, no two of them the same."""
        raise NotImplementedError

    def forward(
        self,
        inputs: Tensors,
        batched: Tensors,
        shared: Tensors,
        ints: Sequence[int],
        floats: Sequence[float],
        keep: bool,
        packed: Any = None,
    ) -> list[Tensor]:
        """The call itself."""
        raise NotImplementedError

    def backward(
        self,
        grads: Tensors,
        inputs: Tensors,
        results: Tensors,
        batched: Tensors,
        shared: Tensors,
        ints: Sequence[int],
        floats: Sequence[float],
    ) -> list[Tensor]:
        """A gradient for each input, of its shape and dtype, from those of the differentiable results."""
        raise NotImplementedError

    def __call__(
        self,
        inputs: Tensors,
        batched: Tensors,
        shared: Tensors,
        ints: Sequence[int],
        floats: Sequence[float],
        packed: Any = None,
    ) -> Tensors:
        """The results, by whichever way this call needs."""
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        transformed = torch._C._are_functorch_transforms_active()
        if not transformed and any(tracing(x) for x in inputs):
            traced: list[Tensor] = self._forward(
                list(inputs), list(batched), list(shared), list(ints), list(floats), wanted
            )
            return traced
        if transformed or wanted:
            sizes = len(inputs), len(batched), len(shared)
            made: tuple[Tensor, ...] = self._function.apply(sizes, ints, floats, packed, *inputs, *batched, *shared)
            return made
        return self.forward(inputs, batched, shared, ints, floats, False, packed)


def _register(op: TorchOperator) -> tuple[Any, Any]:
    """The torch operators of `op`."""

    def forward(
        inputs: list[Tensor],
        batched: list[Tensor],
        shared: list[Tensor],
        ints: list[int],
        floats: list[float],
        keep: bool,
    ) -> list[Tensor]:
        return op.forward([x.resolve_neg() for x in inputs], batched, shared, ints, floats, keep)

    def backward(
        grads: list[Tensor],
        inputs: list[Tensor],
        results: list[Tensor],
        batched: list[Tensor],
        shared: list[Tensor],
        ints: list[int],
        floats: list[float],
    ) -> list[Tensor]:
        grads, inputs = ([x.resolve_neg() for x in some] for some in (grads, inputs))
        return op.backward(grads, inputs, results, batched, shared, ints, floats)

    run = torch.library.custom_op(f"subquad::{op.name}", forward, mutates_args=())
    back = torch.library.custom_op(f"subquad::{op.name}_backward", backward, mutates_args=())

    @run.register_fake
    def _(inputs: Any, batched: Any, shared: Any, ints: Any, floats: Any, keep: bool) -> Any:
        return op.results(inputs, shared, ints, keep)

    @back.register_fake
    def _(grads: Any, inputs: Any, *rest: Any) -> Any:
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]

    # Every (batch, head) is computed on its own, so a mapped axis becomes part of the batch axis. What is repeated
    # along it is a view, which the kernels cannot walk over where they expect contiguous memory.
    @run.register_vmap
    def _(info: Any, in_dims: Any, inputs: Any, batched: Any, shared: Any, *rest: Any) -> Any:
        _refuse_mapped(in_dims[2])
        inputs, batched = (_widen_all(x, d, info.batch_size) for x, d in zip((inputs, batched), in_dims, strict=False))
        return _narrow(run(inputs, [x.contiguous() for x in batched], shared, *rest), info.batch_size)

    @back.register_vmap
    def _(info: Any, in_dims: Any, grads: Any, inputs: Any, results: Any, batched: Any, shared: Any, *rest: Any) -> Any:
        _refuse_mapped(in_dims[4])
        given = zip((grads, inputs, results, batched), in_dims, strict=False)
        grads, inputs, results, batched = (_widen_all(x, d, info.batch_size) for x, d in given)
        grads, batched = ([x.contiguous() for x in some] for some in (grads, batched))
        return _narrow(back(grads, inputs, results, batched, shared, *rest), info.batch_size)

    def save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        given, batched, shared, ints, floats, _ = inputs
        ctx.save_for_backward(*given, *output, *batched, *shared)
        ctx.sizes = len(given), len(output), len(batched), len(shared)
        ctx.ints, ctx.floats = ints, floats

    def differentiate(ctx: Any, grads: Any) -> tuple[Any, ...]:
        given, results, batched, shared = _split(ctx.saved_tensors, ctx.sizes)
        pairs = zip(grads[: op.differentiable], results, strict=False)
        asked = [torch.zeros_like(x) if grad is None else grad for grad, x in pairs]
        found = back(asked, given, results, batched, shared, ctx.ints, ctx.floats)
        return found, [None] * len(batched), [None] * len(shared), None, None, None

    run.register_autograd(differentiate, setup_context=save)
    return run, back


def _make_function(op: TorchOperator) -> Any:
    """Gradients outside of a compiled graph."""

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(sizes: tuple[int, ...], ints: Any, floats: Any, packed: Any, *tensors: Tensor) -> Any:
            given, batched, shared = _split(tensors, sizes)
            if tracing(tensors[0]):
                return tuple(op._forward(given, batched, shared, list(ints), list(floats), True))
            return tuple(op.forward(given, batched, shared, ints, floats, True, packed))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            sizes, ctx.ints, ctx.floats, _, *tensors = inputs
            given, batched, shared = _split(tensors, sizes)
            ctx.sizes = sizes[0], len(output), *sizes[1:]
            ctx.save_for_backward(*given, *output, *batched, *shared)
            ctx.mark_non_differentiable(*output[op.differentiable :])

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            refuse_forward_mode("backend='native'")

        @staticmethod
        @differentiable_once("backend='native'")
        def backward(ctx: Any, *grads: Tensor) -> Any:
            asked = [x.resolve_neg() for x in grads[: op.differentiable]]
            given, results, batched, shared = _split(ctx.saved_tensors, ctx.sizes)
            if tracing(grads[0]):
                found = op._backward(asked, given, results, batched, shared, list(ctx.ints), list(ctx.floats))
            else:
                found = op.backward(asked, given, results, batched, shared, ctx.ints, ctx.floats)
            return None, None, None, None, *found, *[None] * sum(ctx.sizes[2:])

    return Function


def _split(tensors: Tensors, sizes: Sequence[int]) -> list[list[Tensor]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(list(tensors[start : start + size]))
        start += size
    return parts


def _widen(x: Tensor, dim: int | None, size: int) -> Tensor:
    """(B, ...) with a mapped axis at `dim`, or none -> (size * B, ...); what is not there stays empty."""
    if dim is None:
        if x.numel() == 0 and x.dim() == 1:
            return x
        x = x.unsqueeze(0).expand(size, *x.shape)
    else:
        x = x.movedim(dim, 0)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if x.dim() > 1 else x


def _widen_all(tensors: Tensors, dims: Any, size: int) -> list[Tensor]:
    dims = [None] * len(tensors) if dims is None else dims
    return [_widen(x, dim, size) for x, dim in zip(tensors, dims, strict=True)]


def _narrow(results: Tensors, size: int) -> tuple[list[Tensor], list[int | None]]:
    """The results of a widened call with their mapped axis in front, and where that axis is."""
    split = [x if x.dim() == 1 else x.unflatten(0, (size, x.shape[0] // size)) for x in results]
    return split, [None if x.dim() == 1 else 0 for x in results]


def _refuse_mapped(dims: Any) -> None:
    if any(dim is not None for dim in (dims if isinstance(dims, (list, tuple)) else [dims])):
        raise NotImplementedError("vmap over projections is not possible with backend='native'; use backend='chunked'")
