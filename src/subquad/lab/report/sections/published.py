"""The experiments of the published Hadamard report, as they were run and as they should have been.

"Hadamard-Rademacher Performers" compares projections at d = 16, L = 1024 with q, k, v of standard deviation 1.5. Its
orthogonal and Hadamard matrices have rows of norm sqrt(d / m) where omega needs chi(d): as m grows the projection tends
to 0 and the weights to e^{-|y|^2 / 2}, which depend on the key alone. Its Hadamard matrix is besides a sum of factors
where their product is meant, and its sin/cos features multiply every angle by 2 pi. All are rebuilt here, with positive
features and with sin/cos ones (its first figure), and beside them stands what they tend to.
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

from ..figure import Figure, Line, Selector, only_measured
from ..notebook import Notebook
from ..running import REST, Clock, Job
from ..section import Section
from ..settings import Settings

__all__ = ["KINDS", "SECTION", "levels", "points"]

NAME = "published"
DIM, LENGTH, STD = 16, 1024, 1.5
FEATURES = {"trig": "sin/cos", "positive": "positive"}

KINDS = {
    "published-orthogonal": "orthogonal, as published",
    "published-hadamard": "Hadamard, as published",
    "gaussian": "independent rows, correct",
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
    " where their product is meant (its rows are then neither orthogonal nor of equal length), and the "
    "trigonometric code multiplies every angle by 2π. The fast transform of the pseudo-code combines the halves it was "
    "given instead of the transformed ones; the authors’ program uses correct butterflies. Last, the inputs: with q "
    "and k of standard deviation 1.5, attention is so sharp that no unbiased random feature map tried here, up to a "
    "thousand features, beats the mean of the values, so a difference between projections is noise. Correctly built "
    "and at smaller scales (the curves above), orthogonal and three-factor Hadamard rows are equally good and better "
    "than independent ones; one factor alone is biased on sparse directions at every width."
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
    "gaussian": _right("gaussian"),
    "orthogonal": _right("orthogonal"),
    "hadamard-3": _right("hadamard", blocks=3),
}


def _weights(matrix: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Positive features, in log form as far as it goes; the factor e^{-|x|^2/2} of a row cancels."""
    queries, keys = x @ matrix.mT, y @ matrix.mT - 0.5 * y.square().sum(-1, keepdim=True)
    queries = (queries - queries.amax(-1, keepdim=True)).exp()
    weights = queries @ (keys - keys.amax()).exp().mT
    return weights / weights.sum(-1, keepdim=True)


def _trig_weights(matrix: Tensor, x: Tensor, y: Tensor, turn: float) -> Tensor:
    """sin/cos features of the angles turn * omega.x; the factor e^{|x|^2/2} of a row cancels."""
    angles = turn * (x @ matrix.mT), turn * (y @ matrix.mT)
    keys = torch.exp(0.5 * (y.square().sum(-1) - y.square().sum(-1).amax()))
    # cos(a - b) = cos a cos b + sin a sin b
    kernel = sum(f(angles[0]) @ f(angles[1]).mT for f in (torch.cos, torch.sin)) * keys
    return kernel / kernel.sum(-1, keepdim=True)


def _measure(settings: Settings, features: str, draws: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(settings.seed)
    q, k, v = STD * torch.randn(3, LENGTH, DIM, generator=generator, dtype=torch.float64)
    x, y = q * DIM**-0.25, k * DIM**-0.25
    exact = torch.softmax(x @ y.mT, -1) @ v

    def error(out: Tensor) -> float:
        return float((out - exact).square().mean())

    def weights(kind: str, matrix: Tensor) -> Tensor:
        if features == "positive":
            return _weights(matrix, x, y)
        return _trig_weights(matrix, x, y, 2 * math.pi if kind.startswith("published") else 1.0)

    signs = -1.0 if features == "positive" else 1.0
    key_only = torch.softmax(signs * 0.5 * y.square().sum(-1), -1)
    curves = {
        kind: [
            statistics.median(error(weights(kind, make(m, generator)) @ v) for _ in range(draws))
            for m in settings.published_features
        ]
        for kind, make in _MATRICES.items()
    }
    levels = {"uniform": error(v.mean(0).expand_as(v)), "key-only": error((key_only @ v).expand_as(v))}
    return {"curves": curves, "levels": levels, "draws": draws}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """One cell per kind of features."""
    found = []
    for features, words in FEATURES.items():
        asked = {"d": DIM, "length": LENGTH, "std": STD, "draws": settings.published_draws, "features": features,
                 "sizes": list(settings.published_features), "seed": settings.seed}  # fmt: skip

        def run(clock: Clock, features: str = features) -> Mapping[str, Any]:
            return _measure(settings, features, clock.rounds(settings.published_draws, 2))

        quiet = 4.6e-4 * settings.published_draws * sum(settings.published_features) * (2 if features == "trig" else 1)
        label = f"{words}, d={DIM}, L={LENGTH}, std {STD}"
        found.append(Job(label, asked, run, quiet, REST, first=features == "positive", cells=len(KINDS)))
    return found


def points(notebook: Notebook, kind: str, features: str = "positive") -> dict[int, float]:
    """Mean squared error of the output by number of features."""
    for asked, result in notebook.of(NAME):
        if asked["features"] == features:
            return dict(zip(asked["sizes"], result["curves"][kind], strict=True))
    return {}


def levels(notebook: Notebook, features: str = "positive") -> dict[str, float]:
    """The same error of uniform attention and of weights by the key alone."""
    for asked, result in notebook.of(NAME):
        if asked["features"] == features:
            return dict(result["levels"])
    return {}


def figures(notebook: Notebook, settings: Settings) -> list[list[Figure]]:
    """The published experiments, as run and as meant."""
    lines = []
    sizes = list(settings.published_features)
    named = {"uniform": "mean of the values", "key-only": "weights by the key alone"}
    for features in FEATURES:
        choice = {"features": features}
        for kind, words in KINDS.items():
            mine = points(notebook, kind, features)
            if mine:
                notes = [f"mean squared error {y:.3g}" for y in mine.values()]
                lines.append(Line(kind, words, list(mine), list(mine.values()), "performer", choice, notes))
        for key, level in levels(notebook, features).items():
            lines.append(Line(key, named[key], [sizes[0], sizes[-1]], [level] * 2, "", choice, flat=True))
    draws = {result["draws"] for _, result in notebook.of(NAME)} or {settings.published_draws}
    return [[Figure(
        "published", "The published figures, rebuilt",
        f"d 16, 1024 tokens, standard deviation 1.5, median of {min(draws)} draws. With positive features the "
        "published projections give what weights by the key alone give, and the mean of the values, which ignores "
        "everything, is lower still. With sin/cos features (its first figure) the rows shrink as well, and the angles "
        "are 2π times too large. Every correct estimator is above the mean of the values: none is usable here.",
        "features m", "mean squared error of the output", lines,
        [only_measured(Selector("features", "Features", list(FEATURES.items())), lines)], legend=True,
    )]]  # fmt: skip


def _text(notebook: Notebook, settings: Settings) -> str:
    return f'<div class="prose"><p>{PARAGRAPH}</p></div>'


SECTION = Section(NAME, "What was wrong in the published Hadamard report", "", jobs, figures, before=_text)
