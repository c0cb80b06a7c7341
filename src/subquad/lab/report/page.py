"""The page: one HTML file that holds its script, its styles, plotly and every number, and asks nobody for anything."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .figure import Figure
from .findings import headline, star
from .formatting import crossing as crossing_words
from .formatting import milliseconds, times
from .load import warnings
from .notebook import Notebook
from .section import Rows, Section
from .settings import NO_ATTENTION, Settings
from .style import order, style_of

__all__ = ["page"]

_FOLDER = Path(__file__).parent


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _figure(figure: Figure) -> str:
    return (
        f'<figure id="figure-{figure.id}"><div class="head"><h3>{html.escape(figure.title)}</h3></div>'
        '<div class="controls"></div>'
        f'<div class="legend"></div><div class="plot" id="plot-{figure.id}"></div>'
        f"<figcaption>{figure.caption}</figcaption>"
        '<details><summary>the numbers</summary><div class="scroll"></div></details></figure>'
    )


def _section(section: Section, notebook: Notebook, settings: Settings, figures: Rows) -> str:
    drawn = []
    for row in figures:
        present = [_figure(figure) for figure in row if figure.lines]
        if present:
            drawn.append(f'<div class="pair">{"".join(present)}</div>' if len(row) > 1 else present[0])
    before, after = section.before(notebook, settings), section.after(notebook, settings)
    if not (drawn or before or after):
        return ""
    words = f'<p class="intro">{section.intro}</p>' if section.intro else ""
    return f'<section id="{section.name}"><h2>{section.title}</h2>{words}{before}{"".join(drawn)}{after}</section>'


def _missing(notebook: Notebook) -> str:
    """What was not measured, and why."""
    skipped, failed = list(notebook.skipped.values()), notebook.failures
    if not skipped and not failed:
        return ""
    count = f"{notebook.cells_measured} of {notebook.cells_total} cells were measured"
    interrupted = any("interrupted" in item["reason"] for item in skipped)
    title = f"This report was interrupted: {count}" if interrupted else count
    if failed:
        title += f", {len(failed)} failed"
    lines = []
    for reason, by_section in notebook.reasons.items():
        cells = "".join(
            f"<li><b>{html.escape(section)}</b>: {html.escape('; '.join(names))}</li>"
            for section, names in by_section.items()
        )
        lines.append(f"<li>{html.escape(reason)}:<ul>{cells}</ul></li>")
    lines += [f"<li><b>{c['section']}</b>: {html.escape(c['label'])}: {html.escape(c['reason'])}</li>" for c in failed]
    return (
        f'<div class="warning" id="missing"><b>{title}.</b> Run the same command with <code>--resume</code> to add '
        f'the rest.<details><summary>which</summary><ul class="missing">{"".join(lines)}</ul></details></div>'
    )


def _cards(found: Mapping[str, Any], settings: Settings) -> str:
    """Four numbers to remember."""
    cards: list[tuple[str, str]] = []
    name = star(settings)
    crossing = found["crossovers"].get("forward, full", {}).get(name)
    if crossing is not None:
        words = crossing_words(crossing, found["shortest"])
        cards.append((f"tokens from which {name} is faster than softmax", words))
    training = found["crossovers"].get("forward + backward, full", {}).get(name)
    if training is not None:
        cards.append(("the same with the backward pass", crossing_words(training, found["shortest"])))
    gain = found["gains"].get("forward, full", {}).get(name)
    if gain is not None:
        cards.append((f"times softmax’s speed at {gain['length']:,} tokens", f"{times(gain['gain'])}×"))
    decode = found["generation"].get("performer")
    if decode is not None:
        cards.append(
            ("per generated token and layer with performer, at any context", milliseconds(decode["us_per_token"] / 1e3))
        )
    if found["gemm_gflops"] and len(cards) < 4:
        cards.append(("matrix-product limit of this machine", f"{found['gemm_gflops']:.0f} GFLOP/s"))
    return "".join(f"<div><dt>{html.escape(words)}</dt><dd>{html.escape(value)}</dd></div>" for words, value in cards)


def page(
    notebook: Notebook,
    settings: Settings,
    found: dict[str, Any],
    shown: Sequence[tuple[Section, Rows]],
    files: Sequence[str] = (),
) -> str:
    """The whole page as text: sections with their figures; `files` are the names of the figures that lie beside it."""
    from plotly.offline import get_plotlyjs

    figures = [figure for _, rows in shown for row in rows for figure in row if figure.lines]
    lead, *more = headline(found, settings)
    keys = dict.fromkeys([*settings.names, NO_ATTENTION, *(line.key for figure in figures for line in figure.lines)])
    data = {
        "mechanisms": sorted([*settings.names, NO_ATTENTION], key=order),
        "styles": {key: style_of(key) for key in keys},
        "figures": [figure.as_dict() for figure in figures],
    }
    missing = _missing(notebook)
    interrupted = any("interrupted" in item["reason"] for item in notebook.skipped.values())
    main = "".join(
        [
            *(f'<div class="warning">{html.escape(text)}</div>' for text in warnings(notebook.machine, notebook.load)),
            missing if interrupted else "",
            *(_section(section, notebook, settings, rows) for section, rows in shown),
            "" if interrupted else missing,
        ]
    )
    links = ", ".join(f'<a href="{html.escape(name)}">{html.escape(name)}</a>' for name in files)
    footer = (
        f'Every number is in <a href="{html.escape(notebook.path.name)}">{html.escape(notebook.path.name)}</a> beside '
        "this page" + (f"; the figures as files: {links}." if files else ".")
    )
    parts = {
        "css": _read("page.css"),
        "date": html.escape(notebook.started),
        "lead": html.escape(lead),
        "more": html.escape(" ".join(more)),
        "cards": _cards(found, settings),
        "main": main,
        "footer": footer,
        # "</script>" inside a string would end the script.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/"),
        "js": _read("page.js"),
        "plotly": get_plotlyjs(),
    }
    text = _read("page.html")
    for name, value in parts.items():
        text = text.replace("{{" + name + "}}", value, 1)
    return text
