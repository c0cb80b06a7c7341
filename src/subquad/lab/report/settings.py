"""What a report measures, and for how long. Every number here is in the report's JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import subquad
from subquad import checks

__all__ = ["NO_ATTENTION", "Settings", "quick"]

NO_ATTENTION = "no attention"

# Parts of the time by section, from what each takes on two quiet cores. The quick ones are no fraction of the others:
# some measurements (the matrix product, the published setting, a process per mechanism) cost the same in both.
SHARES = {"machine": 1.0, "speed": 76.0, "error": 32.0, "published": 2.0, "projections": 13.0, "generation": 6.0,
          "spectrum": 3.0, "recommendation": 11.0, "memory": 16.0}  # fmt: skip
QUICK_SHARES = {"machine": 1.4, "speed": 12.5, "error": 6.5, "published": 2.2, "projections": 2.6, "generation": 2.0,
                "spectrum": 0.8, "recommendation": 9.0, "memory": 5.0}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The whole question. The defaults take at most three minutes on two quiet cores.

    seconds:          for all measurements together; each section has a share, and what one leaves the next may use
    lengths:          tokens, for speed, memory, projections and recommendations
    longest_training: forward + backward is not measured beyond this length, it costs four times as much
    mechanisms:       names beside softmax; None = all
    runs:             interleaved rounds per timing
    error_*:          of the curves of error against number of features
    recommend_steps:  numbers of random features that a recommendation chooses from
    shares:           parts of the time by section
    """

    seconds: float = 154.0
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    longest_training: int = 4096
    mechanisms: tuple[str, ...] | None = None
    heads: int = 4
    head_dim: int = 64
    runs: int = 4
    memory_lengths: tuple[int, ...] = (1024, 4096, 16384)
    contexts: tuple[int, ...] = (256, 1024, 4096, 16384, 65536)
    error_features: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    error_draws: int = 3
    error_data: tuple[str, ...] | None = None
    published_features: tuple[int, ...] = (16, 32, 64, 128, 256, 592)
    projection_features: int = 300
    projection_dims: tuple[int, ...] = (16, 64, 128)
    spectrum_lengths: tuple[int, ...] = (128, 256, 512, 1024)
    recommend_steps: tuple[int, ...] = (64, 256, 1024)
    recommend_tokens: int = 2048
    budgets: tuple[float, ...] = (0.01, 0.05, 0.2)
    seed: int = 0
    shares: Mapping[str, float] = field(default_factory=lambda: dict(SHARES))

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
                    f"mechanisms: {name!r} is not known{checks.nearest(name, known)}; expected some of {known}"
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

    >>> quick(Settings()).seconds < Settings().seconds
    True
    """
    longest = max(settings.lengths)
    return dataclasses.replace(
        settings,
        seconds=min(settings.seconds, 30.0),
        lengths=tuple(n for n in settings.lengths if n <= 4096) or settings.lengths[:1],
        longest_training=min(settings.longest_training, 1024),
        runs=2,
        memory_lengths=(min(4096, longest),),
        contexts=tuple(n for n in settings.contexts if n <= 16384) or settings.contexts[:1],
        error_features=(32, 128, 512),
        error_draws=2,
        error_data=("d64-0.5", "d64-1", "d16-1.5", "d64-sharp"),
        published_features=(16, 64, 256, 592),
        projection_dims=(16, 64),
        spectrum_lengths=(128, 512),
        recommend_steps=(64, 256),
        recommend_tokens=1024,
        shares=dict(QUICK_SHARES),
    )
