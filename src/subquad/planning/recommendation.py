"""A plan and its choices: what was found, ranked, and said in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..mechanisms import create
from ..mechanisms.base import Mechanism
from .cost import TimeEstimate
from .measuring import SLACK

__all__ = ["Choice", "Plan"]


def _setting(options: dict[str, Any]) -> str:
    words = []
    for name, value in options.items():
        if isinstance(value, dict):
            inner = dict(value)
            words.append(f"{name}={inner.pop('mechanism')}({_setting(inner)})")
        elif isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(str(value) if name == "features" else f"{name}={value}")
    return ", ".join(words)


@dataclass(frozen=True)
class Choice:
    """One mechanism with its options.

    options:          with the seed of the draw of random features that was measured; the heads of a layer share it, so
                      `create` gives the whole layer that draw
    predicted_error:  from the closed form (`predicted_reliable` says whether it holds there) or computed exactly: for
                      random features of the mean over draws
    measured_error:   of this draw on the input itself or as much of it as can be afforded, with what choosing it there
                      among `draws` draws flatters it (with redraws=True, and for clusters and buckets, which are made
                      of the data at hand: the mean over the draws)
    error_over_draws: the mean over these draws: what drawing again would give
    error_at_length:  where the input is shorter than the plan's length: the growth seen in the input carried on to it
    error:            the last of predicted, measured and at length that there is
    error_high:       what it is unlikely to exceed: two deviations more, as stretches of the input differ
    time:             at the plan's length, on this machine; only what meets the target is timed
    """

    mechanism: str
    options: dict[str, Any]
    predicted_error: float | None = None
    predicted_reliable: bool = True
    measured_error: float | None = None
    error_over_draws: float | None = None
    error_at_length: float | None = None
    error_high: float | None = None
    draws: int = 0
    time: TimeEstimate | None = None
    note: str = ""
    given: Mechanism | None = field(default=None, repr=False, compare=False)

    @property
    def error(self) -> float:
        """What counts: carried on to the length, or measured, or predicted."""
        every = (self.error_at_length, self.measured_error, self.predicted_error)
        value = next((x for x in every if x is not None), None)
        return math.inf if value is None or math.isnan(value) else value

    def meets(self, target: float) -> bool:
        """Whether the error is within the target, and what it is unlikely to exceed within 1.2 of it."""
        high = self.error if self.error_high is None else self.error_high
        return self.error <= target and high <= SLACK * target

    @property
    def shown_error(self) -> str:
        """The error and, where it was measured, what it is unlikely to exceed."""
        if self.error_high is None or not math.isfinite(self.error):
            return f"{self.error:.2g}"
        return f"{self.error:.2g} (at most {self.error_high:.2g})"

    @property
    def seconds(self) -> float:
        """Of `time`; infinite where it was not measured."""
        return math.inf if self.time is None else self.time.seconds

    @property
    def label(self) -> str:
        """Name and options in one line."""
        shown = _setting(self.options)
        return f"{self.mechanism} ({shown})" if shown else self.mechanism

    @property
    def needs_calibration(self) -> bool:
        """Whether `calibrate(q, k)` must be called before use, or pays (OPRF)."""
        far = self.options.get("far")
        every = {**self.options, **far} if isinstance(far, dict) else self.options
        return bool(every.get("center") or every.get("hermite") or every.get("features") in ("oprf", "sderf"))

    def create(self, head_dim: int, heads: int | None = None, kv_heads: int | None = None, **more: Any) -> Mechanism:
        """The mechanism itself; see `needs_calibration`. `more` adds options, for example seed=0."""
        if self.given is not None:
            return self.given
        return create(self.mechanism, head_dim, heads, kv_heads, **{**self.options, **more})

    def as_dict(self) -> dict[str, Any]:
        """Plain data; an infinite error is null."""
        time = None if self.time is None else {"seconds": self.seconds, "low": self.time.low, "high": self.time.high}

        def finite(x: float | None) -> float | None:
            return x if x is not None and math.isfinite(x) else None

        return {
            "mechanism": self.mechanism,
            "options": self.options,
            "error": finite(self.error),
            "predicted_error": finite(self.predicted_error),
            "predicted_reliable": self.predicted_reliable,
            "measured_error": finite(self.measured_error),
            "error_over_draws": finite(self.error_over_draws),
            "error_at_length": finite(self.error_at_length),
            "error_high": finite(self.error_high),
            "draws": self.draws,
            "time": time,
            "needs_calibration": self.needs_calibration,
            "note": self.note,
        }


@dataclass(frozen=True)
class Plan:
    """Ranked choices: those that meet the target by their time, softmax among them, then the others by their error.

    best:      the fastest choice that meets the target within the time budget; None if there is no approximation that
               does (softmax itself is best only where it is faster than every approximation that meets the target)
    exact:     softmax attention with its time: what remains when nothing else does
    baselines: errors of uniform attention, degree 1 and Hermite degree 2; what is above "uniform" is never recommended
    """

    choices: tuple[Choice, ...]
    exact: Choice
    target_error: float
    length: int
    heads: int
    time_budget: float | None
    is_causal: bool
    baselines: dict[str, float]
    criterion: str
    measured_tokens: int
    measured_heads: int
    measured_rows: int
    measured_parts: int
    redraws: bool = False

    def _qualifies(self, choice: Choice) -> bool:
        in_time = self.time_budget is None or choice.seconds <= self.time_budget
        uniform = self.baselines["uniform"]
        useful = choice.error < uniform or choice.error == 0  # with a single key everything is exact
        return choice.meets(min(self.target_error, uniform)) and useful and in_time

    @property
    def attainable(self) -> bool:
        """Whether an approximation meets the target (and the time budget) and beats the mean of the values."""
        return any(self._qualifies(choice) for choice in self.choices if choice.mechanism != "softmax")

    @property
    def best(self) -> Choice | None:
        """What to use, or None: see the class."""
        if not self.attainable:
            return None
        return next(choice for choice in self.choices if self._qualifies(choice))

    @property
    def verdict(self) -> str:
        """The answer in words."""
        uniform, softmax = self.baselines["uniform"], self.exact.time
        flat = ""
        if uniform <= self.target_error:
            flat = f" The mean of all values alone has error {uniform:.2g}: attention is nearly uniform here."
        best = self.best
        if best is None:
            others = [choice for choice in self.choices if choice.mechanism != "softmax"]
            if not others:
                return f"Unattainable: there was nothing to choose from. Softmax takes {softmax}."
            nearest = min(others, key=lambda c: max(c.error, c.error_high or 0.0))
            late = any(math.isfinite(choice.seconds) for choice in others) and self.time_budget is not None
            why = (
                f"what meets the target takes longer than the budget of {self.time_budget:.3g} s"
                if late
                else f"the best approximation, {nearest.label}, has error {nearest.shown_error}, "
                f"the mean of all values {uniform:.2g}"
            )
            return (
                f"Unattainable: no approximation reaches error {self.target_error:g} on this input; {why}. "
                f"Use softmax attention, {softmax} at length {self.length}.{flat}"
            )
        if best.mechanism == "softmax":
            return (
                f"Use softmax attention: exact, and at length {self.length} with {softmax} faster than every "
                f"approximation that meets the target.{flat}"
            )
        gain = self.exact.seconds / best.seconds
        calibration = " Call calibrate(q, k) on sample data first." if best.needs_calibration else ""
        return (
            f"Use {best.label}: error {best.shown_error} (target {self.target_error:g}), {best.time} at length "
            f"{self.length}, {gain:.2g} times as fast as softmax.{calibration}{flat}"
        )

    @property
    def notes(self) -> list[str]:
        """What was measured, and what the numbers do not say."""
        heads = "head" if self.measured_heads == 1 else "heads"
        of = "" if self.measured_heads == self.heads else f" (of {self.heads})"
        where = f"{self.measured_tokens} tokens of {self.measured_heads} {heads}{of}, {self.measured_rows} exact rows"
        parts = f"{self.measured_parts} parts of it differ" if self.measured_parts > 1 else "queries differ"
        found = [f"measured on {where} of each; 'at most' is two deviations more, as {parts}"]
        if any(choice.draws > 1 for choice in self.choices):
            named = "that of the draw named by its seed, the best of a few, beside 'any draw', the mean over those few"
            found.append("random features: 'measured' is " + ("the mean over draws" if self.redraws else named))
        if self.length > self.measured_tokens:
            found.append(
                f"the input has fewer tokens than {self.length}, or more than a plan runs: 'at length' carries on the "
                f"growth of the error from {self.measured_tokens // 2} to {self.measured_tokens} tokens"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data: every number of the table."""
        return {
            "verdict": self.verdict,
            "best": None if self.best is None else self.best.as_dict(),
            "choices": [choice.as_dict() for choice in self.choices],
            "baselines": self.baselines,
            "target_error": self.target_error,
            "criterion": self.criterion,
            "length": self.length,
            "heads": self.heads,
            "is_causal": self.is_causal,
            "time_budget": self.time_budget,
            "measured_tokens": self.measured_tokens,
            "measured_heads": self.measured_heads,
            "measured_rows": self.measured_rows,
            "measured_parts": self.measured_parts,
            "redraws": self.redraws,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        def number(x: float | None) -> str:
            return "-" if x is None else f"{x:.2g}" if math.isfinite(x) else "inf"

        width = max([len(choice.label) for choice in self.choices] + [10])
        titles = f"predicted  measured  any draw  at length  at most  time at {self.length}"
        lines = [self.verdict, "", f"{'choice':{width}}  {titles}"]
        for choice in self.choices:
            predicted = number(choice.predicted_error) + ("" if choice.predicted_reliable else " ?")
            time = "-" if choice.time is None else str(choice.time)
            mark = "*" if choice is self.best else " "
            end = f"{time}  {choice.note}".rstrip()
            errors = f"{predicted:>9}  {number(choice.measured_error):>8}  {number(choice.error_over_draws):>8}"
            errors += f"  {number(choice.error_at_length):>9}"
            lines.append(f"{choice.label:{width}}{mark} {errors}  {number(choice.error_high):>7}  {end}")
        shown = ", ".join(f"{name} {value:.2g}" for name, value in self.baselines.items())
        lines.append(f"{'baselines, error of the ' + self.criterion}: {shown}")
        if any(not choice.predicted_reliable for choice in self.choices):
            lines.append("? the prediction is outside its range; the measured value counts")
        return "\n".join(lines + self.notes)
