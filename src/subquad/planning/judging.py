"""The error of one setting on one input, and what it is unlikely to exceed.

Everything runs on the input itself, at the length asked for or as near as the input and an allowance of work let it,
against exact rows over all keys (`measuring.py`). What draws something is judged by one draw, which the choice then
names by its seed: the best of a few on disjoint parts of the input (`variation.py`). Its error counts with what
choosing it on this data flatters it, and with two deviations, as the parts of the input differ. With `redraws` the mean
over draws is judged instead, for those who draw again, as some do in training; and always for clusters and buckets.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..features.calibration import Calibration, calibrations
from ..features.random import ExponentialFeatures
from ..mechanisms import MECHANISMS, create
from ..mechanisms.base import Mechanism
from .baselines import baseline_errors, means_of
from .candidates import Ladder
from .measuring import CONFIDENCE, LEAST_DRAWS, Piece
from .recommendation import Choice
from .sampling import blocks, evenly
from .variation import Parts, best_draw

__all__ = ["Judge", "fewer_heads", "seeds_tried", "with_seed"]

TRIED_FEATURES = 3072  # draws to choose from, times their features
LEAST_TRIED, MOST_TRIED = 4, 12
OTHERS_TRIED = 3  # far fields: draws differ less, and a run takes longer
DRAWS = 10  # of the mean over draws
SAFE_DRAWS = 6  # outside the range of the closed form, and up to MOST_DRAWS of few features
MOST_DRAWS = 30
DRAWN_FEATURES = 6144
MOST_HEADS = 8
LEAST_HEADS = 2
HEAD_TOKENS = 1 << 14  # heads times tokens of what every setting runs on: 8 heads of 2048 tokens, 4 of 4096
MOST_TOKENS = 1 << 14  # of one sequence, which has at least two heads
MOST_SCORES = 1 << 24  # of exact attention: all rows of 1 head of 4096 tokens, 512 rows of 2 heads of 16384
PART_SCORES = 1 << 21
CANDIDATE_ROWS = 128  # of the closed form and the baselines


def with_seed(name: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same options with `seed` wherever something is drawn, also in a far field."""
    options = dict(options)
    far = options.get("far")
    if isinstance(far, dict):
        options["far"] = with_seed(far["mechanism"], far, seed)
    if "seed" in MECHANISMS[name].options():
        options["seed"] = seed
    return options


