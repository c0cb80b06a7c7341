"""A plan and its choices: what was found, ranked, and said in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..mechanisms import create
from ..mechanisms.base import Mechanism
from ..plain_text import aligned
from . import cost
from .candidates import with_seed
from .cost import TimeEstimate

__all__ = ["ROUNDING", "SLACK", "WORTH", "Choice", "Plan", "limit_of", "setting_in_words"]

SLACK = 1.2  # an error that meets the target may be this much above it for all that was measured
WORTH = 1.05  # times softmax's speed: below it an approximation is not worth its error
ROUNDING = 1e-9  # an error of this size is that of exact attention
SHOWN = 8  # rows of the short table
_COUNTED = {"exact_keys": "exact keys", "clusters": "clusters", "topk": "keys each", "landmarks": "landmarks",
            "rounds": "rounds", "buckets": "buckets"}  # fmt: skip
_LEFT_OUT = ("features", "antithetic", "degree", "hermite", "seed", "sinks", "mechanism")


def setting_in_words(mechanism: str, options: Mapping[str, Any]) -> str:
    """A mechanism and its options in a few words.

    >>> setting_in_words("performer", {"features": "sderf", "antithetic": True, "center": True, "num_features": 64})
    'performer, 64 sderf features'
    >>> setting_in_words("hybrid", {"window": 16, "sinks": 4, "far": {"mechanism": "taylor", "degree": 1}})
    'hybrid, window 16 + taylor degree 1'
    """
    words: list[str] = []
    far = ""
    for name, value in options.items():
        if name == "num_features":
            words.insert(0, f"{value} {options.get('features', '')} features".replace("  ", " "))
        elif name in _COUNTED:
            one = _COUNTED[name][:-1] if value == 1 and _COUNTED[name].endswith("s") else _COUNTED[name]
            words.append(f"{value} {one}")
        elif name == "center":
            if value and options.get("features") not in (None, "sderf"):
                words.append("centred")
        elif isinstance(value, Mapping):
            far = f" + {setting_in_words(value['mechanism'], {k: v for k, v in value.items() if k != 'mechanism'})}"
        elif name == "window":
            words.append(f"window {value}")
        elif name not in _LEFT_OUT:
            words.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    start = mechanism
    if mechanism == "taylor":
        start += " Hermite 2" if options.get("hermite") else f" degree {options.get('degree', 2)}"
    return ", ".join([start, *words]) + far


def limit_of(target: float, uniform: float) -> float:
    """The largest error that will do: what is worse than the mean of the values is of no use, however generous the
    target; and where the mean is exact (a single key, or values all alike) rounding still is allowed."""
    return max(min(target, uniform), ROUNDING)


@dataclass(frozen=True)
class Choice:
    """One mechanism with its options.

    options:   with the seed of the draw of random features that was measured; the heads of a layer share it, so
               `create` gives the whole layer that draw
    error:     at the plan's length: measured, or extrapolated from the tokens that were (`extrapolated`)
    low, high: what it is likely to lie between: two deviations, as segments of the input differ
    measured:  on `tokens` tokens, of `draws` draws: the best of them on disjoint segments, corrected for the selection
               bias of choosing it there; of clusters and buckets, which are made of the data at hand, the mean
    slow:      two runs took three times as long as softmax attention, or as another choice: not looked at any further
    any_draw:  the mean over these draws: what drawing again would give
    relative:  of a setting that keeps to an error, whose time depends on the data: seconds over those of softmax
               attention at the plan's length, from runs on the input
    time:      at the plan's length, on this machine; only what meets the target is timed
    """

    mechanism: str
    options: dict[str, Any]
    error: float = 0.0
    low: float = 0.0
    high: float = 0.0
    measured: float = 0.0
    tokens: int = 0
    extrapolated: bool = False
    draws: int = 1
    slow: bool = False
    any_draw: float | None = None
    relative: float | None = None
    time: TimeEstimate | None = None
    given: Mechanism | None = field(default=None, repr=False, compare=False)

    def meets(self, target: float) -> bool:
        """Whether the error is within the target, and what it is unlikely to exceed within 1.2 of it.

        >>> Choice("local", {}, error=0.9, high=1.1).meets(1.0), Choice("local", {}, error=0.9, high=1.3).meets(1.0)
        (True, False)
        """
        return self.error <= target and self.high <= SLACK * target

    @property
    def unjudged(self) -> bool:
        """Whether the tokens measured were too few to say anything of the length."""
        return self.high == math.inf and math.isfinite(self.error) and not self.slow and self.tokens > 0

    @property
    def seconds(self) -> float:
        """Of `time`; infinite where it was not measured."""
        return math.inf if self.time is None else self.time.seconds

    @property
    def label(self) -> str:
        """Name and options in a few words."""
        return setting_in_words(self.mechanism, self.options)

    @property
    def needs_calibration(self) -> bool:
        """Whether `calibrate(q, k)` must be called before use, or pays (OPRF)."""
        far = self.options.get("far")
        every = {**self.options, **far} if isinstance(far, dict) else self.options
        return bool(every.get("center") or every.get("hermite") or every.get("features") in ("oprf", "sderf"))

    def create(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        seed: int | None = None,
        **more: Any,
    ) -> Mechanism:
        """The mechanism itself; see `needs_calibration`. `more` adds options; a `seed` is for what is drawn, if any."""
        if self.given is not None:
            return self.given
        options = self.options if seed is None else with_seed(self.mechanism, self.options, seed)
        return create(self.mechanism, head_dim, heads, kv_heads, **{**options, **more})

    def as_dict(self) -> dict[str, Any]:
        """Plain data; an infinite error is null."""
        plain = {name: value for name, value in vars(self).items() if name not in ("given", "time")}
        time = None if self.time is None else {"seconds": self.seconds, "low": self.time.low, "high": self.time.high}
        plain = {n: None if isinstance(x, float) and not math.isfinite(x) else x for n, x in plain.items()}
        return {**plain, "time": time, "label": self.label, "needs_calibration": self.needs_calibration}


@dataclass(frozen=True)
class Plan:
    """Ranked choices: those that meet the target by their time, softmax among them, then the others by their error.

    best:     the fastest choice that meets the target within the time budget; None if there is no approximation that
              does (softmax itself is best only where no approximation that meets the target is 1.05 times as fast)
    exact:    softmax attention with its time: what remains when nothing else does
    uniform:  the error of the mean of the values; what is not below it is never recommended
    tokens, heads_measured, rows, segments: of the input that errors were measured on;  sequences: of the `batch`
    queries:  per key, at every length
    """

    choices: tuple[Choice, ...]
    exact: Choice
    target_error: float
    length: int
    heads: int
    head_dim: int
    time_budget: float | None
    is_causal: bool
    uniform: float
    criterion: str
    tokens: int
    heads_measured: int
    rows: int
    segments: int
    sequences: int = 1
    batch: int = 1
    queries: float = 1.0
    seconds: float = 0.0

    @property
    def longer(self) -> int:
        """Queries or keys, whichever are more: what times are measured and carried on by."""
        return round(self.length * max(1.0, self.queries))

    def _qualifies(self, choice: Choice) -> bool:
        in_time = self.time_budget is None or choice.seconds <= self.time_budget
        useful = choice.error < max(self.uniform, ROUNDING)
        return choice.meets(limit_of(self.target_error, self.uniform)) and useful and in_time

    @property
    def attainable(self) -> bool:
        """Whether an approximation meets the target (and the time budget) and beats the mean of the values."""
        return any(self._qualifies(choice) for choice in self.choices if choice.mechanism != "softmax")

    @property
    def best(self) -> Choice | None:
        """What to use, or None: see the class."""
        return next((choice for choice in self.choices if self._qualifies(choice)), None) if self.attainable else None

    def _gain(self, choice: Choice) -> str:
        gain = self.exact.seconds / choice.seconds
        about = "about " if self.longer > cost.LENGTHS[-1] or choice.relative is not None else ""
        return (
            f"{about}{gain:.{1 if gain < 100 else 0}f}x faster than softmax"
            if gain >= WORTH
            else "no faster than softmax"
        )

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        best, exact = self.best, self.exact.time
        flat = " (the mean of all values alone would do)" if self.uniform <= self.target_error else ""
        if best is not None and best.mechanism == "softmax":
            return f"softmax: exact, and at {self.length} tokens no approximation that will do is faster{flat}"
        if best is not None:
            carried = f" extrapolated from {best.tokens} tokens" if best.extrapolated else ""
            return (
                f"{best.label}: error {best.error:.2g} (at most {best.high:.2g}){carried}, {self._gain(best)} at "
                f"{self.length} tokens{flat}"
            )
        others = [choice for choice in self.choices if choice.mechanism != "softmax"]
        if not others:
            return f"softmax: there was nothing else to choose from; {exact} at {self.length} tokens"
        if self.time_budget is not None and any(math.isfinite(choice.seconds) for choice in others):
            return (
                f"nothing: what reaches error {self.target_error:g} at {self.length} tokens takes longer than the "
                f"budget of {self.time_budget:.3g} s, the fastest {min(choice.seconds for choice in others):.3g} s, "
                f"softmax {exact}"
            )
        if unknown := [choice for choice in others if choice.unjudged and choice.error <= self.target_error]:
            why = f"{unknown[0].label} may, but {self.tokens} tokens are too few to see how its error grows"
        else:
            nearest = min(others, key=lambda choice: max(choice.error, choice.high))
            why = f"the nearest, {nearest.label}, has {nearest.error:.2g} (at most {nearest.high:.2g})"
        return (
            f"softmax: no approximation reaches error {self.target_error:g} at {self.length} tokens; {why}; the mean "
            f"of all values has {self.uniform:.2g}"
        )

    @property
    def notes(self) -> list[str]:
        """What was measured, and what the numbers do not say."""
        of = "" if self.heads_measured == self.heads else f" of {self.heads}"
        heads = f"{self.heads_measured}{of} {'head' if self.heads_measured == 1 and not of else 'heads'}"
        some = f"{self.sequences} of {self.batch} sequences, " if self.sequences < self.batch else ""
        found = [
            f"error: relative and squared, of the {self.criterion}; the mean of all values has {self.uniform:.2g}",
            f"measured on {self.tokens} tokens of {some}{heads}, {self.rows} exact rows each",
            f"'at most': two deviations more, as {self.segments} segments of the input differ"
            if self.segments > 1
            else "'at most': the input is too short to see how segments of it differ",
        ]
        if any(choice.extrapolated for choice in self.choices):
            found.append(
                f"{self.length} tokens are more than were measured: errors are carried on with their growth from "
                f"{self.tokens // self.segments} to {self.tokens} tokens"
            )
        if self.queries != 1:
            found.append(f"cross attention: at every length {self.queries:.3g} queries per key, as in the input")
        if self.longer > cost.LENGTHS[-1]:
            found.insert(2, f"times are extrapolated from up to {cost.LENGTHS[-1]} tokens; the JSON has their range")
        best = self.best
        if best is not None and best.needs_calibration:
            found.append("before use: call calibrate(q, k) on sample data")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data: every number of the table."""
        plain = {name: value for name, value in vars(self).items() if name not in ("choices", "exact")}
        return {
            "verdict": self.verdict,
            "best": None if self.best is None else self.best.as_dict(),
            "choices": [choice.as_dict() for choice in self.choices],
            **plain,
            "notes": self.notes,
        }

    def _table(self, choices: list[Choice], *, details: bool) -> list[str]:
        rows = [["", "error", "at most", "time", "times as fast as softmax"]]
        rows[0] += ["measured", "any draw", "options"] if details else []

        def number(x: float | None) -> str:
            return "-" if x is None else f"{x:.2g}" if x > ROUNDING else "0"

        for choice in choices:
            timed = choice.time is not None
            label = choice.label if details or len(choice.label) <= 58 else choice.label[:57] + "…"
            row = [("* " if choice is self.best else "  ") + label, number(choice.error)]
            row += [number(choice.high if math.isfinite(choice.high) else None)]
            row += [choice.time.brief if choice.time else "slow" if choice.slow else "-"]
            row += [f"{self.exact.seconds / choice.seconds:.2g}" if timed else "-"]
            if details:
                row += [f"{number(choice.measured)} ({choice.tokens})", number(choice.any_draw), str(choice.options)]
            rows.append(row)
        return [line.rstrip() for line in aligned(rows)]

    @property
    def details(self) -> str:
        """Every choice with its options, and what was measured."""
        return "\n".join([self.verdict, "", *self._table(list(self.choices), details=True), *self.notes])

    def __str__(self) -> str:
        good = [choice for choice in self.choices if choice.time is not None]
        rest = [choice for choice in self.choices if choice.time is None]
        kept = good[:SHOWN]
        kept += [self.exact] if self.exact not in kept else []
        shown = self._table(kept + rest[: max(2, SHOWN - len(kept))], details=False)
        return "\n".join([self.verdict, "", *shown, *self.notes[: 3 if self.longer > cost.LENGTHS[-1] else 2]])
