"""What local attention remembers: a window of the newest tokens and the first ones, in constant memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..state import check_same, register_state
from .windows import Order, take

__all__ = ["WindowState"]


@dataclass(frozen=True)
class WindowState:
    """What local attention remembers: the newest tokens, those that everyone sees, and how many there were.

    k, v:             (B, H, window, D), (B, H, window, E)  the newest real tokens, the last one in the last slot
    first_k, first_v: (B, H, global_tokens, D), (.., E)     the first real tokens
    count:            (B,) int64  real tokens so far; slots that it does not reach are empty
    """

    k: Tensor
    v: Tensor
    first_k: Tensor
    first_v: Tensor
    count: Tensor
    origin: str = ""

    def extend(self, k: Tensor, v: Tensor, order: Order) -> WindowState:
        """The state after tokens k (B, H, L, D), v (B, H, L, E), real ones first as `order` left them."""
        window, globals_, length = self.k.shape[2], self.first_k.shape[2], k.shape[2]
        first_k, first_v = self.first_k, self.first_v
        if globals_:
            # Slots of [first tokens so far | new tokens]; those beyond the last token are empty, whatever is put there.
            place = torch.arange(globals_, device=k.device)
            seen = self.count[:, None]
            first = torch.where(place < seen, place, globals_ + place - seen)
            first = first.clamp(max=globals_ + min(globals_, length) - 1)
            first_k, first_v = (
                take(torch.cat([old, x[:, :, :globals_]], 2), first) for old, x in ((first_k, k), (first_v, v))
            )
        if order.mask is None:
            # New storage of the size of the window: a slice would keep all tokens of a long prefill alive.
            kept, new = min(length, window), max(length - window, 0)
            newest_k, newest_v = (
                torch.cat([old[:, :, kept:], x[:, :, new:]], 2) for old, x in ((self.k, k), (self.v, v))
            )
        else:
            newest = order.count + torch.arange(window, device=k.device)
            newest_k, newest_v = (take(torch.cat([old, x], 2), newest) for old, x in ((self.k, k), (self.v, v)))
        return WindowState(newest_k, newest_v, first_k, first_v, self.count + order.count[:, 0], self.origin)

    def merge(self, later: WindowState) -> WindowState:
        """This context followed by `later`'s: the last `window` tokens of both, and the first ones of both."""
        check_same(self, later, same_shape=("k", "v"))
        window, globals_ = self.k.shape[2], self.first_k.shape[2]
        slot = torch.arange(window, device=self.k.device)
        have = later.count[:, None]
        # `later` fills its own slots from the right; what it leaves empty is shifted in from here.
        newest = torch.where(slot >= window - have, window + slot, slot + have)
        place = torch.arange(globals_, device=self.k.device)
        seen = self.count[:, None]
        first = torch.where(place < seen, place, globals_ + place - seen)
        return WindowState(
            take(torch.cat([self.k, later.k], 2), newest),
            take(torch.cat([self.v, later.v], 2), newest),
            take(torch.cat([self.first_k, later.first_k], 2), first),
            take(torch.cat([self.first_v, later.first_v], 2), first),
            self.count + later.count,
            self.origin,
        )


register_state(WindowState)
