"""Section 4: how long a projection takes against length, alone and inside the whole attention.

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

from .notebook import Notebook
from .running import Clock, Job
from .settings import Settings

__all__ = ["LOOPS", "WORDS", "jobs", "points"]

NAME = "projections"
# The projections of `lab.errors.PROJECTIONS` in words.
WORDS = {"iid": "independent rows", "orthogonal": "orthogonal", "hadamard-1": "Hadamard k = 1",
         "hadamard-3": "Hadamard k = 3", "simplex": "simplex"}  # fmt: skip
LOOPS = {"hadamard-1-loop": "Hadamard k = 1, torch butterflies", "hadamard-3-loop": "Hadamard k = 3, torch butterflies"}


def _measure(settings: Settings, length: int, dim: int, clock: Clock) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(settings.seed)
    q, k, v = (0.5 * torch.randn(1, 1, length, dim, generator=generator) for _ in range(3))
    count = settings.projection_features
    alone: dict[str, Callable[[], object]] = {}
    whole: dict[str, Callable[[], object]] = {}
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
        attend = subquad.create(
            "performer", dim, num_features=count, features="positive", seed=settings.seed, **options
        )
        whole[name] = lambda attend=attend: attend(q, k, v)  # type: ignore[misc]
    seconds = max(0.2, 0.1 * clock.left)
    found: dict[str, Any] = {}
    for what, calls in (("alone", alone), ("whole", whole), ("drawing", drawn)):
        timings = interleave(calls, runs=settings.runs + 1, warmup=1, seconds=seconds)
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
            found.append(Job(f"d={dim}, L={length}", asked, run, memory, first=length == settings.lengths[0]))
    return found


def points(notebook: Notebook, what: str, kind: str, dim: int) -> dict[int, float]:
    """Milliseconds by length; `what` is alone, whole or drawing."""
    found = {
        asked["length"]: result[what][kind]["best_ms"]
        for asked, result in notebook.of(NAME)
        if asked["dim"] == dim and kind in result[what]
    }
    return dict(sorted(found.items()))
