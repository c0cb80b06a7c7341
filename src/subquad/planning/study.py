"""The errors of everything a plan chooses from, on one input.

Every setting that is recommended has been run on the input itself, at the length asked for or as near as the input and
an allowance of work let it, with several draws where it draws, against exact rows over all keys (`measuring.py`). It
meets the target if its mean error does and two standard errors above it stay within 1.1 of the target.

Random features: their cost depends on their number alone, so the family that needs the fewest is the fastest, and the
others are only asked whether they could do with no more. Where the closed form holds and is far above the target,
nothing is run; what trigonometric features do not reach by the closed form they do not reach at all, and where one of
their normalisers may cross 0 a few good draws say nothing: those are not recommended either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..features.calibration import Calibration
from ..mechanisms import MECHANISMS, create
from ..mechanisms.base import Mechanism
from ..mechanisms.taylor import Taylor
from .baselines import means_of
from .candidates import Ladder, least_tokens
from .measuring import LEAST_DRAWS, Measured, Piece
from .prediction import Curve, baseline_errors, calibrated
from .recommendation import Choice
from .sampling import blocks, evenly

__all__ = ["Study", "fewer_heads", "with_seed"]

DRAWS = 10
SAFE_DRAWS = 6  # outside the range of the closed form, and up to MOST_DRAWS of few features
MOST_DRAWS = 30
DRAWN_FEATURES = 6144
MOST_HEADS = 8
LEAST_HEADS = 2
HEAD_TOKENS = 1 << 14  # heads times tokens of what every setting runs on: 8 heads of 2048 tokens, 4 of 4096
MOST_TOKENS = 1 << 14  # of one sequence, which has at least two heads
MOST_SCORES = 1 << 24  # of exact attention: all rows of 1 head of 4096 tokens, 512 rows of 2 heads of 16384
CANDIDATE_ROWS = 128  # of the closed form and the baselines, and how many of them it looks at
ROWS_PER_HEAD = 12
KEYS_PER_ROW = 128
HOPELESS = 1.5  # a prediction that holds within 20 % and is this far above the target
FAR = 2.0  # times the target
EXTRAPOLATE_BELOW = 0.1  # above it the error does not fall as 1/M


def with_seed(name: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same options with `seed` wherever something is drawn, also in a far field."""
    options = dict(options)
    far = options.get("far")
    if isinstance(far, dict):
        options["far"] = with_seed(far["mechanism"], far, seed)
    if "seed" in MECHANISMS[name].options():
        options["seed"] = seed
    return options


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


