"""Tokens of groups of any sizes: their order by (group, position), and blocks of one group each, without a loop.

Everything here is integer arithmetic on indices; no gradient passes through it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checkpointing import tracing

__all__ = ["before", "counts", "inverse", "ordered", "slots", "take_rows"]


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of every sequence, x (X, N, W) at index (X, n) -> (X, n, W), as one copy of whole rows.

    >>> take_rows(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[1, 1, 0]]))
    tensor([[[3, 4],
             [3, 4],
             [1, 2]]])
    """
    if x.shape[-1] == 1:
        return x.squeeze(-1).gather(-1, index).unsqueeze(-1)
    start = x.shape[1] * torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
    rows: Tensor = x.flatten(0, 1).index_select(0, (index + start).flatten()).unflatten(0, index.shape)
    return rows


def inverse(order: Tensor) -> Tensor:
    """place[order[p]] = p along the last dimension."""
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.zeros_like(order).scatter(-1, order, places)


def counts(group: Tensor, groups: int) -> Tensor:
    """How many tokens each group has: (X, R, L) -> (X, R, groups)."""
    return group.new_zeros((*group.shape[:-1], groups)).scatter_add(-1, group, torch.ones_like(group))


def before(counts: Tensor) -> Tensor:
    """Running sum without the own term."""
    return counts.cumsum(-1) - counts


def ordered(bucket: Tensor) -> tuple[Tensor, Tensor]:
    """Order by (bucket, position): which token stands at each place, and the place of each token."""
    length = bucket.shape[-1]
    # One sort of distinct numbers is stable by construction, and its values already hold the positions.
    code = bucket * length + torch.arange(length, device=bucket.device)
    order = code.sort(-1).values % max(length, 1)
    return order, inverse(order)


def slots(group: Tensor, groups: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of `size` rows that all belong to one group, for groups of any sizes, without a loop.

    group (..., L) int64 -> slot of each row (..., L), row of each slot (..., n*size) with L in empty slots, group of
    each block (..., n). n = L // size + groups suffices whatever the groups are; blocks at the end that no sequence
    uses are cut off where a look at the values is free.

    >>> slots(torch.tensor([1, 0, 1, 1]), groups=2, size=2)
    (tensor([2, 0, 3, 4]), tensor([1, 4, 0, 2, 3, 4]), tensor([0, 1, 1]))
    """
    length = group.shape[-1]
    blocks = length // size + groups
    _, place = ordered(group)
    sizes = counts(group, groups)
    needed = (sizes + size - 1) // size
    slot = (before(needed) * size - before(sizes)).gather(-1, group) + place
    if group.numel() and group.device.type == "cpu" and not tracing(group):
        blocks = int(slot.max()) // size + 1
    rows = torch.arange(length, device=group.device).expand_as(slot)
    row_of = group.new_full((*group.shape[:-1], blocks * size), length).scatter(-1, slot, rows)
    # The group of block b: how many groups have all of their blocks before it.
    last = needed.cumsum(-1).clamp(max=blocks)
    ends = group.new_zeros((*group.shape[:-1], blocks + 1)).scatter_add(-1, last, torch.ones_like(needed))
    return slot, row_of, ends.cumsum(-1)[..., :-1].clamp(max=groups - 1)
