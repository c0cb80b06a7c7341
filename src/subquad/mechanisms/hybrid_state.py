"""What hybrid attention remembers: the far field, the window and the sinks, in constant memory.

Every token enters the window. When it leaves, `window` positions later, it becomes a sink if it is among the first
`sinks` positions of its sequence, and part of the far field otherwise: never both, so nothing has to be subtracted.

Positions are counted from the first real key of each sequence: padding in front of it does not exist, padding after it
holds a place but has no weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..features.base import FeatureMap
from ..features.precision import widened
from ..kernels.chunked import masked
from ..state import LinearState, check_same, register_state
from .windows import take

__all__ = ["HybridState", "Sinks", "settle"]


class Sinks(NamedTuple):
    """The first positions of each sequence that have left its window: k (B, H, N, D), v (B, H, N, E), mask (B, N)."""

    k: Tensor
    v: Tensor
    mask: Tensor


def settle(sinks: Sinks, k: Tensor, v: Tensor, mask: Tensor, slot: Tensor) -> tuple[Sinks, Tensor]:
    """Put tokens that leave a window where they belong among the sinks; also says when each sink left.

    k (B, H, T, D), v (B, H, T, E), mask (B, T); slot (B, T): a sink's number, or anything outside 0..N-1 for the
    others. Returns the sinks and (B, N): the place among the T tokens at which a sink came, -1 if it was there before
    or is not.
    """
    if 0 in (slot.shape[1], sinks.mask.shape[1]):
        return sinks, torch.full_like(sinks.mask, -1, dtype=torch.int64)
    places = torch.arange(sinks.mask.shape[1], device=slot.device)
    match = slot.unsqueeze(-1) == places  # (B, T, N)
    found, index = match.any(1), match.to(torch.int8).argmax(1)
    here = found[:, None, :, None]
    settled = Sinks(
        torch.where(here, take(k, index), sinks.k),
        torch.where(here, take(v, index), sinks.v),
        torch.where(found, mask.gather(1, index), sinks.mask),
    )
    return settled, torch.where(found, index, -1)


@dataclass(frozen=True)
class HybridState:
    """State of `hybrid`; make one with its `scan`. Immutable.

    far:          LinearState of the tokens that are neither in the window nor sinks
    window_k, window_v, window_mask: (B, H, W, D), (B, H, W, E), (B, W): the last W positions, the newest last
    sink_k, sink_v, sink_mask:       (B, H, N, D), (B, H, N, E), (B, N): the first N positions that left the window
    length, start: (B,) int64: positions so far, and the position of the first real key (= length before there is one)
    feature_map, scale: phi of the far field: a merge turns window tokens into features
    """

    far: LinearState
    window_k: Tensor
    window_v: Tensor
    window_mask: Tensor
    sink_k: Tensor
    sink_v: Tensor
    sink_mask: Tensor
    length: Tensor
    start: Tensor
    feature_map: FeatureMap = field(repr=False, compare=False)
    scale: float
    origin: str = ""

    @staticmethod
    def empty(
        far: LinearState, k: Tensor, *, window: int, sinks: int, feature_map: FeatureMap, scale: float
    ) -> HybridState:
        """A state that has seen nothing; k (B, H, ..., D) gives the shape, `far` the value width and the origin."""
        batch, heads, width, value_width = k.shape[0], k.shape[1], k.shape[-1], far.weighted.shape[-1]
        like = far.weighted
        none = torch.zeros(batch, dtype=torch.int64, device=k.device)
        return HybridState(
            far,
            like.new_zeros(batch, heads, window, width),
            like.new_zeros(batch, heads, window, value_width),
            torch.zeros(batch, window, dtype=torch.bool, device=k.device),
            like.new_zeros(batch, heads, sinks, width),
            like.new_zeros(batch, heads, sinks, value_width),
            torch.zeros(batch, sinks, dtype=torch.bool, device=k.device),
            none,
            none,
            feature_map,
            scale,
            far.origin,
        )

    @property
    def sinks(self) -> Sinks:
        """The sinks as one piece."""
        return Sinks(self.sink_k, self.sink_v, self.sink_mask)

    @property
    def window_slot(self) -> Tensor:
        """(B, W): positions of the window tokens from the first real key on, which number the sinks among them."""
        return (self.length - self.start)[:, None] - torch.arange(
            self.window_mask.shape[1], 0, -1, device=self.length.device
        )

    def first_real(self, mask: Tensor) -> Tensor:
        """`start` after further tokens with mask (B, L)."""
        before = (mask.long().cumsum(-1) == 0).sum(-1)
        return torch.where(self.start < self.length, self.start, self.length + before)

    def merge(self, later: HybridState) -> HybridState:
        """This context followed by `later`'s.

        The tokens that `later` pushes out of this window, and those of its sinks that are no longer among the first,
        become part of the far field.
        """
        check_same(self, later, same_shape=("window_k", "window_v", "sink_k"))
        window = self.window_mask.shape[1]
        started = self.start < self.length
        start = torch.where(started, self.start, self.length + later.start)
        place = torch.arange(window, device=start.device)
        # The new window: `later`'s where it has seen that many positions, else the newest of this one, moved left.
        kept = place + later.length[:, None]
        index = torch.where(kept >= window, window + place, kept)

        def windowed(mine: Tensor, theirs: Tensor) -> Tensor:
            return take(torch.cat([mine, theirs], 2), index)

        # Who leaves: this window's oldest tokens, and `later`'s sinks, which had left a window already.
        numbers = torch.arange(self.sink_mask.shape[1], device=start.device)
        slot = torch.cat(
            [
                (self.length - start)[:, None] + place - window,
                (self.length + later.start - start)[:, None] + numbers,
            ],
            1,
        )
        gone = torch.cat([place < later.length[:, None], torch.ones_like(later.sink_mask)], 1)
        mask = torch.cat([self.window_mask, later.sink_mask], 1) & gone
        k = torch.cat([self.window_k, later.sink_k], 2)
        v = torch.cat([self.window_v, later.sink_v], 2)
        is_sink = (slot >= 0) & (slot < self.sink_mask.shape[1])
        # An empty place must not overwrite a sink that is there already.
        sinks, _ = settle(self.sinks, k, v, mask, torch.where(mask & is_sink, slot, -1))
        far = self.far.merge(later.far)
        if k.shape[2]:
            far_mask = (mask & ~is_sink)[:, None, :, None]
            keys, values = masked(self.feature_map.keys(k, self.scale), v, far_mask)
            assert values is not None
            far = far.absorb(keys, values, far_mask.sum((1, 2, 3)))
        both = torch.cat([self.window_mask, later.window_mask], 1).gather(1, index)
        return HybridState(
            far,
            windowed(self.window_k, later.window_k),
            windowed(self.window_v, later.window_v),
            both,
            *sinks,
            self.length + later.length,
            start,
            self.feature_map,
            self.scale,
            self.origin,
        )

    def _changed(self, change: Any) -> HybridState:
        parts = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: change(part) for name, part in parts.items()})

    def to(self, *args: Any, **kwargs: Any) -> HybridState:
        """The same state on another device; floats are kept at float32 or above."""

        def moved(x: Tensor) -> Tensor:
            y = x.to(*args, **kwargs)
            return widened(y) if x.is_floating_point() else y.to(x.dtype)

        return replace(self._changed(moved), far=self.far.to(*args, **kwargs))

    def detach(self) -> HybridState:
        """The same state, cut off from the graph."""
        return replace(self._changed(Tensor.detach), far=self.far.detach())


register_state(HybridState, static=("feature_map", "scale", "origin"))
