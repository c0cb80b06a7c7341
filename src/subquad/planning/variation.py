"""How an error differs between data and between draws, seen on disjoint parts of what there is.

The error of random features, and of a polynomial, on one input is carried by the few keys of largest norm, which all
rows share: rows agree with each other where another input of the same kind does not. So the parts are stretches with
queries *and* keys of their own: other sequences, or pieces of one.

Their deviation is taken as it is, not divided by the root of their number. Where the largest keys carry the error, more
tokens bring larger keys, not a better mean: an input four times as long varies as much from one to the next. Where
nothing is large, the parts agree anyway.

A draw is chosen by its error on all parts. How much that flatters it is seen by leaving out each part in turn: the draw
that is best on the others, on the one left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mechanisms.base import Mechanism
from .measuring import CONFIDENCE, Piece

__all__ = ["BestDraw", "Parts", "best_draw"]

PARTS = 4
LEAST_PART = 16  # tokens; on fewer there is no attention to speak of
CLEAR = 0.25  # of the target: no need for a better draw


class Parts:
    """Disjoint stretches of a piece, each with its own queries and keys; sizes: (P, Hq) |A v|^2 of each."""

    def __init__(self, piece: Piece, *, seed: int, most_scores: int | None) -> None:
        batch = piece.q.shape[0]
        shortest = min(piece.q.shape[2], piece.k.shape[2])
        each = min(math.ceil(PARTS / batch), max(1, shortest // LEAST_PART))
        places = [(item, i) for item in range(batch) for i in range(each)]
        found = [piece.stretch(item, i, each, seed=seed, most_scores=most_scores) for item, i in places]
        # Padding has no error; a mask may leave queries in one part and their keys in another.
        self.pieces = [part for part in found if part.norm > 0] or [piece]
        self.sizes = torch.stack([part.sizes.sum((0, 2)) for part in self.pieces])

    def squares(self, attend: Mechanism) -> Tensor:
        """Squared errors (P, Hq) of one run on each part."""
        with torch.no_grad():
            found = torch.stack([part.squares(attend).sum((0, 2)) for part in self.pieces])
        return torch.nan_to_num(found, nan=math.inf)

    def deviation(self, squares: Tensor) -> float:
        """From one stretch of this data to another, relative to the error: heads are compared with themselves only.

        No more than if one stretch had all the error and the next input were like that one throughout.
        """
        count, total = len(squares), float(squares.sum())
        if count < 2 or not 0 < total < math.inf:
            return 0.0
        error = squares.sum(0) / self.sizes.sum(0).clamp(min=1e-300)
        off = float((squares - error * self.sizes).square().sum())
        return min(count * math.sqrt(off / (count - 1)) / total, (count - 1) / CONFIDENCE)


@dataclass(frozen=True)
class BestDraw:
    """Which of the draws tried is best, and what is known of it.

    index:     among those given;  tried: how many were run
    others:    the mean over the draws tried, relative to this one's error on the same parts
    flattered: its error on data that it was not chosen on over that on the data it was chosen on, at least 1
    deviation: between stretches of the data, relative to the error: over all draws, since one that has met no large key
               here may meet one elsewhere
    """

    index: int
    tried: int
    others: float
    flattered: float
    deviation: float


def best_draw(parts: Parts, makes: Sequence[Callable[[], Mechanism]], target: float) -> BestDraw:
    """The best of several draws of one setting; fewer are run where it is clear that none or every one will do."""
    norm = float(parts.sizes.sum())
    found: list[Tensor] = []
    for make in makes:
        found.append(parts.squares(make()))
        least = min(float(squares.sum()) for squares in found) / norm
        # One draw five times too large, two three times, four twice.
        if least <= CLEAR * target or least > target * (1 + 4 / len(found)):
            break
    squares = torch.stack(found)  # (draws, P, Hq)
    each = squares.sum(-1)  # (draws, P)
    total = each.sum(-1)
    index = int(total.argmin())
    others = (total.unsqueeze(-1) - each).nan_to_num(nan=math.inf)
    verified = float(each.gather(0, others.argmin(0, keepdim=True)).sum())
    least, several = float(total[index]), len(parts.pieces) > 1
    usable = 0 < least < math.inf
    flattered = verified / least if several and usable else 1.0
    mean = float(total.mean()) / least if usable else 1.0
    spread = [parts.deviation(one) ** 2 for one in squares[total <= 2 * total[index]]]
    deviation = math.sqrt(sum(spread) / len(spread)) if spread else 0.0
    return BestDraw(index, len(found), mean, max(1.0, flattered), deviation)
