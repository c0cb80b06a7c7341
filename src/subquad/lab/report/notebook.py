"""The numbers of a report while it runs: one JSON file, written anew and atomically after every cell.

A cell is one measurement: what was asked, what came out, how long it took. A cell is found again by what was asked, so
an interrupted report continues where it stopped and a longer one reuses the shorter one's cells.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from subquad.files import write_json

__all__ = ["FORMAT", "Notebook"]

FORMAT = "subquad report 2"
# A number measured elsewhere must not stand beside one measured here.
SAME = ("processor", "threads", "torch", "subquad")


def _key(section: str, asked: Mapping[str, Any]) -> str:
    return section + json.dumps(asked, sort_keys=True)


class Notebook:
    """Cells by section, what was skipped and why, and the file that holds them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     book = Notebook(Path(folder) / "report.json", {"threads": 1})
    ...     book.add("speed", "L=16", {"length": 16}, {"softmax": 1.5}, seconds=0.1)
    ...     again = Notebook.resume(Path(folder) / "report.json", {"threads": 1})
    ...     again.find("speed", {"length": 16})
    {'softmax': 1.5}
    """

    def __init__(self, path: Path, machine: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> None:
        self.path, self.machine, self.settings = path, dict(machine), dict(settings or {})
        self.cells: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        self.load: dict[str, Any] = {}
        self.complete = False
        self._wanted: dict[str, int] | None = None
        self.started = time.strftime("%Y-%m-%d %H:%M:%S %z")

    @classmethod
    def resume(cls, path: Path, machine: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> Notebook:
        """The notebook in that file, to be continued here; a new one where there is none."""
        book = cls(path, machine, settings)
        if not path.exists():
            return book
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["format"] != FORMAT:
                raise KeyError
            cells, where = list(stored["cells"]), dict(stored["machine"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: this is not a readable report; run without --resume to replace it") from error
        for name in SAME:
            if where.get(name) != book.machine.get(name):
                raise ValueError(
                    f"{path} was measured with {name} = {where.get(name)!r}, here it is {book.machine.get(name)!r}; "
                    "timings of both cannot stand in one report: run without --resume, or with another --out"
                )
        for cell in cells:
            if cell.get("status") == "measured":
                book.cells[_key(cell["section"], cell["asked"])] = cell
        book.started = stored.get("started", book.started)
        return book

    @staticmethod
    def stored_threads(path: Path) -> int | None:
        """The number of threads that the report in this file was measured with; None where there is none to read."""
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["machine"]["threads"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def show_only(self, wanted: Iterable[tuple[str, Mapping[str, Any], int]]) -> None:
        """Show the cells of these (section, question, numbers it stands for) alone: a resumed file may hold those of
        other settings too."""
        self._wanted = {_key(section, asked): count for section, asked, count in wanted}

    @property
    def cells_total(self) -> int:
        """Numbers that the page would show if everything were measured."""
        return len(self.cells) if self._wanted is None else sum(self._wanted.values())

    @property
    def cells_measured(self) -> int:
        """Those that are there: a mechanism that a measured cell left out is not."""
        found = 0
        for key, cell in self.cells.items():
            if cell["status"] == "measured" and (self._wanted is None or key in self._wanted):
                every = cell["result"].get("mechanisms", {})
                missing = sum(one["status"] == "skipped" for one in every.values())
                found += (1 if self._wanted is None else self._wanted[key]) - missing
        return found

    def find(self, section: str, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of that measurement, or None."""
        cell = self.cells.get(_key(section, asked))
        return cell["result"] if cell and cell["status"] == "measured" else None

    def add(
        self, section: str, label: str, asked: Mapping[str, Any], result: Mapping[str, Any], seconds: float
    ) -> None:
        """Keep a result and write the file."""
        self._put(section, label, asked, {"status": "measured", "seconds": seconds, "result": dict(result)})

    def fail(self, section: str, label: str, asked: Mapping[str, Any], reason: str) -> None:
        """Keep the fact that a measurement failed, which is a bug, and go on."""
        self._put(section, label, asked, {"status": "failed", "reason": reason})

    def skip(self, section: str, label: str, reason: str, cells: int = 1) -> None:
        """Remember what was not measured; the page says so."""
        self.skipped[f"{section}: {label}"] = {"section": section, "cell": label, "reason": reason, "cells": cells}

    @property
    def reasons(self) -> dict[str, dict[str, list[str]]]:
        """What was skipped: the cells of each section by the reason, which is said once for all of them."""
        found: dict[str, dict[str, list[str]]] = {}
        for item in self.skipped.values():
            found.setdefault(item["reason"], {}).setdefault(item["section"], []).append(item["cell"])
        return found

    def _put(self, section: str, label: str, asked: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        cell = {"section": section, "label": label, "asked": dict(asked), **rest}
        self.cells[_key(section, asked)] = cell
        self.save()

    def of(self, section: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(asked, result) of every measured cell of a section."""
        for key, cell in self.cells.items():
            shown = self._wanted is None or key in self._wanted
            if shown and cell["section"] == section and cell["status"] == "measured":
                yield cell["asked"], cell["result"]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Cells that raised."""
        return [cell for cell in self.cells.values() if cell["status"] == "failed"]

    def as_dict(self) -> dict[str, Any]:
        """Every number."""
        return {
            "format": FORMAT,
            "started": self.started,
            "complete": self.complete,
            "cells_total": self.cells_total,
            "cells_measured": self.cells_measured,
            "load": self.load,
            "machine": self.machine,
            "settings": self.settings,
            "summary": self.summary,
            "skipped": list(self.skipped.values()),
            "cells": list(self.cells.values()),
        }

    def save(self) -> None:
        """Write the file, atomically."""
        write_json(self.path, self.as_dict())