class Study:
    """One input: its sample, its pieces and the mechanisms made for it."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor | None, target: float, length: int, seed: int, **form: Any
    ) -> None:
        self.q, self.k, self.length, self.seed = q, k, length, seed
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
        # Whether an error grows with length can only be seen at two lengths.
        half = self.piece.tokens // 2
        self._half: Callable[[], Piece] = functools.cache(
            lambda: Piece(q, k, v, tokens=half, seed=seed, most_scores=MOST_SCORES, **form)
        )
        self.growing = self.length > self.piece.tokens and q.shape[2] == k.shape[2] and half > 0
        self.sample = list(blocks(q, k, v, max_queries=CANDIDATE_ROWS, **{**form, "scale": self.scale}))
        if not self.sample or not self.piece.norm > 0:
            raise ValueError("key_mask leaves no query with a key; at least one real key per sequence is expected")
        statistics = Calibration(k.shape[1], k.shape[-1])
        statistics.update(q, k, self.key_mask)
        weights, outs = baseline_errors(self.sample, means_of(statistics, self.scale))
        self.baselines = outs if self.with_values else weights
        # What is worse than the mean of the values is of no use, however generous the target.
        self.target = min(target, self.baselines["uniform"])

    def make(self, ladder: Ladder, options: dict[str, Any]) -> Mechanism:
        """The mechanism of one step, calibrated on the data where it uses calibration."""
        if ladder.given is not None:
            return ladder.given
        made = create(
            *(ladder.mechanism, self.q.shape[-1], self.q.shape[1], self.k.shape[1]),
            **with_seed(ladder.mechanism, options, self.seed),
        )
        return calibrated(made, self.q, self.k, self.key_mask)

    def judge(self, ladder: Ladder, choice: Choice, *, grows: bool = True) -> Choice:
        """`choice` with its error on the piece and, if that would do, what its growth with length makes of it."""
        attend = self.make(ladder, choice.options)
        far: Mechanism = getattr(attend, "far", attend)
        draws, least = 1, 1
        if "seed" in attend.options() or "seed" in far.options():
            draws, least = DRAWS, LEAST_DRAWS
            # Outside the range of the closed form errors have long tails, of which few draws may show nothing; of few
            # features there can be many.
            if choice.predicted_error is None or not choice.predicted_reliable:
                least = max(
                    SAFE_DRAWS, min(MOST_DRAWS, DRAWN_FEATURES // getattr(attend, "num_features", DRAWN_FEATURES))
                )
                draws = max(DRAWS, 2 * least)
        found = self.piece.measure(attend, draws=draws, target=self.target, least=least)
        choice = replace(choice, measured_error=found.error, error_high=found.high, draws=len(found.draws))
        if not (found.meets(self.target) and grows and self.growing):
            return choice
        factor = self._growth(ladder, choice.options, found) ** math.log2(self.length / self.piece.tokens)
        return replace(choice, error_at_length=factor * found.error, error_high=factor * found.high)

    def _growth(self, ladder: Ladder, options: dict[str, Any], found: Measured) -> float:
        """The factor of the error per doubling, never below 1, of the same draws: the keys left out double, their
        squared share may grow fourfold. The offset keeps two errors that are both nothing from making a factor."""
        shorter = self._half().error(self.make(ladder, options), draws=len(found.draws))
        offset = 1e-3 * self.target
        return max(1.0, (found.error + offset) / (shorter + offset))

    def climb(self, ladder: Ladder) -> Choice | None:
        """The cheapest step that meets the target, or the best one, one after the other.

        None where no step can be judged on so few tokens: a window that covers them all is exact there and only there.
        """
        tokens, length = self.piece.tokens, self.length
        steps = [o for o in ladder.steps if length <= tokens or tokens >= least_tokens(ladder.mechanism, o)]
        tried: dict[int, Choice] = {}

        def tried_at(i: int) -> Choice:
            if i not in tried:
                tried[i] = self._step(ladder, steps[i])
            return tried[i]

        last = len(steps) - 1
        for i in range(len(steps)):
            found = tried_at(i)
            if found.meets(self.target):
                return found
            # Far away: what lies between here and the last step is only worth a run if that one meets the target.
            if found.error > FAR * self.target and not tried_at(last).meets(self.target):
                break
        return min(tried.values(), key=lambda choice: choice.error, default=None)

    def _step(self, ladder: Ladder, options: dict[str, Any]) -> Choice:
        choice = Choice(ladder.mechanism, options, given=ladder.given)
        computed = self._computed(self.make(ladder, options))
        if computed is None:
            return self.judge(ladder, choice)
        choice = replace(choice, predicted_error=computed)
        return self.judge(ladder, choice, grows=False) if computed <= HOPELESS * self.target else choice

    def _computed(self, attend: Mechanism) -> float | None:
        """The error without a run, where it has no randomness."""
        if not isinstance(attend, Taylor):
            return None
        curve = Curve(attend, self.sample, scale=self.scale, max_keys=KEYS_PER_ROW)
        return curve.error(None, output=self.with_values)

    def features(self, group: list[Ladder]) -> Iterator[Choice]:
        """Of every family of random features, the smallest number that meets the target and no other undercuts."""
        curves = [
            Curve(
                self.make(ladder, ladder.steps[0]),
                *(self.sample,),
                scale=self.scale,
                max_rows=ROWS_PER_HEAD,
                max_keys=KEYS_PER_ROW,
                output_keys=KEYS_PER_ROW,
            )
            for ladder in group
        ]

        def promise(i: int) -> float:
            return curves[i].error(group[i].steps[-1]["num_features"], output=self.with_values)

        most = math.inf
        for i in sorted(range(len(group)), key=promise):
            found = self._fewest(group[i], curves[i], most)
            if found.meets(self.target):
                most = min(most, found.options["num_features"])
            yield found

    def _fewest(self, ladder: Ladder, curve: Curve, most: float) -> Choice:
        steps = [step for step in ladder.steps if step["num_features"] <= most]
        choices: list[Choice] = []
        for step in steps:
            count = step["num_features"]
            error, trusted = curve.error(count, output=self.with_values), curve.trust(count)[0]
            choices.append(Choice(ladder.mechanism, step, predicted_error=error, predicted_reliable=trusted))
        last = len(steps) - 1
        top = choices[last]
        if not curve.steady(steps[last]["num_features"]):
            return replace(top, error_high=math.inf, note="a normaliser may come close to 0")
        trig = any(law.trig for law in curve.laws.values())
        if (top.predicted_reliable or trig) and top.error > HOPELESS * self.target:
            return self._noted(top)
        found: dict[int, Choice] = {}

        def meets(i: int) -> bool:
            if not curve.steady(steps[i]["num_features"]):
                return False
            if i not in found:
                # Where the first order holds, the error is a mean over pairs that more pairs do not change.
                found[i] = self.judge(ladder, choices[i], grows=not choices[i].predicted_reliable)
            return found[i].meets(self.target)

        if not meets(last):
            return self._noted(found[last])
        # The error falls with the number: between one that fails and one that does, starting where the formula points.
        below, above = -1, last
        trial = next((i for i in range(last) if choices[i].predicted_reliable and choices[i].error <= self.target), -1)
        while above - below > 1:
            if not below < trial < above:
                trial = (below + above) // 2
            if meets(trial):
                above = trial
            else:
                below = trial
            trial = above - 1 if trial == above else below + 1
        return found[above]

    def _noted(self, choice: Choice) -> Choice:
        note = ""
        if 0 < self.target < choice.error < EXTRAPOLATE_BELOW:
            needed = math.ceil(choice.options["num_features"] * choice.error / self.target)
            note = f"would need about {needed} features"
        return replace(choice, note=note)
