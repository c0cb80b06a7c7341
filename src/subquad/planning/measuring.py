"""The error of any mechanism, measured: its own output on a contiguous piece of the sequence against exact attention.

Contiguous, because what a window or a cluster leaves out depends on what stands where, and as long as can be afforded,
because errors grow with length: of more keys the largest is larger, and what a window leaves out is more. The mechanism
runs on the whole piece; exact attention, whose cost is quadratic, is computed for all queries or for a sample of them
against *all* keys.

With values v of independent entries +-1 and width E, the mean of |A' v - A v|^2 is E |A' - A|^2: one run measures the
error of the whole matrix. Its size E |A|^2 is computed, not taken from |A v|^2: rows of flat attention are all alike,
and the E numbers that they make of v scatter by sqrt(2 / E) however many rows there are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mechanisms.base import Mechanism
from ..mechanisms.kernelised import Kernelised
from .sampling import evenly, pick_rows

__all__ = ["CONFIDENCE", "LEAST_DRAWS", "SLACK", "Measured", "Piece"]

VALUE_WIDTH = 64
CHUNK = 1 << 22  # scores of one step of exact attention: 16 MB
CONFIDENCE = 2.0  # standard errors
SLACK = 1.2  # an error that meets the target may be this much above it for all that was measured
LEAST_DRAWS = 3


@dataclass(frozen=True)
class Measured:
    """The mean error over draws, and how far it may be off.

    draws:     the error of each draw
    deviation: standard error of the mean: between the draws, and between the queries (other data will bring others)
    """

    draws: tuple[float, ...]
    deviation: float

    @property
    def error(self) -> float:
        """The mean over the draws."""
        return statistics.fmean(self.draws)

    @property
    def high(self) -> float:
        """What the error is unlikely to exceed: the mean and two standard errors."""
        return self.error + CONFIDENCE * self.deviation

    def meets(self, target: float) -> bool:
        """The mean is within the target, and what it is unlikely to exceed is within 1.2 of it.

        >>> Measured((0.9, 1.0, 0.8), 0.05).meets(1.0), Measured((0.9, 1.9, 0.0), 0.5).meets(1.0)
        (True, False)
        """
        return self.error <= target and self.high <= SLACK * target


class Piece:
    """The first tokens of a few sequences, in float32 on the CPU, with their exact output.

    exact: (B, Hq, R, E) of the queries compared: all of them, or as many as `most_scores` allows
    count: (B, Hq, R) queries that each of them stands for; padding counts 0
    norm:  |A v|^2, or its mean E |A|^2 where the values are made up
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        tokens: int,
        is_causal: bool,
        scale: float | None,
        key_mask: Tensor | None,
        seed: int,
        most_scores: int | None = None,
    ) -> None:
        length, size = q.shape[2], k.shape[2]
        self.made_up = v is None
        items = evenly(q.shape[0], max(1, min(4, tokens // max(length, size))))
        rows = slice(0, min(length, tokens)) if length == size else evenly(length, tokens)

        def taken(x: Tensor, at: slice | Tensor) -> Tensor:
            return x.detach()[items.to(x.device)][:, :, at if isinstance(at, slice) else at.to(x.device)].float().cpu()

        self.q, self.k = taken(q, rows), taken(k, slice(0, tokens))
        if v is None:
            generator = torch.Generator().manual_seed(seed)
            shape = (*self.k.shape[:3], VALUE_WIDTH)
            self.v = 2.0 * torch.randint(0, 2, shape, generator=generator).float() - 1.0
        else:
            self.v = taken(v, slice(0, tokens))
        self.call: dict[str, object] = {"is_causal": is_causal, "scale": scale, "key_mask": None}
        real = None
        if key_mask is not None:
            real = key_mask[items.to(key_mask.device), :tokens].cpu()
            self.call["key_mask"] = real
        self.scale = 1.0 / math.sqrt(self.q.shape[-1]) if scale is None else scale
        # Padding is no query either, and a row without any key is 0 in both.
        queries = real if real is not None and length == size else None
        self.index, self.count = self._compared(queries, is_causal, most_scores)
        exact, squares = zip(*self._exact_rows(is_causal, real), strict=True)
        self.exact = torch.cat(exact, 2)
        sizes = VALUE_WIDTH * torch.cat(squares, 2) if v is None else self.exact.square().sum(-1)
        self.sizes = sizes.double() * self.count
        self.norm = float(self.sizes.sum())

    def _compared(self, real: Tensor | None, is_causal: bool, most_scores: int | None) -> tuple[Tensor | None, Tensor]:
        """Which queries are compared, (B, Hq, R) or None for all, and how many each stands for."""
        batch, heads, length, _ = self.q.shape
        share = length if most_scores is None else max(64, most_scores // (batch * heads * self.k.shape[2]))
        if share >= length:
            count = torch.ones(batch, heads, length) if real is None else real.unsqueeze(1).expand(-1, heads, -1)
            return None, count.double()
        index = torch.zeros(batch, heads, share, dtype=torch.int64)
        count = torch.zeros(batch, heads, share, dtype=torch.float64)
        for item in range(batch):
            kept = torch.arange(length) if real is None else real[item].nonzero().squeeze(-1)
            for head in range(heads):
                picked, stands = pick_rows(self.q[item, head, kept], share, is_causal=is_causal)
                index[item, head, : len(picked)] = kept[picked]
                count[item, head, : len(picked)] = stands
        return index, count

    def _exact_rows(self, is_causal: bool, real: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Exact outputs (B, Hq, r, E) and |a|^2 (B, Hq, r) of the queries compared, some at a time."""
        group = self.q.shape[1] // self.k.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (self.k, self.v))
        queries = self._picked(self.q)
        place = torch.arange(self.q.shape[2]) if self.index is None else self.index
        step = max(1, CHUNK // (queries.shape[0] * queries.shape[1] * keys.shape[2]))
        for rows in torch.arange(queries.shape[2]).split(step):
            scores = (self.scale * queries[:, :, rows]) @ keys.mT
            if is_causal:
                scores.masked_fill_(torch.arange(keys.shape[2]) > place[..., rows, None], -math.inf)
            if real is not None:
                scores.masked_fill_(~real[:, None, None, :], -math.inf)
            # A row without keys is NaN here and 0 in the output: it counts as 0.
            weights = torch.softmax(scores, -1).nan_to_num_(0.0)
            yield weights @ values, weights.square().sum(-1)

    def _picked(self, x: Tensor) -> Tensor:
        if self.index is None:
            return x
        return x.gather(2, self.index.unsqueeze(-1).expand(*self.index.shape, x.shape[-1]))

    @property
    def tokens(self) -> int:
        """Keys per sequence."""
        return self.k.shape[2]

    def stretch(self, item: int, number: int, of: int, *, seed: int, most_scores: int | None) -> Piece:
        """One of `of` equal stretches of one sequence: its queries against its own keys alone."""

        def cut(x: Tensor, dim: int) -> Tensor:
            return x[item : item + 1].tensor_split(of, dim)[number]

        q, k = cut(self.q, 2), cut(self.k, 2)
        mask = self.call["key_mask"]
        return Piece(
            *(q, k, None if self.made_up else cut(self.v, 2)),
            tokens=max(q.shape[2], k.shape[2]),
            is_causal=bool(self.call["is_causal"]),
            scale=self.scale,
            key_mask=cut(mask, 1) if isinstance(mask, Tensor) else None,
            seed=seed,
            most_scores=most_scores,
        )

    def squares(self, attend: Mechanism) -> Tensor:
        """Squared errors (B, Hq, R) of one run."""
        # Queries of random features do not see each other: only those compared need to run.
        alone = isinstance(attend, Kernelised) and not self.call["is_causal"] and self.index is not None
        out = attend(self._picked(self.q) if alone else self.q, self.k, self.v, **self.call)
        difference = (out if alone else self._picked(out)) - self.exact
        return difference.square_().sum(-1).double() * self.count

    def errors(self, attend: Mechanism, *, draws: int = 1) -> list[float]:
        """|A' v - A v|^2 / |A v|^2 of every one of `draws` redraws; fewer once one is infinite."""
        return list(self.measure(attend, draws=draws).draws)

    def error(self, attend: Mechanism, *, draws: int = 1) -> float:
        """The mean of `errors`."""
        return self.measure(attend, draws=draws).error

    def measure(
        self, attend: Mechanism, *, draws: int = 1, target: float | None = None, least: int = LEAST_DRAWS
    ) -> Measured:
        """At most `draws` draws; with a target, no more than it takes to see whether it is met, of which it takes
        `least` to see that it is."""
        found: list[float] = []
        total = torch.zeros_like(self.sizes)
        deviation = math.inf
        with torch.no_grad():
            for draw in range(draws):
                if draw:
                    attend.redraw()
                squares = self.squares(attend)
                error = float(squares.sum()) / self.norm
                found.append(error if math.isfinite(error) else math.inf)
                if found[-1] == math.inf:
                    return Measured((math.inf,), 0.0)
                total += squares
                deviation = self._deviation(found, total / len(found))
                if target is not None and self._decided(Measured(tuple(found), deviation), target, least):
                    break
        return Measured(tuple(found), deviation)

    @staticmethod
    def _decided(so_far: Measured, target: float, least: int) -> bool:
        count = len(so_far.draws)
        if so_far.error * count > target * (2 + count):  # one draw three times too large, two twice, and so on
            return True
        above = 2 * so_far.error - so_far.high > target
        return (count >= LEAST_DRAWS and above) or (count >= least and so_far.meets(target))

    def _deviation(self, found: list[float], squares: Tensor) -> float:
        between = statistics.variance(found) / len(found) if len(found) > 1 else 0.0
        # A ratio of two sums over queries.
        rows = float((squares - statistics.fmean(found) * self.sizes).square().sum()) / self.norm**2
        return math.sqrt(between + rows)
