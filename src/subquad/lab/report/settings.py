"""What a report measures, and for how long. Every number here is in the report's JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import subquad
from subquad import checks
from subquad.lab.peak_memory import NO_ATTENTION

__all__ = ["NO_ATTENTION", "Settings", "full", "quick"]


@dataclass(frozen=True)
class Settings:
    """The whole question. The defaults take at most three minutes on two quiet cores.

    seconds:          for all measurements; what matters most comes first, and all shrinks before any is dropped
    lengths:          tokens, for speed, memory, projections and recommendations
    longest_training: forward + backward is not measured beyond this length, it costs four times as much
    mechanisms:       names beside softmax; None = all
    runs:             interleaved rounds per timing
    error_*:          of the curves of error against number of features; error_data: None = all inputs
    shipped_step:     1 = all heads that the library ships, 2 = every other one
    recommend_steps:  settings of each of the planner's rows that a recommendation chooses from
    """

    seconds: float = 162.0
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    longest_training: int = 4096
    mechanisms: tuple[str, ...] | None = None
    heads: int = 4
    head_dim: int = 64
    runs: int = 3
    memory_lengths: tuple[int, ...] = (1024, 4096)
    contexts: tuple[int, ...] = (256, 1024, 4096, 16384, 65536)
    error_features: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    error_draws: int = 3
    error_data: tuple[str, ...] | None = (
        "d64-0.5", "d64-1", "d64-flat", "d64-sharp", "d16-0.5", "d16-1.5", "d16-1.5-4096"
    )  # fmt: skip
    published_features: tuple[int, ...] = (16, 32, 64, 128, 256, 592)
    published_draws: int = 4
    projection_features: int = 300
    projection_dims: tuple[int, ...] = (16, 64, 128)
    spectrum_lengths: tuple[int, ...] = (128, 256, 512, 1024)
    recommend_steps: int = 3
    recommend_tokens: int = 2048
    recommend_draws: int = 2
    shipped_step: int = 1
    budgets: tuple[float, ...] = (0.01, 0.05, 0.2)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("lengths", "memory_lengths", "contexts", "error_features", "spectrum_lengths"):
            values = getattr(self, name)
            if not values or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in values):
                raise ValueError(f"{name}={values!r}: one or more positive whole numbers are expected")
            object.__setattr__(self, name, tuple(sorted(set(values))))
        if not (isinstance(self.seconds, int | float) and math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds={self.seconds!r}: a positive number of seconds is expected")
        known = subquad.list_mechanisms()
        for name in self.mechanisms or ():
            if name not in known:
                raise ValueError(
                    f"mechanisms: {name!r} is not known; expected some of {known}{checks.nearest(name, known)}"
                )

    @property
    def names(self) -> list[str]:
        """Softmax first, then what was asked for, each once."""
        asked = subquad.list_mechanisms() if self.mechanisms is None else self.mechanisms
        return ["softmax", *dict.fromkeys(name for name in asked if name != "softmax")]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**dataclasses.asdict(self), "names": self.names}


def quick(settings: Settings) -> Settings:
    """The same report from fewer lengths, draws and inputs: about half a minute.

    >>> quick(Settings()).seconds < Settings().seconds < full(Settings()).seconds
    True
    """
    longest = max(settings.lengths)
    return dataclasses.replace(
        settings,
        seconds=min(settings.seconds, 30.0),
        lengths=tuple(n for n in settings.lengths if n <= 4096) or settings.lengths[:1],
        longest_training=min(settings.longest_training, 1024),
        runs=2,
        memory_lengths=(min(2048, longest),),
        contexts=tuple(n for n in settings.contexts if n <= 16384) or settings.contexts[:1],
        error_features=(32, 128, 512),
        error_draws=2,
        error_data=("d64-0.5", "d64-1", "d16-1.5", "d64-sharp"),
        published_features=(16, 64, 256, 592),
        published_draws=2,
        projection_dims=(16, 64),
        spectrum_lengths=(128, 512),
        recommend_steps=2,
        recommend_tokens=1024,
        recommend_draws=1,
        shipped_step=3,
    )


def full(settings: Settings) -> Settings:
    """The same report with more draws, settings and lengths: about a quarter of an hour."""
    return dataclasses.replace(
        settings,
        seconds=max(settings.seconds, 900.0),
        longest_training=max(settings.longest_training, 16384),
        runs=8,
        memory_lengths=(*settings.memory_lengths, 16384),
        error_data=None,
        error_draws=10,
        published_features=(16, 32, 64, 128, 256, 592, 1024, 2048),
        published_draws=20,
        spectrum_lengths=(*settings.spectrum_lengths, 2048),
        recommend_steps=6,
        recommend_tokens=4096,
        recommend_draws=4,
    )
