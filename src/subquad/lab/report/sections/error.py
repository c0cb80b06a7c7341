"""Error against number of features, every feature map with every projection, beside what must be beaten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from subquad import describe
from subquad.lab.errors import FAMILIES, PROJECTIONS, SIZES, error_study
from subquad.lab.inputs import gaussian_inputs

from ..figure import Figure, Line, Selector
from ..notebook import Notebook
from ..running import ERRORS, Clock, Job
from ..section import Section
from ..settings import Settings
from .projections import WORDS

__all__ = ["BASELINES", "DATA", "SECTION", "Data", "curve", "data_of"]

NAME = "error"
BASELINES = {"uniform": "uniform attention", "degree-1": "degree 1", "taylor-2": "Taylor degree 2"}
# Mechanisms without features, each with its defaults: a level to compare with.
LEVELS = ("multipole", "improved-clustered", "nystrom")
FAMILY_WORDS = {"trig": "trigonometric", "positive": "positive", "hyperbolic": "hyperbolic", "oprf": "OPRF",
                "sderf": "SDERF"}  # fmt: skip


@dataclass(frozen=True)
class Data:
    """Gaussian queries and keys of one law; `anisotropy` is the power of the falling spectrum."""

    name: str
    words: str
    head_dim: int
    length: int
    std: float
    anisotropy: float = 0.0
    heads: int = 2


# d = 16 with 1024 and 4096 tokens of standard deviation 1.5 are the settings of the published Hadamard report.
DATA = (
    Data("d64-0.5", "d 64, isotropic, std 0.5", 64, 1024, 0.5),
    Data("d64-1", "d 64, isotropic, std 1", 64, 1024, 1.0),
    Data("d64-flat", "d 64, anisotropic, mild", 64, 1024, 0.35, 1.0),
    Data("d64-sharp", "d 64, anisotropic, sharp", 64, 1024, 0.7, 1.0),
    Data("d16-0.5", "d 16, isotropic, std 0.5", 16, 1024, 0.5),
    Data("d16-1", "d 16, isotropic, std 1", 16, 1024, 1.0),
    Data("d16-1.5", "d 16, isotropic, std 1.5 (published)", 16, 1024, 1.5),
    Data("d16-0.5-4096", "d 16, std 0.5, 4096 tokens", 16, 4096, 0.5, heads=1),
    Data("d16-1.5-4096", "d 16, std 1.5, 4096 tokens (published)", 16, 4096, 1.5, heads=1),
)


def data_of(settings: Settings) -> list[Data]:
    """The inputs asked for, in the order in which they are measured."""
    wanted = settings.error_data
    return [data for data in DATA if wanted is None or data.name in wanted]


def _known(notebook: Notebook, data: Data, seed: int) -> Mapping[str, float] | None:
    """The levels on that input, where a cell has them: they are half of a cell's time and no cell changes them."""
    wanted = {**vars(data), "seed": seed}
    for asked, result in notebook.of(NAME):
        if all(asked[name] == value for name, value in wanted.items()):
            return dict(result["baselines"])
    return None


def _default(name: str) -> dict[str, Any]:
    """The size that would vary with default options: the line is then horizontal."""
    return {SIZES[name]: describe(name)["options"][SIZES[name]]} if name in SIZES else {}


