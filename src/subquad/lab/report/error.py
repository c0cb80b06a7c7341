"""Section 3: error against number of features, every feature map with every projection, beside what must be beaten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from subquad.lab.errors import FAMILIES, PROJECTIONS, error_study
from subquad.lab.inputs import gaussian_inputs

from .notebook import Notebook
from .running import Clock, Job
from .settings import Settings

__all__ = ["BASELINES", "DATA", "Data", "curve", "data_of", "jobs"]

NAME = "error"
BASELINES = {"uniform": "uniform attention", "degree-1": "degree 1", "taylor-2": "Taylor degree 2"}


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
    """The baselines on that input, where a cell has them: they are half of a cell's time and no cell changes them."""
    wanted = {**vars(data), "seed": seed}
    for asked, result in notebook.of(NAME):
        if all(asked[name] == value for name, value in wanted.items()):
            return dict(result["baselines"])
    return None


def _study(settings: Settings, notebook: Notebook, data: Data, family: str, draws: int) -> dict[str, Any]:
    law: dict[str, Any] = {
        "heads": data.heads, "head_dim": data.head_dim, "std": data.std, "anisotropy": data.anisotropy
    }  # fmt: skip
    inputs = gaussian_inputs(data.length, **law, seed=settings.seed)
    other = gaussian_inputs(data.length, **law, seed=settings.seed + 1)  # what calibrated features may see
    study = error_study(
        inputs.q, inputs.k, features=[family], projections=list(PROJECTIONS), num_features=settings.error_features,
        calibration=(other.q, other.k), baselines=_known(notebook, data, settings.seed), draws=draws,
        tokens=data.length, seed=settings.seed, predict=False,
    )  # fmt: skip
    if not study.complete:
        raise KeyboardInterrupt
    lines = {
        projection: [point.as_dict() for point in line.points]
        for projection, line in zip(PROJECTIONS, study.lines, strict=True)
    }
    return {"lines": lines, "baselines": dict(study.baselines)}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """One per input and feature map, with all projections."""
    found: list[Job] = []
    for index, data in enumerate(data_of(settings)):
        # Long inputs average more rows: fewer draws say as much.
        draws = settings.error_draws if data.length <= 2048 else max(1, settings.error_draws // 2)
        for family in FAMILIES:
            asked = {**vars(data), "features": family, "sizes": list(settings.error_features), "draws": draws,
                     "seed": settings.seed}  # fmt: skip

            def run(clock: Clock, data: Data = data, family: str = family, draws: int = draws) -> Mapping[str, Any]:
                with torch.no_grad():
                    return _study(settings, notebook, data, family, draws)

            memory = 4 * data.heads * data.length * (max(settings.error_features) * 4 + 512)
            found.append(Job(f"{family}, {data.words}", asked, run, memory, first=index == 0))
    return found


def curve(notebook: Notebook, data: str, family: str, projection: str) -> list[dict[str, Any]]:
    """The points of one curve: size, measured, deviation, draws."""
    for asked, result in notebook.of(NAME):
        if asked["name"] == data and asked["features"] == family:
            return list(result["lines"].get(projection, []))
    return []
