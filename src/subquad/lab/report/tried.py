"""The settings that the report compares: every mechanism with default options, and what it recommends from.

One list for the times (section speed) and the errors (section use), so that no two tables can hold different numbers of
one setting. It is made from the planner's candidates: a mechanism that is added there is here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import subquad
from subquad.lab.calibrated import make_calibrated, options_for
from subquad.planning.answer import setting_in_words
from subquad.planning.candidates import CANDIDATES, with_seed

from .settings import Settings

__all__ = ["Tried", "candidates", "defaults", "make"]


@dataclass(frozen=True)
class Tried:
    """One setting; `label` tells it apart, a mechanism with default options has its name."""

    label: str
    mechanism: str
    options: dict[str, Any]

    @property
    def timed_as(self) -> str:
        """Whose time it is: a setting that is the default has that of its mechanism, so that there is one number."""
        if not self.options or self.mechanism not in subquad.list_mechanisms():
            return self.label
        usual = subquad.describe(self.mechanism)["options"]
        return self.mechanism if all(usual.get(n, usual) == x for n, x in self.options.items()) else self.label


def defaults(settings: Settings) -> list[Tried]:
    """Every mechanism with its defaults, softmax first."""
    return [Tried(name, name, {}) for name in settings.names]


def _thinned(steps: tuple[dict[str, Any], ...], count: int) -> list[dict[str, Any]]:
    """At most `count` of the steps, each the middle one of its share."""
    if len(steps) <= count:
        return list(steps)
    return [steps[int((i + 0.5) * len(steps) / count)] for i in range(count)]


def candidates(settings: Settings) -> list[Tried]:
    """What a recommendation chooses from: some steps of each of the planner's rows."""
    found = []
    for name, steps in CANDIDATES:
        if name in settings.names:
            kept = _thinned(steps, settings.recommend_steps)
            found += [Tried(setting_in_words(name, options), name, dict(options)) for options in kept]
    return found


def make(tried: Tried, head_dim: int, heads: int, length: int, seed: int) -> subquad.Mechanism:
    """Ready to be timed: seeded, built for the length, calibrated on made-up data where it must be."""
    own = with_seed(tried.mechanism, tried.options, seed) if tried.options else {}
    for name in options_for(tried.mechanism, seed=seed, length=length):
        own.pop(name, None)  # `made` has it already
    return make_calibrated(tried.mechanism, head_dim, heads, length, seed, **own)
