"""The page: one HTML file that holds its script, its styles, plotly and every number, and asks nobody for anything."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import published, tables
from .figure import Figure
from .figures import milliseconds
from .findings import headline, star
from .notebook import Notebook
from .settings import NO_ATTENTION, Settings
from .style import order, style_of

__all__ = ["page"]

_FOLDER = Path(__file__).parent

_TITLES: dict[str, tuple[str, str]] = {
    "use": (
        "What to use",
        (
            "The fastest setting within an error budget, on five kinds of attention. Error is relative and squared: "
            "0.01 means that one per cent of the attention matrix’s energy is wrong. Your own data may be none of "
            "these: <code>subquad plan</code> answers for it."
        ),
    ),
    "model": ("Your model, layer by layer", ""),
    "speed": ("Speed and memory", "Everything that is compared ran in turn, on the same inputs, in the same minute."),
    "error": (
        "Error",
        (
            "Random features estimate softmax attention. Whether the estimate is any good depends on the data more "
            "than on the method, so every curve stands beside three answers that need no randomness at all."
        ),
    ),
    "published": ("What was wrong in the published Hadamard report", ""),
    "projections": (
        "Projections",
        "The random matrix behind the features: how it is drawn does not change its cost, how it is applied does.",
    ),
    "generation": ("Generation", "Token by token, what was read before is kept in a state of fixed size."),
    "spectrum": (
        "The spectrum of attention",
        "Low-rank methods assume that attention matrices have low rank. Some do.",
    ),
    "machine": ("Machine and method", ""),
}
# By section, from top to bottom: the figures that stand side by side.
_PAIRS: dict[str, list[tuple[str, ...]]] = {
    "use": [("tradeoff",)],
    "model": [("model-error",)],
    "speed": [("speed",), ("memory",)],
    "error": [("error-features",), ("error-projections",)],
    "published": [("published",)],
    "projections": [("projections",)],
    "generation": [("generation-time", "generation-memory")],
    "spectrum": [("spectrum", "rank")],
}


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


def _section(name: str, figures: Mapping[str, Figure], before: str = "", after: str = "") -> str:
    title, intro = _TITLES[name]
    drawn = []
    for row in _PAIRS.get(name, []):
        present = [_figure(figures[each]) for each in row if each in figures]
        if present:
            drawn.append(f'<div class="pair">{"".join(present)}</div>' if len(row) > 1 else present[0])
    if not (drawn or before or after):
        return ""
    words = f'<p class="intro">{intro}</p>' if intro else ""
    return f'<section id="{name}"><h2>{title}</h2>{words}{before}{"".join(drawn)}{after}</section>'


def _cards(found: Mapping[str, Any], settings: Settings) -> str:
    """Four numbers to remember."""
    cards: list[tuple[str, str]] = []
    name = star(settings)
    crossing = found["crossovers"].get("forward, full", {}).get(name)
    if crossing is not None:
        words = tables.crossing(crossing, found["shortest"])
        cards.append((f"tokens from which {name} is faster than softmax", words))
    training = found["crossovers"].get("forward + backward, full", {}).get(name)
    if training is not None:
        cards.append(("the same with the backward pass", tables.crossing(training, found["shortest"])))
    gain = found["gains"].get("forward, full", {}).get(name)
    if gain is not None:
        cards.append((f"times softmax’s speed at {gain['length']:,} tokens", f"{tables.times(gain['gain'])}×"))
    decode = found["generation"].get(name)
    if decode is not None:
        cards.append(("per generated token and layer, at any context", milliseconds(decode["us_per_token"] / 1e3)))
    if found["gemm_gflops"] and len(cards) < 4:
        cards.append(("matrix-product limit of this machine", f"{found['gemm_gflops']:.0f} GFLOP/s"))
    return "".join(f"<div><dt>{html.escape(words)}</dt><dd>{html.escape(value)}</dd></div>" for words, value in cards)


def page(
    notebook: Notebook,
    settings: Settings,
    found: dict[str, Any],
    figures: Sequence[Figure],
    pictures: Sequence[str] = (),
) -> str:
    """The whole page as text; `pictures` are the names of the picture files beside it."""
    from plotly.offline import get_plotlyjs

    by_id = {figure.id: figure for figure in figures}
    lead, *more = headline(found, settings)
    keys = dict.fromkeys([*settings.names, NO_ATTENTION, *(line.key for figure in figures for line in figure.lines)])
    data = {
        "mechanisms": sorted([*settings.names, NO_ATTENTION], key=order),
        "styles": {key: style_of(key) for key in keys},
        "figures": [figure.as_dict() for figure in figures],
    }
    published_text = f'<div class="prose"><p>{published.PARAGRAPH}</p></div>' if "published" in by_id else ""
    missing = tables.missing(notebook)
    interrupted = any("interrupted" in item["reason"] for item in notebook.skipped.values())
    main = "".join(
        [
            missing if interrupted else "",
            _section("use", by_id, before=tables.recommendations(found, settings)),
            _section("model", by_id, after=tables.model_layers(notebook)),
            _section("speed", by_id, after=tables.crossovers(found, settings)),
            _section("error", by_id),
            _section("published", by_id, before=published_text),
            _section("projections", by_id),
            _section("generation", by_id),
            _section("spectrum", by_id),
            _section("machine", by_id, before=tables.machine(notebook, settings, found)),
            "" if interrupted else missing,
        ]
    )
    files = ", ".join(f'<a href="{html.escape(name)}">{html.escape(name)}</a>' for name in pictures)
    footer = (
        f'Every number is in <a href="{html.escape(notebook.path.name)}">{html.escape(notebook.path.name)}</a> beside '
        "this page" + (f"; the figures as pictures: {files}." if files else ".")
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
