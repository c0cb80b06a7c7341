"""From a question to a folder: measure, then write the page, the pictures and the JSON file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.files import check_writable, write_text

from . import error, generation, machine, memory, model, projections, published, recommendation, spectrum, speed
from .figure import Figure
from .figures import generation_figures, memory_figure, speed_figure
from .findings import findings
from .notebook import Notebook
from .page import page
from .pictures import draw_pictures
from .running import Section, measure
from .settings import Settings
from .study_figures import error_figures, projection_figure, published_figure, spectrum_figures, tradeoff_figure
from .table import terminal_table

__all__ = ["Outcome", "all_figures", "report", "sections"]

# Memory comes last: its longest length can be missed most easily, since it grows in a straight line.
_SECTIONS: tuple[Any, ...] = (
    machine, speed, error, published, projections, generation, spectrum, recommendation, memory
)  # fmt: skip
_MODEL_SHARE = 0.375  # of all the others together, on top of them, in a longer report


@dataclass(frozen=True)
class Outcome:
    """Where everything is, and the table for the terminal."""

    notebook: Notebook
    page: Path
    json: Path
    table: str
    interrupted: bool

    @property
    def failed(self) -> bool:
        """Whether a measurement raised."""
        return bool(self.notebook.failures)


def sections(settings: Settings, notebook: Notebook, seen: model.Captured | None = None) -> list[Section]:
    """Everything there is to measure, the user's model first: it is what they asked about."""
    found = [Section(each.NAME, settings.shares[each.NAME], each.jobs(settings, notebook)) for each in _SECTIONS]
    if seen is not None:
        share = _MODEL_SHARE * sum(settings.shares.values())
        found.insert(1, Section(model.NAME, share, model.jobs(settings, notebook, seen)))
    return found


def all_figures(notebook: Notebook, settings: Settings) -> list[Figure]:
    """Every figure, also those that nothing was measured for."""
    layers = model.model_figure(notebook)
    return [
        tradeoff_figure(notebook, settings),
        *([] if layers is None else [layers]),
        speed_figure(notebook, settings),
        memory_figure(notebook, settings),
        *error_figures(notebook, settings),
        published_figure(notebook, settings),
        projection_figure(notebook, settings),
        *generation_figures(notebook, settings),
        *spectrum_figures(notebook),
    ]


def report(
    out: str | os.PathLike[str] = "results/report",
    settings: Settings | None = None,
    *,
    resume: bool = False,
    seen: model.Captured | None = None,
    pictures: bool = True,
    on_step: Callable[[str, int, int], None] | None = None,
) -> Outcome:
    """Measure what `settings` ask for and write `index.html`, `report.json` and the pictures into `out`.

    Every cell is in the JSON file as soon as it is measured. Ctrl-C ends the measuring; the page is written all the
    same and says what is missing. With `resume` the cells of an earlier run in the same folder are kept. `seen` is
    what the layers of a model saw (`captured`), for the section about it. Without `pictures` no PNG and SVG files are
    drawn.
    """
    settings = settings or Settings()
    folder = Path(out)
    check_writable("--out", folder, folder=True)
    path, where = folder / "report.json", machine.describe()
    notebook = (Notebook.resume if resume else Notebook)(path, where, settings.as_dict())
    seconds = settings.seconds * (1.0 if seen is None else 1.0 + _MODEL_SHARE)
    done = measure(sections(settings, notebook, seen), notebook, seconds, on_step)
    notebook.complete = done and not notebook.skipped
    found = findings(notebook, settings)
    notebook.summary = found
    notebook.save()
    figures = all_figures(notebook, settings)
    names = draw_pictures(figures, folder) if pictures else []
    write_text(folder / "index.html", page(notebook, settings, found, figures, names))
    table = terminal_table(notebook, settings, found)
    return Outcome(notebook, folder / "index.html", path, table, interrupted=not done)
