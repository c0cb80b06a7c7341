"""The figures as PNG and SVG, for papers and slides: panels over the first selector, the others at their start."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.files import replacing

from .figure import Figure, Line
from .style import style_of

__all__ = ["write_figures"]

_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v", "star": "*",
            "pentagon": "p", "hexagon": "h", "x": "x", "line-ew": ""}  # fmt: skip
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
MOST_PANELS = 9
MOST_TICKS = 9  # as many x are all named; more get the powers of ten


def _plain(text: str) -> str:
    return re.sub(r"<[^>]+>", "", text)


def _curve(axes: Any, line: Line, points: bool) -> Any:
    style = style_of(line.key)
    marker = style["symbol"].removesuffix("-open")
    hollow = style["symbol"].endswith("-open")
    dash = "dash" if line.flat and style["dash"] == "solid" else style["dash"]
    y = [math.nan if value is None else value for value in line.y]
    (drawn,) = axes.plot(
        line.x, y, label=line.label, color=style["light"], lw=0 if points else 2.2 if line.key == "softmax" else 1.4,
        ls=_DASHES[dash], marker="" if line.flat else _MARKERS.get(marker, "o"), ms=6 if points else 3.6,
        mfc="none" if hollow else style["light"],
    )  # fmt: skip
    return drawn


def _number(axes: Any) -> None:
    """Numbers on a logarithmic axis that spans less than two powers of ten, which would have one or none."""
    low, high = axes.get_ylim()
    if low > 0 and high / low < 160:
        first = math.floor(math.log10(low))
        every = [step * 10.0**power for power in range(first, first + 4) for step in (1, 2, 5)]
        shown = [y for y in every if low <= y <= high]
        if len(shown) < 2:
            shown = [low * (high / low) ** (i / 3) for i in range(4)]
        axes.set_yticks(shown, [f"{y:.3g}" for y in shown])


def _panels(figure: Figure) -> list[tuple[str, dict[str, str]]]:
    if not figure.selectors:
        return [("", {})]
    first = figure.selectors[0]
    return [(words, {**figure.start, first.name: value}) for value, words in first.options[:MOST_PANELS]]


def write_figures(figures: Sequence[Figure], folder: Path) -> list[str]:
    """Write each figure that has a line as NAME.png and NAME.svg; returns the names."""
    # Not pyplot: it keeps a global list of figures and looks for a screen.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    written = []
    settings: Any = {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#ebe8e0", "axes.edgecolor": "#8a8f98", "svg.fonttype": "none", "svg.hashsalt": "subquad",
    }  # fmt: skip
    for figure in figures:
        panels = [(words, figure.shown(choice), choice) for words, choice in _panels(figure)]
        panels = [panel for panel in panels if any(y is not None for line in panel[1] for y in line.y)]
        if not panels:
            continue
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        with rc_context(settings):
            canvas = Canvas(figsize=(max(6.4, 3.7 * columns) + 1.6, 3.2 * rows + 0.7), layout="constrained")
            FigureCanvasAgg(canvas)
            grid = canvas.subplots(rows, columns, squeeze=False)
            handles: dict[str, Any] = {}
            for axes, (words, lines, choice) in zip(grid.flat, panels, strict=False):
                for line in lines:
                    handles.setdefault(line.label, _curve(axes, line, figure.points))
                if figure.x_log:
                    axes.set_xscale("log")
                if figure.y_log:
                    axes.set_yscale("log")
                if figure.y_max is not None and axes.get_ylim()[1] > figure.y_max:
                    axes.set_ylim(top=figure.y_max)
                values = sorted({x for line in lines for x in line.x})
                if figure.x_log and len(values) <= MOST_TICKS:
                    shown = values[:: -2 if len(values) > 5 else -1]
                    axes.set_xticks(
                        shown, [f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}" for x in shown]
                    )
                axes.minorticks_off()  # they take most of the time of drawing a logarithmic axis
                if figure.y_log:
                    _number(axes)
                axes.set_title(words, fontsize=9)
                axes.set_xlabel(figure.x_title)
                axes.set_ylabel(figure.y_titles.get(choice.get("show", ""), figure.y_title))
            for axes in list(grid.flat)[len(panels) :]:
                axes.set_visible(False)
            canvas.suptitle(_plain(figure.title), x=0.01, ha="left", fontsize=12, fontweight="bold")
            canvas.legend(list(handles.values()), list(handles), loc="outside right center", frameon=False, fontsize=8)
            canvas.draw_without_rendering()
            canvas.set_layout_engine("none")  # laid out once, not once per file
            for kind in ("png", "svg"):
                name = f"{figure.id}.{kind}"
                with replacing(folder / name) as draft:
                    canvas.savefig(draft, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
                written.append(name)
    return written
