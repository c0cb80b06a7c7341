"""Reversible residual blocks: the backward rebuilds every activation from the last one.

    forward   (a, b) <- (b, a + f(b))          inverse   (a, b) <- (b - f(a), a)          for each branch f in turn

Gomez et al., "The Reversible Residual Network", 2017, as used by Kitaev et al., "Reformer", 2020. The stack starts from
(x, x) and gives (a + b) / 2. What is kept for the backward is the last pair, whatever the depth (and, with dropout, the
state of the random generator before each branch, 5 kB on the CPU); each branch is computed again. The inverse is
exact up to rounding: keep the residual stream in float32 (autocast does) for deep stacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import get_device_states, set_device_states

from ..kernels.checkpointing import tracing
from .blocks import Block, BlockInputs, Branch
from .recomputing import Unchanged

__all__ = ["run_reversible"]

Steps = list[tuple[Block, Branch]]


class _Randomness:
    """The state of the generators that dropout draws from, to be drawn from once more."""

    def __init__(self, x: Tensor) -> None:
        self.cpu = torch.get_rng_state()
        self.devices, self.states = get_device_states(x)

    @contextmanager
    def again(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            yield


class _Autocast:
    """Autocast as it was in the forward: autograd runs the backward outside of it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.known = torch.amp.is_autocast_available(device)
        self.enabled = self.known and torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if self.known else None

    def again(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled) if self.known else nullcontext()


def _steps(blocks: Sequence[Block], call: BlockInputs) -> Steps:
    return [(block, branch) for block in blocks for branch in block.branches(call)]


def _draws(block: Block) -> bool:
    # Each module has a mode of its own, and adapters put dropout anywhere.
    return any(isinstance(part, _DropoutNd) and part.training and part.p > 0 for part in block.modules())


class _ReversibleStack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[Block],
        call: BlockInputs,
        x: Tensor,
        memory: Tensor | None,
        *parameters: nn.Parameter,
    ) -> Tensor:
        pair, randomness = (x, x), []
        for block, branch in _steps(blocks, call):
            randomness.append(_Randomness(x) if _draws(block) else None)
            pair = block.couple(pair, [branch])
        ctx.blocks, ctx.call, ctx.randomness = blocks, replace(call, memory=None), randomness
        ctx.autocast = _Autocast(x.device.type)
        # The modules own the parameters, so they need no saving; that they are still the same is checked below.
        ctx.parameters, ctx.unchanged = parameters, Unchanged(blocks)
        ctx.save_for_backward(*pair, memory)
        return (pair[0] + pair[1]) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with ctx.unchanged.again():
            return _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, memory = ctx.saved_tensors
    parameters = ctx.parameters
    if memory is not None:
        memory = memory.detach().requires_grad_(ctx.needs_input_grad[3])
    totals: list[Tensor | None] = [None] * len(parameters)
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    memory_grad: Tensor | None = None
    grad_a = grad_b = grad / 2
    steps = _steps(ctx.blocks, replace(ctx.call, memory=memory))
    for (block, branch), randomness in zip(reversed(steps), reversed(ctx.randomness), strict=True):
        own = [p for module in branch.modules for p in module.parameters() if p.requires_grad]
        leaf = a.detach().requires_grad_()
        with (
            torch.enable_grad(),
            ctx.autocast.again(),
            nullcontext() if randomness is None else randomness.again(),
        ):
            delta = block.delta(branch, leaf)
        wanted = [leaf, *own, *([memory] if memory is not None and memory.requires_grad else [])]
        grads = torch.autograd.grad(delta, wanted, grad_b.to(delta.dtype), allow_unused=True)
        for parameter, part in zip(own, grads[1 : 1 + len(own)], strict=True):
            index = place[id(parameter)]
            totals[index] = _added(totals[index], part)
        if len(grads) > 1 + len(own):
            memory_grad = _added(memory_grad, grads[-1])
        a, b = b - delta.detach(), a
        grad_a, grad_b = grad_b, grad_a if grads[0] is None else grad_a + grads[0]
    return None, None, grad_a + grad_b, memory_grad, *totals


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total + part


def run_reversible(blocks: Sequence[Block], x: Tensor, call: BlockInputs) -> Tensor:
    """x (B, L, dim) through all blocks -> (B, L, dim); gradients are those of the plain computation.

    Where nothing can be rebuilt (no gradient wanted, torch.compile, torch.func) it is the plain computation.
    """
    parameters = [p for block in blocks for p in block.parameters() if p.requires_grad]
    memory_grad = call.memory is not None and call.memory.requires_grad
    wanted = torch.is_grad_enabled() and (x.requires_grad or memory_grad or bool(parameters))
    if not wanted or tracing(x):
        pair = (x, x)
        for block in blocks:
            pair = block.couple(pair, block.branches(call))
        return (pair[0] + pair[1]) / 2
    # Each parameter once: tied ones would otherwise get their gradient several times.
    unique = list(dict.fromkeys(parameters))
    out: Tensor = _ReversibleStack.apply(blocks, call, x, call.memory, *unique)  # type: ignore[no-untyped-call]
    return out
