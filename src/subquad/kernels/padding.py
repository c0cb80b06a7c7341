"""Padding has one meaning wherever places count (windows, sinks, strides, projections): it is not there.

The position of a token is its rank among the real tokens of its sequence, wherever padding stands: before, between or
after them. A masked token takes no place, is seen by nobody, and its own output is 0. `Order` moves the real tokens of
each sequence to its front, so that what comes after it only ever meets padding at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..state import take
from .checkpointing import tracing

__all__ = ["Order", "all_finite", "empty_output", "real_keys"]


def real_keys(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """(B, S) bool, True = real: the mask of keys k (B, H, S, D), written out where none was given."""
    return torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask


def all_finite(*tensors: Tensor) -> bool:
    """Whether they are known to hold no NaN and no infinity. Only a CPU can look without waiting, and no tracer can."""
    return all(x.device.type == "cpu" and not tracing(x) and bool(x.detach().sum().isfinite()) for x in tensors)


def empty_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """0 for every query (B, Hq, L, E), where there is nothing to attend to; still a part of the graph."""
    return v.new_zeros((*q.shape[:3], v.shape[-1])) + sum(x[:0].sum() for x in (q, k, v))


class Order:
    """The real tokens of each sequence, moved to its front in their order; `mask` (B, L) bool, True = real, or None.

    count: (B, 1) int64, real tokens per sequence; real: (B, L) bool, which places hold one after the move;
    B is 1 where there is no mask, since then all sequences are alike

    >>> order = Order(torch.tensor([[False, True, True]]), 3, torch.device("cpu"))
    >>> x = torch.tensor([7.0, 8.0, 9.0]).view(1, 1, 3, 1)
    >>> order.front(x).flatten().tolist(), order.back(order.front(x)).flatten().tolist()
    ([8.0, 9.0, 7.0], [0.0, 8.0, 9.0])
    """

    def __init__(self, mask: Tensor | None, length: int, device: torch.device) -> None:
        self.mask = mask
        places = torch.arange(length, device=device)
        self._order: Tensor | None = None
        if mask is None:
            self.count = torch.full((1, 1), length, dtype=torch.int64, device=device)
            self.real = places.new_ones((1, length), dtype=torch.bool)
            return
        self.count = mask.sum(-1, keepdim=True)
        self.real = places < self.count
        # Padding usually stands at the end already. Only a CPU can look without waiting.
        if tracing(mask) or device.type != "cpu" or not torch.equal(mask, self.real):
            self._order = torch.argsort((~mask).to(torch.uint8), dim=-1, stable=True)

    def front(self, x: Tensor) -> Tensor:
        """x (B, H, L, C) with the real tokens first."""
        return x if self._order is None else take(x, self._order)

    def back(self, x: Tensor) -> Tensor:
        """x as `front` left it, in the order it came from; 0 at tokens that are not real."""
        if self.mask is None:
            return x
        if self._order is not None:
            x = take(x, torch.argsort(self._order, dim=-1))
        return x.masked_fill(~self.mask[:, None, :, None], 0.0)
