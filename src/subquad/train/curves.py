"""A page of several runs: the task's metric against steps and against time, and the training loss; seeds as bands.

curves.png, curves.svg     the three plots
index.html                 the same with a table, samples and settings; one file, nothing is fetched
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import checks
from ..files import replacing, write_text
from .collection import comparison_rows

__all__ = ["check_drawing", "draw_curves", "draw_page", "envelope"]

# Okabe and Ito's colours, which are told apart without red and green; then the same again, dashed.
_COLOURS = ("#1b1d22", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#c98a00", "#56b4e9", "#882255")
_DASHES = ("-", "--", ":")

Curve = tuple[np.ndarray, np.ndarray]
# What a panel shows: which records, which of their figures (None = the task's metric), and against what.
Panel = tuple[str, str | None, str]
VALIDATION: tuple[Panel, ...] = (("valid", None, "steps"), ("valid", None, "time"))


def envelope(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, least, most) of curves over the x that all of them reach; between its points a curve is straight.

    >>> one, two = (np.array([0.0, 2.0]), np.array([0.0, 2.0])), (np.array([0.0, 1.0, 4.0]), np.array([1.0, 1.0, 4.0]))
    >>> [part.tolist() for part in envelope([one, two])]
    [[0.0, 1.0, 2.0], [0.5, 1.0, 2.0], [0.0, 1.0, 2.0], [1.0, 1.0, 2.0]]
    """
    begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    every = np.unique(np.concatenate([x for x, _ in curves]))
    grid = every[(every >= begin) & (every <= end)]
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid, values.mean(0), values.min(0), values.max(0)


def _curves(runs: Sequence[Mapping[str, Any]], kind: str, name: str, against: str, pace: float | None) -> list[Curve]:
    """One curve per seed; `pace` seconds per step, where measured apart, replace those of the run itself."""
    found = []
    for one in runs:
        records = [record for record in one[kind] if record.get(name) is not None]
        if records:
            seconds = [record["step"] * pace if pace else record.get("training_seconds", 0.0) for record in records]
            x = [record["step"] for record in records] if against == "steps" else seconds
            found.append((np.asarray(x, dtype=float), np.asarray([record[name] for record in records], dtype=float)))
    return found


def _unit(longest: float) -> tuple[str, float]:
    return next((u for u in (("hours", 3600.0), ("minutes", 60.0)) if longest > 2 * u[1]), ("seconds", 1.0))


def _plot(axes: Any, result: Mapping[str, Any], kind: str, name: str, against: str) -> None:
    paces = result.get("step_seconds") or {}
    lines = {
        label: curves
        for label, runs in result["runs"].items()
        if (curves := _curves(runs, kind, name, against, paces.get(label)))
    }
    unit, divisor = "steps", 1.0
    if against == "time":
        unit, divisor = _unit(max((float(x[-1]) for curves in lines.values() for x, _ in curves), default=0.0))
        unit = f"{unit} of training" + (", at the step time measured apart" if paces else "")
    early, levels = [], []
    for number, label in enumerate(result["runs"]):
        if label not in lines:
            continue
        x, mean, least, most = envelope(lines[label])
        if not len(x):
            continue
        colour = _COLOURS[number % len(_COLOURS)]
        dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
        axes.plot(
            x / divisor, mean, dash, color=colour, label=label, linewidth=1.6, marker="o" if len(x) == 1 else None
        )
        if len(lines[label]) > 1:
            axes.fill_between(x / divisor, least, most, color=colour, alpha=0.18, linewidth=0)
        early.append(float(most[np.searchsorted(x, x[-1] / 10)]))
        levels += [float(least.min()), float(most.max())]
    smaller = kind == "train" or not result["larger_is_better"]
    if smaller and levels and 0 < 20 * min(levels) < max(levels):
        axes.set_yscale("log")  # error rates of .01 and .05 would be one line
    # The first values of a loss would flatten all that follows.
    elif smaller and early and axes.get_ylim()[1] > 1.05 * max(early):
        bottom = axes.get_ylim()[0]
        axes.set_ylim(bottom, max(early) + 0.05 * abs(max(early) - bottom))
    if kind == "valid":
        for number, (label, level) in enumerate((result.get("baselines") or {}).items()):
            axes.axhline(level, color="#8a8f98", linewidth=1.2, linestyle=(0, (1 + 2 * number, 2)), label=label)
    what = f"{name.replace('_', ' ')} ({'validation' if kind == 'valid' else 'training'})"
    axes.set(xlabel=unit, ylabel=what)
    axes.grid(alpha=0.25)


