"""From a question to a folder: measure, then write the page, its figures and the JSON file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from subquad.files import check_writable, write_text

from .figure_files import write_figures
from .findings import findings
from .load import Watch, free_threads, others
from .notebook import Notebook
from .page import page
from .running import measure
from .sections import sections
from .sections.machine import describe
from .sections.model import Captured, shipped
from .settings import Settings
from .table import terminal_table

__all__ = ["Outcome", "report"]

_MODEL_SECONDS = 4.0  # per layer of the user's own model, on top


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


def report(
    out: str | os.PathLike[str] = "results/report",
    settings: Settings | None = None,
    *,
    resume: bool = False,
    seen: Captured | None = None,
    figure_files: bool = True,
    on_step: Callable[[str, int, int], None] | None = None,
) -> Outcome:
    """Measure what `settings` ask for and write `index.html`, `report.json` and the figures (PNG, SVG) into `out`.

    Every cell is in the JSON file as soon as it is measured. Ctrl-C ends the measuring; the page is written all the
    same and says what is missing. With `resume` the cells of an earlier run in the same folder are kept, and the
    threads that it used. `seen` is what the layers of a model saw (`captured`), for the section about it; without it
    these are the heads that the library ships. Without `figure_files` no PNG and SVG files are drawn.

    Where other processes take a part of the cores, fewer threads are used and the report says so (`load.py`).
    """
    settings = settings or Settings()
    folder = Path(out)
    check_writable("--out", folder, folder=True)
    path = folder / "report.json"
    usual, cores = torch.get_num_threads(), os.cpu_count() or 1
    taken = others()
    kept = Notebook.stored_threads(path) if resume else None
    threads = free_threads(taken, usual, cores) if kept is None else min(kept, max(usual, cores))
    torch.set_num_threads(threads)
    try:
        notebook = (Notebook.resume if resume else Notebook)(path, describe(), settings.as_dict())
        parts = sections(seen or shipped())
        seconds = settings.seconds + (0.0 if seen is None else _MODEL_SECONDS * len(seen.layers))
        watch = Watch()
        done = measure([(part.name, part.jobs(settings, notebook)) for part in parts], notebook, seconds, on_step)
        notebook.load = {
            "others": watch.others, "others_at_start": taken, "cores": cores, "threads": threads,
            "usual_threads": usual,
        }  # fmt: skip
    finally:
        torch.set_num_threads(usual)
    notebook.complete = done and not notebook.skipped
    found = findings(notebook, settings)
    notebook.summary = found
    notebook.save()
    shown = [(part, part.figures(notebook, settings)) for part in parts]
    names = (
        write_figures([figure for _, rows in shown for row in rows for figure in row], folder) if figure_files else []
    )
    write_text(folder / "index.html", page(notebook, settings, found, shown, names))
    table = terminal_table(notebook, settings, found)
    return Outcome(notebook, folder / "index.html", path, table, interrupted=not done)
