"""Section 3, continued: the experiment of the published Hadamard report, as it was run and as it should have been.

"Hadamard-Rademacher Performers" compares projections at d = 16, L = 1024 with q, k, v of standard deviation 1.5. Its
orthogonal and Hadamard matrices have rows of norm sqrt(d / m) where omega needs chi(d): as m grows the projection tends
to 0 and the weights to e^{-|y|^2 / 2}, which depend on the key alone. Its Hadamard matrix is besides a sum of factors
where their product is meant. Both are rebuilt here, and beside them stands what they tend to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.features.hadamard import fwht
from subquad.features.projections import haar, make_projection

from .notebook import Notebook
from .running import Clock, Job
from .settings import Settings

__all__ = ["KINDS", "PARAGRAPH", "jobs", "levels", "points"]

NAME = "published"
DIM, LENGTH, STD, DRAWS = 16, 1024, 1.5, 4

KINDS = {
    "published-orthogonal": "orthogonal, as published",
    "published-hadamard": "Hadamard, as published",
    "iid": "independent rows, correct",
    "orthogonal": "orthogonal, correct",
    "hadamard-3": "Hadamard k = 3, correct",
}

PARAGRAPH = (
    "The report “Hadamard-Rademacher Performers” compares projections by the error of the attention they give. "
    "Its own setting, rebuilt here, shows why those figures do not compare what they name. Both orthogonal "
    "builders divide unit rows by √(m/d), so a row has norm √(d/m) instead of a chi(d) length: the more features,"
    " the shorter the rows, until every score is forgotten and what remains are weights e<sup>−|k|²/2√d</sup> "
    "that depend on the key alone. That is the level at which the published curves lie, and the plain mean of the"
    " values, which looks at nothing, is below it. The Hadamard matrix is besides a <em>sum</em> of its k factors"
    " where their product is meant (its rows are then neither orthogonal nor of equal length), the fast transform"
    " combines the halves it was given instead of the transformed ones, and the trigonometric code multiplies "
    "every angle by 2π. Last, the inputs: with q and k of standard deviation 1.5, attention is so sharp that no "
    "unbiased random feature map tried here, up to a thousand features, beats the mean of the values, so a "
    "difference between projections is noise. Correctly built and at smaller scales (the curves above), "
    "orthogonal and three-factor Hadamard rows are equally good and better than independent ones; one factor "
    "alone is biased on sparse directions at every width."
)


def _short_orthogonal(m: int, generator: torch.Generator) -> Tensor:
    blocks = haar(-(-m // DIM), DIM, generator)
    return blocks.flatten(0, 1)[:m] * math.sqrt(DIM / m)


def _summed_hadamard(m: int, generator: torch.Generator) -> Tensor:
    count = -(-m // DIM)
    signs = torch.randint(0, 2, (count, 3, 1, DIM), generator=generator).double() * 2 - 1
    h = fwht(torch.eye(DIM, dtype=torch.float64), orthonormal=True)
    return (h * signs).sum(1).flatten(0, 1)[:m] * math.sqrt(DIM / m)


def _right(kind: str, **options: Any) -> Callable[[int, torch.Generator], Tensor]:
    return lambda m, generator: make_projection(kind, m, DIM, seed=generator, **options).as_matrix(torch.float64)


_MATRICES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "published-orthogonal": _short_orthogonal,
    "published-hadamard": _summed_hadamard,
    "iid": _right("gaussian"),
    "orthogonal": _right("orthogonal"),
    "hadamard-3": _right("hadamard", blocks=3),
}


def _weights(matrix: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Positive features, in log form as far as it goes; the factor e^{-|x|^2/2} of a row cancels."""
    queries, keys = x @ matrix.mT, y @ matrix.mT - 0.5 * y.square().sum(-1, keepdim=True)
    queries = (queries - queries.amax(-1, keepdim=True)).exp()
    weights = queries @ (keys - keys.amax()).exp().mT
    return weights / weights.sum(-1, keepdim=True)


def _measure(settings: Settings) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(settings.seed)
    q, k, v = STD * torch.randn(3, LENGTH, DIM, generator=generator, dtype=torch.float64)
    x, y = q * DIM**-0.25, k * DIM**-0.25
    exact = torch.softmax(x @ y.mT, -1) @ v

    def error(out: Tensor) -> float:
        return float((out - exact).square().mean())

    key_only = torch.softmax(-0.5 * y.square().sum(-1), -1)
    curves = {
        kind: [
            statistics.median(error(_weights(make(m, generator), x, y) @ v) for _ in range(DRAWS))
            for m in settings.published_features
        ]
        for kind, make in _MATRICES.items()
    }
    levels = {"uniform": error(v.mean(0).expand_as(v)), "key-only": error((key_only @ v).expand_as(v))}
    return {"curves": curves, "levels": levels}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """One cell: it takes a second or two."""
    asked = {"d": DIM, "length": LENGTH, "std": STD, "draws": DRAWS, "sizes": list(settings.published_features),
             "seed": settings.seed}  # fmt: skip

    def run(clock: Clock) -> Mapping[str, Any]:
        return _measure(settings)

    return [Job(f"d={DIM}, L={LENGTH}, std {STD}", asked, run, first=True)]


def points(notebook: Notebook, kind: str) -> dict[int, float]:
    """Mean squared error of the output by number of features."""
    for asked, result in notebook.of(NAME):
        return dict(zip(asked["sizes"], result["curves"][kind], strict=True))
    return {}


def levels(notebook: Notebook) -> dict[str, float]:
    """The same error of uniform attention and of weights by the key alone."""
    for _, result in notebook.of(NAME):
        return dict(result["levels"])
    return {}
