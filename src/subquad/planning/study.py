"""The settings a plan chooses from, climbed from cheap to dear until one meets the target (`judging.py` says when).

Random features: the cost of exponential ones depends on their number alone, so the family that needs the fewest is the
fastest, and the others are only asked whether they could do with no more. Trigonometric ones may take three times as
long, so they come last: they say nothing about how many of the others to look for. Where the closed form holds and is
far above the target, nothing is run; what trigonometric features do not reach by the closed form they do not reach at
all, and where one of their normalisers may cross 0 a few good draws say nothing: those are not recommended either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..mechanisms.base import Mechanism
from ..mechanisms.taylor import Taylor
from .candidates import Ladder, least_tokens
from .curve import Curve
from .judging import Judge
from .recommendation import Choice

__all__ = ["Study"]

ROWS_PER_HEAD = 12  # that the closed form looks at
KEYS_PER_ROW = 128
HOPELESS = 1.5  # a prediction that holds within 20 % and is this far above the target
FAR = 2.0  # times the target
EXTRAPOLATE_BELOW = 0.1  # above it the error does not fall as 1/M


class Study(Judge):
    """The search for the cheapest setting on one input."""

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

        def promise(i: int) -> tuple[bool, float]:
            trig = any(law.trig for law in curves[i].laws.values())
            return trig, curves[i].error(group[i].steps[-1]["num_features"], output=self.with_values)

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
        if not curve.steady(steps[last]["num_features"], redraws=self.redraws):
            return replace(top, error_high=math.inf, note="a normaliser may come close to 0")
        trig = any(law.trig for law in curve.laws.values())
        if (top.predicted_reliable or trig) and top.error > HOPELESS * self.target:
            return self._noted(top)
        found: dict[int, Choice] = {}

        def meets(i: int) -> bool:
            if i not in found:
                # Where the first order holds, the error is a mean over pairs that more pairs do not change.
                found[i] = self.judge(ladder, choices[i], grows=not choices[i].predicted_reliable)
            return found[i].meets(self.target)

        # Another family does with `most`: if this one does not, there is nothing to look for.
        if most < math.inf and not meets(last):
            return self._noted(found[last])
        # From few to many: the best of a few draws may do with fewer features than the mean over draws promises.
        enough = 0.0
        for i, choice in enumerate(choices):
            count = choice.options["num_features"]
            ruled_out = choice.predicted_reliable and choice.error > HOPELESS * self.target
            if count < enough or ruled_out or not curve.steady(count, redraws=self.redraws):
                continue
            if meets(i):
                return found[i]
            if found[i].error > FAR * self.target and not meets(last):
                break
            # Errors fall as the inverse of the number at best.
            enough = count * found[i].error / (FAR * self.target)
        return self._noted(min(found.values(), key=lambda choice: choice.error, default=top))

    def _noted(self, choice: Choice) -> Choice:
        note = ""
        if 0 < self.target < choice.error < EXTRAPOLATE_BELOW:
            needed = math.ceil(choice.options["num_features"] * choice.error / self.target)
            note = f"would need about {needed} features"
        return replace(choice, note=note)