def seeds_tried(attend: Mechanism) -> int:
    """From how many draws of this mechanism one is chosen: the fewer features, the more they differ.

    >>> [seeds_tried(create("performer", 16, num_features=count)) for count in (64, 512, 2048)]
    [12, 6, 4]
    """
    far: Mechanism = getattr(attend, "far", attend)
    if "seed" not in attend.options() and "seed" not in far.options():
        return 1
    count = getattr(attend, "num_features", None)
    return OTHERS_TRIED if count is None else max(LEAST_TRIED, min(MOST_TRIED, TRIED_FEATURES // count))


def keeps_its_draw(attend: Mechanism) -> bool:
    """Whether a good draw on one input is a good one on the next: of random features it is. Clusters and buckets are
    made of the data at hand, with starting points that are as good as any others: there only the mean counts.

    >>> [keeps_its_draw(create(name, 16)) for name in ("performer", "clustered", "lsh")]
    [True, False, False]
    """
    far: Mechanism = getattr(attend, "far", attend)
    return seeds_tried(attend) == 1 or hasattr(far, "num_features")


def fewer_heads(
    q: Tensor, k: Tensor, v: Tensor | None, *, length: int, keep_all: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """On the CPU, some query heads in whole groups: what a plan costs must not grow with the model."""
    group = q.shape[1] // k.shape[1]
    tokens = min(length, max(q.shape[2], k.shape[2]))
    most = min(MOST_HEADS, max(LEAST_HEADS, HEAD_TOKENS // tokens))
    kept = evenly(k.shape[1], k.shape[1] if keep_all else max(1, most // group))
    queries = (kept.unsqueeze(1) * group + torch.arange(group)).flatten()

    def taken(x: Tensor, heads: Tensor) -> Tensor:
        return x.detach()[:, heads.to(x.device)].cpu()

    return taken(q, queries), taken(k, kept), None if v is None else taken(v, kept)


class Judge:
    """One input: its sample, its pieces and the mechanisms made for it."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor | None, target: float, length: int, seed: int, **form: Any
    ) -> None:
        self.q, self.k, self.length, self.seed = q, k, length, seed
        self.redraws: bool = form.pop("redraws", False)
        self.key_mask: Tensor | None = form["key_mask"]
        self.with_values = v is not None
        self.scale = 1.0 / math.sqrt(q.shape[-1]) if form["scale"] is None else float(form["scale"])
        heads = q.shape[1]
        size = max(q.shape[2], k.shape[2])
        # Several short sequences count as one long one; a sequence longer than asked for is cut.
        tokens = max(1, min(MOST_TOKENS, 2 * HEAD_TOKENS // heads))
        if size > length and q.shape[2] == k.shape[2] and self.key_mask is None:
            q, k, v = q[:, :, :length], k[:, :, :length], None if v is None else v[:, :, :length]
        self.piece = Piece(q, k, v, tokens=tokens, seed=seed, most_scores=MOST_SCORES, **form)
        self._parts = functools.cache(lambda: Parts(self.piece, seed=seed, most_scores=PART_SCORES))
        # Whether an error grows with length can only be seen at two lengths.
        half = self.piece.tokens // 2
        self._half: Callable[[], Piece] = functools.cache(
            lambda: Piece(q, k, v, tokens=half, seed=seed, most_scores=MOST_SCORES, **form)
        )
        self.growing = self.length > self.piece.tokens and q.shape[2] == k.shape[2] and half > 0
        self.sample = list(blocks(q, k, v, max_queries=CANDIDATE_ROWS, **{**form, "scale": self.scale}))
        if self.key_mask is None and not self.piece.norm > 0:
            largest = max(float(x.abs().max()) for x in (q, k))
            raise ValueError(
                "softmax attention is 0 or undefined here, so no error is relative to it: v is 0, or q and k are "
                f"too large (entries up to {largest:.2g}) for their products to be finite; check how they were scaled"
            )
        if not self.sample or not self.piece.norm > 0:
            raise ValueError("key_mask leaves no query with a key; at least one real key per sequence is expected")
        self.statistics = Calibration(k.shape[1], k.shape[-1])
        self.statistics.update(self.q, self.k, self.key_mask)
        weights, outs = baseline_errors(self.sample, means_of(self.statistics, self.scale))
        self.baselines = outs if self.with_values else weights
        # What is worse than the mean of the values is of no use, however generous the target.
        self.target = min(target, self.baselines["uniform"])

    @property
    def parts(self) -> int:
        """Disjoint stretches of the input that are compared."""
        return len(self._parts().pieces)

    def make(self, ladder: Ladder, options: dict[str, Any], draw: int = 0) -> Mechanism:
        """The mechanism of one step, calibrated on the data where it uses calibration.

        All heads of a layer share one draw, which depends on the seed alone: the whole layer has the draw that is
        looked at here, with some of its heads.
        """
        if ladder.given is not None:
            return ladder.given
        made = create(
            *(ladder.mechanism, self.q.shape[-1], self.q.shape[1], self.k.shape[1]),
            **with_seed(ladder.mechanism, options, self.seed + draw),
        )
        # The same statistics for all: gathering them costs more than many a run.
        known = self.statistics
        for own in calibrations(made):
            own.assign(known.query_mean, known.key_mean, known.query_cov, known.key_cov, known.counts)
        for part in made.modules():
            if isinstance(part, ExponentialFeatures):
                part.use_statistics()
        return made

    def judge(self, ladder: Ladder, choice: Choice, *, grows: bool = True) -> Choice:
        """`choice` with its error on the piece and, if that would do, what its growth with length makes of it."""
        mean = self.redraws or (ladder.given is None and not keeps_its_draw(self.make(ladder, choice.options)))
        judged, growth = self._mean(ladder, choice) if mean else self._one(ladder, choice)
        if not (judged.meets(self.target) and grows and self.growing):
            return judged
        factor = growth() ** math.log2(self.length / self.piece.tokens)
        assert judged.error_high is not None
        return replace(judged, error_at_length=factor * judged.error, error_high=factor * judged.error_high)

    def _one(self, ladder: Ladder, choice: Choice) -> tuple[Choice, Callable[[], float]]:
        """The draw that is best on parts of the input, its error on all of it, and how that grows."""
        count = 1 if ladder.given is not None else seeds_tried(self.make(ladder, choice.options))
        makes = [functools.partial(self.make, ladder, choice.options, draw) for draw in range(count)]
        best = best_draw(self._parts(), makes, self.target)
        attend = makes[best.index]()
        found = self.piece.measure(attend)
        error, spread = best.flattered * found.error, math.hypot(found.deviation, best.deviation * found.error)
        high = error + CONFIDENCE * spread if math.isfinite(error) else math.inf
        choice = replace(choice, measured_error=error, error_high=high, draws=best.tried)
        if count > 1:
            choice = replace(choice, options=with_seed(ladder.mechanism, choice.options, self.seed + best.index))
            choice = replace(choice, error_over_draws=best.others * found.error)
        return choice, lambda: self._growth(found.error, self._half().error(attend))

    def _mean(self, ladder: Ladder, choice: Choice) -> tuple[Choice, Callable[[], float]]:
        """The mean over draws, and how it grows. A given object is copied: it keeps the draw that it has."""
        attend = self.make(ladder, choice.options)
        first = copy.deepcopy(attend)
        attend = attend if ladder.given is None else copy.deepcopy(attend)
        draws, least = 1, 1
        if seeds_tried(attend) > 1:
            draws, least = DRAWS, LEAST_DRAWS
            # Outside the range of the closed form errors have long tails, of which few draws may show nothing; of few
            # features there can be many.
            if choice.predicted_error is None or not choice.predicted_reliable:
                each = getattr(attend, "num_features", DRAWN_FEATURES)
                least = max(SAFE_DRAWS, min(MOST_DRAWS, DRAWN_FEATURES // each))
                draws = max(DRAWS, 2 * least)
        found = self.piece.measure(attend, draws=draws, target=self.target, least=least)
        spread = found.deviation
        if found.meets(self.target):
            parts = self._parts()
            spread = math.hypot(spread, parts.deviation(parts.squares(attend)) * found.error)
        choice = replace(
            choice,
            measured_error=found.error,
            error_high=found.error + CONFIDENCE * spread,
            error_over_draws=found.error if draws > 1 else None,
            draws=len(found.draws),
        )
        return choice, lambda: self._growth(found.error, self._half().error(first, draws=len(found.draws)))

    def _growth(self, error: float, shorter: float) -> float:
        """The factor of the error per doubling, never below 1, of the same draws: the keys left out double, their
        squared share may grow fourfold. The offset keeps two errors that are both nothing from making a factor."""
        offset = 1e-3 * self.target
        return max(1.0, (error + offset) / (shorter + offset))
