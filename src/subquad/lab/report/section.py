"""A section of the report: what it measures, and what it shows. Each is one file of `sections/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .figure import Figure
from .notebook import Notebook
from .running import Job
from .settings import Settings

__all__ = ["Rows", "Section"]

Rows = Sequence[Sequence[Figure]]


def _nothing(notebook: Notebook, settings: Settings) -> str:
    return ""


@dataclass(frozen=True)
class Section:
    """One section.

    name:       of its cells in the JSON file, and of its place in the page
    title, intro: as the page shows them, HTML
    jobs:       what to measure, in the order of its worth
    figures:    rows of figures that stand side by side, also those that nothing was measured for
    before, after: HTML around the figures
    """

    name: str
    title: str
    intro: str = ""
    jobs: Callable[[Settings, Notebook], list[Job]] = lambda settings, notebook: []
    figures: Callable[[Notebook, Settings], Rows] = lambda notebook, settings: ()
    before: Callable[[Notebook, Settings], str] = _nothing
    after: Callable[[Notebook, Settings], str] = _nothing
