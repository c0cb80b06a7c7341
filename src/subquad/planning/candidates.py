"""What a plan chooses from: ladders of settings, each from cheap to dear.

Mechanisms with a kernel of their own (linear, efficient, relu) or that must be trained first (Linformer, Hedgehog) do
not estimate softmax attention; their error without training says nothing, so no plan proposes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .. import checks
from ..mechanisms import MECHANISMS
from ..mechanisms.base import Mechanism

__all__ = ["DEGREE_1", "PLANNABLE", "SDERF", "Ladder", "ladders", "least_tokens"]

# Steps of a quarter to a third: a number that just fails makes the next one cost little more than it had to.
FEATURE_COUNTS = (32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
DEGREE_1 = {"mechanism": "taylor", "degree": 1, "center": True}
SDERF = {"features": "sderf", "antithetic": True, "center": True}

FAMILIES: tuple[dict[str, Any], ...] = (
    {"features": "hyperbolic"},
    {"features": "positive"},
    {"features": "trig"},
    {"features": "oprf", "antithetic": True},
    {"features": "hyperbolic", "center": True},
    SDERF,
)
STEPS: dict[str, tuple[tuple[dict[str, Any], ...], ...]] = {
    "taylor": (({"degree": 1, "center": True},), ({"degree": 2, "hermite": True},), ({"degree": 2},)),
    "hybrid": (
        tuple({"window": window, "sinks": 4, "far": DEGREE_1} for window in (16, 64, 128, 256)),
        tuple(
            {"window": window, "sinks": 4, "far": {"mechanism": "performer", **SDERF, "num_features": 4 * window}}
            for window in (16, 64)
        ),
    ),
    "local": (tuple({"window": window} for window in (16, 32, 64, 128, 256)),),
    "clustered": (tuple({"clusters": clusters} for clusters in (25, 50, 100, 200)),),
    "improved-clustered": (tuple({"clusters": clusters} for clusters in (25, 50, 100, 150, 200, 300)),),
    "nystrom": (tuple({"landmarks": landmarks} for landmarks in (32, 64, 128)),),
    "lsh": (tuple({"rounds": rounds} for rounds in (1, 4)),),
}
PLANNABLE = ("performer", *STEPS)


@dataclass(frozen=True)
class Ladder:
    """Settings of one mechanism from cheap to dear; an object from outside is a ladder of one step."""

    mechanism: str
    steps: tuple[dict[str, Any], ...]
    given: Mechanism | None = None

    @property
    def random_features(self) -> bool:
        """Whether the steps differ in the number of random features only."""
        return self.mechanism == "performer" and self.given is None


def least_tokens(mechanism: str, options: dict[str, Any]) -> int:
    """On fewer tokens than this a setting sees nearly everything, and its error there says nothing about more tokens.

    >>> least_tokens("local", {"window": 64}), least_tokens("taylor", {"degree": 1})
    (512, 0)
    """
    if mechanism == "lsh":
        return 16 * 64 * int(options.get("rounds", 4)) // 4
    sizes = [int(options[name]) for name in ("window", "clusters", "landmarks") if name in options]
    return 8 * max(sizes, default=0)


def _of(name: str) -> list[Ladder]:
    if name == "performer":
        return [
            Ladder(name, tuple({**family, "num_features": count} for count in FEATURE_COUNTS)) for family in FAMILIES
        ]
    return [Ladder(name, steps) for steps in STEPS[name]]


def ladders(mechanisms: Iterable[str | Mechanism] | None, *, is_causal: bool, cross: bool) -> list[Ladder]:
    """The ladders of the mechanisms asked for, or of all that can do what the call needs."""
    if isinstance(mechanisms, str | Mechanism):
        mechanisms = [mechanisms]
    chosen: list[Ladder] = []
    for item in PLANNABLE if mechanisms is None else mechanisms:
        if isinstance(item, Mechanism):
            chosen.append(Ladder(item.name, ({},), item))
            continue
        checks.check_option("mechanisms", item, MECHANISMS)
        if item == "softmax":
            continue  # always there, as the exact answer
        if item not in PLANNABLE:
            raise ValueError(
                f"mechanisms: {item!r} does not estimate softmax attention without training, so its error on a sample "
                f"says nothing; expected some of {sorted(PLANNABLE)}, or an object that you have trained"
            )
        cls = MECHANISMS.get(item)
        if cls is None or (is_causal and not cls.causal) or (cross and not cls.cross):
            continue
        chosen += _of(item)
    return chosen
