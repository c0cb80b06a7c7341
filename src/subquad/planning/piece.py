"""The error of any mechanism, measured: its own output on a segment of the input against exact attention.

A segment is contiguous, because what a window or a cluster leaves out depends on what stands where. The mechanism runs
on all of it; exact attention, whose cost is quadratic, is computed for all queries or for a sample of them against
*all* keys. `folded` cuts it into shorter segments with queries and keys of their own: how their errors differ says how
much inputs of this kind differ, and their mean against the whole says how the error grows with length.

With values v of independent entries +-1 and width E, the mean of |A' v - A v|^2 is E |A' - A|^2: one run measures the
error of the whole matrix; on up to E keys, with rows of a Hadamard matrix, without noise. Its size E |A|^2 is computed,
not taken from |A v|^2: rows of flat attention are all alike, and the E numbers that they make of v scatter by
sqrt(2 / E) however many rows there are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..features.hadamard import fwht
from ..mechanisms.base import Mechanism
from ..mechanisms.kernelised import Kernelised
from ..state.windowed import take

__all__ = ["Piece", "check_inputs", "evenly", "pick_rows"]

VALUE_WIDTH = 64
CHUNK = 1 << 22  # scores of one step of exact attention: 16 MB
LEAST_STRETCH = 16  # tokens; on fewer there is no attention to speak of
STRETCHES = 4


def check_inputs(q: Any, k: Any, v: Any, *, is_causal: bool, key_mask: Any, scale: Any) -> None:
    """Shapes, at least one query with one key, and nothing that is not finite."""
    width = q.shape[-1] if isinstance(q, Tensor) and q.dim() else 0
    checks.check_attention(q, k, k if v is None else v, head_dim=width, heads=None, kv_heads=None)
    checks.check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k.device)
    if 0 in q.shape or k.shape[2] == 0:
        raise ValueError(
            f"q {checks.describe_shape(q)} and k {checks.describe_shape(k)}: at least one query and one key of width 1 "
            "or more is expected"
        )
    if key_mask is not None and not bool(key_mask.any()):
        raise ValueError("key_mask leaves no query with a key; it must be True for at least one token")
    checks.check_flag("is_causal", is_causal)
    if is_causal:
        checks.check_causal_lengths(q, k)
    if scale is not None:
        checks.check_scale(scale)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and not bool(torch.isfinite(x).all()):
            raise ValueError(
                f"{name} must be finite; {int((~torch.isfinite(x)).sum())} of its {x.numel()} entries are NaN or "
                "infinite. Check what wrote it: half precision overflows at 65504"
            )


def evenly(count: int, most: int) -> Tensor:
    """At most `most` of the indices 0 .. count - 1, evenly spread over the whole.

    >>> evenly(10, 4).tolist(), evenly(3, 4).tolist()
    ([1, 3, 6, 8], [0, 1, 2])
    """
    if count <= most:
        return torch.arange(count)
    return ((torch.arange(most, dtype=torch.float64) + 0.5) * (count / most)).long()


def pick_rows(x: Tensor, most: int, *, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Indices of at most `most` of the queries x (n, D), and how many queries each of them stands for.

    The error grows exponentially with the norm: a quarter of them are the largest, and stand for themselves alone.
    Nothing is random.
    """
    count = len(x)
    if count <= most:
        return torch.arange(count), torch.ones(count, dtype=torch.float64)
    x = x.to(torch.float64)
    order = (x - x.mean(0)).square().sum(-1).argsort(dim=0, descending=True, stable=True)
    largest, rest = order.tensor_split([most // 4])
    some = most - len(largest)
    if is_causal:
        # A row of n keys has |a|^2 of about 1/n: every doubling of the position carries as much as the one before.
        edges = torch.logspace(0, math.log10(len(rest) + 1), some + 1, dtype=torch.float64).round().long().unique() - 1
        picked, counts = rest.sort().values[(edges[:-1] + edges[1:]) // 2], torch.diff(edges)
    else:
        picked, counts = rest[evenly(len(rest), some)], torch.full((some,), len(rest) / some)
    return torch.cat([largest, picked]), torch.cat([torch.ones(len(largest)), counts]).to(torch.float64)


def _signs(shape: torch.Size, seed: int) -> Tensor:
    """Values +-1, (B, H, S, VALUE_WIDTH): drawn, or rows of a Hadamard matrix where there are enough of them. Those are
    orthogonal, and then one run gives |A' - A|^2 exactly."""
    generator = torch.Generator().manual_seed(seed)
    if shape[2] > VALUE_WIDTH:
        return 2.0 * torch.randint(0, 2, (*shape, VALUE_WIDTH), generator=generator).float() - 1.0
    rows = fwht(torch.eye(VALUE_WIDTH))[torch.randperm(VALUE_WIDTH, generator=generator)[: shape[2]]]
    return rows.expand(*shape, VALUE_WIDTH).contiguous()


class Piece:
    """The first real tokens of a few sequences, the longest, in float32 on the CPU, with their exact output.

    Padding is moved behind the real tokens, which keep their order, and set to 0; what all sequences have is cut off.

    tokens:    at most so many in all, or of the one sequence that is longer
    sequences: at most so many
    cross:     whether padding among the keys is none among the queries; None = where there are more or fewer queries

    given: sequences that have a key, here or not
    exact: (B, Hq, R, E) of the queries compared: all of them, or as many as `most_scores` allows
    count: (B, Hq, R) queries that each of them stands for; padding counts 0
    sizes: (B, Hq, R) |A v|^2 of each, or its mean E |A|^2 where the values are made up;  norm: their sum
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        tokens: int,
        is_causal: bool = False,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        seed: int = 0,
        most_scores: int | None = None,
        made_up: bool = False,
        sequences: int = STRETCHES,
        cross: bool | None = None,
    ) -> None:
        self.cross = q.shape[2] != k.shape[2] if cross is None else cross
        self.made_up = made_up or v is None
        self.most_scores = most_scores
        real = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool) if key_mask is None else key_mask.cpu()
        lengths = real.sum(1)
        self.given = int((lengths > 0).sum())
        longest = max(int(lengths.max()), q.shape[2] if self.cross else 1)
        most = max(1, min(sequences, self.given, tokens // longest))
        items = (lengths >= lengths.sort(descending=True).values[most - 1]).nonzero().squeeze(-1)
        items = items[evenly(len(items), most)]
        real = real[items]
        order = real.logical_not().byte().argsort(dim=1, stable=True)[:, : min(tokens, int(lengths.max()))]
        real = real.gather(1, order)

        rows, asked = order, real
        if self.cross:
            rows = evenly(q.shape[2], tokens).unsqueeze(0)
            asked = torch.ones_like(rows, dtype=torch.bool)

        def taken(x: Tensor, places: Tensor, shown: Tensor) -> Tensor:
            some = take(x.detach()[items.to(x.device)], places.to(x.device)).float().cpu()
            return some.masked_fill_(~shown[:, None, :, None], 0.0)

        self.q, self.k = taken(q, rows, asked), taken(k, order, real)
        if v is None:
            self.v = _signs(self.k.shape[:3], seed)
        else:
            # Errors are relative: values of any size are judged alike, without overflow of their squares.
            self.v = taken(v, order, real)
            self.v /= self.v.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
        mask = None if bool(real.all()) else real
        self.scale = 1.0 / math.sqrt(self.q.shape[-1]) if scale is None else scale
        queries = None if self.cross else mask  # padding is no query either
        self.call: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "key_mask": mask, "query_mask": queries}
        self.index, self.count = self._compared(queries, is_causal)
        exact, squares = zip(*self._exact_rows(is_causal, mask), strict=True)
        self.exact = torch.cat(exact, 2)
        sizes = VALUE_WIDTH * torch.cat(squares, 2) if self.made_up else self.exact.square().sum(-1)
        self.sizes = sizes.double() * self.count
        self.norm = float(self.sizes.sum())
        if not 0 < self.norm < math.inf:
            if not bool(self.v.any()):
                raise ValueError("v is 0 everywhere, and no error is relative to outputs of 0; check what wrote it")
            largest = max(float(x.abs().max()) for x in (self.q, self.k))
            raise ValueError(
                f"q and k have entries up to {largest:.2g}: their products are not finite, so there is no softmax "
                "attention to compare with; check how they were scaled"
            )

    def _compared(self, real: Tensor | None, is_causal: bool) -> tuple[Tensor | None, Tensor]:
        """Which queries are compared, (B, Hq, R) or None for all, and how many each stands for."""
        batch, heads, length, _ = self.q.shape
        most = self.most_scores
        share = length if most is None else max(64, most // (batch * heads * self.k.shape[2]))
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
        """Keys of the longest sequence."""
        return self.k.shape[2]

    @property
    def sequences(self) -> int:
        """How many are looked at, of those `given`."""
        return self.k.shape[0]

    def folded(self, most: int = STRETCHES) -> Piece | None:
        """The same tokens as `most` times as many sequences of that part of the length; None where they are too few."""
        of = min(most, min(self.q.shape[2], self.k.shape[2]) // LEAST_STRETCH)
        if of < 2:
            return None

        def cut(x: Tensor, dim: int) -> Tensor:
            each = x.shape[dim] // of
            shape = (*x.shape[:dim], of, each, *x.shape[dim + 1 :])
            return x.narrow(dim, 0, of * each).reshape(shape).movedim(dim, 1).flatten(0, 1)

        mask = self.call["key_mask"]
        return Piece(
            *(cut(x, 2) for x in (self.q, self.k, self.v)),
            tokens=self.sequences * max(self.q.shape[2], self.k.shape[2]),
            is_causal=self.call["is_causal"],
            scale=self.scale,
            key_mask=None if mask is None else cut(mask, 1),
            most_scores=self.most_scores,
            made_up=self.made_up,
            sequences=self.sequences * of,
            cross=self.cross,
        )

    def squares(self, attend: Callable[..., Tensor]) -> Tensor:
        """Squared errors (B, Hq, R) of one run."""
        # Queries of random features do not see each other: only those compared need to run.
        alone = isinstance(attend, Kernelised) and not self.call["is_causal"] and self.index is not None
        with torch.no_grad():
            if alone:
                out = attend(self._picked(self.q), self.k, self.v, **{**self.call, "query_mask": None})
            else:
                out = attend(self.q, self.k, self.v, **self.call)
        difference = (out if alone else self._picked(out)) - self.exact
        return torch.nan_to_num(difference.square_().sum(-1).double() * self.count, nan=math.inf, posinf=math.inf)

    def error(self, attend: Callable[..., Tensor]) -> float:
        """|A' v - A v|^2 / |A v|^2 of one run."""
        return float(self.squares(attend).sum()) / self.norm

    def errors(self, attend: Mechanism, *, draws: int = 1) -> list[float]:
        """The same of every one of `draws` draws, the first being the one that it has."""
        found = []
        for draw in range(draws):
            if draw:
                attend.redraw()
            found.append(self.error(attend))
        return found

    def mean_error(self, attend: Mechanism, *, draws: int = 1) -> float:
        """The mean of `errors`."""
        return statistics.fmean(self.errors(attend, draws=draws))

    def by_segment(self, squares: Tensor) -> Tensor:
        """Squares (B, Hq, R) summed to (P, Hq): P groups of whole sequences, four if there are as many."""
        return torch.stack([group.sum((0, 2)) for group in squares.tensor_split(min(STRETCHES, len(squares)))])

    def deviation(self, squares: Tensor) -> float:
        """How the error differs from one segment to another, relative to it; squares (P, Hq) of `by_segment`.

        Heads are compared with themselves only. Not divided by the root of their number: where the largest keys carry
        the error, more tokens bring larger keys, not a better mean. No more than if one segment had all of it.
        """
        count, total = len(squares), float(squares.sum())
        if count < 2 or not 0 < total < math.inf:
            return 0.0
        sizes = self.by_segment(self.sizes)
        error = squares.sum(0) / sizes.sum(0).clamp(min=1e-300)
        off = float((squares - error * sizes).square().sum())
        return min(count * math.sqrt(off / (count - 1)) / total, (count - 1) / 2)
