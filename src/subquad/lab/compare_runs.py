"""Two saved comparisons side by side.

A ratio below 1 means that the second is faster. Two saved runs were made at different times, so their ratio also holds
what else the machine was doing; softmax attention, which both ran, says how much: `drift` is its own ratio.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subquad.lab.bench import Comparison
from subquad.lab.measure import Timing
from subquad.plain_text import aligned

__all__ = ["Ratio", "Ratios", "compare_saved", "saved_path"]

FOLDER = Path("subquad-bench")
# What two comparisons must have in common for their times to be compared.
_SHAPE = ("batch", "heads", "head_dim", "dtype", "backward")


def saved_path(name: str) -> Path:
    """Where `--save NAME` keeps a comparison: always inside the folder `subquad-bench`.

    >>> saved_path("before").as_posix()
    'subquad-bench/before.json'
    """
    if not re.fullmatch(r"[\w+-][\w.+-]*", name):
        raise ValueError(
            f"--save {name}: a name of letters, digits, '.', '_', '+' and '-' is expected, not a path; the run is kept "
            f"as {FOLDER}/NAME.json, and --json FILE writes anywhere"
        )
    return FOLDER / f"{name.removesuffix('.json')}.json"


@dataclass(frozen=True)
class Ratio:
    """One mechanism at one length: the times of both and second / first."""

    mechanism: str
    length: int
    causal: bool
    first: Timing
    second: Timing

    @property
    def ratio(self) -> float:
        """Best of the second over best of the first."""
        return self.second.best / self.first.best

    @property
    def noise(self) -> float:
        """How far apart the runs of one side are, at most: a ratio nearer to 1 than this says nothing."""
        return max(self.first.spread, self.second.spread)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "mechanism": self.mechanism, "length": self.length, "causal": self.causal, "ratio": self.ratio,
            "noise": self.noise, "first": self.first.as_dict(), "second": self.second.as_dict(),
        }  # fmt: skip


@dataclass(frozen=True)
class Ratios:
    """Every mechanism and length that both have; `missing` says what only one of them could do."""

    names: tuple[str, str]
    rows: tuple[Ratio, ...]
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Every number."""
        return {
            "first": self.names[0], "second": self.names[1], "rows": [row.as_dict() for row in self.rows],
            "missing": list(self.missing), "notes": list(self.notes), "settings": dict(self.settings),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [["mechanism", "L", *(f"{name} ms" for name in self.names), "second/first", "noise"]]
        for row in self.rows:
            ratio = f"{row.ratio:.2f}" + ("" if abs(row.ratio - 1) <= row.noise else " *")
            times = [f"{side.best * 1e3:.2f}" for side in (row.first, row.second)]
            kind = " causal" if row.causal else ""
            lines.append([row.mechanism + kind, str(row.length), *times, ratio, f"{row.noise:.0%}"])
        text = aligned(lines)
        text += ["", "below 1: the second is faster; * beyond the spread between runs (noise)"]
        text += [*self.notes, *(f"only in one: {line}" for line in self.missing)]
        return "\n".join(text)


def compare_saved(first: Comparison, second: Comparison, names: Sequence[str] = ("first", "second")) -> Ratios:
    """Ratios of the times that both comparisons measured; refuses shapes that differ, notes machines that differ."""
    for key in _SHAPE:
        one, other = (side.settings.get(key, False if key == "backward" else None) for side in (first, second))
        if one != other:
            raise ValueError(f"{names[0]} was measured with {key}={one!r}, {names[1]} with {other!r}: not comparable")
    sides = [{(c.mechanism, c.length, c.causal): c for c in side.cells if c.timing} for side in (first, second)]
    rows, missing = [], []
    for place in dict.fromkeys([*sides[0], *sides[1]]):
        name, length, causal = place
        cells = [side.get(place) for side in sides]
        timings = [cell.timing for cell in cells if cell is not None and cell.timing is not None]
        if len(timings) == 2:
            rows.append(Ratio(name, length, causal, timings[0], timings[1]))
        else:
            missing.append(f"{name} L={length}{' causal' if causal else ''}")
    if not rows:
        raise ValueError(f"{names[0]} and {names[1]} have no mechanism and length in common")
    notes = [
        f"{key}: {first.machine.get(key)} and {second.machine.get(key)}"
        for key in ("processor", "threads", "torch", "cpu_capability")
        if first.machine.get(key) != second.machine.get(key)
    ]
    drift = [row.ratio for row in rows if row.mechanism == "softmax"]
    if drift:
        notes.append(f"drift of the machine, from softmax attention in both: {min(drift):.2f} to {max(drift):.2f}")
    settings = {key: first.settings.get(key) for key in _SHAPE}
    return Ratios((names[0], names[1]), tuple(rows), tuple(missing), tuple(notes), settings)
