"""Will a batch fit? Estimated before the first step, from what one example makes the model keep for the backward.

Weights, gradients and two moments (AdamW's) are counted exactly. Activations are what autograd saves while one example
goes forward, times the examples computed at a time; what an operator needs for a moment only comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..lab.peak_memory import available_memory
from ..plain_text import first_line
from ..tasks.base import Batch

__all__ = ["MemoryEstimate", "estimate_memory", "free_memory", "is_out_of_memory", "out_of_memory", "refuse_batch"]

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes: `fixed` for weights, gradients and moments, `example` for each example computed at a time."""

    fixed: int
    example: int

    def total(self, examples: int) -> int:
        """Bytes for so many examples at a time."""
        return self.fixed + examples * self.example


def estimate_memory(model: nn.Module, batch: Batch) -> MemoryEstimate:
    """What training `model` needs, from one forward of `batch`; generators and gradients are left as they were.

    >>> from subquad.tasks import get_task
    >>> task = get_task("copy")()
    >>> model = task.build({**task.model, "mechanism": "linear"})
    >>> item = task.examples("train").item(0, torch.Generator())
    >>> estimate = estimate_memory(model, task.collate([item]))
    >>> estimate.total(10) > estimate.total(1) > 4 * 4 * sum(p.numel() for p in model.parameters())
    True
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    own |= {b.untyped_storage().data_ptr() for b in model.buffers()}
    kept: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    def same(x: Tensor) -> Tensor:
        return x

    with torch.random.fork_rng(), torch.autograd.graph.saved_tensors_hooks(count, same):
        sums = model(batch)
    examples = len(batch["weight"])
    del sums
    weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return MemoryEstimate(4 * weights, sum(kept.values()) // examples)


def free_memory(device: torch.device) -> int | None:
    """Free bytes on `device`; for the CPU the smaller of the machine's and the container's; None if unknown."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


def _message(estimate: MemoryEstimate, examples: int, free: int | None, what: str) -> str:
    if free is None:
        there = "how much is free is unknown"
    else:
        room = (free - estimate.fixed) // max(estimate.example, 1)
        advice = f"at most {room} examples at a time fit" if room >= 1 else "not even one fits: use a smaller model"
        there = f"{free / GIB:.2f} GiB are free; {advice}"
    return (
        f"{what}: {examples} examples at a time need about {estimate.total(examples) / GIB:.2f} GiB "
        f"({estimate.fixed / GIB:.2f} for weights and optimiser, {estimate.example / GIB:.3f} per example), "
        f"{there}. Lower --batch, raise --accumulate (the same result in smaller "
        "parts), shorten the examples, or use --checkpoint-activations"
    )


def refuse_batch(estimate: MemoryEstimate, examples: int, device: torch.device) -> None:
    """Raise where so many examples at a time do not fit, with the estimate and what to change."""
    free = free_memory(device)
    if free is not None and estimate.total(examples) > free:
        raise ValueError(_message(estimate, examples, free, "the batch does not fit in memory"))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocation that failed; on the CPU torch gives it no class of its own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def out_of_memory(
    estimate: MemoryEstimate | None, examples: int, device: torch.device, error: BaseException
) -> ValueError:
    """The error to raise instead."""
    first = first_line(error)
    if estimate is None:
        return ValueError(f"out of memory ({first}); lower --batch or raise --accumulate")
    return ValueError(_message(estimate, examples, free_memory(device), f"out of memory ({first})"))
