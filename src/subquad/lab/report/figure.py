"""A figure as data: the page draws it with plotly, a picture of it is drawn with matplotlib."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Figure", "Line", "Selector", "only_measured"]


@dataclass(frozen=True)
class Line:
    """One curve.

    key:    whose colour it has, and its entry in the legend
    filter: the mechanism whose check box hides it; "" = always shown
    choice: the values of the figure's selectors at which it is shown; a selector not named does not matter
    notes:  one line of text per point, shown when the pointer is over it
    flat:   a level to compare with, drawn dashed and without points
    """

    key: str
    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    filter: str = ""
    choice: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    flat: bool = False

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or (self.notes and len(self.notes) != len(self.x)):
            raise ValueError(f"line {self.label!r}: {len(self.x)} x, {len(self.y)} y and {len(self.notes)} notes")
        # NaN is not JSON, and a logarithmic axis has no place for what is not positive.
        object.__setattr__(self, "y", [y if y is not None and math.isfinite(y) and y > 0 else None for y in self.y])


@dataclass(frozen=True)
class Selector:
    """One choice that the reader makes: (value, words) pairs, the first one is shown at the start."""

    name: str
    title: str
    options: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Figure:
    """Curves with axes, selectors and a caption that says what to see."""

    id: str
    title: str
    caption: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    selectors: Sequence[Selector] = ()
    x_log: bool = True
    y_log: bool = True
    y_titles: Mapping[str, str] = field(default_factory=dict)  # by the value of the selector "show"
    legend: bool = False  # a legend of its own; else the check boxes of the page are its legend
    points: bool = False  # points without lines
    y_max: float | None = None  # what is larger leaves the figure, so that the rest can be seen

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    def shown(self, choice: Mapping[str, str]) -> list[Line]:
        """The lines at this choice of the selectors."""
        return [
            line for line in self.lines if all(choice.get(name, value) == value for name, value in line.choice.items())
        ]

    @property
    def start(self) -> dict[str, str]:
        """The first option of every selector."""
        return {selector.name: selector.options[0][0] for selector in self.selectors}


def only_measured(selector: Selector, lines: Sequence[Line]) -> Selector:
    """The same selector with the options that some line has."""
    found = {line.choice.get(selector.name) for line in lines}
    kept = tuple(option for option in selector.options if option[0] in found)
    return Selector(selector.name, selector.title, kept or selector.options[:1])
