"""Section 6: how low-rank attention matrices are.

Wang et al., "Linformer", 2020, plot the cumulated singular values of softmax matrices; what a rank-r method can reach
is the energy (the squares) of the first r of them, Eckart and Young, 1936.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .inputs import KINDS, sample
from .notebook import Notebook
from .running import Clock, Job
from .settings import Settings

__all__ = ["jobs", "of_matrix", "points", "ranks"]

NAME = "spectrum"
ENERGY = 0.95


def of_matrix(scores: torch.Tensor) -> dict[str, Any]:
    """Cumulated shares of the singular values of softmax(scores), and the rank that holds 95 % of the energy."""
    values = torch.linalg.svdvals(torch.softmax(scores.double(), -1))
    linear, energy = values.cumsum(-1) / values.sum(), values.square().cumsum(-1) / values.square().sum()
    count = len(values)
    index = sorted({round(count * (i / 40) ** 2) for i in range(1, 41)} - {0})
    at = torch.tensor(index) - 1
    return {
        "index": index,
        "cumulated": linear[at].tolist(),
        "energy": energy[at].tolist(),
        "rank": int((energy < ENERGY).sum()) + 1,
        "size": count,
    }


def _measure(settings: Settings, kind: str, length: int) -> dict[str, Any]:
    q, k = sample(kind, length, heads=1, head_dim=settings.head_dim, seed=settings.seed)
    return of_matrix((q @ k.mT)[0, 0] / settings.head_dim**0.5)


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """One per kind of input and length; the longest is cubic in its length."""
    found = []
    for length in settings.spectrum_lengths:
        for kind, words in KINDS.items():
            asked = {"kind": kind, "length": length, "head_dim": settings.head_dim, "seed": settings.seed}

            def run(clock: Clock, kind: str = kind, length: int = length) -> Mapping[str, Any]:
                return _measure(settings, kind, length)

            shortest = length == settings.spectrum_lengths[0]
            found.append(Job(f"{words}, L={length}", asked, run, 8 * 6 * length**2, first=shortest))
    return found


def points(notebook: Notebook, kind: str, length: int, what: str) -> dict[float, float]:
    """`cumulated` or `energy` by the share of the singular values that are kept."""
    for asked, result in notebook.of(NAME):
        if asked["kind"] == kind and asked["length"] == length:
            return {i / result["size"]: y for i, y in zip(result["index"], result[what], strict=True)}
    return {}


def ranks(notebook: Notebook, kind: str) -> dict[int, float]:
    """The rank that holds 95 % of the energy, by length."""
    found = {asked["length"]: result["rank"] for asked, result in notebook.of(NAME) if asked["kind"] == kind}
    return dict(sorted(found.items()))
