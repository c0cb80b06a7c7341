"""The state of windowed linear attention: the newest tokens, the first ones, and sums for the rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import describe_shape
from ..features.base import FeatureMap
from .checks import Movable, check_same, register_state
from .sums import Sums, masked

__all__ = ["State", "Tokens", "take"]


class Tokens(NamedTuple):
    """Keys (B, H, N, D) and values (B, H, N, E) that a state holds as they are."""

    k: Tensor
    v: Tensor

    def take(self, index: Tensor) -> Tokens:
        """The tokens at the places index (B, M)."""
        return Tokens(take(self.k, index), take(self.v, index))

    def followed_by(self, k: Tensor, v: Tensor) -> Tokens:
        """These, then the given ones in the same dtype."""
        return Tokens(torch.cat([self.k, k.to(self.k.dtype)], 2), torch.cat([self.v, v.to(self.v.dtype)], 2))


def take(x: Tensor, index: Tensor) -> Tensor:
    """x (B, H, N, C) at the places index (B, M), or (1, M) for all sequences alike -> (B, H, M, C)."""
    return x.gather(2, index[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[-1]))


@dataclass(frozen=True)
class State(Movable):
    """What attention remembers in constant memory. Make one with `mechanism.scan` or `mechanism.absorb`; immutable.

    count:  (B,) int64, real tokens so far; the rank of a token is how many real ones came before it
    far:    Sums of the tokens that are known by their features only, or None
    window: the newest W tokens, the last one in the last place, or None. Rank count - W + i stands in place i: places
            of negative rank are empty
    sinks:  the first N tokens, place i empty unless i < count, or None
    origin: which mechanism, draw and scale made it
    feature_map, scale: phi of the far part, where a merge has to turn window tokens into features

    A token enters the window when it is seen, also if it is one of the sinks; it joins the far sums when it leaves the
    window, unless it is a sink. So a token has one weight: as a sink, in the window, or far.
    """

    count: Tensor
    far: Sums | None = None
    window: Tokens | None = None
    sinks: Tokens | None = None
    origin: str = ""
    feature_map: FeatureMap | None = field(default=None, repr=False, compare=False)
    scale: float = 1.0

    @property
    def weighted(self) -> Tensor:
        """(B, H, M, E): the far sums of values."""
        assert self.far is not None
        return self.far.weighted

    @property
    def normaliser(self) -> Tensor:
        """(B, H, M): the far sums of features."""
        assert self.far is not None
        return self.far.normaliser

    @property
    def log_max(self) -> Tensor:
        """(B, H, M) or (B, H, 1): the shift of both."""
        assert self.far is not None
        return self.far.log_max

    def example(self) -> Tensor:
        """A tensor (B, H, ., E) that shows the batch, KV heads, value width and dtype of the state."""
        if self.far is not None:
            return self.far.weighted
        assert self.window is not None
        return self.window.v

    def ranks(self, tokens: int) -> Tensor:
        """(B, W + tokens): the ranks of the places in the window and of the tokens that follow it."""
        assert self.window is not None
        window = self.window.k.shape[2]
        return self.count[:, None] + torch.arange(-window, tokens, device=self.count.device)

    def extend(self, k: Tensor, v: Tensor, new: Tensor | int) -> State:
        """Window, sinks and count after tokens k (B, H, L, D), v (B, H, L, E), of which the first `new` (B,) are real.

        The far sums are left as they are: whoever computes adds the tokens that leave the window.
        """
        count = self.count + new
        window, sinks, length = self.window, self.sinks, k.shape[2]
        if sinks is not None and sinks.k.shape[2]:
            # Places of [sinks so far | new tokens]; those beyond the last token are empty, whatever is put there.
            number = sinks.k.shape[2]
            place = torch.arange(number, device=k.device)
            first = torch.where(place < self.count[:, None], place, number + place - self.count[:, None])
            first = first.clamp(max=number + min(number, length) - 1)
            sinks = sinks.followed_by(k[:, :, :number], v[:, :, :number]).take(first)
        if window is not None and window.k.shape[2]:
            size = window.k.shape[2]
            if isinstance(new, int) and new == length:
                # New storage of the size of the window: a slice would keep all tokens of a long prefill alive.
                old = Tokens(*(x[:, :, min(length, size) :] for x in window))
                window = old.followed_by(*(x[:, :, max(length - size, 0) :] for x in (k, v)))
            else:
                newest = torch.as_tensor(new, device=k.device).view(-1, 1) + torch.arange(size, device=k.device)
                window = window.followed_by(k, v).take(newest)
        return replace(self, count=count, window=window, sinks=sinks)

    def merge(self, later: State) -> State:
        """This context followed by `later`'s: the newest W and the first N tokens of both, and the rest far."""
        check_same(self, later)
        if self.example().shape != later.example().shape:
            shapes = " and ".join(describe_shape(x.example()) for x in (self, later))
            raise ValueError(f"merge: the states differ in batch, heads or value width: {shapes}")
        count = self.count + later.count
        far = self.far if later.far is None or self.far is None else self.far.merge(later.far)
        if self.window is None or later.window is None or self.sinks is None or later.sinks is None:
            return replace(self, count=count, far=far)
        window, number = self.window.k.shape[2], self.sinks.k.shape[2]
        mine, theirs = self.count[:, None], later.count[:, None]
        place, first = (torch.arange(n, device=count.device) for n in (window, number))
        # `later` fills its own places from the right; what it leaves empty is shifted in from here.
        newest = torch.where(place + theirs >= window, window + place, place + theirs)
        sinks = torch.where(first < mine, first, number + first - mine)
        if far is not None and window + number:
            # Who becomes far: this window's oldest tokens, and those of `later`'s sinks that are no longer the first.
            assert self.feature_map is not None
            rank = mine - window + place
            gone = (rank >= number) & (place < theirs)
            displaced = (first + mine >= number) & (first < theirs - window)
            tokens = self.window.followed_by(*later.sinks)
            hidden = torch.cat([gone, displaced], 1).logical_not()[:, None, :, None]
            keys = masked(self.feature_map.keys(tokens.k, self.scale), hidden)
            far = far.absorb(keys, tokens.v.masked_fill(hidden, 0.0))
        return replace(
            self,
            count=count,
            far=far,
            window=self.window.followed_by(*later.window).take(newest),
            sinks=self.sinks.followed_by(*later.sinks).take(sinks),
        )


register_state(State, static=("origin", "feature_map", "scale"))