def check_drawing() -> None:
    """Say what is missing before hours are spent on what is to be drawn."""
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ModuleNotFoundError:
        raise checks.missing_package("a page of curves", "matplotlib", "lab") from None


def _figure(result: Mapping[str, Any], panels: Sequence[Panel]) -> Any:
    check_drawing()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels))
    for one, (kind, name, against) in zip(axes, panels, strict=True):
        _plot(one, result, kind, name or result["metric"], against)
    handles, labels = max((one.get_legend_handles_labels() for one in axes), key=lambda pair: len(pair[0]))
    if handles:  # none while nothing was recorded
        # A letter is about .075 inches wide, the line before a name and the space after it half an inch.
        columns = int(figure.get_figwidth() / (0.075 * max(map(len, labels)) + 0.5))
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(columns, 5)), frameon=False)
    return figure


def _picture(path: Path, name: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<figure><img src="data:image/png;base64,{data}" alt="{name}"><figcaption>{name}</figcaption></figure>'


_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:75rem;margin:0 auto;padding:1rem;
color:#1b1d22;background:#fff}
svg{width:100%;min-width:50rem;height:auto}table{border-collapse:collapse;font-size:.9rem}
td,th{padding:.2rem .7rem;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}tr{border-bottom:1px solid #ddd}.scroll{overflow-x:auto}
.samples{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0}img{max-width:100%}pre{overflow-x:auto;font-size:.8rem}"""


def _page(result: Mapping[str, Any], drawing: str) -> str:
    head, *rows = comparison_rows(result)
    cells = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    header = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in head)
    every = [(label, one) for label, runs in result["runs"].items() for one in runs]
    pictures = [
        _picture(path, html.escape(f"{label}, seed {one['seed']}"))
        for label, one in every
        if one["artefacts"].get("samples") == "samples.png" and (path := Path(one["folder"]) / "samples.png").is_file()
    ]
    seeds = sorted({one["seed"] for _, one in every})
    settings = {f"{label}, seed {one['seed']}": one["run"] for label, one in every}
    claim = f"<p>Claim: {html.escape(result['claim'])}</p>" if "claim" in result else ""
    samples = f'<h2>Samples</h2><div class="samples">{"".join(pictures)}</div>' if pictures else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{result['task']}: runs compared</title><style>{_STYLE}</style></head><body>"
        f"<h1>{result['task']}: {len(result['runs'])} settings, {len(seeds)} seed{'s' * (len(seeds) != 1)}</h1>{claim}"
        "<p>Lines are means over seeds, bands reach from the least to the most of them. Time is that of the steps "
        f'alone, without validation.</p><div class="scroll">{drawing}</div>'
        f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{"".join(cells)}</tbody></table></div>'
        f"{samples}<h2>Settings</h2><details><summary>of every run</summary>"
        f"<pre>{html.escape(json.dumps(settings, indent=1))}</pre></details></body></html>\n"
    )


def draw_curves(result: Mapping[str, Any], path: Path) -> None:
    """The metric against steps and against time, as `draw_page` draws them, into one SVG file.

    Of `result` it needs `metric`, `larger_is_better` and, in `runs`, the validations of every run: `valid`.
    """
    with replacing(path) as draft:
        _figure(result, VALIDATION).savefig(draft, format="svg", metadata={"Date": None})


def draw_page(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the plots and the page of `compare`'s or `collect`'s result into `folder`; returns their paths.

    `result["step_seconds"]`, seconds per step by label, replaces the time that the runs took, which may have met other
    work on the machine; `result["baselines"]`, the metric by name, are levels to compare with.
    """
    figure = _figure(result, (*VALIDATION, ("train", "loss", "steps")))
    picture, vectors, page = (folder / name for name in ("curves.png", "curves.svg", "index.html"))
    with replacing(picture) as draft:
        figure.savefig(draft, dpi=120, format="png")
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    text = drawing.getvalue()
    write_text(vectors, text)
    write_text(page, _page(result, text[text.index("<svg") :]))
    return [picture, vectors, page]