def _study(settings: Settings, notebook: Notebook, data: Data, family: str, draws: int) -> dict[str, Any]:
    law: dict[str, Any] = {
        "heads": data.heads, "head_dim": data.head_dim, "std": data.std, "anisotropy": data.anisotropy
    }  # fmt: skip
    inputs = gaussian_inputs(data.length, **law, seed=settings.seed)
    other = gaussian_inputs(data.length, **law, seed=settings.seed + 1)  # what calibrated features may see
    known = _known(notebook, data, settings.seed)
    levels = [name for name in LEVELS if name in settings.names] if known is None else []
    study = error_study(
        inputs.q, inputs.k, features=[family], projections=list(PROJECTIONS), num_features=settings.error_features,
        calibration=(other.q, other.k), baselines=known, draws=draws,
        mechanisms=[{"mechanism": name, **_default(name)} for name in levels],
        tokens=data.length, seed=settings.seed,
    )  # fmt: skip
    if not study.complete:
        raise KeyboardInterrupt
    lines = {
        projection: [point.as_dict() for point in line.points]
        for projection, line in zip(PROJECTIONS, study.lines, strict=False)
    }
    found = {line.mechanism: line.points[0].measured for line in study.lines[len(PROJECTIONS) :] if line.points}
    return {"lines": lines, "baselines": {**study.baselines, **found}}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """One per input and feature map, with all projections."""
    found: list[Job] = []
    for index, data in enumerate(data_of(settings)):
        # Long inputs average more rows: fewer draws say as much.
        draws = (
            settings.error_draws
            if data.length <= 2048
            else max(min(2, settings.error_draws), settings.error_draws // 2)
        )
        for family in FAMILIES:
            asked = {**vars(data), "features": family, "sizes": list(settings.error_features), "draws": draws,
                     "seed": settings.seed}  # fmt: skip

            def run(clock: Clock, data: Data = data, family: str = family, draws: int = draws) -> Mapping[str, Any]:
                with torch.no_grad():
                    return _study(settings, notebook, data, family, clock.rounds(draws, min(2, draws)))

            memory = 4 * data.heads * data.length * (max(settings.error_features) * 4 + 512)
            quiet = 0.25 * draws * data.heads * data.length / 2048 * sum(settings.error_features) / 2032
            cells = len(PROJECTIONS)
            found.append(Job(f"{family}, {data.words}", asked, run, quiet, ERRORS, memory, index == 0, cells))
    return found


def curve(notebook: Notebook, data: str, family: str, projection: str) -> list[dict[str, Any]]:
    """The points of one curve: size, measured, deviation, draws."""
    for asked, result in notebook.of(NAME):
        if asked["name"] == data and asked["features"] == family:
            return list(result["lines"].get(projection, []))
    return []


def _levels(notebook: Notebook, data: str, sizes: list[int], choice: dict[str, str]) -> list[Line]:
    found: dict[str, float] = {}
    for asked, result in notebook.of(NAME):
        if asked["name"] == data:
            found |= result["baselines"]
    words = {**BASELINES, **{name: f"{name}, default options" for name in LEVELS}}
    return [
        Line(key, words[key], [sizes[0], sizes[-1]], [found[key]] * 2,
             {"uniform": ""}.get(key, key if key in LEVELS else "taylor"), choice, flat=True)
        for key in words if key in found
    ]  # fmt: skip


def _point(point: Mapping[str, Any]) -> str:
    if point["measured"] is None:
        return "diverged"
    return f"error {point['measured']:.3g} ± {point['deviation'] or 0:.2g} over {point['draws']} draws"


def figures(notebook: Notebook, settings: Settings) -> list[list[Figure]]:
    """The same curves per input twice: by feature map at one projection, and by projection at one feature map."""
    sizes = list(settings.error_features)
    done = {asked["name"] for asked, _ in notebook.of(NAME)}
    data = [each for each in data_of(settings) if each.name in done]
    maps, matrices = [], []
    for each in data:
        for family in FAMILIES:
            for projection in PROJECTIONS:
                points = curve(notebook, each.name, family, projection)
                if not points:
                    continue
                x, y = [p["size"] for p in points], [p["measured"] for p in points]
                notes = [_point(p) for p in points]
                choice = {"data": each.name}
                maps.append(Line(family, FAMILY_WORDS[family], x, y, "performer", {**choice, "by": projection}, notes))
                matrices.append(Line(projection, WORDS[projection], x, y, "performer", {**choice, "by": family}, notes))
        levels = _levels(notebook, each.name, sizes, {"data": each.name})
        maps += levels
        matrices += levels
    chooser = Selector("data", "Inputs", [(each.name, each.words) for each in data] or [("none", "none")])
    by_projection = Selector("by", "Projection", [("orthogonal", "orthogonal"), *(
        item for item in WORDS.items() if item[0] != "orthogonal")])  # fmt: skip
    by_family = Selector("by", "Features", [("hyperbolic", "hyperbolic"), *(
        item for item in FAMILY_WORDS.items() if item[0] != "hyperbolic")])  # fmt: skip
    return [[
        Figure(
            "error-features", "Which feature map?",
            "Relative squared error of the attention matrix against the number of features, mean over draws. The "
            "dashed levels do not depend on it: a curve above <em>uniform attention</em> is worse than averaging the "
            "values. On flat scores polynomials win; on sharp scores in few directions the calibrated SDERF does; on "
            "large isotropic inputs nothing random helps. Errors beyond 100 leave the figure: trigonometric features "
            "divide by sums that can vanish.",
            "features M", "relative squared error", maps, [chooser, by_projection], legend=True, y_max=100.0,
        )], [
        Figure(
            "error-projections", "Which projection?",
            "The same measurements, one feature map at a time. Orthogonal, simplex and three-factor Hadamard rows are "
            "about equally good, and better than independent ones where the error is small. A single Hadamard factor "
            "looks as good on isotropic inputs and fails on anisotropic ones: choose those above to see it.",
            "features M", "relative squared error", matrices, [chooser, by_family], legend=True, y_max=100.0,
        ),
    ]]  # fmt: skip


SECTION = Section(
    NAME,
    "Error",
    "Random features estimate softmax attention. Whether the estimate is any good depends on the data more than on the "
    "method, so every curve stands beside answers that need no random features at all.",
    jobs,
    figures,
)
