"""The time of a run over all its starts: on the wall and in steps alone, tokens per second, and when it is up."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ..tasks.base import Progress

__all__ = ["Clock", "paced"]

# Seconds between two lines of a phase that takes long.
PACE = 2.0


class Clock:
    """Seconds on the wall while the run was going on, over all its starts; of these, those in steps; and their tokens.

    valid_seconds: `due` once per so many seconds in steps.   limit: `over` after so many seconds on the wall

    >>> clock = Clock({"seconds": 100.0, "training_seconds": 90.0, "tokens": 5000}, limit=100.0)
    >>> clock.step(0.5, tokens=200)
    >>> figures = clock.figures()
    >>> figures["training_seconds"], figures["tokens"], figures["tokens_per_second"], clock.over
    (90.5, 5200, 400.0, True)
    """

    def __init__(
        self,
        before: Mapping[str, float] | None = None,
        *,
        valid_seconds: float | None = None,
        limit: float | None = None,
    ) -> None:
        before = before or {}
        self._began, self._before = time.perf_counter(), before.get("seconds", 0.0)
        self.training, self.tokens = before.get("training_seconds", 0.0), int(before.get("tokens", 0))
        self._every, self.limit = valid_seconds, limit
        self._validated = self._turn()
        self._recorded = self.training, self.tokens

    def _turn(self) -> int:
        return int(self.training // self._every) if self._every else 0

    @property
    def seconds(self) -> float:
        """On the wall, validation and checkpoints included."""
        return self._before + time.perf_counter() - self._began

    @property
    def over(self) -> bool:
        """Whether the limit is reached."""
        return self.limit is not None and self.seconds >= self.limit

    def step(self, seconds: float, tokens: int) -> None:
        """Count a step."""
        self.training += seconds
        self.tokens += tokens

    def due(self) -> bool:
        """Whether another `valid_seconds` has passed since this last said so."""
        turn = self._turn()
        passed, self._validated = turn > self._validated, turn
        return passed

    def spent(self) -> dict[str, float]:
        """What a checkpoint keeps and every record holds."""
        return {"seconds": self.seconds, "training_seconds": self.training, "tokens": self.tokens}

    def figures(self) -> dict[str, float]:
        """`spent`, and the throughput of the steps since the last call."""
        seconds, tokens = self._recorded
        self._recorded = self.training, self.tokens
        rate = (self.tokens - tokens) / (self.training - seconds) if self.training > seconds else 0.0
        return {**self.spent(), "tokens_per_second": rate}


def paced(report: Progress, *, at_once: bool, pace: float = PACE) -> Progress:
    """`report`, called at most every `pace` seconds; its first call only after such a time unless `at_once`."""
    last = float("-inf") if at_once else time.perf_counter()

    def call(what: str, done: int, total: int | None) -> None:
        nonlocal last
        if (now := time.perf_counter()) - last >= pace:
            last = now
            report(what, done, total)

    return call
