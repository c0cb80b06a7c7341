"""The tables of the page, as HTML that can be read without its script."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from . import model
from .findings import FORMS, tokens
from .inputs import KINDS
from .notebook import Notebook
from .settings import Settings
from .style import style_of

__all__ = ["crossing", "crossovers", "machine", "missing", "model_layers", "recommendations", "times"]


def times(ratio: float) -> str:
    """A ratio with as many digits as it deserves.

    >>> times(0.384), times(3.24), times(148.2)
    ('0.38', '3.2', '148')
    """
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}"


def crossing(length: float | None, shortest: float) -> str:
    """A crossover in words.

    >>> crossing(256.0, 256), crossing(612.3, 256), crossing(None, 256)
    ('≤ 256', '610', 'never here')
    """
    if length is None:
        return "never here"
    return f"≤ {length:,.0f}" if length <= shortest else tokens(length)


def _dot(name: str) -> str:
    style = style_of(name)
    return f'<i class="dot" style="--light:{style["light"]};--dark:{style["dark"]}"></i>'


def _choice(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "<td>–</td>"
    if row["mechanism"] == "softmax":
        return f"<td>{_dot('softmax')}softmax<small>exact</small></td>"
    note = " · the mean would do" if row["mean_would_do"] else ""
    return (
        f"<td>{_dot(row['mechanism'])}{html.escape(row['label'])}"
        f"<small>{times(row['gain'])}× faster · error {row['error']:.2g}{note}</small></td>"
    )


def recommendations(found: Mapping[str, Any], settings: Settings) -> str:
    """One table per kind of input, behind tabs."""
    rows = found["recommendations"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    if not kinds:
        return '<p class="warning">Nothing can be recommended: errors and times were not measured.</p>'
    tabs, bodies = [], []
    for kind in kinds:
        first = kind == kinds[0]
        tabs.append(
            f'<button type="button" data-table="use-{kind}" aria-pressed="{"true" if first else "false"}">'
            f"{html.escape(KINDS[kind])}</button>"
        )
        mine = {(row["length"], row["budget"]): row for row in rows if row["kind"] == kind}
        head = "".join(f"<th>error ≤ {budget:g}</th>" for budget in settings.budgets)
        lines = "".join(
            f"<tr><td>{length:,}</td>{''.join(_choice(mine.get((length, b))) for b in settings.budgets)}</tr>"
            for length in sorted({length for length, _ in mine})
        )
        bodies.append(
            f'<div class="scroll" id="use-{kind}"{"" if first else " hidden"}><table class="use">'
            f"<thead><tr><th>tokens</th>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
        )
    return f'<div class="tabs" role="group" aria-label="Kind of input">{"".join(tabs)}</div>{"".join(bodies)}'


def crossovers(found: Mapping[str, Any], settings: Settings) -> str:
    """From which length each mechanism is faster than softmax, and by how much at the longest one."""
    forms = [form for form in FORMS if found["crossovers"].get(form)]
    if not forms:
        return ""

    def cell(form: str, name: str) -> str:
        if name not in found["crossovers"][form]:
            return "<td>–</td>"
        length, gain = found["crossovers"][form][name], found["gains"][form][name]
        where = f'<span class="wide"> at {gain["length"]:,}</span>'
        return f"<td>{crossing(length, found['shortest'])}<small>{times(gain['gain'])}×{where}</small></td>"

    names = [name for name in settings.names[1:] if any(name in found["crossovers"][form] for form in forms)]
    head = "".join(f"<th>{html.escape(form)}</th>" for form in forms)
    rows = "".join(
        f"<tr><td>{_dot(name)}{html.escape(name)}</td>{''.join(cell(form, name) for form in forms)}</tr>"
        for name in names
    )
    return (
        '<figure><h3>Crossovers: tokens from which each is faster than softmax</h3><div class="scroll"><table><thead>'
        f"<tr><th>mechanism</th>{head}</tr></thead><tbody>{rows}</tbody></table></div><figcaption>Interpolated between "
        "measured lengths. Below, the speed against softmax at the longest length measured. A dash: the mechanism "
        "cannot do it, or it was not measured.</figcaption></figure>"
    )


def machine(notebook: Notebook, settings: Settings, found: Mapping[str, Any]) -> str:
    """What the numbers depend on."""
    where = notebook.machine
    rate = found["gemm_gflops"]
    facts = {
        "processor": f"{where.get('processor')}, {where.get('cores')} cores, {where.get('threads')} threads used",
        "instructions": where.get("cpu_capability"),
        "memory": f"{where.get('memory_gib', 0):.1f} GiB",
        "matrix-product limit": "not measured" if rate is None else f"{rate:.0f} GFLOP/s in float32, in this run",
        "busy before the start": f"{where.get('load_1min') or 0:.2f} (load of the last minute; near 0 is quiet)",
        "versions": f"subquad {where.get('subquad')}, torch {where.get('torch')}, Python {where.get('python')}",
        "native kernels": "yes" if where.get("native_kernels") else "no: torch computes everything",
        "system": where.get("platform"),
        "shapes": f"batch 1, {settings.heads} heads of width {settings.head_dim}, float32, on the CPU",
        "timing": f"up to {settings.runs} interleaved rounds after a warm-up; the best counts, the usual run is in the "
        "hover text; what takes longer than half a second at the longest lengths runs once",
        "settings": "every mechanism with its defaults (performer: 256 hyperbolic features, orthogonal rows); "
        "what must be calibrated saw other data of the same kind",
        "error": "‖A′ − A‖² / ‖A‖² of the normalised attention matrix, measured with random ±1 values",
    }
    rows = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd>" for key, value in facts.items())
    return f'<dl class="facts">{rows}</dl>'


def missing(notebook: Notebook) -> str:
    """What was not measured, and why."""
    skipped, failed = list(notebook.skipped.values()), notebook.failures
    if not skipped and not failed:
        return ""
    if any("interrupted" in item["reason"] for item in skipped):
        title = f"This report was interrupted: {len(skipped)} measurements are missing"
    else:
        title = f"{len(skipped)} measurements were skipped"
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
        f'them.<details><summary>which</summary><ul class="missing">{"".join(lines)}</ul></details></div>'
    )


def model_layers(notebook: Notebook) -> str:
    """The plan of every layer of the user's model."""
    rows = model.layers(notebook)
    if not rows:
        return ""
    lines = "".join(
        f"<tr><td>{row['layer']}<small>{html.escape(row['name'])}</small></td>"
        f"<td>{_dot(row['mechanism'])}{html.escape(row['verdict'])}</td><td>{row['uniform']:.2g}</td></tr>"
        for row in rows
    )
    return (
        f'<figure><h3>What each layer could use at {rows[0]["length"]:,} tokens</h3><div class="scroll">'
        '<table class="use plan"><thead><tr><th>layer</th><th>plan, for an error of at most '
        f"{model.TARGET:g}</th><th>error of the mean</th></tr></thead><tbody>{lines}</tbody></table></div>"
        "<figcaption>From <code>sq.plan</code> on what the layer saw. Where the mean of the values is already good, "
        "the layer attends to nearly everything alike, and almost any mechanism will do.</figcaption></figure>"
    )
