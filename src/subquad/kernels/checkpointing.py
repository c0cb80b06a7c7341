"""A scan over chunks of a sequence whose backward keeps O(L) memory.

    carry_{i+1}, out_i = step(carry_i, inputs_i)

The forward keeps the inputs and the carry at the start of each chunk, nothing else. The backward goes through the
chunks in reverse, runs `step` again from its stored carry and differentiates it, so the gradient is that of the same
code, and no state is rebuilt by subtraction (which drifts in float32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Carry", "scan_chunks", "tracing"]

Carry = tuple[Tensor, ...]
Step = Callable[..., tuple[Carry, Tensor | None]]


def tracing(x: Tensor) -> bool:
    """Whether `x` only stands for data (torch.compile, export, functorch, fake tensors), so nothing may depend on
    values.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or type(x) not in (Tensor, torch.nn.Parameter)
    )


def _parts(length: int, chunk_size: int) -> list[tuple[int, int]]:
    """(first token, number of tokens) of each chunk."""
    return [(start, min(chunk_size, length - start)) for start in range(0, length, chunk_size)]


def _cut(inputs: Sequence[Tensor | None], part: tuple[int, int]) -> list[Tensor | None]:
    return [None if x is None else x.narrow(-2, *part) for x in inputs]


def scan_chunks(
    step: Step,
    carry: Carry,
    inputs: Sequence[Tensor | None],
    constants: Sequence[Tensor],
    chunk_size: int,
    *,
    checkpoint: bool = True,
) -> tuple[Carry, Tensor | None]:
    """Run `step` over chunks of `inputs` along dimension -2 and join its outputs there.

    carry:     tensors handed from chunk to chunk; integer ones carry no gradient
    inputs:    tensors (..., L, width) of one length L, or None
    constants: tensors that `step` reads from elsewhere and that want a gradient (parameters, a state)
    checkpoint: False where `step` reads tensors that cannot be listed; their gradient needs the whole graph
    """
    first = next(x for x in inputs if x is not None)
    length = first.shape[-2]
    tensors = [*carry, *(x for x in inputs if x is not None), *constants]
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    # One chunk has nothing to recompute, and tracers differentiate the loop themselves.
    if checkpoint and wants_gradient and length > chunk_size and not tracing(first):
        count = len(carry)
        results = _Checkpointed.apply(  # type: ignore[no-untyped-call]
            step, chunk_size, count, len(inputs), *carry, *inputs, *constants
        )
        return results[:count], results[count]
    return _plain(step, carry, inputs, chunk_size)


def _plain(step: Step, carry: Carry, inputs: Sequence[Tensor | None], chunk_size: int) -> tuple[Carry, Tensor | None]:
    outputs = []
    for part in _parts(next(x for x in inputs if x is not None).shape[-2], chunk_size):
        carry, out = step(carry, *_cut(inputs, part))
        if out is not None:
            outputs.append(out)
    if len(outputs) < 2:
        return carry, (outputs[0] if outputs else None)
    return carry, torch.cat(outputs, dim=-2)


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, chunk_size: int, carried: int, taken: int, *tensors: Tensor | None) -> Any:
        carry: Carry = tensors[:carried]  # type: ignore[assignment]
        inputs, constants = tensors[carried : carried + taken], tensors[carried + taken :]
        length = next(x for x in inputs if x is not None).shape[-2]
        starts: list[Tensor] = []
        joined: Tensor | None = None
        for part in _parts(length, chunk_size):
            starts.extend(carry)
            carry, out = step(carry, *_cut(inputs, part))
            if out is not None:
                if joined is None:
                    joined = out.new_empty((*out.shape[:-2], length, out.shape[-1]))
                joined.narrow(-2, *part).copy_(out)
        ctx.step, ctx.chunk_size, ctx.carried, ctx.taken = step, chunk_size, carried, taken
        ctx.present = [x is not None for x in inputs]
        ctx.save_for_backward(*inputs, *constants, *starts)
        ctx.mark_non_differentiable(*(x for x in carry if not x.is_floating_point()))
        return (*carry, joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        inputs = saved[: ctx.taken]
        constants = saved[ctx.taken : ctx.taken + len(needs) - ctx.carried - ctx.taken]
        starts = saved[ctx.taken + len(constants) :]
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return (None, None, None, None, *_graph_of_gradient(ctx, inputs, constants, starts, grads, needs))
        wanted = needs[ctx.carried : ctx.carried + ctx.taken]
        input_grads = [torch.zeros_like(x) if want else None for x, want in zip(inputs, wanted, strict=True)]
        constant_grads: list[Tensor | None] = [None] * len(constants)
        carry_grads, out_grad = list(grads[: ctx.carried]), grads[ctx.carried]
        length = next(x for x in inputs if x is not None).shape[-2]
        for index, part in reversed(list(enumerate(_parts(length, ctx.chunk_size)))):
            with torch.enable_grad():
                carry = [
                    x.detach().requires_grad_(x.is_floating_point())
                    for x in starts[index * ctx.carried : (index + 1) * ctx.carried]
                ]
                chunk = [
                    None if x is None else x.detach().requires_grad_(want)
                    for x, want in zip(_cut(inputs, part), wanted, strict=True)
                ]
                after, out = ctx.step(tuple(carry), *chunk)
            outputs, output_grads = [], []
            for result, grad in zip((*after, out), (*carry_grads, out_grad), strict=True):
                if result is None or grad is None or not result.requires_grad:
                    continue
                outputs.append(result)
                output_grads.append(grad.narrow(-2, *part) if result is out else grad)
            sources = [x for x in (*carry, *chunk, *constants) if x is not None and x.requires_grad]
            found = iter(torch.autograd.grad(outputs, sources, output_grads, allow_unused=True) if outputs else [])
            carry_grads = [next(found, None) if x.requires_grad else None for x in carry]
            for total, x in zip(input_grads, chunk, strict=True):
                grad = next(found, None) if x is not None and x.requires_grad else None
                if total is not None and grad is not None:
                    total.narrow(-2, *part).copy_(grad)
            for i, x in enumerate(constants):
                grad = next(found, None) if x.requires_grad else None
                if grad is not None:
                    total = constant_grads[i]
                    constant_grads[i] = grad if total is None else total + grad
        carry_out = [g if need else None for g, need in zip(carry_grads, needs[: ctx.carried], strict=True)]
        return (None, None, None, None, *carry_out, *input_grads, *constant_grads)


def _graph_of_gradient(
    ctx: Any,
    inputs: Sequence[Tensor | None],
    constants: Sequence[Tensor],
    starts: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The same gradient with a graph behind it, for second derivatives: all chunks at once, so no memory is saved."""
    # Views, so that a gradient stops at our own arguments even where one of them was computed from another.
    carry = [x.view_as(x) for x in starts[: ctx.carried]]
    taken = [None if x is None else x.view_as(x) for x in inputs]
    after, out = _plain(ctx.step, tuple(carry), taken, ctx.chunk_size)
    pairs = [
        (result, grad)
        for result, grad in zip((*after, out), grads, strict=True)
        if result is not None and grad is not None and result.requires_grad
    ]
    every = [*carry, *taken, *constants]
    sources = [x for x, need in zip(every, needs, strict=True) if need and x is not None]
    found = iter(
        torch.autograd.grad(
            [result for result, _ in pairs], sources, [grad for _, grad in pairs], create_graph=True, allow_unused=True
        )
    )
    return [next(found) if need and x is not None else None for x, need in zip(every, needs, strict=True)]
