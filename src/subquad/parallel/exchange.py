"""What processes send each other: states, with their gradients, and pieces of sequences.

A state travels as one row of bytes: all its tensors in one all-gather, whatever their types. The gradient of a gathered
state goes back to the process it came from by one reduce-scatter of the floating-point part. Every process must
therefore run the backward that the others run; a loss that one of them has no part in counts as zero there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import checks

__all__ = ["gather_sequence", "gather_tensors", "place", "split_sequence"]


def place(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's number in the group and the number of processes, or an error that says how to begin."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group first, under torchrun or accelerate launch"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: this process is not a member of the process group given")
    return rank, dist.get_world_size(group)


@contextmanager
def _others(what: str, group: ProcessGroup | None) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        rank, world = place(group)
        raise RuntimeError(
            f"{what} failed on process {rank} of {world}: another process ended, did not answer in time, or sent a "
            f"piece of another shape (batch, heads and widths must agree everywhere). {error}"
        ) from error


def _bytes(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([x.detach().contiguous().reshape(-1).view(torch.uint8) for x in tensors])


def _unpacked(rows: Tensor, like: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in each row of bytes (processes, bytes)."""
    sizes = [x.nbytes for x in like]
    for row in rows:
        parts = row.split(sizes)
        # A clone starts at an aligned address, which a view as a wider type needs.
        yield tuple(p.clone().view(x.dtype).view(x.shape) for p, x in zip(parts, like, strict=True))


class _Gather(torch.autograd.Function):
    """tensors of this process -> those of every process, in order of rank, in one flat tuple."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        _, world = place(group)
        mine = _bytes(tensors)
        rows = mine.new_empty(world, mine.numel())
        with _others("all-gather of states", group):
            dist.all_gather(list(rows.unbind(0)), mine, group=group)
        ctx.group, ctx.world = group, world
        ctx.like = [(x.shape, x.dtype, x.device) for x in tensors]
        flat = tuple(x for row in _unpacked(rows, tensors) for x in row)
        ctx.mark_non_differentiable(*(x for x in flat if not x.is_floating_point()))
        return flat

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wanted = [i for i, (_, dtype, _) in enumerate(ctx.like) if dtype.is_floating_point]
        count = len(ctx.like)
        rows = []
        for process in range(ctx.world):
            row = []
            for i in wanted:
                shape, dtype, device = ctx.like[i]
                grad = grads[process * count + i]
                row.append(torch.zeros(shape.numel(), dtype=dtype, device=device) if grad is None else grad.reshape(-1))
            rows.append(torch.cat(row))
        mine = torch.empty_like(rows[0])
        with _others("reduce-scatter of the states' gradients", ctx.group):
            dist.reduce_scatter(mine, rows, group=ctx.group)
        parts = iter(mine.split([ctx.like[i][0].numel() for i in wanted]))
        own = [next(parts).view(shape) if dtype.is_floating_point else None for shape, dtype, _ in ctx.like]
        return None, *own


def gather_tensors(tensors: list[Tensor], group: ProcessGroup | None = None) -> list[list[Tensor]]:
    """`tensors` of every process, in order of rank; differentiable. Shapes and dtypes are the same everywhere."""
    floats = {x.dtype for x in tensors if x.is_floating_point()}
    if len(floats) > 1:
        raise TypeError(f"gather_tensors: one floating-point dtype is expected, got {sorted(map(str, floats))}")
    flat: tuple[Tensor, ...] = _Gather.apply(group, *tensors)  # type: ignore[no-untyped-call]
    count = len(tensors)
    return [list(flat[i : i + count]) for i in range(0, len(flat), count)]


def split_sequence(x: Tensor, dim: int = 1, group: ProcessGroup | None = None) -> Tensor:
    """This process's piece of `x`, which every process holds whole: contiguous, in order of rank, as equal as can be.

    dim: the sequence's axis: 1 for tokens (B, L) and hidden states (B, L, dim), 2 for q, k, v (B, H, L, D)

    A piece may be empty where there are fewer tokens than processes.
    """
    rank, world = place(group)
    checks.check_positive("dim", dim, 0)
    length = x.shape[dim]
    begin, end = rank * length // world, (rank + 1) * length // world
    return x.narrow(dim, begin, end - begin)


def gather_sequence(x: Tensor, dim: int = 1, group: ProcessGroup | None = None) -> Tensor:
    """The whole sequence from the pieces of all processes, on every process; differentiable.

    Pieces may differ in length.
    """
    length = torch.tensor([x.shape[dim]], device=x.device)
    lengths = [int(row[0]) for row in gather_tensors([length], group)]
    longest = max(lengths)
    # Collectives need equal shapes: shorter pieces are padded for the journey.
    padding = x.new_zeros((*x.shape[:dim], longest - x.shape[dim], *x.shape[dim + 1 :]))
    pieces = gather_tensors([torch.cat([x, padding], dim)], group)
    return torch.cat([row[0].narrow(dim, 0, n) for row, n in zip(pieces, lengths, strict=True)], dim)
