"""What each method costs on paper: per layer, one after the other, and per generated token.

The table of Vaswani et al., "Attention Is All You Need", 2017, with the methods that came after it: L queries, S keys,
heads of width D, values of width E, M features, C clusters.
"""

from __future__ import annotations

import html

import subquad

from ..formatting import dot
from ..notebook import Notebook
from ..section import Section
from ..settings import Settings

__all__ = ["SECTION"]

NAME = "complexity"
STEPS = {"multipole": "O((S clusters / chunk + exact_keys + chunk) (D + E))"}
RECURRENT_NETWORK = ("recurrent network (RNN)", "O(L D²)", "O(L)", "O(D)", "O(D²)")


def _sequential(name: str) -> str:
    """Operations that must follow each other where all tokens are known, as in training."""
    return {
        "lsh": "O(log L), sorting",
        "clustered": "O(1) per iteration",
        "improved-clustered": "O(1) per iteration",
        "multipole": "O(1) per iteration",
    }.get(name, "O(1)")


def _table(notebook: Notebook, settings: Settings) -> str:
    rows = []
    for name in settings.names:
        about = subquad.describe(name)
        recurrent = bool(about["recurrent"]) and bool(about["causal"])
        fixed = bool(about["constant_memory"])
        state = "–" if not recurrent else "fixed" if fixed else "all keys and values"
        step = "–" if not recurrent else "independent of L" if fixed else STEPS.get(name, "O(S (D + E))")
        cells = (
            f"{dot(name)}{html.escape(name)}",
            html.escape(str(about["complexity"])),
            _sequential(name),
            state,
            step,
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in RECURRENT_NETWORK) + "</tr>")
    head = "".join(
        f"<th>{words}</th>"
        for words in (
            "layer",
            "operations per layer",
            "sequential operations",
            "kept while generating",
            "per new token",
        )
    )
    return (
        f'<div class="scroll"><table class="plain"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        "</div>"
    )


SECTION = Section(
    NAME,
    "On paper",
    "Operations of one layer (L queries, S keys, heads of width D, values of width E, M features, C clusters), how "
    "many must follow each other where all tokens are known, and what a new token costs. A recurrent network has as "
    "few operations as linear attention and as small a state, but takes its L steps one after the other.",
    before=_table,
)
