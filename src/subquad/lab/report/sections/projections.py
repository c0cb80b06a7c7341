"""How long a projection takes against length, alone and inside the whole attention.

Gaussian, orthogonal and simplex projections are one matrix product, whatever they cost to draw. Hadamard ones can be
applied as butterflies, d log2 d additions per block: as separate torch operations, or inside the native kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import subquad
from subquad.features.projections import make_projection
from subquad.lab.errors import PROJECTIONS
from subquad.lab.measure import interleave

from ..figure import Figure, Line, Selector
from ..formatting import milliseconds
from ..notebook import Notebook
from ..running import REST, Clock, Job
from ..section import Section
from ..settings import Settings

__all__ = ["LOOPS", "SECTION", "WORDS", "points"]

NAME = "projections"
# The projections of `lab.errors.PROJECTIONS` in words.
WORDS = {"gaussian": "independent rows", "orthogonal": "orthogonal", "hadamard-1": "Hadamard k = 1",
         "hadamard-3": "Hadamard k = 3", "simplex": "simplex"}  # fmt: skip
LOOPS = {"hadamard-1-loop": "Hadamard k = 1, torch butterflies", "hadamard-3-loop": "Hadamard k = 3, torch butterflies"}


def _measure(settings: Settings, length: int, dim: int, clock: Clock) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(settings.seed)
    q, k, v = (0.5 * torch.randn(1, 1, length, dim, generator=generator) for _ in range(3))
    count = settings.projection_features
    alone: dict[str, Callable[[], object]] = {}
    whole: dict[str, Callable[[], object]] = {}
    trig: dict[str, Callable[[], object]] = {}
    drawn: dict[str, Callable[[], object]] = {}
    for name, options in PROJECTIONS.items():
        rest = dict(options)
        kind = rest.pop("projection")
        projection = make_projection(kind, count, dim, seed=settings.seed, **rest)
        matrix = projection.as_matrix()
        alone[name] = lambda matrix=matrix: q @ matrix.mT  # type: ignore[misc]
        drawn[name] = projection.redraw
        if kind == "hadamard":
            alone[f"{name}-loop"] = lambda projection=projection: projection(q)  # type: ignore[misc]
        for features, calls in (("positive", whole), ("trig", trig)):
            attend = subquad.create(
                "performer", dim, num_features=count, features=features, seed=settings.seed, **options
            )
            calls[name] = lambda attend=attend: attend(q, k, v)  # type: ignore[misc]
    seconds = max(0.1, clock.seconds / 4)
    found: dict[str, Any] = {}
    for what, calls in (("alone", alone), ("whole", whole), ("trig", trig), ("drawing", drawn)):
        timings = interleave(calls, runs=clock.rounds(settings.runs + 1, 2), warmup=1, seconds=seconds)
        found[what] = {name: timing.as_dict() for name, timing in timings.items()}
    return found


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """One per width and length, one head."""
    found = []
    for length in settings.lengths:
        for dim in settings.projection_dims:
            asked = {"length": length, "dim": dim, "features": settings.projection_features, "runs": settings.runs,
                     "seed": settings.seed}  # fmt: skip

            def run(clock: Clock, length: int = length, dim: int = dim) -> Mapping[str, Any]:
                with torch.no_grad():
                    return _measure(settings, length, dim, clock)

            memory = 4 * length * (8 * settings.projection_features + 6 * dim)
            quiet, first = 0.15 + 6e-5 * length * (1 + dim / 64), length == settings.lengths[0]
            found.append(Job(f"d={dim}, L={length}", asked, run, quiet, REST, memory, first, len(PROJECTIONS) * 4 + 2))
    return found


def points(notebook: Notebook, what: str, kind: str, dim: int) -> dict[int, float]:
    """Milliseconds by length; `what` is alone, whole, trig or drawing."""
    found = {
        asked["length"]: result[what][kind]["best_ms"]
        for asked, result in notebook.of(NAME)
        if asked["dim"] == dim and kind in result.get(what, {})
    }
    return dict(sorted(found.items()))


def figures(notebook: Notebook, settings: Settings) -> list[list[Figure]]:
    """Time of the projection alone and of the whole attention, with positive and with sin/cos features."""
    lines = []
    for dim in settings.projection_dims:
        for what in ("alone", "whole", "trig", "drawing"):
            for kind, words in {**WORDS, **LOOPS}.items():
                mine = points(notebook, what, kind, dim)
                if mine:
                    choice = {"dim": str(dim), "show": what}
                    notes = [milliseconds(ms) for ms in mine.values()]
                    lines.append(Line(kind, words, list(mine), list(mine.values()), "performer", choice, notes))
    show = Selector("show", "Time of", (
        ("alone", "the projection"), ("whole", "attention, positive features"), ("trig", "attention, sin/cos features"),
        ("drawing", "drawing the matrix")))  # fmt: skip
    width = Selector("dim", "Width", [(str(dim), f"d {dim}") for dim in settings.projection_dims])
    return [[Figure(
        "projections", "What a projection costs",
        f"{settings.projection_features} features, one head; sin/cos at d 16 is the setting of the published report’s "
        "figure of times. Written out as a matrix, every projection is the same product. Butterflies as separate torch "
        "operations lose to it by an order of magnitude. Inside the native kernel they run on data that stays in "
        "cache, for exponential features from width 32 on; sin/cos and SDERF features, and narrower heads, are "
        "multiplied by the matrix.",
        "tokens", "milliseconds", lines, [show, width], legend=True,
    )]]  # fmt: skip


SECTION = Section(
    NAME,
    "Projections",
    "The random matrix behind the features: how it is drawn does not change its cost, how it is applied does.",
    jobs,
    figures,
)
